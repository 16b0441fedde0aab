//! Reading and writing the content of one file.

use std::ffi::CString;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use wire::message::BuiltinArgs;
use wire::value::Writer;

use super::{answer, stdin, stdout, Failure, Result};
use crate::kernel::{self, check, check_size, errno};

/// Standard output and input are enlarged to this.
pub const PIPE_SIZE: usize = 1 << 20;
/// What one copy moves.
const COPY_SIZE: usize = 256 << 10;
/// Symlinks followed before a path counts as a loop; the kernel's own limit.
const SYMLINKS_MAX: usize = 40;

pub fn path(bytes: &[u8]) -> &Path {
    Path::new(std::ffi::OsStr::from_bytes(bytes))
}

/// `read`: the content of a regular file, from `offset` on, at most `length` bytes.
pub fn read(arguments: &BuiltinArgs) -> Result<()> {
    let fail = |act: &str, error: &io::Error| Failure::at(act, &arguments.path, error);
    // O_NONBLOCK: a FIFO would wait for a writer before it can be refused.
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path(&arguments.path));
    let mut file = opened.map_err(|error| fail("open", &error))?;
    let metadata = file.metadata().map_err(|error| fail("stat", &error))?;
    refuse_irregular(&metadata, &arguments.path)?;
    if arguments.offset > 0 {
        file.seek(SeekFrom::Start(arguments.offset))
            .map_err(|error| fail("seek", &error))?;
    }
    kernel::enlarge_pipe(stdout().as_raw_fd(), PIPE_SIZE);
    pour(
        &mut file,
        &mut stdout(),
        arguments.length.unwrap_or(u64::MAX),
    )
    .map(drop)
    .map_err(|error| fail("read", &error))
}

fn refuse_irregular(metadata: &Metadata, name: &[u8]) -> Result<()> {
    let errno = match metadata.file_type() {
        kind if kind.is_file() => return Ok(()),
        kind if kind.is_dir() => libc::EISDIR,
        _ => libc::EINVAL,
    };
    Err(Failure::at(
        "open",
        name,
        &io::Error::from_raw_os_error(errno),
    ))
}

/// Writes all that standard input brings into `file`. Not by splice: that keeps the pipe locked while the file's filesystem takes the
/// pages, and chronus spins at the other end.
fn drain_into(file: &mut File) -> io::Result<()> {
    let mut buffer = vec![0; COPY_SIZE];
    loop {
        match stdin().read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => file.write_all(&buffer[..count])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Moves up to `limit` bytes from a file into a pipe. Pages aren't copied more than they must; where the kernel can't splice (much of
/// /proc) they are.
fn pour(from: &mut File, to: &mut File, limit: u64) -> io::Result<u64> {
    let mut moved = 0;
    while moved < limit {
        match splice(from.as_raw_fd(), to.as_raw_fd(), limit - moved) {
            Ok(0) => break,
            Ok(count) => moved += count as u64,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if errno(&error) == libc::EINVAL => {
                return copy(from, to, limit - moved).map(|count| moved + count)
            }
            Err(error) => return Err(error),
        }
    }
    Ok(moved)
}

fn splice(from: RawFd, to: RawFd, limit: u64) -> io::Result<usize> {
    let count = usize::try_from(limit).unwrap_or(usize::MAX).min(PIPE_SIZE);
    // SAFETY: splice between two open descriptors at their own positions.
    check_size(unsafe {
        libc::splice(
            from,
            std::ptr::null_mut(),
            to,
            std::ptr::null_mut(),
            count,
            0,
        )
    })
}

fn copy(from: &mut File, to: &mut File, limit: u64) -> io::Result<u64> {
    let mut source = io::BufReader::with_capacity(COPY_SIZE, from.take(limit));
    io::copy(&mut source, to)
}

/// `write`: standard input becomes the content of a file, whole or not at all (`append` excepted). The answer is its size.
pub fn write(arguments: &BuiltinArgs) -> Result<()> {
    let fail = |act: &str, error: &io::Error| Failure::at(act, &arguments.path, error);
    let target = final_target(path(&arguments.path)).map_err(|error| fail("open", &error))?;
    let directory = target
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    kernel::enlarge_pipe(stdin().as_raw_fd(), PIPE_SIZE);
    if arguments.parents {
        fs::create_dir_all(directory).map_err(|error| fail("mkdir", &error))?;
    }
    let existing = match fs::metadata(&target) {
        Ok(_) if arguments.exclusive => {
            return Err(fail("create", &io::Error::from_raw_os_error(libc::EEXIST)))
        }
        Ok(metadata) => {
            refuse_irregular(&metadata, &arguments.path)?;
            // A rename over it would not ask whether the user may write it. (Opening it would: and have overlayfs copy it whole.)
            may_write(&target).map_err(|error| fail("open", &error))?;
            Some(metadata)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(fail("stat", &error)),
    };
    let size = if arguments.append {
        append(&target, arguments)
    } else {
        match Draft::create(directory) {
            Ok(draft) => draft.complete(&target, existing.as_ref(), arguments),
            // The directory isn't the user's to write in (or takes no new names, like /proc), but the file may be.
            Err(_) if existing.is_some() => overwrite(&target, arguments),
            Err(error) => Err(error),
        }
    };
    answer(
        Writer::new()
            .map(1)
            .text("size")
            .unsigned(size.map_err(|error| fail("write", &error))?),
    )
}

fn may_write(target: &Path) -> io::Result<()> {
    let path = CString::new(target.as_os_str().as_bytes())?;
    // SAFETY: path is NUL-terminated and outlives the call.
    check(unsafe { libc::access(path.as_ptr(), libc::W_OK) }).map(drop)
}

/// The path that a write to `name` means: a final symlink stands for its target, also for one that doesn't exist yet.
fn final_target(name: &Path) -> io::Result<PathBuf> {
    let mut target = name.to_path_buf();
    for _ in 0..SYMLINKS_MAX {
        match fs::read_link(&target) {
            Ok(link) => target = target.parent().unwrap_or(Path::new("/")).join(link),
            Err(error) if matches!(errno(&error), libc::EINVAL | libc::ENOENT) => {
                return Ok(target)
            }
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::from_raw_os_error(libc::ELOOP))
}

fn append(target: &Path, arguments: &BuiltinArgs) -> io::Result<u64> {
    let mut file = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(arguments.mode.unwrap_or(0o666))
        .open(target)?;
    drain_into(&mut file)?;
    set_mode(&file, arguments.mode)?;
    Ok(file.metadata()?.size())
}

fn overwrite(target: &Path, arguments: &BuiltinArgs) -> io::Result<u64> {
    let mut file = OpenOptions::new().write(true).truncate(true).open(target)?;
    drain_into(&mut file)?;
    set_mode(&file, arguments.mode)?;
    Ok(file.metadata()?.size())
}

fn set_mode(file: &File, mode: Option<u32>) -> io::Result<()> {
    mode.map_or(Ok(()), |mode| {
        file.set_permissions(fs::Permissions::from_mode(mode & 0o7777))
    })
}

/// A file that gets its name when its content is complete.
struct Draft {
    file: File,
    directory: PathBuf,
    /// Without a name it vanishes with its writer; filesystems that can't do that need a temporary one from the start.
    name: Option<PathBuf>,
}

impl Draft {
    fn create(directory: &Path) -> io::Result<Draft> {
        let nameless = OpenOptions::new()
            .write(true)
            .custom_flags(libc::O_TMPFILE)
            .mode(0o666)
            .open(directory);
        match nameless {
            Ok(file) => Ok(Draft {
                file,
                directory: directory.to_owned(),
                name: None,
            }),
            Err(error)
                if matches!(
                    errno(&error),
                    libc::EOPNOTSUPP | libc::EISDIR | libc::EINVAL
                ) =>
            {
                let name = temporary_name(directory)?;
                let file = OpenOptions::new()
                    .write(true)
                    .create_new(true)
                    .mode(0o666)
                    .open(&name)?;
                Ok(Draft {
                    file,
                    directory: directory.to_owned(),
                    name: Some(name),
                })
            }
            Err(error) => Err(error),
        }
    }

    /// Fills it from standard input and puts it in the place of `target`.
    fn complete(
        mut self,
        target: &Path,
        existing: Option<&Metadata>,
        arguments: &BuiltinArgs,
    ) -> io::Result<u64> {
        let result = self.fill(existing, arguments).and_then(|size| {
            self.publish(target, existing, arguments.exclusive)
                .map(|()| size)
        });
        if let (Err(_), Some(name)) = (&result, &self.name) {
            fs::remove_file(name)?;
        }
        result
    }

    fn fill(&mut self, existing: Option<&Metadata>, arguments: &BuiltinArgs) -> io::Result<u64> {
        drain_into(&mut self.file)?;
        if let Some(metadata) = existing {
            // Only root may give files away; anybody else's new file stays their own.
            let _own_file =
                std::os::unix::fs::fchown(&self.file, Some(metadata.uid()), Some(metadata.gid()));
        }
        // After fchown, which clears set-id bits.
        set_mode(&self.file, arguments.mode.or(existing.map(Metadata::mode)))?;
        Ok(self.file.metadata()?.size())
    }

    fn publish(
        &mut self,
        target: &Path,
        existing: Option<&Metadata>,
        exclusive: bool,
    ) -> io::Result<()> {
        if existing.is_none() {
            match self.link(target) {
                // Somebody was faster; without `exclusive` that makes it a replacement.
                Err(error) if errno(&error) == libc::EEXIST && !exclusive => {}
                other => return other,
            }
        }
        let temporary = match &self.name {
            Some(name) => name.clone(),
            None => {
                let name = temporary_name(&self.directory)?;
                self.link(&name)?;
                name
            }
        };
        self.name = Some(temporary.clone());
        match fs::rename(&temporary, target) {
            Err(error) if errno(&error) == libc::EBUSY => {
                fill_in_place(&temporary, target)?;
                fs::remove_file(&temporary)
            }
            other => other,
        }
    }

    /// Makes it appear as `name`, which must be free.
    fn link(&mut self, name: &Path) -> io::Result<()> {
        if let Some(temporary) = self.name.take() {
            fs::hard_link(&temporary, name).inspect_err(|_| self.name = Some(temporary.clone()))?;
            return fs::remove_file(temporary);
        }
        let from = CString::new(format!("/proc/self/fd/{}", self.file.as_raw_fd()))?;
        let to = CString::new(name.as_os_str().to_os_string().into_vec())?;
        // SAFETY: both paths are C strings.
        check(unsafe {
            libc::linkat(
                libc::AT_FDCWD,
                from.as_ptr(),
                libc::AT_FDCWD,
                to.as_ptr(),
                libc::AT_SYMLINK_FOLLOW,
            )
        })
        .map(drop)
    }
}

/// For a target that is a mount point, whose name can't be taken: its content is replaced instead.
fn fill_in_place(from: &Path, target: &Path) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).truncate(true).open(target)?;
    copy(&mut File::open(from)?, &mut file, u64::MAX).map(drop)
}

fn temporary_name(directory: &Path) -> io::Result<PathBuf> {
    let mut random = [0; 8];
    kernel::fill_random(&mut random)?;
    Ok(directory.join(format!(".{:016x}.tmp", u64::from_ne_bytes(random))))
}
