//! The capabilities that a sandbox's commands may have at most, which are also all that chronus has; and what capget(2) and capset(2) take.

use std::io;

/// Docker's default set less NET_RAW and MKNOD, as numbers of linux/capability.h: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID,
/// SETUID, SETPCAP, NET_BIND_SERVICE, SYS_CHROOT, AUDIT_WRITE, SETFCAP.
pub const COMMAND_SET: [u32; 12] = [0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 29, 31];

/// The same as the bits of a capability set.
pub const COMMAND_BITS: u64 = bits();

const fn bits() -> u64 {
    let (mut bits, mut place) = (0, 0);
    while place < COMMAND_SET.len() {
        bits |= 1 << COMMAND_SET[place];
        place += 1;
    }
    bits
}

/// Takes all but these bits out of the bounding set of the calling thread and of what it starts, for good. Allocates nothing.
///
/// # Errors
/// The caller lacks SETPCAP.
pub fn bound(bits: u64) -> io::Result<()> {
    // The kernel says how many it has: an error at the first one beyond.
    for number in 0..u64::BITS {
        let number = libc::c_ulong::from(number);
        // SAFETY: plain integers.
        unsafe {
            if libc::prctl(libc::PR_CAPBSET_READ, number, 0, 0, 0) < 0 {
                break;
            }
            if bits >> number & 1 == 0 && libc::prctl(libc::PR_CAPBSET_DROP, number, 0, 0, 0) < 0 {
                return Err(io::Error::last_os_error());
            }
        }
    }
    Ok(())
}

/// Whose capabilities are meant: the caller's.
#[repr(C)]
pub struct Header {
    version: u32,
    pid: i32,
}

impl Header {
    /// _LINUX_CAPABILITY_VERSION_3: two words a set.
    pub const OWN: Header = Header {
        version: 0x2008_0522,
        pid: 0,
    };
}

/// One word of each set.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Words {
    pub effective: u32,
    pub permitted: u32,
    pub inheritable: u32,
}

/// The sets with these bits effective and permitted, and nothing inheritable.
#[must_use]
pub fn sets(bits: u64) -> [Words; 2] {
    [0, 32].map(|shift| Words {
        effective: (bits >> shift) as u32,
        permitted: (bits >> shift) as u32,
        inheritable: 0,
    })
}
