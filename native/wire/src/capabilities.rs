//! The capabilities that a sandbox's commands may have at most, which are also all that chronus has.

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
