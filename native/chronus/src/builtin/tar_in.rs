//! A tar stream into a directory. The archive is hostile, and so may be what runs in the directory meanwhile: every name is resolved by
//! the kernel below the directory, and never through a symlink.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs::{self, File};
use std::io::{self, BufReader, Read};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use wire::message::BuiltinArgs;
use wire::value::Writer;

use super::archive::{self, padding, Broken, Entry, Kind};
use super::files::{path, PIPE_SIZE};
use super::{answer, stdin, Failure, Result};
use crate::kernel::{self, check, errno, own};

const BUFFER: usize = 256 << 10;
/// Open directories that are remembered, so that the files of one directory don't look it up again and again.
const PARENTS_MAX: usize = 64;

/// linux/openat2.h.
#[repr(C)]
struct OpenHow {
    flags: u64,
    mode: u64,
    resolve: u64,
}
const RESOLVE_NO_MAGICLINKS: u64 = 0x02;
const RESOLVE_NO_SYMLINKS: u64 = 0x04;
const RESOLVE_BENEATH: u64 = 0x08;

/// `tar_in`: the answer counts the entries and the bytes of file content.
pub fn tar_in(arguments: &BuiltinArgs) -> Result<()> {
    let fail = |act: &str, error: &io::Error| Failure::at(act, &arguments.path, error);
    kernel::enlarge_pipe(stdin().as_raw_fd(), PIPE_SIZE);
    if arguments.parents {
        fs::create_dir_all(path(&arguments.path)).map_err(|error| fail("mkdir", &error))?;
    }
    let top = c_string(&arguments.path)
        .and_then(|name| open(libc::AT_FDCWD, &name, libc::O_PATH | libc::O_DIRECTORY, 0));
    let top = top.map_err(|error| fail("open", &error))?;
    // SAFETY: geteuid has no preconditions.
    let is_root = unsafe { libc::geteuid() } == 0;
    let mut unpacker = Unpacker {
        top,
        is_root,
        parents: HashMap::new(),
        directories: Vec::new(),
        entries: 0,
        bytes: 0,
    };
    let source = stdin();
    let mut from = BufReader::with_capacity(BUFFER, &*source);
    while let Some(entry) = archive::read_entry(&mut from).map_err(broken)? {
        let name = entry.path.clone();
        unpacker
            .entry(entry, &mut from)
            .map_err(|error| Failure::at("tar entry", &name, &error))?;
    }
    unpacker.finish().map_err(|error| fail("tar", &error))?;
    // Archives are often padded to whole records; their writer must not find the pipe closed.
    io::copy(&mut from, &mut io::sink())?;
    answer(
        Writer::new()
            .map(2)
            .text("entries")
            .unsigned(unpacker.entries)
            .text("bytes")
            .unsigned(unpacker.bytes),
    )
}

fn broken(error: Broken) -> Failure {
    match error {
        Broken::Format(message) => Failure::new(libc::EINVAL, message),
        Broken::Io(error) => error.into(),
    }
}

fn os_error(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

fn c_string(bytes: &[u8]) -> io::Result<CString> {
    CString::new(bytes).map_err(|_| os_error(libc::EINVAL))
}

fn open(
    directory: RawFd,
    name: &CStr,
    flags: libc::c_int,
    mode: libc::mode_t,
) -> io::Result<OwnedFd> {
    // SAFETY: the name is a C string.
    own(unsafe { libc::openat(directory, name.as_ptr(), flags | libc::O_CLOEXEC, mode) })
}

/// Opens a directory below `top`, by way of directories only. Symlinks in between are ELOOP, ways out EXDEV.
fn open_beneath(top: RawFd, name: &CStr) -> io::Result<OwnedFd> {
    let how = OpenHow {
        flags: (libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC) as u64,
        mode: 0,
        resolve: RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS,
    };
    // SAFETY: openat2 reads the name and an open_how of the size that is given.
    own(unsafe {
        libc::syscall(
            libc::SYS_openat2,
            top,
            name.as_ptr(),
            &how,
            size_of::<OpenHow>(),
        )
    } as libc::c_int)
}

/// A name of the archive as its components; absolute ones and `..` are refused, `.` and empty ones mean nothing.
fn components(name: &[u8]) -> io::Result<Vec<&[u8]>> {
    if name.starts_with(b"/") {
        return Err(os_error(libc::EINVAL));
    }
    let parts: Vec<&[u8]> = name
        .split(|byte| *byte == b'/')
        .filter(|part| !part.is_empty() && *part != b".")
        .collect();
    if parts.contains(&b"..".as_slice()) || name.contains(&0) {
        return Err(os_error(libc::EINVAL));
    }
    Ok(parts)
}

struct Unpacker {
    top: OwnedFd,
    is_root: bool,
    parents: HashMap<Vec<u8>, OwnedFd>,
    /// In the order of the archive.
    directories: Vec<(Vec<u8>, Entry)>,
    entries: u64,
    bytes: u64,
}

impl Unpacker {
    /// Makes one entry; reads its data from `from`.
    fn entry(&mut self, entry: Entry, from: &mut impl Read) -> io::Result<()> {
        let parts = components(&entry.path)?;
        self.entries += 1;
        let Some((name, parents)) = parts.split_last() else {
            // The directory itself ("./"): it is the caller's, and stays as it is.
            return if entry.kind == Kind::Directory {
                Ok(())
            } else {
                Err(os_error(libc::EINVAL))
            };
        };
        let (name, parent) = (c_string(name)?, self.parent(parents)?);
        match entry.kind {
            Kind::File => self.file(parent, &name, &entry, from)?,
            Kind::Directory => {
                make_directory(parent, &name)?;
                self.directories.push((parts.join(&b'/'), entry));
            }
            Kind::Symlink => {
                clear(parent, &name)?;
                let target = c_string(&entry.link)?;
                // SAFETY: both are C strings.
                check(unsafe { libc::symlinkat(target.as_ptr(), parent, name.as_ptr()) })?;
                self.finish_entry(parent, &name, &entry)?;
            }
            Kind::Hardlink => self.hardlink(parents, &name, &entry)?,
            Kind::Fifo => {
                clear(parent, &name)?;
                // SAFETY: a C string.
                check(unsafe { libc::mkfifoat(parent, name.as_ptr(), entry.mode & 0o777) })?;
                self.finish_entry(parent, &name, &entry)?;
            }
            Kind::Device => return Err(os_error(libc::EPERM)),
            Kind::Other(_) => return Err(os_error(libc::EOPNOTSUPP)),
        }
        Ok(())
    }

    /// The directory of these components, made where it is missing. The descriptor lives until the next call.
    fn parent(&mut self, parts: &[&[u8]]) -> io::Result<RawFd> {
        if parts.is_empty() {
            return Ok(self.top.as_raw_fd());
        }
        let key = parts.join(&b'/');
        if let Some(directory) = self.parents.get(&key) {
            return Ok(directory.as_raw_fd());
        }
        let name = c_string(&key)?;
        let directory = match open_beneath(self.top.as_raw_fd(), &name) {
            Err(error) if errno(&error) == libc::ENOENT => {
                let (last, above) = parts.split_last().ok_or(error)?;
                let above = self.parent(above)?;
                make_directory(above, &c_string(last)?)?;
                open_beneath(self.top.as_raw_fd(), &name)?
            }
            other => other?,
        };
        if self.parents.len() >= PARENTS_MAX {
            self.parents.clear();
        }
        let fd = directory.as_raw_fd();
        self.parents.insert(key, directory);
        Ok(fd)
    }

    fn file(
        &mut self,
        parent: RawFd,
        name: &CStr,
        entry: &Entry,
        from: &mut impl Read,
    ) -> io::Result<()> {
        clear(parent, name)?;
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW;
        let mut file = File::from(open(parent, name, flags, 0o600)?);
        let copied = io::copy(&mut from.take(entry.size), &mut file)?;
        if copied < entry.size {
            return Err(os_error(libc::EINVAL));
        }
        io::copy(&mut from.take(padding(entry.size)), &mut io::sink())?;
        self.bytes += entry.size;
        self.chown(file.as_raw_fd(), c"", entry)?;
        // SAFETY: the file is open. After chown, which clears set-id bits.
        check(unsafe { libc::fchmod(file.as_raw_fd(), entry.mode) })?;
        set_times(file.as_raw_fd(), c"", entry.mtime)
    }

    /// A link to an entry that lies below the directory too; the link itself, if that is a symlink.
    fn hardlink(&mut self, parents: &[&[u8]], name: &CStr, entry: &Entry) -> io::Result<()> {
        let target = components(&entry.link)?;
        let (target_name, target_parents) =
            target.split_last().ok_or_else(|| os_error(libc::EINVAL))?;
        // By descriptors of their own: looking up one may drop the other's.
        let target_parent = match target_parents {
            [] => self.top.try_clone()?,
            parts => open_beneath(self.top.as_raw_fd(), &c_string(&parts.join(&b'/'))?)?,
        };
        let target_name = c_string(target_name)?;
        let parent = self.parent(parents)?;
        clear(parent, name)?;
        // SAFETY: both are C strings.
        check(unsafe {
            libc::linkat(
                target_parent.as_raw_fd(),
                target_name.as_ptr(),
                parent,
                name.as_ptr(),
                0,
            )
        })
        .map(drop)
    }

    /// Owner and time of an entry that isn't opened.
    fn finish_entry(&self, parent: RawFd, name: &CStr, entry: &Entry) -> io::Result<()> {
        self.chown(parent, name, entry)?;
        set_times(parent, name, entry.mtime)
    }

    /// The archive's owner, if the sandbox's root unpacks it. An id that this sandbox can't have becomes root.
    fn chown(&self, directory: RawFd, name: &CStr, entry: &Entry) -> io::Result<()> {
        if !self.is_root {
            return Ok(());
        }
        let flags = libc::AT_EMPTY_PATH | libc::AT_SYMLINK_NOFOLLOW;
        let (uid, gid) = (id(entry.uid), id(entry.gid));
        // SAFETY: a C string.
        match check(unsafe { libc::fchownat(directory, name.as_ptr(), uid, gid, flags) }) {
            Err(error) if errno(&error) == libc::EINVAL => Ok(()),
            other => other.map(drop),
        }
    }

    /// Sets what directories are to be, the deepest first: a read-only one would have refused its content, and content changes its time.
    fn finish(&mut self) -> io::Result<()> {
        for (name, entry) in std::mem::take(&mut self.directories).into_iter().rev() {
            let parts = components(&name)?;
            let Some((last, above)) = parts.split_last() else {
                continue;
            };
            let (last, parent) = (c_string(last)?, self.parent(above)?);
            // Not through a symlink that stands there by now.
            let directory = open(
                parent,
                &last,
                libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW,
                0,
            )?;
            self.chown(directory.as_raw_fd(), c"", &entry)?;
            // SAFETY: the directory is open.
            check(unsafe { libc::fchmod(directory.as_raw_fd(), entry.mode) })?;
            set_times(directory.as_raw_fd(), c"", entry.mtime)?;
        }
        Ok(())
    }
}

fn id(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX - 1)
}

/// An existing directory is fine; a symlink to one is not a directory.
fn make_directory(parent: RawFd, name: &CStr) -> io::Result<()> {
    // SAFETY: a C string.
    match check(unsafe { libc::mkdirat(parent, name.as_ptr(), 0o755) }) {
        Err(error) if errno(&error) == libc::EEXIST => {
            // A symlink is refused, so that nothing is written where it points.
            match open(
                parent,
                name,
                libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW,
                0,
            ) {
                Ok(_) => Ok(()),
                Err(error) if errno(&error) == libc::ENOTDIR && is_symlink(parent, name)? => {
                    Err(os_error(libc::ELOOP))
                }
                Err(error) => Err(error),
            }
        }
        other => other.map(drop),
    }
}

fn is_symlink(parent: RawFd, name: &CStr) -> io::Result<bool> {
    // SAFETY: stat is plain data that fstatat fills in.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        check(libc::fstatat(
            parent,
            name.as_ptr(),
            &mut stat,
            libc::AT_SYMLINK_NOFOLLOW,
        ))?;
        Ok(stat.st_mode & libc::S_IFMT == libc::S_IFLNK)
    }
}

/// Makes way for an entry; a directory is not removed.
fn clear(parent: RawFd, name: &CStr) -> io::Result<()> {
    // SAFETY: a C string.
    match check(unsafe { libc::unlinkat(parent, name.as_ptr(), 0) }) {
        Err(error) if errno(&error) == libc::ENOENT => Ok(()),
        other => other.map(drop),
    }
}

fn set_times(directory: RawFd, name: &CStr, (seconds, nanoseconds): (i64, u32)) -> io::Result<()> {
    let time = libc::timespec {
        tv_sec: seconds,
        tv_nsec: i64::from(nanoseconds),
    };
    let times = [time, time];
    let flags = libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH;
    // SAFETY: a C string, and two times.
    check(unsafe { libc::utimensat(directory, name.as_ptr(), times.as_ptr(), flags) }).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_lead_out_are_refused() {
        for name in [
            &b"/etc/passwd"[..],
            b"..",
            b"a/../b",
            b"../x",
            b"a/..",
            b"a\0b",
        ] {
            assert!(components(name).is_err(), "{name:?}");
        }
        assert_eq!(components(b"./a//b/").unwrap(), [b"a", b"b"]);
        assert!(components(b"./").unwrap().is_empty());
    }
}
