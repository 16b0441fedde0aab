//! The child's side of a creation: from `clone3` to the exec of chronus.
//!
//! It runs in a copy of a threaded process, so it makes system calls only: no allocation, no lock, nothing of std that might take either. All its
//! strings are prepared before. A step that fails is told to the parent by number and errno.

use std::ffi::CStr;
use std::os::fd::RawFd;

use libc::{c_int, c_ulong, sock_filter, sock_fprog};

use crate::covers;
use crate::sysapi::{self, MAX_SENT_FDS, MOVE_MOUNT_F_EMPTY_PATH};

/// Told to the parent once the descriptor table is the child's own; no step has this number.
pub const UNSHARED: u8 = 255;

/// What a step was doing, for the error that the parent reports.
pub const STEPS: [&str; 22] = [
    "none",
    "leaving the spawner's descriptors",
    "receiving its mounts",
    "leaving the groups and ids of the host",
    "making mounts private",
    "attaching its root",
    "finding /proc, /sys and /dev in the image",
    "mounting /proc",
    "mounting /sys",
    "attaching /dev",
    "mounting /dev/pts",
    "mounting /dev/shm",
    "masking /proc",
    "covering /proc",
    "changing its root",
    "bringing up loopback",
    "setting the hostname",
    "setting limits",
    "raising capabilities",
    "placing descriptors",
    "loading the seccomp filter",
    "running chronus",
];

/// Paths below /proc that the sandbox must not read, as far as their owner doesn't close them to it already.
pub struct Mask {
    pub path: &'static CStr,
    pub directory: bool,
}

pub const MASKS: [Mask; 9] = [
    Mask {
        path: c"proc/keys",
        directory: false,
    },
    Mask {
        path: c"proc/kcore",
        directory: false,
    },
    Mask {
        path: c"proc/timer_list",
        directory: false,
    },
    Mask {
        path: c"proc/latency_stats",
        directory: false,
    },
    Mask {
        path: c"proc/sched_debug",
        directory: false,
    },
    Mask {
        path: c"proc/acpi",
        directory: true,
    },
    Mask {
        path: c"proc/scsi",
        directory: true,
    },
    Mask {
        path: c"sys/firmware",
        directory: true,
    },
    Mask {
        path: c"sys/devices/virtual/powercap",
        directory: true,
    },
];

/// Everything that the child needs, prepared by the parent.
pub struct Plan<'a> {
    /// First and last number of the block that the five descriptors below are in; the child closes all others.
    pub own: (RawFd, RawFd),
    pub socket: RawFd,
    pub listener: RawFd,
    /// The sandbox's v2 cgroup directory; -1: none.
    pub cgroup: RawFd,
    pub configuration: RawFd,
    pub chronus: RawFd,
    pub hostname: &'a [u8],
    /// Options of the /dev/shm tmpfs.
    pub shm_options: &'a CStr,
    pub filter: &'a [sock_filter],
    /// Which of [`MASKS`] exist on this host.
    pub masks: &'a [bool],
    pub last_capability: c_int,
}

/// Where chronus finds its descriptors, and where those that end with the exec stay until then.
const LISTENER_FD: c_int = 3;
const CGROUP_FD: c_int = 4;
const CONFIGURATION_FD: c_int = 5;
const SOCKET_FD: c_int = 6;
const CHRONUS_FD: c_int = 7;

/// SECCOMP_FILTER_FLAG_NEW_LISTENER: the call returns the descriptor at which reported calls arrive.
const NEW_LISTENER: libc::c_ulong = 8;

static UNSHARED_BYTE: u8 = UNSHARED;

struct Failure {
    step: u8,
}

fn step(number: u8, value: libc::c_long) -> Result<libc::c_long, Failure> {
    if value < 0 {
        Err(Failure { step: number })
    } else {
        Ok(value)
    }
}

/// Never returns: execs chronus or tells the parent why not.
///
/// # Safety
/// Must be called in a fresh child whose descriptor table is shared with the parent (CLONE_FILES) and whose memory isn't.
pub unsafe fn run(plan: &Plan) -> ! {
    // SAFETY: the caller's promise is this function's too.
    let failure = match unsafe { set_up(plan) } {
        Ok(never) => match never {},
        Err(failure) => failure,
    };
    // SAFETY: errno is this thread's own.
    let message = [failure.step, unsafe { *libc::__errno_location() } as u8];
    // SAFETY: system calls on descriptors, strings and structures that live as long as this child does.
    unsafe {
        // The parent's end may be at either number, depending on how far the child came.
        let target = if failure.step >= 20 {
            SOCKET_FD
        } else {
            plan.socket
        };
        libc::send(target, message.as_ptr().cast(), 2, libc::MSG_NOSIGNAL);
        libc::_exit(1)
    }
}

enum Never {}

unsafe fn mount(
    source: &CStr,
    target: &CStr,
    kind: &CStr,
    flags: c_ulong,
    data: &CStr,
) -> libc::c_long {
    // SAFETY: system calls on descriptors, strings and structures that live as long as this child does.
    unsafe {
        libc::mount(
            source.as_ptr(),
            target.as_ptr(),
            kind.as_ptr(),
            flags,
            data.as_ptr().cast(),
        ) as libc::c_long
    }
}

unsafe fn attach(fd: RawFd, path: &CStr) -> libc::c_long {
    // SAFETY: system calls on descriptors, strings and structures that live as long as this child does.
    unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            fd,
            c"".as_ptr(),
            libc::AT_FDCWD,
            path.as_ptr(),
            MOVE_MOUNT_F_EMPTY_PATH,
        )
    }
}

unsafe fn set_up(plan: &Plan) -> Result<Never, Failure> {
    // SAFETY: system calls on descriptors, strings and structures that live as long as this child does.
    unsafe {
        // Nothing of the parent's stays: were its end of the socket among it, this process would outlive a parent that dies now.
        let (first, last) = plan.own;
        step(
            1,
            libc::syscall(
                libc::SYS_close_range,
                last as u32 + 1,
                u32::MAX,
                libc::CLOSE_RANGE_UNSHARE,
            ),
        )?;
        step(
            1,
            libc::syscall(libc::SYS_close_range, 3, first as u32 - 1, 0),
        )?;
        step(
            1,
            libc::send(
                plan.socket,
                (&raw const UNSHARED_BYTE).cast(),
                1,
                libc::MSG_NOSIGNAL,
            ) as libc::c_long,
        )?;
        let mut mounts = [-1; MAX_SENT_FDS];
        let count = receive(plan.socket, &mut mounts);
        step(2, if count < 2 { -1 } else { 0 })?;
        // Only now is it in all its groups: a cgroup namespace made earlier would show their paths on the host.
        step(3, libc::unshare(libc::CLONE_NEWCGROUP) as libc::c_long)?;
        // Inodes that the child makes must belong to ids that the sandbox's filesystems know.
        libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>());
        libc::setfsgid(0);
        libc::setfsuid(0);
        step(3, if libc::setfsuid(u32::MAX) == 0 { 0 } else { -1 })?;
        step(
            4,
            mount(c"", c"/", c"", libc::MS_REC | libc::MS_PRIVATE, c""),
        )?;
        step(5, attach(mounts[0], c"/new"))?;
        step(5, libc::chdir(c"/new".as_ptr()) as libc::c_long)?;
        for name in [c"proc", c"sys", c"dev"] {
            step(6, ensure_directory(name))?;
        }
        let quiet = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
        step(7, mount(c"proc", c"proc", c"proc", quiet, c""))?;
        step(
            8,
            mount(c"sysfs", c"sys", c"sysfs", quiet | libc::MS_RDONLY, c""),
        )?;
        step(9, attach(mounts[1], c"dev"))?;
        step(
            10,
            mount(
                c"devpts",
                c"dev/pts",
                c"devpts",
                libc::MS_NOSUID | libc::MS_NOEXEC,
                c"newinstance,ptmxmode=0666,mode=0620,gid=5",
            ),
        )?;
        step(
            11,
            mount(
                c"shm",
                c"dev/shm",
                c"tmpfs",
                libc::MS_NOSUID | libc::MS_NODEV,
                plan.shm_options,
            ),
        )?;
        for (mask, exists) in MASKS.iter().zip(plan.masks) {
            if *exists {
                let source = if mask.directory {
                    c"dev/mqueue"
                } else {
                    c"dev/null"
                };
                step(12, mount(source, mask.path, c"", libc::MS_BIND, c""))?;
            }
        }
        step(12, mount(c"proc/sys", c"proc/sys", c"", libc::MS_BIND, c""))?;
        step(
            12,
            mount(
                c"",
                c"proc/sys",
                c"",
                libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY | quiet,
                c"",
            ),
        )?;
        for (index, path) in covers::PATHS
            .iter()
            .enumerate()
            .take((count as usize).saturating_sub(2))
        {
            step(13, attach(mounts[2 + index], path))?;
        }
        step(
            14,
            libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()),
        )?;
        step(
            14,
            libc::umount2(c".".as_ptr(), libc::MNT_DETACH) as libc::c_long,
        )?;
        step(14, libc::chdir(c"/".as_ptr()) as libc::c_long)?;
        step(15, loopback_up())?;
        step(
            16,
            libc::sethostname(plan.hostname.as_ptr().cast(), plan.hostname.len()) as libc::c_long,
        )?;
        let none = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        step(
            17,
            libc::setrlimit(libc::RLIMIT_CORE, &none) as libc::c_long,
        )?;
        libc::umask(0o022);
        libc::setsid();
        // The filesystem ids go back to the real ones (an argument of -1 changes nothing else): with another one, kernels since 6.17 take the exec
        // for one that changes ids, and drop the ambient capabilities.
        let keep = -1_i32;
        step(18, libc::syscall(libc::SYS_setregid, keep, keep))?;
        step(18, libc::syscall(libc::SYS_setreuid, keep, keep))?;
        step(18, raise_capabilities(plan.last_capability))?;
        place_descriptors(plan)?;
        let program = sock_fprog {
            len: plan.filter.len() as u16,
            filter: plan.filter.as_ptr().cast_mut(),
        };
        let listener = step(
            20,
            libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                NEW_LISTENER,
                &program,
            ),
        )?;
        // The kernel closes it here at the exec.
        step(
            20,
            if sysapi::send_fds(SOCKET_FD, &[listener as RawFd]).is_ok() {
                0
            } else {
                -1
            },
        )?;
        let arguments = [c"chronus".as_ptr(), std::ptr::null()];
        let environment = [std::ptr::null::<libc::c_char>()];
        step(
            21,
            libc::syscall(
                libc::SYS_execveat,
                CHRONUS_FD,
                c"".as_ptr(),
                arguments.as_ptr(),
                environment.as_ptr(),
                libc::AT_EMPTY_PATH,
            ),
        )?;
        libc::_exit(2)
    }
}

/// An image that lacks the directory gets it; one that has something else there (a link out of the tree, say) is refused.
unsafe fn ensure_directory(name: &CStr) -> libc::c_long {
    // SAFETY: system calls on descriptors, strings and structures that live as long as this child does.
    unsafe {
        if libc::mkdir(name.as_ptr(), 0o755) == 0 {
            return 0;
        }
        let mut stat: libc::stat = std::mem::zeroed();
        if libc::lstat(name.as_ptr(), &mut stat) != 0 {
            return -1;
        }
        if stat.st_mode & libc::S_IFMT == libc::S_IFDIR {
            return 0;
        }
        *libc::__errno_location() = libc::ENOTDIR;
        -1
    }
}

unsafe fn receive(socket: RawFd, mounts: &mut [RawFd; MAX_SENT_FDS]) -> c_int {
    // SAFETY: system calls on descriptors, strings and structures that live as long as this child does.
    unsafe {
        let mut byte = 0_u8;
        let mut iov = libc::iovec {
            iov_base: (&raw mut byte).cast(),
            iov_len: 1,
        };
        let mut control = [0_u64; 8];
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &mut iov;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = std::mem::size_of_val(&control);
        if libc::recvmsg(socket, &mut message, libc::MSG_CMSG_CLOEXEC) != 1 {
            return -1;
        }
        let header = libc::CMSG_FIRSTHDR(&message);
        if header.is_null() || (*header).cmsg_type != libc::SCM_RIGHTS {
            return -1;
        }
        let bytes = (*header).cmsg_len - libc::CMSG_LEN(0) as usize;
        let count = (bytes / std::mem::size_of::<RawFd>()).min(MAX_SENT_FDS);
        std::ptr::copy_nonoverlapping(
            libc::CMSG_DATA(header),
            mounts.as_mut_ptr().cast::<u8>(),
            count * std::mem::size_of::<RawFd>(),
        );
        count as c_int
    }
}

unsafe fn loopback_up() -> libc::c_long {
    // SAFETY: system calls on descriptors, strings and structures that live as long as this child does.
    unsafe {
        let socket = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        if socket < 0 {
            return -1;
        }
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_name[0] = b'l' as libc::c_char;
        request.ifr_name[1] = b'o' as libc::c_char;
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
        let result = libc::ioctl(socket, libc::SIOCSIFFLAGS as _, &request);
        libc::close(socket);
        libc::c_long::from(result)
    }
}

/// chronus keeps, across its exec, every capability of the sandbox's user namespace: its id isn't root's there, so ambient ones must carry them.
unsafe fn raise_capabilities(last: c_int) -> libc::c_long {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: c_int,
    }
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Data {
        effective: u32,
        permitted: u32,
        inheritable: u32,
    }
    const VERSION_3: u32 = 0x2008_0522;
    const PR_CAP_AMBIENT_RAISE: c_int = 2;
    // SAFETY: system calls on descriptors, strings and structures that live as long as this child does.
    unsafe {
        let header = Header {
            version: VERSION_3,
            pid: 0,
        };
        let mut data = [Data {
            effective: 0,
            permitted: 0,
            inheritable: 0,
        }; 2];
        if libc::syscall(libc::SYS_capget, &header, data.as_mut_ptr()) < 0 {
            return -1;
        }
        for half in &mut data {
            half.effective = half.permitted;
            half.inheritable = half.permitted;
        }
        if libc::syscall(libc::SYS_capset, &header, data.as_ptr()) < 0 {
            return -1;
        }
        for capability in 0..=last {
            let held = data[capability as usize / 32].permitted >> (capability % 32) & 1 == 1;
            if held && libc::prctl(libc::PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability, 0, 0) < 0
            {
                return -1;
            }
        }
        0
    }
}

/// Moves the descriptors to their numbers and closes all others. Sources stand above the targets (the parent keeps them from 16 on), so none overwrites another.
unsafe fn place_descriptors(plan: &Plan) -> Result<(), Failure> {
    // SAFETY: system calls on descriptors, strings and structures that live as long as this child does.
    unsafe {
        let lasting = [
            (plan.listener, LISTENER_FD),
            (plan.cgroup, CGROUP_FD),
            (plan.configuration, CONFIGURATION_FD),
        ];
        for (source, target) in lasting {
            if source >= 0 {
                step(19, libc::syscall(libc::SYS_dup3, source, target, 0))?;
            } else {
                libc::close(target);
            }
        }
        for (source, target) in [(plan.socket, SOCKET_FD), (plan.chronus, CHRONUS_FD)] {
            step(
                19,
                libc::syscall(libc::SYS_dup3, source, target, libc::O_CLOEXEC),
            )?;
        }
        // /dev/null of the sandbox for the three standard streams: nothing of the spawner's log is chronus' to write.
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
        step(19, libc::c_long::from(null))?;
        for target in 0..3 {
            step(19, libc::syscall(libc::SYS_dup3, null, target, 0))?;
        }
        step(19, libc::syscall(libc::SYS_close_range, 8, u32::MAX, 0))?;
        Ok(())
    }
}
