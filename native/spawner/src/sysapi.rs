//! System calls that libc has no function for, and descriptors that close themselves. No policy here.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use libc::{c_int, c_long, c_uint, c_ulong};

pub const MOUNT_ATTR_RDONLY: u64 = 0x1;
pub const MOUNT_ATTR_NOSUID: u64 = 0x2;
pub const MOUNT_ATTR_NODEV: u64 = 0x4;
pub const MOUNT_ATTR_NOEXEC: u64 = 0x8;
pub const MOUNT_ATTR_IDMAP: u64 = 0x0010_0000;
pub const OPEN_TREE_CLONE: c_uint = 1;
pub const OPEN_TREE_CLOEXEC: c_uint = libc::O_CLOEXEC as c_uint;
pub const MOVE_MOUNT_F_EMPTY_PATH: c_uint = 0x4;
const FSCONFIG_SET_FLAG: c_uint = 0;
const FSCONFIG_SET_STRING: c_uint = 1;
const FSCONFIG_SET_FD: c_uint = 5;
const FSCONFIG_CMD_CREATE: c_uint = 6;

/// The result of a raw call: its value, or errno.
pub fn check(value: c_long) -> io::Result<c_long> {
    if value < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(value)
    }
}

/// `ioctl(2)` with the structure that the request takes.
pub fn ioctl<T>(fd: RawFd, request: c_ulong, argument: *mut T) -> io::Result<()> {
    // SAFETY: callers pass what the request takes.
    check(c_long::from(unsafe {
        libc::ioctl(fd, request as _, argument)
    }))
    .map(drop)
}

fn owned(value: c_long) -> io::Result<OwnedFd> {
    let raw = check(value)? as RawFd;
    // SAFETY: the call just returned this descriptor; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// `open_tree(2)`: a detached copy of the mount that `fd` (and `path` below it) stands for.
pub fn clone_mount(fd: RawFd, path: &CStr) -> io::Result<OwnedFd> {
    let flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | libc::AT_EMPTY_PATH as c_uint;
    // SAFETY: path is NUL-terminated and outlives the call.
    owned(unsafe { libc::syscall(libc::SYS_open_tree, fd, path.as_ptr(), flags) })
}

/// A detached copy of the mount at `fd` and of those below it.
pub fn clone_mounts(fd: RawFd) -> io::Result<OwnedFd> {
    let flags =
        OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | (libc::AT_EMPTY_PATH | libc::AT_RECURSIVE) as c_uint;
    // SAFETY: a constant NUL-terminated path.
    owned(unsafe { libc::syscall(libc::SYS_open_tree, fd, c"".as_ptr(), flags) })
}

#[repr(C)]
struct MountAttr {
    attr_set: u64,
    attr_clr: u64,
    propagation: u64,
    userns_fd: u64,
}

/// `mount_setattr(2)` on a detached mount: sets `attributes`, and maps ids by `userns` where MOUNT_ATTR_IDMAP is among them.
pub fn set_mount_attributes(
    mount: RawFd,
    attributes: u64,
    userns: Option<RawFd>,
) -> io::Result<()> {
    let attr = MountAttr {
        attr_set: attributes,
        attr_clr: 0,
        propagation: 0,
        userns_fd: userns.map_or(0, |fd| fd as u64),
    };
    // SAFETY: attr is a valid mount_attr of the size given.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount,
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &attr,
            std::mem::size_of::<MountAttr>(),
        )
    })
    .map(drop)
}

/// `move_mount(2)` of a detached mount onto `path`.
pub fn attach_mount(mount: RawFd, path: &CStr) -> io::Result<()> {
    // SAFETY: both paths are NUL-terminated and outlive the call.
    check(unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            mount,
            c"".as_ptr(),
            libc::AT_FDCWD,
            path.as_ptr(),
            MOVE_MOUNT_F_EMPTY_PATH,
        )
    })
    .map(drop)
}

/// A filesystem being configured by `fsopen(2)`.
pub struct FsContext(OwnedFd);

impl FsContext {
    pub fn open(kind: &CStr) -> io::Result<Self> {
        const FSOPEN_CLOEXEC: c_uint = 1;
        // SAFETY: kind is NUL-terminated and outlives the call.
        owned(unsafe { libc::syscall(libc::SYS_fsopen, kind.as_ptr(), FSOPEN_CLOEXEC) })
            .map(FsContext)
    }

    fn configure(
        &self,
        command: c_uint,
        key: Option<&CStr>,
        value: *const libc::c_char,
        aux: RawFd,
    ) -> io::Result<()> {
        let key = key.map_or(std::ptr::null(), CStr::as_ptr);
        // SAFETY: key and value are null or NUL-terminated and outlive the call.
        check(unsafe {
            libc::syscall(
                libc::SYS_fsconfig,
                self.0.as_raw_fd(),
                command,
                key,
                value,
                aux,
            )
        })
        .map(drop)
    }

    pub fn set(&self, key: &CStr, value: &CStr) -> io::Result<()> {
        self.configure(FSCONFIG_SET_STRING, Some(key), value.as_ptr(), 0)
    }

    pub fn set_fd(&self, key: &CStr, fd: RawFd) -> io::Result<()> {
        self.configure(FSCONFIG_SET_FD, Some(key), std::ptr::null(), fd)
    }

    pub fn set_flag(&self, key: &CStr) -> io::Result<()> {
        self.configure(FSCONFIG_SET_FLAG, Some(key), std::ptr::null(), 0)
    }

    /// Creates the superblock and a detached mount of it with these MOUNT_ATTR flags.
    pub fn mount(&self, attributes: u64) -> io::Result<OwnedFd> {
        const FSMOUNT_CLOEXEC: c_uint = 1;
        self.configure(FSCONFIG_CMD_CREATE, None, std::ptr::null(), 0)?;
        // SAFETY: plain integers.
        owned(unsafe {
            libc::syscall(
                libc::SYS_fsmount,
                self.0.as_raw_fd(),
                FSMOUNT_CLOEXEC,
                attributes as c_uint,
            )
        })
    }

    /// What the kernel wrote into the context's log about the last failure.
    pub fn log(&self) -> String {
        let mut buffer = [0_u8; 512];
        let mut text = String::new();
        loop {
            // SAFETY: buffer is writable for its length.
            let read =
                unsafe { libc::read(self.0.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len()) };
            let Ok(read) = usize::try_from(read) else {
                return text;
            };
            if read == 0 {
                return text;
            }
            text.push_str(String::from_utf8_lossy(&buffer[..read]).trim());
            text.push(' ');
        }
    }
}

pub fn open_at(dir: RawFd, path: &CStr, flags: c_int) -> io::Result<OwnedFd> {
    // SAFETY: path is NUL-terminated and outlives the call.
    owned(c_long::from(unsafe {
        libc::openat(dir, path.as_ptr(), flags | libc::O_CLOEXEC, 0o600)
    }))
}

pub fn make_dir_at(dir: RawFd, path: &CStr, mode: libc::mode_t) -> io::Result<()> {
    // SAFETY: path is NUL-terminated and outlives the call.
    check(c_long::from(unsafe {
        libc::mkdirat(dir, path.as_ptr(), mode)
    }))
    .map(drop)
}

pub fn remove_dir_at(dir: RawFd, path: &CStr) -> io::Result<()> {
    // SAFETY: path is NUL-terminated and outlives the call.
    check(c_long::from(unsafe {
        libc::unlinkat(dir, path.as_ptr(), libc::AT_REMOVEDIR)
    }))
    .map(drop)
}

pub fn unlink_at(dir: RawFd, path: &CStr) -> io::Result<()> {
    // SAFETY: path is NUL-terminated and outlives the call.
    check(c_long::from(unsafe {
        libc::unlinkat(dir, path.as_ptr(), 0)
    }))
    .map(drop)
}

/// Renames within a directory; `AlreadyExists` where the new name is taken.
pub fn rename_new_at(dir: RawFd, from: &CStr, to: &CStr) -> io::Result<()> {
    // SAFETY: both names are NUL-terminated and outlive the call.
    check(c_long::from(unsafe {
        libc::renameat2(dir, from.as_ptr(), dir, to.as_ptr(), libc::RENAME_NOREPLACE)
    }))
    .map(drop)
}

pub fn chown_at(dir: RawFd, path: &CStr, uid: u32, gid: u32) -> io::Result<()> {
    // SAFETY: path is NUL-terminated and outlives the call.
    check(c_long::from(unsafe {
        libc::fchownat(
            dir,
            path.as_ptr(),
            uid,
            gid,
            libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH,
        )
    }))
    .map(drop)
}

pub fn chmod_at(dir: RawFd, path: &CStr, mode: libc::mode_t) -> io::Result<()> {
    // SAFETY: path is NUL-terminated and outlives the call.
    check(c_long::from(unsafe {
        libc::fchmodat(dir, path.as_ptr(), mode, 0)
    }))
    .map(drop)
}

/// Classic `mount(2)`; absent arguments are null.
pub fn mount(
    source: Option<&CStr>,
    target: &CStr,
    kind: Option<&CStr>,
    flags: c_ulong,
    data: Option<&CStr>,
) -> io::Result<()> {
    let pointer = |text: Option<&CStr>| text.map_or(std::ptr::null(), CStr::as_ptr);
    // SAFETY: every string is null or NUL-terminated and outlives the call.
    check(c_long::from(unsafe {
        libc::mount(
            pointer(source),
            target.as_ptr(),
            pointer(kind),
            flags,
            pointer(data).cast(),
        )
    }))
    .map(drop)
}

pub fn unmount(target: &CStr, flags: c_int) -> io::Result<()> {
    // SAFETY: target is NUL-terminated and outlives the call.
    check(c_long::from(unsafe {
        libc::umount2(target.as_ptr(), flags)
    }))
    .map(drop)
}

pub fn unshare(flags: c_int) -> io::Result<()> {
    // SAFETY: plain integers.
    check(c_long::from(unsafe { libc::unshare(flags) })).map(drop)
}

pub fn pivot_root_here() -> io::Result<()> {
    // SAFETY: constant NUL-terminated paths.
    check(unsafe { libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()) }).map(drop)
}

pub fn pidfd_open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: plain integers.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })
}

/// The user namespace that a child of the caller's is in.
pub fn user_namespace(pidfd: RawFd, pid: i32) -> io::Result<OwnedFd> {
    const PIDFD_GET_USER_NAMESPACE: c_ulong = 0xff09;
    // SAFETY: the request takes no argument.
    owned(c_long::from(unsafe {
        libc::ioctl(pidfd, PIDFD_GET_USER_NAMESPACE as _, 0)
    }))
    // Before Linux 6.11. The pid can't become another's before its parent waits for it.
    .or_else(|_| File::open(format!("/proc/{pid}/ns/user")).map(OwnedFd::from))
}

pub fn pidfd_kill(pidfd: RawFd) -> io::Result<()> {
    // SAFETY: plain integers and a null siginfo.
    check(unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            pidfd,
            libc::SIGKILL,
            std::ptr::null::<libc::siginfo_t>(),
            0,
        )
    })
    .map(drop)
}

/// Whether `fd` becomes readable (or hangs up) within `timeout_ms`.
pub fn wait_readable(fd: RawFd, timeout_ms: c_int) -> io::Result<bool> {
    wait_any([fd], timeout_ms).map(|[ready]| ready)
}

/// Which of the descriptors are readable (or have hung up) once one is; none: that took longer than `timeout_ms`.
pub fn wait_any<const N: usize>(fds: [RawFd; N], timeout_ms: c_int) -> io::Result<[bool; N]> {
    let mut entries = fds.map(|fd| libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    });
    loop {
        // SAFETY: the entries are valid pollfds, as many as are named.
        match check(c_long::from(unsafe {
            libc::poll(entries.as_mut_ptr(), N as libc::nfds_t, timeout_ms)
        })) {
            Ok(_) => return Ok(entries.map(|entry| entry.revents != 0)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Whether a descriptor is in an error state, or its other end is gone.
pub fn has_failed(fd: RawFd) -> bool {
    let mut entry = libc::pollfd {
        fd,
        events: 0,
        revents: 0,
    };
    // SAFETY: entry is one valid pollfd; nothing is waited for.
    unsafe { libc::poll(&mut entry, 1, 0) };
    entry.revents & (libc::POLLERR | libc::POLLHUP) != 0
}

/// A connected pair of Unix stream sockets, both close-on-exec.
pub fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut pair = [0; 2];
    // SAFETY: pair has room for two descriptors.
    check(c_long::from(unsafe {
        libc::socketpair(
            libc::AF_UNIX,
            libc::SOCK_STREAM | libc::SOCK_CLOEXEC,
            0,
            pair.as_mut_ptr(),
        )
    }))?;
    // SAFETY: the kernel just made both; nobody else owns them.
    Ok(unsafe { (OwnedFd::from_raw_fd(pair[0]), OwnedFd::from_raw_fd(pair[1])) })
}

pub fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut pair = [0; 2];
    // SAFETY: pair has room for two descriptors.
    check(c_long::from(unsafe {
        libc::pipe2(pair.as_mut_ptr(), libc::O_CLOEXEC)
    }))?;
    // SAFETY: the kernel just made both; nobody else owns them.
    Ok(unsafe { (OwnedFd::from_raw_fd(pair[0]), OwnedFd::from_raw_fd(pair[1])) })
}

/// The most descriptors that one [`send_fds`] carries.
pub const MAX_SENT_FDS: usize = 8;

/// Sends one byte and these descriptors (at most [`MAX_SENT_FDS`]).
pub fn send_fds(socket: RawFd, fds: &[RawFd]) -> io::Result<()> {
    assert!(fds.len() <= MAX_SENT_FDS);
    let mut byte = [fds.len() as u8];
    let mut iov = libc::iovec {
        iov_base: byte.as_mut_ptr().cast(),
        iov_len: 1,
    };
    let mut control = [0_u64; 8];
    let payload = std::mem::size_of_val(fds);
    // SAFETY: the message points at live buffers; the control buffer is aligned and has room for one header and eight descriptors.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &mut iov;
        message.msg_iovlen = 1;
        if !fds.is_empty() {
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(payload as c_uint) as usize;
            let header = libc::CMSG_FIRSTHDR(&message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(payload as c_uint) as usize;
            std::ptr::copy_nonoverlapping(
                fds.as_ptr().cast::<u8>(),
                libc::CMSG_DATA(header),
                payload,
            );
        }
        check(libc::sendmsg(socket, &message, libc::MSG_NOSIGNAL) as c_long).map(drop)
    }
}

/// One byte from a socket, and the descriptor that came with it. None: the other end is closed.
pub fn receive(socket: RawFd) -> io::Result<Option<(u8, Option<OwnedFd>)>> {
    let mut byte = 0_u8;
    let mut iov = libc::iovec {
        iov_base: (&raw mut byte).cast(),
        iov_len: 1,
    };
    let mut control = [0_u64; 8];
    // SAFETY: the message points at live buffers, and its one descriptor is new and nobody else's.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &mut iov;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(std::mem::size_of::<RawFd>() as c_uint) as usize;
        if check(libc::recvmsg(socket, &mut message, libc::MSG_CMSG_CLOEXEC) as c_long)? == 0 {
            return Ok(None);
        }
        let header = libc::CMSG_FIRSTHDR(&message);
        if header.is_null() || (*header).cmsg_type != libc::SCM_RIGHTS {
            return Ok(Some((byte, None)));
        }
        let raw = std::ptr::read_unaligned(libc::CMSG_DATA(header).cast::<RawFd>());
        Ok(Some((byte, Some(OwnedFd::from_raw_fd(raw)))))
    }
}

/// Writes a small value into a file of a kernel filesystem (cgroup, proc) in one call.
pub fn write_at(dir: RawFd, path: &CStr, value: &[u8]) -> io::Result<()> {
    let file = open_at(dir, path, libc::O_WRONLY)?;
    // SAFETY: value is readable for its length.
    check(unsafe { libc::write(file.as_raw_fd(), value.as_ptr().cast(), value.len()) } as c_long)
        .map(drop)
}

/// Reads a small file of a kernel filesystem, at most 64 KiB.
pub fn read_at(dir: RawFd, path: &CStr) -> io::Result<String> {
    let file = open_at(dir, path, libc::O_RDONLY)?;
    let mut content = Vec::new();
    io::Read::read_to_end(&mut io::Read::take(File::from(file), 1 << 16), &mut content)?;
    Ok(String::from_utf8_lossy(&content).into_owned())
}

/// The names in a directory, without `.` and `..`.
pub fn names_in(dir: RawFd) -> io::Result<Vec<String>> {
    Ok(std::fs::read_dir(format!("/proc/self/fd/{dir}"))?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect())
}

/// When a process started, in clock ticks since boot: with the pid, it names a process for good. None: no such process.
pub fn start_time(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Field 22 of proc_pid_stat(5); the second, the command's name, may hold anything, so counting starts behind its parenthesis.
    stat.rsplit_once(')')?
        .1
        .split_ascii_whitespace()
        .nth(19)?
        .parse()
        .ok()
}
