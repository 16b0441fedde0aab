//! One v2 cgroup a command: the exact set of its processes, killed as one.

use std::cell::RefCell;
use std::collections::HashSet;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use crate::kernel::{check, errno, own, write};

/// The directory on fd 4 and the cgroups made in it.
pub struct Groups {
    root: OwnedFd,
    next: u64,
    /// Cgroups whose command is gone but which still hold processes.
    retired: Vec<Group>,
    /// Empty cgroups kept for the next commands: making and removing one costs a short command a tenth of its time, and the kernel's workers as much.
    idle: Vec<Group>,
    /// Cgroups that were killed and still exist. They can't be used again: the kernel (6.18) takes whatever is cloned into one later for a child that was
    /// being forked during the kill, and kills it too.
    killed: RefCell<HashSet<u64>>,
}

/// Cgroups kept for the next commands: more are rarely in use at once.
const MAX_IDLE: usize = 4;

/// A cgroup of one command, named `e<number>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group(u64);

impl Group {
    fn path(self, file: &str) -> CString {
        let path = if file.is_empty() {
            format!("e{}", self.0)
        } else {
            format!("e{}/{file}", self.0)
        };
        CString::new(path).unwrap_or_default()
    }
}

impl Groups {
    pub fn new(root: OwnedFd) -> Groups {
        Groups {
            root,
            next: 1,
            retired: Vec::new(),
            idle: Vec::new(),
            killed: RefCell::default(),
        }
    }

    /// Takes an empty cgroup, or makes the next one, and opens it for CLONE_INTO_CGROUP.
    pub fn create(&mut self) -> io::Result<(Group, OwnedFd)> {
        let group = match self.idle.pop() {
            Some(group) => group,
            None => self.make()?,
        };
        let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
        // SAFETY: the path is a C string; the descriptor is ours.
        match own(unsafe { libc::openat(self.root.as_raw_fd(), group.path("").as_ptr(), flags) }) {
            Ok(directory) => Ok((group, directory)),
            Err(error) => {
                self.retire(group);
                Err(error)
            }
        }
    }

    fn make(&mut self) -> io::Result<Group> {
        loop {
            let group = Group(self.next);
            self.next += 1;
            let path = group.path("");
            // SAFETY: the path is a C string; the descriptor is ours.
            match check(unsafe { libc::mkdirat(self.root.as_raw_fd(), path.as_ptr(), 0o755) }) {
                // Left by an earlier chronus of the same tree; its number is skipped.
                Err(error) if errno(&error) == libc::EEXIST => continue,
                Err(error) => return Err(error),
                Ok(_) => return Ok(group),
            }
        }
    }

    fn write(&self, group: Group, file: &str, data: &[u8]) -> io::Result<()> {
        // SAFETY: the path is a C string; the descriptor is ours.
        let file = own(unsafe {
            libc::openat(
                self.root.as_raw_fd(),
                group.path(file).as_ptr(),
                libc::O_WRONLY | libc::O_CLOEXEC,
            )
        })?;
        write(file.as_raw_fd(), data).map(drop)
    }

    /// Kills everything in it; processes that are being forked right now included.
    pub fn kill(&self, group: Group) -> io::Result<()> {
        self.killed.borrow_mut().insert(group.0);
        self.write(group, "cgroup.kill", b"1")
    }

    /// Puts the calling process into it (by a child that could not be cloned into it).
    pub fn enter(&self, group: Group) -> io::Result<()> {
        self.write(group, "cgroup.procs", b"0")
    }

    /// The command is gone. True when its cgroup is empty; false when survivors still hold it: it is removed when they are gone.
    pub fn retire(&mut self, group: Group) -> bool {
        let reusable = !self.killed.borrow().contains(&group.0);
        if reusable && self.idle.len() < MAX_IDLE && self.is_empty(group) {
            self.idle.push(group);
            return true;
        }
        let removed = self.remove(group);
        if !removed {
            self.retired.push(group);
        }
        removed
    }

    /// Whether it holds no process.
    fn is_empty(&self, group: Group) -> bool {
        let mut content = [0_u8; 64];
        // SAFETY: the path is a C string; the descriptors are ours; content is writable for its length.
        unsafe {
            let Ok(file) = own(libc::openat(
                self.root.as_raw_fd(),
                group.path("cgroup.events").as_ptr(),
                libc::O_RDONLY | libc::O_CLOEXEC,
            )) else {
                return false;
            };
            let read = libc::read(file.as_raw_fd(), content.as_mut_ptr().cast(), content.len());
            usize::try_from(read).is_ok_and(|length| content[..length].starts_with(b"populated 0"))
        }
    }

    fn remove(&self, group: Group) -> bool {
        // SAFETY: the path is a C string; the descriptor is ours.
        match check(unsafe {
            libc::unlinkat(
                self.root.as_raw_fd(),
                group.path("").as_ptr(),
                libc::AT_REMOVEDIR,
            )
        }) {
            Ok(_) => {
                self.killed.borrow_mut().remove(&group.0);
                true
            }
            Err(error) => errno(&error) == libc::ENOENT,
        }
    }

    /// Removes the retired cgroups that are empty by now. True when some are left.
    pub fn sweep(&mut self) -> bool {
        let retired = std::mem::take(&mut self.retired);
        self.retired = retired
            .into_iter()
            .filter(|group| !self.remove(*group))
            .collect();
        self.has_retired()
    }

    pub fn has_retired(&self) -> bool {
        !self.retired.is_empty()
    }
}
