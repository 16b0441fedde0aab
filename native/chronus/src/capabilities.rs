//! What chronus' commands may do: a fixed few capabilities, and only as root.

use std::io;

use wire::capabilities::{bound, sets, Header, Words, COMMAND_BITS};

use crate::kernel::check;

fn set(bits: u64) -> io::Result<()> {
    let (header, words) = (Header::OWN, sets(bits));
    // SAFETY: capset reads the header and two words of each set.
    check(unsafe { libc::syscall(libc::SYS_capset, &header, words.as_ptr()) } as libc::c_int)
        .map(drop)
}

/// Of the commands' set, what this process has itself.
pub fn of_commands() -> io::Result<u64> {
    Ok(COMMAND_BITS & permitted()?)
}

fn permitted() -> io::Result<u64> {
    let header = Header::OWN;
    let mut words = [Words::default(); 2];
    // SAFETY: capget reads the header and writes two words of each set.
    check(unsafe { libc::syscall(libc::SYS_capget, &header, words.as_mut_ptr()) } as libc::c_int)?;
    Ok(u64::from(words[0].permitted) | u64::from(words[1].permitted) << 32)
}

/// Prepares this process so that its children need little more: the bounding set is what a command may ever have, nothing is inheritable
/// or ambient. Chronus itself keeps what it has, since it never executes another program.
pub fn confine_children() -> io::Result<()> {
    bound(COMMAND_BITS)?;
    // SAFETY: a plain prctl call; the unused arguments have to be 0.
    check(unsafe {
        libc::prctl(
            libc::PR_CAP_AMBIENT,
            libc::PR_CAP_AMBIENT_CLEAR_ALL,
            0,
            0,
            0,
        )
    })?;
    set(permitted()?)
}

/// In a child that has taken on its user: leaves root with the command set, anybody else with nothing.
pub fn drop_for(uid: u32) -> io::Result<()> {
    set(if uid == 0 { of_commands()? } else { 0 })
}
