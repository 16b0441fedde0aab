//! Loop devices: files as block devices. Each frees itself when its last user (the mount) is gone, so nobody has to remember it.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::sysapi::{check, ioctl};

const CONTROL_MAJOR: u32 = 10;
const CONTROL_MINOR: u32 = 237;
const LOOP_MAJOR: u32 = 7;

const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4c82;
const LOOP_CONFIGURE: libc::c_ulong = 0x4c0a;
const LO_FLAGS_READ_ONLY: u32 = 1;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;

/// Attempts to get a number that nobody else takes first.
const ATTEMPTS: u32 = 64;

/// What is done with the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
}

// struct loop_info64 and loop_config of include/uapi/linux/loop.h.
#[repr(C)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    sizelimit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

/// A loop device over `backing`, past its page cache: what is read is kept once, and reads that wait don't hold up others. `name` is what
/// the kernel shows for it; `devices` holds the device files, or gets them.
pub fn attach(backing: &File, name: &[u8], devices: &Path, access: Access) -> io::Result<File> {
    let control = open_device(
        devices,
        "loop-control",
        CONTROL_MAJOR,
        CONTROL_MINOR,
        Access::Write,
    )?;
    for _ in 0..ATTEMPTS {
        // SAFETY: the request takes no argument.
        let number = check(libc::c_long::from(unsafe {
            libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE as _)
        }))?;
        let minor = u32::try_from(number).map_err(io::Error::other)?;
        let device = open_device(devices, &format!("loop{minor}"), LOOP_MAJOR, minor, access)?;
        // SAFETY: all fields are plain integers and arrays of them; zero is valid for each.
        let mut config: LoopConfig = unsafe { std::mem::zeroed() };
        config.fd = backing.as_raw_fd() as u32;
        config.info.flags = LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO;
        if access == Access::Read {
            config.info.flags |= LO_FLAGS_READ_ONLY;
        }
        let length = name.len().min(config.info.file_name.len() - 1);
        config.info.file_name[..length].copy_from_slice(&name[..length]);
        match ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &mut config) {
            Ok(()) => return Ok(device),
            // Somebody else took this number between the two calls.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other("no free loop device"))
}

fn open_device(
    directory: &Path,
    name: &str,
    major: u32,
    minor: u32,
    access: Access,
) -> io::Result<File> {
    let path = directory.join(name);
    let open = || {
        File::options()
            .read(true)
            .write(access == Access::Write)
            .open(&path)
    };
    match open() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let kind = if major == LOOP_MAJOR {
                libc::S_IFBLK
            } else {
                libc::S_IFCHR
            };
            let node = CString::new(path.as_os_str().as_bytes())?;
            // SAFETY: the path is NUL-terminated and outlives the call.
            let made = check(libc::c_long::from(unsafe {
                libc::mknod(node.as_ptr(), kind | 0o600, libc::makedev(major, minor))
            }));
            match made {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
                _ => open(),
            }
        }
        result => result,
    }
}
