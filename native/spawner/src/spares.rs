//! Empty subvolumes that wait for the next sandbox.
//!
//! Deleting a subvolume is dear: for each one the kernel commits the filesystem's transaction before it drops the quota group, and whoever makes or
//! writes a file meanwhile waits. A sandbox that wrote little is therefore cleared file by file, and its subvolume given to a later one.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::sysapi;

/// How many wait at most, and right after the start.
pub const SPARES: usize = 64;
/// What a sandbox may have written for its subvolume to be cleared instead of deleted: clearing costs about 10 us an entry.
pub const MOST_BYTES: u64 = 4 << 20;
const MOST_ENTRIES: usize = 1024;
/// What the quota counts of an empty one: metadata.
pub const UNUSED_BYTES: u64 = 64 << 10;
/// Each level of directories holds a descriptor meanwhile.
const MAX_DEPTH: usize = 32;

const READY: &str = ".spare-";
const USED: &str = ".used-";

#[derive(Default)]
pub struct Spares {
    ready: Mutex<Vec<CString>>,
    number: AtomicU64,
}

impl Spares {
    /// Takes over the ones that an earlier spawner left below `root`. Returns the names of those that it was clearing: they are to be deleted.
    pub fn find(&self, root: RawFd) -> io::Result<Vec<String>> {
        let mut ready = self.ready();
        let mut used = Vec::new();
        for name in sysapi::names_in(root)? {
            let number = name.strip_prefix(READY).or(name.strip_prefix(USED));
            let Some(number) = number.and_then(|number| number.parse().ok()) else {
                continue;
            };
            self.number.fetch_max(number, Ordering::Relaxed);
            if name.starts_with(READY) {
                ready.push(CString::new(name)?);
            } else {
                used.push(name);
            }
        }
        Ok(used)
    }

    /// How many may be added.
    pub fn wanted(&self) -> usize {
        SPARES.saturating_sub(self.ready().len())
    }

    /// A name for an empty subvolume that is being made below the root: [`Spares::add`] it afterwards.
    pub fn new_name(&self) -> String {
        format!("{READY}{}", self.next())
    }

    pub fn add(&self, name: &str) -> io::Result<()> {
        let name = CString::new(name)?;
        self.ready().push(name);
        Ok(())
    }

    /// Renames a spare subvolume to `name`; false: there is none.
    ///
    /// # Errors
    /// `AlreadyExists`: the name is taken.
    pub fn take(&self, root: RawFd, name: &str) -> io::Result<bool> {
        let name = CString::new(name)?;
        let Some(spare) = self.ready().pop() else {
            return Ok(false);
        };
        let renamed = sysapi::rename_new_at(root, &spare, &name);
        if renamed.is_err() {
            // It is still there, under its own name.
            self.ready().push(spare);
        }
        renamed.map(|()| true)
    }

    /// Clears the subvolume `name`, open as `volume`, of which nothing is in use any more, and lets `furnish` make what every new one has.
    /// On an error it is still there, under the name that comes with it, and to be deleted.
    pub fn give_back(
        &self,
        root: RawFd,
        name: &str,
        volume: &OwnedFd,
        furnish: impl FnOnce(&OwnedFd) -> io::Result<()>,
    ) -> Result<(), String> {
        let number = self.next();
        let used = format!("{USED}{number}");
        let renamed = |from: &str, to: &str| -> io::Result<CString> {
            let to = CString::new(to)?;
            sysapi::rename_new_at(root, &CString::new(from)?, &to).map(|()| to)
        };
        renamed(name, &used).map_err(|_| name.to_owned())?;
        let mut entries_left = MOST_ENTRIES;
        let cleared = clear(volume, MAX_DEPTH, &mut entries_left).and_then(|()| furnish(volume));
        let mut ready = self.ready();
        if cleared.is_err() || ready.len() >= SPARES {
            return Err(used);
        }
        ready.push(renamed(&used, &format!("{READY}{number}")).map_err(|_| used)?);
        Ok(())
    }

    fn next(&self) -> u64 {
        self.number.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn ready(&self) -> MutexGuard<'_, Vec<CString>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Removes everything in a directory that a sandbox filled; no link is followed.
///
/// # Errors
/// More entries or levels of directories than allowed, or one that can't be removed: some are gone then.
fn clear(dir: &OwnedFd, depth_left: usize, entries_left: &mut usize) -> io::Result<()> {
    for entry in std::fs::read_dir(format!("/proc/self/fd/{}", dir.as_raw_fd()))? {
        let entry = entry?;
        *entries_left = entries_left
            .checked_sub(1)
            .ok_or_else(|| io::Error::other("too many entries"))?;
        let is_directory = entry.file_type()?.is_dir();
        let name = CString::new(entry.file_name().into_vec())?;
        if is_directory {
            let depth_left = depth_left
                .checked_sub(1)
                .ok_or_else(|| io::Error::other("nested too deeply"))?;
            let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW;
            let child = sysapi::open_at(dir.as_raw_fd(), &name, flags)?;
            clear(&child, depth_left, entries_left)?;
            sysapi::remove_dir_at(dir.as_raw_fd(), &name)?;
        } else {
            sysapi::unlink_at(dir.as_raw_fd(), &name)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::ffi::OsStrExt;
    use std::path::Path;

    use crate::testing::Directory;

    fn open(directory: &Path) -> OwnedFd {
        let path = CString::new(directory.as_os_str().as_bytes()).unwrap();
        let flags = libc::O_RDONLY | libc::O_DIRECTORY;
        sysapi::open_at(libc::AT_FDCWD, &path, flags).unwrap()
    }

    fn fill(directory: &Path) {
        let odd = std::ffi::OsStr::from_bytes(b"not utf-8 \xff");
        fs::create_dir_all(directory.join("u/deep/er")).unwrap();
        fs::write(directory.join("u/deep/er").join(odd), "x").unwrap();
        fs::write(directory.join("sandbox"), "1 2 3").unwrap();
        std::os::unix::fs::symlink("../../outside", directory.join("u/link")).unwrap();
    }

    #[test]
    fn what_was_cleared_is_given_to_the_next() {
        let root = Directory::make("spares-next");
        fill(&root.join("sb-1"));
        fs::create_dir(root.join("outside")).unwrap();
        fs::write(root.join("outside/kept"), "").unwrap();
        let (spares, top) = (Spares::default(), open(&root));
        let furnish = |volume: &OwnedFd| sysapi::make_dir_at(volume.as_raw_fd(), c"u", 0o755);
        assert!(!spares.take(top.as_raw_fd(), "sb-2").unwrap());
        spares
            .give_back(top.as_raw_fd(), "sb-1", &open(&root.join("sb-1")), furnish)
            .unwrap();
        assert_eq!(spares.wanted(), SPARES - 1);
        assert!(!root.join("sb-1").exists());
        assert!(root.join("outside/kept").exists());
        assert!(spares.take(top.as_raw_fd(), "sb-2").unwrap());
        let inside: Vec<_> = fs::read_dir(root.join("sb-2"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(inside, ["u"]);
        assert!(!spares.take(top.as_raw_fd(), "sb-3").unwrap());
    }

    #[test]
    fn a_name_that_is_taken_costs_no_spare() {
        let root = Directory::make("spares-taken");
        let (spares, top) = (Spares::default(), open(&root));
        fs::create_dir(root.join("sb-1")).unwrap();
        let name = spares.new_name();
        fs::create_dir(root.join(&name)).unwrap();
        spares.add(&name).unwrap();
        let taken = spares.take(top.as_raw_fd(), "sb-1").unwrap_err();
        assert_eq!(taken.kind(), io::ErrorKind::AlreadyExists);
        assert!(spares.take(top.as_raw_fd(), "sb-2").unwrap());
    }

    #[test]
    fn too_much_to_clear_is_to_be_deleted() {
        let root = Directory::make("spares-much");
        let (spares, top) = (Spares::default(), open(&root));
        for number in 0..=MOST_ENTRIES {
            fs::create_dir_all(root.join(format!("sb-1/{number}"))).unwrap();
        }
        let deep = "d/".repeat(MAX_DEPTH + 1);
        fs::create_dir_all(root.join("sb-2").join(deep)).unwrap();
        for name in ["sb-1", "sb-2"] {
            let left = spares
                .give_back(top.as_raw_fd(), name, &open(&root.join(name)), |_| Ok(()))
                .unwrap_err();
            assert!(left.starts_with(USED), "{left}");
            assert!(root.join(left).exists());
        }
        assert_eq!(spares.wanted(), SPARES);
    }

    #[test]
    fn a_later_spawner_finds_the_spares_and_what_was_being_cleared() {
        let root = Directory::make("spares-later");
        for name in [".spare-7", ".used-9", "sb-1", ".spare-x"] {
            fs::create_dir(root.join(name)).unwrap();
        }
        let (spares, top) = (Spares::default(), open(&root));
        assert_eq!(spares.find(top.as_raw_fd()).unwrap(), [".used-9"]);
        assert_eq!(spares.wanted(), SPARES - 1);
        assert_eq!(spares.new_name(), ".spare-10");
    }
}
