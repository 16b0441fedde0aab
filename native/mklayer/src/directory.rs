//! A source that is a directory: the writable layer of a sandbox, in a snapshot that no longer changes.
//!
//! Its owner is hostile, but can't change it any more: names may be any bytes, trees as deep as the disk holds, and nothing in it may lead this
//! program elsewhere. So everything is reached by descriptor, one name at a time, without following a link. What overlayfs keeps in it becomes
//! what it stands for: a character device 0:0 is a whiteout, `trusted.overlay.opaque` an opaque directory. Owners are taken as they are.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use crate::archive::Segment;
use crate::blob::BlobWriter;
use crate::convert::check_device;
use crate::error::{LayerError, Result};
use crate::extents::{FileWriter, CHUNK_INDEX};
use crate::globs::Globs;
use crate::limits::{FILE_SIZE_MAX, PATH_MAX};
use crate::tree::{keep_xattr, Arena, Attributes, Directory, Leaf, LeafId, LeafKind, Node, Xattrs};

/// Bytes read from a file at once, and from a directory.
const BUFFER: usize = 1 << 20;
const LISTING: usize = 64 << 10;
/// What the kernel allows of one inode's names of attributes, and of one value (linux/limits.h).
const XATTR_NAMES_MAX: usize = 64 << 10;
const XATTR_VALUE_MAX: usize = 64 << 10;
/// Memory that a range of a sparse file takes while the file is read.
const SEGMENT_COST: u64 = 16;

const OVERLAY_PREFIX: &[u8] = b"trusted.overlay.";
const OPAQUE: &[u8] = b"trusted.overlay.opaque";
/// These send overlayfs elsewhere. Sandboxes are mounted without either feature, so a layer that has one was not made by them.
const STEERING: [&[u8]; 2] = [b"trusted.overlay.redirect", b"trusted.overlay.metacopy"];

/// What one glob kept out of the layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    pub entries: u64,
    /// Bytes that the files take on the disk.
    pub bytes: u64,
}

/// What a directory gave beside its tree.
pub struct Found {
    pub root: Directory,
    pub entries: u64,
    pub dropped_xattrs: u64,
    /// For each glob.
    pub removed: Vec<Removed>,
}

/// Reads everything below `top`.
pub fn read(
    top: OwnedFd,
    globs: &Globs,
    arena: &mut Arena,
    blob: &mut BlobWriter,
) -> Result<Found> {
    let mut reader = Reader {
        globs,
        arena,
        blob,
        links: BTreeMap::new(),
        buffer: vec![0; BUFFER],
        path: Vec::new(),
        depth: 0,
        entries: 0,
        dropped_xattrs: 0,
        removed: vec![Removed::default(); globs.count()],
    };
    let stat = stat_of(&top).map_err(|source| reader.failed("looking at", source))?;
    let root = reader.directory(&top, &stat, None)?;
    Ok(Found {
        root,
        entries: reader.entries,
        dropped_xattrs: reader.dropped_xattrs,
        removed: reader.removed,
    })
}

struct Reader<'a> {
    globs: &'a Globs,
    arena: &'a mut Arena,
    blob: &'a mut BlobWriter,
    /// Files with several names, by inode: all are in one subvolume.
    links: BTreeMap<u64, LeafId>,
    buffer: Vec<u8>,
    /// Of what is being read, with a leading slash; empty: the top.
    path: Vec<u8>,
    depth: usize,
    entries: u64,
    dropped_xattrs: u64,
    removed: Vec<Removed>,
}

impl Reader<'_> {
    /// `excluded`: the glob that keeps this directory and all in it out, but for what hides files of the layers below.
    fn directory(
        &mut self,
        dir: &OwnedFd,
        stat: &libc::stat,
        excluded: Option<usize>,
    ) -> Result<Directory> {
        let (xattrs, opaque) = self.xattrs(dir, true)?;
        let mut directory = Directory {
            attributes: attributes(stat, xattrs),
            synthesized: false,
            opaque,
            ..Directory::default()
        };
        let names = list(dir, self.arena).map_err(|error| error.about(&self.path))?;
        for name in names {
            let length = self.path.len();
            self.path.push(b'/');
            self.path.extend_from_slice(&name);
            if self.path.len() > PATH_MAX && excluded.is_none() {
                return Err(LayerError::entry(
                    &self.path,
                    format!("a path longer than {PATH_MAX} bytes"),
                ));
            }
            let node = self.entry(dir, &name, excluded)?;
            self.path.truncate(length);
            if let Some(node) = node {
                directory.children.insert(name, node);
            }
        }
        Ok(directory)
    }

    /// What a name becomes; None: nothing.
    fn entry(
        &mut self,
        dir: &OwnedFd,
        name: &[u8],
        excluded: Option<usize>,
    ) -> Result<Option<Node>> {
        let c_name = CString::new(name).map_err(|_| LayerError::input("a NUL byte in a name"))?;
        let stat = stat_at(dir.as_raw_fd(), &c_name)
            .map_err(|source| self.failed("looking at", source))?;
        let device = (libc::major(stat.st_rdev), libc::minor(stat.st_rdev));
        let kind = stat.st_mode & libc::S_IFMT;
        self.entries += 1;
        if kind == libc::S_IFCHR && device == (0, 0) {
            return Ok(Some(Node::Whiteout));
        }
        let excluded = excluded.or_else(|| self.globs.first_match(&self.path));
        if kind == libc::S_IFDIR {
            return self.subdirectory(dir, &c_name, excluded);
        }
        if let Some(glob) = excluded {
            self.removed[glob].entries += 1;
            self.removed[glob].bytes += stat.st_blocks as u64 * 512;
            return Ok(None);
        }
        if let Some(leaf) = self.links.get(&stat.st_ino) {
            return Ok(Some(Node::Leaf(*leaf)));
        }
        let mut kept = attributes(&stat, Default::default());
        let kind = match kind {
            libc::S_IFREG => {
                let file = self.open(dir, &c_name, libc::O_NONBLOCK | libc::O_NOCTTY)?;
                kept.xattrs = self.xattrs(&file, false)?.0;
                self.file(file, stat.st_size)?
            }
            libc::S_IFLNK => LeafKind::Symlink(self.link_target(dir, &c_name)?),
            libc::S_IFCHR | libc::S_IFBLK => {
                let (major, minor) = device;
                check_device(major, minor).map_err(|error| error.about(&self.path))?;
                if kind == libc::S_IFCHR {
                    LeafKind::CharDevice { major, minor }
                } else {
                    LeafKind::BlockDevice { major, minor }
                }
            }
            libc::S_IFIFO => LeafKind::Fifo,
            libc::S_IFSOCK => LeafKind::Socket,
            other => {
                return Err(LayerError::entry(
                    &self.path,
                    format!("a file of the unknown type {other:o}"),
                ))
            }
        };
        let leaf = self.arena.add(Leaf {
            attributes: kept,
            kind,
        });
        if stat.st_nlink > 1 {
            self.links.insert(stat.st_ino, leaf);
        }
        Ok(Some(Node::Leaf(leaf)))
    }

    fn subdirectory(
        &mut self,
        dir: &OwnedFd,
        name: &CString,
        excluded: Option<usize>,
    ) -> Result<Option<Node>> {
        if let (Some(glob), true) = (excluded, self.is_too_deep()) {
            // No layer reaches as far down, so nothing in there can hide anything.
            self.removed[glob].entries += 1;
            return Ok(None);
        }
        self.depth += 1;
        if self.depth > self.arena.limits.depth {
            return Err(LayerError::entry(
                &self.path,
                format!(
                    "more than {} directories below each other",
                    self.arena.limits.depth
                ),
            ));
        }
        let child = self.open(dir, name, libc::O_DIRECTORY)?;
        let stat = stat_of(&child).map_err(|source| self.failed("looking at", source))?;
        let directory = self.directory(&child, &stat, excluded)?;
        self.depth -= 1;
        match excluded {
            Some(glob) if directory.children.is_empty() && !directory.opaque => {
                self.removed[glob].entries += 1;
                Ok(None)
            }
            _ => Ok(Some(Node::Directory(Box::new(directory)))),
        }
    }

    fn is_too_deep(&self) -> bool {
        self.depth >= self.arena.limits.depth || self.path.len() > PATH_MAX
    }

    fn open(&self, dir: &OwnedFd, name: &CString, flags: libc::c_int) -> Result<OwnedFd> {
        let flags = flags | libc::O_RDONLY | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        // SAFETY: the name is NUL-terminated; the new descriptor is nobody else's.
        let opened = unsafe {
            let fd = libc::openat(dir.as_raw_fd(), name.as_ptr(), flags);
            check(fd as libc::ssize_t).map(|_| OwnedFd::from_raw_fd(fd))
        };
        opened.map_err(|source| self.failed("opening", source))
    }

    fn link_target(&mut self, dir: &OwnedFd, name: &CString) -> Result<Vec<u8>> {
        let mut target = vec![0; PATH_MAX + 1];
        // SAFETY: the name is NUL-terminated, the buffer writable for its length.
        let length = check(unsafe {
            libc::readlinkat(
                dir.as_raw_fd(),
                name.as_ptr(),
                target.as_mut_ptr().cast(),
                target.len(),
            )
        })
        .map_err(|source| self.failed("reading", source))?;
        target.truncate(length);
        self.arena.charge_meta(length as u64)?;
        Ok(target)
    }

    /// The attributes that are kept, and whether overlayfs takes this directory for opaque.
    fn xattrs(&mut self, file: &OwnedFd, is_directory: bool) -> Result<(Xattrs, bool)> {
        let mut kept = Xattrs::new();
        let mut opaque = false;
        let names = xattr_names(file).map_err(|source| self.failed("reading xattrs of", source))?;
        for name in names
            .split(|byte| *byte == 0)
            .filter(|name| !name.is_empty())
        {
            if STEERING.contains(&name) {
                return Err(LayerError::entry(
                    &self.path,
                    format!("has the attribute {}", name.escape_ascii()),
                ));
            }
            if name == OPAQUE && is_directory {
                let value = self.xattr(file, name)?;
                if value != b"y" {
                    return Err(LayerError::entry(&self.path, "is opaque in an unknown way"));
                }
                opaque = true;
            } else if keep_xattr(name) {
                let value = self.xattr(file, name)?;
                self.arena.charge_meta((name.len() + value.len()) as u64)?;
                kept.insert(name.to_vec(), value);
            } else if !name.starts_with(OVERLAY_PREFIX) {
                self.dropped_xattrs += 1;
            }
        }
        Ok((kept, opaque))
    }

    fn xattr(&self, file: &OwnedFd, name: &[u8]) -> Result<Vec<u8>> {
        let c_name = CString::new(name).map_err(|_| LayerError::input("a NUL byte in a name"))?;
        let mut value = vec![0; XATTR_VALUE_MAX];
        // SAFETY: the name is NUL-terminated, the buffer writable for its length.
        let length = check(unsafe {
            libc::fgetxattr(
                file.as_raw_fd(),
                c_name.as_ptr(),
                value.as_mut_ptr().cast(),
                value.len(),
            )
        })
        .map_err(|source| self.failed("reading xattrs of", source))?;
        value.truncate(length);
        Ok(value)
    }

    /// Copies a file's data, without its holes.
    fn file(&mut self, file: OwnedFd, size: i64) -> Result<LeafKind> {
        let size = size as u64;
        if size > FILE_SIZE_MAX {
            return Err(LayerError::entry(
                &self.path,
                format!("{size} bytes are too many"),
            ));
        }
        let mut file = File::from(file);
        let segments = self.segments(&file, size)?;
        let mut writer = FileWriter::new(self.blob, size, &segments);
        self.arena.charge_data(writer.stored_bytes(&segments))?;
        self.arena
            .charge_meta(writer.chunks().saturating_mul(CHUNK_INDEX))?;
        for (offset, length) in segments {
            writer.seek(offset)?;
            let failed = |source| io_error("reading", &self.path, source);
            file.seek(SeekFrom::Start(offset)).map_err(failed)?;
            let mut left = length;
            while left > 0 {
                let part = left.min(BUFFER as u64) as usize;
                let got = file.read(&mut self.buffer[..part]).map_err(failed)?;
                if got == 0 {
                    return Err(LayerError::entry(&self.path, "ends before its size"));
                }
                writer.append(&self.buffer[..got])?;
                left -= got as u64;
            }
        }
        writer.finish().map(LeafKind::File)
    }

    /// The ranges of a file that have data.
    fn segments(&mut self, file: &File, size: u64) -> Result<Vec<Segment>> {
        let mut segments = Vec::new();
        let mut at = 0;
        while at < size {
            let Some(start) = self
                .next(file, at, libc::SEEK_DATA)?
                .filter(|at| *at < size)
            else {
                break;
            };
            let end = self.next(file, start, libc::SEEK_HOLE)?.unwrap_or(size);
            self.arena.charge_meta(SEGMENT_COST)?;
            segments.push((start, end.min(size) - start));
            at = end;
        }
        Ok(segments)
    }

    /// Where the next data, or the next hole, begins. None: there is none.
    fn next(&self, file: &File, from: u64, what: libc::c_int) -> Result<Option<u64>> {
        // SAFETY: plain integers; the descriptor is open.
        let found = unsafe { libc::lseek(file.as_raw_fd(), from as libc::off_t, what) };
        match check(found as libc::ssize_t) {
            Ok(offset) => Ok(Some(offset as u64)),
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            Err(source) => Err(self.failed("reading", source)),
        }
    }

    fn failed(&self, what: &str, source: io::Error) -> LayerError {
        io_error(what, &self.path, source)
    }
}

fn io_error(what: &str, path: &[u8], source: io::Error) -> LayerError {
    LayerError::Io {
        what: format!("{what} \"{}\"", path.escape_ascii()),
        source,
    }
}

fn check(value: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(value).map_err(|_| io::Error::last_os_error())
}

fn attributes(stat: &libc::stat, xattrs: Xattrs) -> Attributes {
    Attributes {
        mode: (stat.st_mode & 0o7777) as u16,
        uid: stat.st_uid,
        gid: stat.st_gid,
        mtime: stat.st_mtime,
        mtime_nsec: stat.st_mtime_nsec as u32,
        xattrs,
    }
}

fn stat_of(file: &OwnedFd) -> io::Result<libc::stat> {
    stat(file.as_raw_fd(), c"", libc::AT_EMPTY_PATH)
}

fn stat_at(dir: RawFd, name: &CString) -> io::Result<libc::stat> {
    stat(dir, name, libc::AT_SYMLINK_NOFOLLOW)
}

fn stat(dir: RawFd, name: &CStr, flags: libc::c_int) -> io::Result<libc::stat> {
    // SAFETY: stat is plain data, and the name NUL-terminated.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        check(libc::fstatat(dir, name.as_ptr(), &mut stat, flags) as libc::ssize_t)?;
        Ok(stat)
    }
}

fn xattr_names(file: &OwnedFd) -> io::Result<Vec<u8>> {
    let mut names = vec![0; XATTR_NAMES_MAX];
    // SAFETY: the buffer is writable for its length.
    let length = check(unsafe {
        libc::flistxattr(file.as_raw_fd(), names.as_mut_ptr().cast(), names.len())
    })?;
    names.truncate(length);
    Ok(names)
}

/// The names in a directory, each charged to the arena before it takes memory. `readdir` would want more system calls than are left.
fn list(dir: &OwnedFd, arena: &mut Arena) -> Result<Vec<Vec<u8>>> {
    /// Offsets in `struct linux_dirent64`: d_reclen, d_name.
    const LENGTH: usize = 16;
    const NAME: usize = 19;
    let mut names = Vec::new();
    let mut buffer = vec![0_u8; LISTING];
    loop {
        // SAFETY: the buffer is writable for its length.
        let length = check(unsafe {
            libc::syscall(
                libc::SYS_getdents64,
                dir.as_raw_fd(),
                buffer.as_mut_ptr(),
                buffer.len(),
            )
        } as libc::ssize_t)
        .map_err(|source| LayerError::Io {
            what: "listing a directory".into(),
            source,
        })?;
        if length == 0 {
            return Ok(names);
        }
        let mut rest = &buffer[..length];
        while rest.len() > NAME {
            let size = usize::from(u16::from_ne_bytes([rest[LENGTH], rest[LENGTH + 1]]));
            let (entry, following) = rest.split_at(size.clamp(NAME, rest.len()));
            let name = entry[NAME..]
                .split(|byte| *byte == 0)
                .next()
                .unwrap_or_default();
            if !matches!(name, b"." | b"..") {
                arena.count_entry()?;
                arena.charge_meta(name.len() as u64)?;
                names.push(name.to_vec());
            }
            rest = following;
        }
    }
}
