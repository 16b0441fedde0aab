//! Directories and what stands in them: list, stat, mkdir, move, remove, chmod, chown.

use std::ffi::CString;
use std::fs::{self, Metadata};
use std::io::{self, BufWriter, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;

use wire::message::BuiltinArgs;
use wire::value::Writer;

use super::files::path;
use super::{answer, stdout, Failure, Result};
use crate::kernel::check;
use crate::users::{self, Unresolved};

/// Answers of many entries are written in pieces of this size.
const ANSWER_BUFFER: usize = 64 << 10;

/// A file map of `docs/wire.md`. `name` is how the entry is shown.
fn file_map(out: Writer, name: &[u8], metadata: &Metadata, target: Option<&[u8]>) -> Writer {
    let mtime = metadata.mtime() as f64 + metadata.mtime_nsec() as f64 / 1e9;
    let out = out
        .map(9)
        .text("path")
        .bytes(name)
        .text("type")
        .text(kind(metadata));
    let out = out
        .text("size")
        .unsigned(metadata.size())
        .text("mode")
        .unsigned(u64::from(metadata.mode() & 0o7777));
    let out = out
        .text("uid")
        .unsigned(u64::from(metadata.uid()))
        .text("gid")
        .unsigned(u64::from(metadata.gid()));
    let out = out
        .text("mtime")
        .float(mtime)
        .text("nlink")
        .unsigned(metadata.nlink());
    out.text("target").optional(target, Writer::bytes)
}

fn kind(metadata: &Metadata) -> &'static str {
    match metadata.file_type() {
        kind if kind.is_file() => "file",
        kind if kind.is_dir() => "directory",
        kind if kind.is_symlink() => "symlink",
        kind if kind.is_fifo() => "fifo",
        kind if kind.is_socket() => "socket",
        kind if kind.is_char_device() => "char",
        _ => "block",
    }
}

/// The map of the entry itself, with its target if it is a symlink.
fn describe(name: &Path, metadata: &Metadata) -> Writer {
    let target = if metadata.is_symlink() {
        fs::read_link(name).ok()
    } else {
        None
    };
    let target = target.as_ref().map(|target| target.as_os_str().as_bytes());
    file_map(Writer::new(), name.as_os_str().as_bytes(), metadata, target)
}

/// `stat`: one file map; `follow` looks through a final symlink.
pub fn stat(arguments: &BuiltinArgs) -> Result<()> {
    let name = path(&arguments.path);
    let metadata = if arguments.follow {
        fs::metadata(name)
    } else {
        fs::symlink_metadata(name)
    };
    answer(describe(
        name,
        &metadata.map_err(|error| Failure::at("stat", &arguments.path, &error))?,
    ))
}

/// `list`: the entries of a directory, sorted by name; `recursive` goes down, without following symlinks. What vanishes or can't be
/// opened meanwhile is left out.
pub fn list(arguments: &BuiltinArgs) -> Result<()> {
    let mut left = arguments.limit.unwrap_or(u64::MAX);
    let mut target = stdout();
    let mut out = BufWriter::with_capacity(ANSWER_BUFFER, &mut *target);
    let top = path(&arguments.path);
    let first = entries(top).map_err(|error| Failure::at("open", &arguments.path, &error))?;
    let mut open = vec![first.into_iter()];
    while let Some(directory) = open.last_mut() {
        let Some(name) = directory.next() else {
            open.pop();
            continue;
        };
        let Ok(metadata) = fs::symlink_metadata(&name) else {
            continue;
        };
        if left == 0 {
            break;
        }
        left -= 1;
        out.write_all(&describe(&name, &metadata).finish())?;
        if arguments.recursive && metadata.is_dir() {
            if let Ok(below) = entries(&name) {
                open.push(below.into_iter());
            }
        }
    }
    Ok(out.flush()?)
}

/// Paths of a directory's entries, sorted.
pub fn entries(directory: &Path) -> io::Result<Vec<std::path::PathBuf>> {
    let mut names = fs::read_dir(directory)?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<io::Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

/// `mkdir`: with `parents` an existing directory is fine, and missing ones above are made.
pub fn mkdir(arguments: &BuiltinArgs) -> Result<()> {
    let mode = arguments.mode.unwrap_or(0o777) & 0o7777;
    let made = fs::DirBuilder::new()
        .recursive(arguments.parents)
        .mode(mode)
        .create(path(&arguments.path));
    made.map_err(|error| Failure::at("mkdir", &arguments.path, &error))
}

/// `move`: rename, replacing what rename(2) replaces. Across mount points it is an error (EXDEV).
pub fn rename(arguments: &BuiltinArgs) -> Result<()> {
    fs::rename(path(&arguments.path), path(&arguments.to))
        .map_err(|error| Failure::at("move", &arguments.path, &error))
}

/// `remove`: a file, or an empty directory; with `recursive` everything below, without following symlinks.
pub fn remove(arguments: &BuiltinArgs) -> Result<()> {
    let name = path(&arguments.path);
    let removed = fs::symlink_metadata(name).and_then(|metadata| {
        match (metadata.is_dir(), arguments.recursive) {
            (true, true) => fs::remove_dir_all(name),
            (true, false) => fs::remove_dir(name),
            (false, _) => fs::remove_file(name),
        }
    });
    removed.map_err(|error| Failure::at("remove", &arguments.path, &error))
}

/// `chmod`: through symlinks, as chmod(2).
pub fn chmod(arguments: &BuiltinArgs) -> Result<()> {
    let mode = arguments
        .mode
        .ok_or_else(|| Failure::new(libc::EINVAL, "chmod takes a mode"))?;
    let changed = fs::set_permissions(
        path(&arguments.path),
        fs::Permissions::from_mode(mode & 0o7777),
    );
    changed.map_err(|error| Failure::at("chmod", &arguments.path, &error))
}

/// `chown`: of the entry itself, also of a symlink; by numbers (-1 leaves one as it is) or by `owner`, as START's `user`.
pub fn chown(arguments: &BuiltinArgs) -> Result<()> {
    let (uid, gid) = match &arguments.owner {
        Some(owner) => {
            let account = users::look_up_in_place(owner);
            let account = account.map_err(|unresolved| match unresolved {
                Unresolved::User | Unresolved::Group => {
                    Failure::new(libc::EINVAL, format!("no owner {owner} in the sandbox"))
                }
                Unresolved::Unreadable(errno) => Failure::new(
                    errno,
                    "the sandbox's /etc/passwd or /etc/group can't be read",
                ),
            })?;
            let group = owner.contains(':') || owner.parse::<u32>().is_err();
            (Some(account.uid), group.then_some(account.gid))
        }
        None => (id(arguments.uid)?, id(arguments.gid)?),
    };
    let name = CString::new(arguments.path.as_slice())
        .map_err(|_| Failure::new(libc::EINVAL, "a path can't contain a NUL byte"))?;
    // SAFETY: the path is a C string; -1 means to leave an id.
    let changed = check(unsafe {
        libc::lchown(
            name.as_ptr(),
            uid.unwrap_or(u32::MAX),
            gid.unwrap_or(u32::MAX),
        )
    });
    changed
        .map(drop)
        .map_err(|error| Failure::at("chown", &arguments.path, &error))
}

fn id(value: Option<i64>) -> Result<Option<u32>> {
    match value {
        None | Some(-1) => Ok(None),
        Some(id) => u32::try_from(id)
            .map(Some)
            .map_err(|_| Failure::new(libc::EINVAL, format!("{id} is no user or group id"))),
    }
}
