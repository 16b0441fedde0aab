//! /dev/fuse: the kernel's requests in, replies and notifications out. `include/uapi/linux/fuse.h` has the format.
//!
//! The protocol is spoken here and not by a library, because a connection that was taken over from an earlier process has had its INIT.
//! FUSE_DEV_IOC_CLONE is not used: what was read from a clone is aborted when its process dies, instead of waiting for the next one.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

const IN_HEADER: usize = 40;
/// The kernel asks for room for its largest request: a name, or 8 KiB at least (FUSE_MIN_READ_BUFFER).
pub const REQUEST_ROOM: usize = 64 << 10;

/// Notifications, sent in the place of an error with the unique number 0.
const NOTIFY_INVAL_INODE: i32 = 2;
const NOTIFY_INVAL_ENTRY: i32 = 3;

const ASYNC_READ: u32 = 1 << 0;
const ASYNC_DIO: u32 = 1 << 15;
const PARALLEL_DIROPS: u32 = 1 << 18;
const MAX_PAGES: u32 = 1 << 22;

/// Pages of one read: 1 MiB.
const PAGES: u16 = 256;
const READAHEAD: u32 = 1 << 20;
/// Reads that may be outstanding in the kernel. Those that wait for the store must not keep others from being asked.
const BACKGROUND: u16 = 4096;
/// Names and sizes never change while a blob is known; what is forgotten is invalidated.
const VALID_S: u64 = 365 * 24 * 3600;

pub const ROOT: u64 = 1;

pub mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const READ: u32 = 15;
    pub const STATFS: u32 = 17;
    pub const INIT: u32 = 26;
    pub const READDIR: u32 = 28;
    pub const BATCH_FORGET: u32 = 42;
}

/// One request of the kernel's.
pub struct Request<'a> {
    pub opcode: u32,
    pub unique: u64,
    pub node: u64,
    /// The task that it comes from, as this process numbers tasks.
    pub task: u32,
    pub body: &'a [u8],
}

/// A READ's arguments; a READDIR's are the same.
pub struct Range {
    pub offset: u64,
    pub size: u32,
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes
        .get(at..at + 4)
        .and_then(|raw| raw.try_into().ok())
        .map_or(0, u32::from_ne_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes
        .get(at..at + 8)
        .and_then(|raw| raw.try_into().ok())
        .map_or(0, u64::from_ne_bytes)
}

impl Request<'_> {
    /// struct fuse_read_in.
    pub fn range(&self) -> Range {
        Range {
            offset: u64_at(self.body, 8),
            size: u32_at(self.body, 16),
        }
    }

    /// A LOOKUP's name.
    pub fn name(&self) -> &[u8] {
        self.body
            .split(|byte| *byte == 0)
            .next()
            .unwrap_or_default()
    }
}

/// What a file or the root directory looks like.
#[derive(Clone, Copy)]
pub struct Attributes {
    pub node: u64,
    pub size: u64,
    pub is_directory: bool,
}

impl Attributes {
    pub fn root() -> Self {
        Attributes {
            node: ROOT,
            size: 0,
            is_directory: true,
        }
    }

    /// struct fuse_attr.
    fn write(&self, out: &mut Vec<u8>) {
        let (mode, links) = if self.is_directory {
            (libc::S_IFDIR | 0o555, 2)
        } else {
            (libc::S_IFREG | 0o444, 1)
        };
        for number in [self.node, self.size, self.size.div_ceil(512), 0, 0, 0] {
            out.extend(number.to_ne_bytes());
        }
        for number in [0, 0, 0, mode, links, 0, 0, 0, 4096, 0] {
            out.extend(number.to_ne_bytes());
        }
    }

    /// struct fuse_entry_out.
    pub fn entry(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(128);
        for number in [self.node, 0, VALID_S, VALID_S, 0] {
            out.extend(number.to_ne_bytes());
        }
        self.write(&mut out);
        out
    }

    /// struct fuse_attr_out.
    pub fn attr(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(104);
        for number in [VALID_S, 0] {
            out.extend(number.to_ne_bytes());
        }
        self.write(&mut out);
        out
    }
}

/// The answer to INIT (struct fuse_init_out): no write support, no passthrough, reads of 1 MiB.
pub fn init(body: &[u8]) -> Vec<u8> {
    let (minor, flags) = (u32_at(body, 4), u32_at(body, 12));
    let mut out = Vec::with_capacity(64);
    let ours = ASYNC_READ | ASYNC_DIO | PARALLEL_DIROPS | MAX_PAGES;
    for number in [7, minor.min(38), READAHEAD, flags & ours] {
        out.extend(number.to_ne_bytes());
    }
    out.extend(BACKGROUND.to_ne_bytes());
    out.extend((BACKGROUND / 4 * 3).to_ne_bytes());
    // max_write, of which nothing is used; time_gran.
    out.extend(4096_u32.to_ne_bytes());
    out.extend(1_u32.to_ne_bytes());
    out.extend(PAGES.to_ne_bytes());
    out.resize(64, 0);
    out
}

/// One entry of a directory (struct fuse_dirent), appended if it fits into `room` bytes.
pub fn add_entry(out: &mut Vec<u8>, room: usize, node: u64, next: u64, name: &[u8]) -> bool {
    let length = (24 + name.len()).next_multiple_of(8);
    if out.len() + length > room {
        return false;
    }
    let end = out.len() + length;
    out.extend(node.to_ne_bytes());
    out.extend(next.to_ne_bytes());
    out.extend((name.len() as u32).to_ne_bytes());
    out.extend(u32::from(libc::DT_REG).to_ne_bytes());
    out.extend(name);
    out.resize(end, 0);
    true
}

/// struct fuse_statfs_out: there is nothing to tell but the longest name.
pub fn statfs() -> Vec<u8> {
    let mut out = vec![0; 80];
    out[40..44].copy_from_slice(&4096_u32.to_ne_bytes());
    out[44..48].copy_from_slice(&255_u32.to_ne_bytes());
    out[48..52].copy_from_slice(&4096_u32.to_ne_bytes());
    out
}

/// The connection.
pub struct Device(OwnedFd);

impl Device {
    pub fn new(descriptor: OwnedFd) -> Self {
        Device(descriptor)
    }

    /// The next request; None when the connection has ended.
    pub fn next<'a>(&self, buffer: &'a mut [u8]) -> io::Result<Option<Request<'a>>> {
        let length = loop {
            // SAFETY: buffer is writable for its length.
            let read =
                unsafe { libc::read(self.0.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len()) };
            if let Ok(length) = usize::try_from(read) {
                break length;
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                // ENOENT: the request was taken back while it was read.
                Some(libc::EINTR | libc::ENOENT | libc::EAGAIN) => {}
                Some(libc::ENODEV | libc::ECONNABORTED) => return Ok(None),
                _ => return Err(error),
            }
        };
        if length < IN_HEADER {
            return Err(io::Error::other("a request without a header"));
        }
        Ok(Some(Request {
            opcode: u32_at(buffer, 4),
            unique: u64_at(buffer, 8),
            node: u64_at(buffer, 16),
            task: u32_at(buffer, 32),
            body: &buffer[IN_HEADER..length],
        }))
    }

    /// Answers a request. Nothing is done about a failure: the request is gone, or the whole connection, which [`Device::next`] tells.
    pub fn reply(&self, unique: u64, data: &[u8]) {
        let _ = self.write(0, unique, data);
    }

    pub fn refuse(&self, unique: u64, errno: i32) {
        let _ = self.write(-errno, unique, &[]);
    }

    /// Makes the kernel drop a name in the root directory, and its inode if nobody uses it. `NotFound`: it doesn't know the name.
    pub fn drop_name(&self, name: &[u8]) -> io::Result<()> {
        let mut out = Vec::with_capacity(24 + name.len());
        out.extend(ROOT.to_ne_bytes());
        out.extend((name.len() as u32).to_ne_bytes());
        out.extend(0_u32.to_ne_bytes());
        out.extend(name);
        out.push(0);
        self.write(NOTIFY_INVAL_ENTRY, 0, &out)
    }

    /// Whether the kernel has an inode of this number: it can't be without one while the file is open or mounted.
    pub fn has_inode(&self, node: u64) -> io::Result<bool> {
        let mut out = Vec::with_capacity(24);
        out.extend(node.to_ne_bytes());
        // A negative offset: attributes only, no page is dropped.
        out.extend((-1_i64).to_ne_bytes());
        out.extend(0_i64.to_ne_bytes());
        match self.write(NOTIFY_INVAL_INODE, 0, &out) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn write(&self, error: i32, unique: u64, data: &[u8]) -> io::Result<()> {
        let mut header = [0; 16];
        header[..4].copy_from_slice(&((16 + data.len()) as u32).to_ne_bytes());
        header[4..8].copy_from_slice(&error.to_ne_bytes());
        header[8..].copy_from_slice(&unique.to_ne_bytes());
        let parts = [&header[..], data].map(|part| libc::iovec {
            iov_base: part.as_ptr().cast_mut().cast(),
            iov_len: part.len(),
        });
        // SAFETY: both parts are readable for their lengths; the kernel doesn't write to them.
        if unsafe { libc::writev(self.0.as_raw_fd(), parts.as_ptr(), 2) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    pub fn raw(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_sizes_of_the_kernels() {
        let file = Attributes {
            node: 7,
            size: 5000,
            is_directory: false,
        };
        assert_eq!(file.entry().len(), 128);
        assert_eq!(file.attr().len(), 104);
        assert_eq!(init(&[0; 64]).len(), 64);
        assert_eq!(statfs().len(), 80);
    }

    #[test]
    fn only_what_the_kernel_offers_is_taken() {
        let mut body = [0_u8; 64];
        body[4..8].copy_from_slice(&45_u32.to_ne_bytes());
        body[12..16].copy_from_slice(&(MAX_PAGES | 2).to_ne_bytes());
        let answer = init(&body);
        assert_eq!(u32_at(&answer, 4), 38);
        assert_eq!(u32_at(&answer, 12), MAX_PAGES);
    }

    #[test]
    fn names_end_at_the_nul_and_short_requests_are_zeros() {
        let request = Request {
            opcode: opcode::LOOKUP,
            unique: 1,
            node: ROOT,
            task: 1,
            body: b"name\0rest",
        };
        assert_eq!(request.name(), b"name");
        assert_eq!((request.range().offset, request.range().size), (0, 0));
    }

    #[test]
    fn directory_entries_are_aligned_and_bounded() {
        let mut out = Vec::new();
        assert!(add_entry(&mut out, 64, 9, 1, b"abcdefghi"));
        assert_eq!(out.len(), 40);
        assert!(!add_entry(&mut out, 64, 9, 2, b"abcdefghi"));
        assert_eq!(out.len(), 40);
    }
}
