//! Ending a sandbox: everything that bears its name goes, whoever made it and however far its creation came.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::cgroup::Figures;
use crate::node::Node;
use crate::sysapi;

/// How long killed processes may take to end (a process in an uninterruptible wait takes as long as that).
const END_DEADLINE: Duration = Duration::from_secs(20);

/// Processes of a sandbox are still there: of its other objects none was touched.
#[derive(Debug)]
pub struct NotEnded;

impl std::fmt::Display for NotEnded {
    fn fmt(&self, out: &mut std::fmt::Formatter) -> std::fmt::Result {
        let patience = END_DEADLINE.as_secs();
        write!(out, "a process of it has not ended within {patience} s")
    }
}

/// What is left to report of a sandbox that is gone.
#[derive(Default, Debug)]
pub struct Ended {
    pub figures: Figures,
    pub disk: u64,
    /// What could not be removed, in words; the next sweep tries again.
    pub left: Vec<String>,
}

/// Waits for the end of the process and takes its status if it is ours. None: it is still there.
pub fn wait_for_end(pidfd: &OwnedFd) -> Option<i32> {
    let ready = sysapi::wait_readable(pidfd.as_raw_fd(), END_DEADLINE.as_millis() as libc::c_int);
    if !ready.unwrap_or(false) {
        return None;
    }
    // SAFETY: siginfo_t is plain data; P_PIDFD takes an open pidfd.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let reaped = libc::waitid(
            libc::P_PIDFD,
            pidfd.as_raw_fd() as libc::id_t,
            &mut info,
            libc::WEXITED | libc::WNOHANG,
        );
        // Not a child of this process (an earlier spawner made it): whoever adopted it reaps it.
        Some(if reaped == 0 { info.si_status() } else { 0 })
    }
}

/// Kills everything of a sandbox and removes all but its control groups, which are for [`crate::endings::Endings`].
///
/// # Errors
/// A process hangs in the kernel: its files and its ids are in use.
pub fn end(
    node: &Node,
    id: &str,
    slot: Option<u32>,
    pidfd: Option<&OwnedFd>,
    keep_scratch: bool,
) -> Result<Ended, NotEnded> {
    let killed = node.cgroups.kill(id);
    match pidfd {
        Some(pidfd) => {
            if !killed {
                let _ = sysapi::pidfd_kill(pidfd.as_raw_fd());
            }
            // The last one of its namespace.
            wait_for_end(pidfd).ok_or(NotEnded)?;
        }
        None => end_strays(node, id)?,
    }
    Ok(take_files(node, id, slot, keep_scratch))
}

/// Ends processes that only the group knows.
fn end_strays(node: &Node, id: &str) -> Result<(), NotEnded> {
    let deadline = Instant::now() + END_DEADLINE;
    loop {
        let pids = node.cgroups.pids(id);
        if pids.is_empty() {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(NotEnded);
        }
        for pid in pids {
            // Killed through a pidfd that was checked against the group again, so that a reused number can't be hit.
            if let Ok(pidfd) = sysapi::pidfd_open(pid) {
                if node.cgroups.pids(id).contains(&pid) {
                    let _ = sysapi::pidfd_kill(pidfd.as_raw_fd());
                    wait_for_end(&pidfd).ok_or(NotEnded)?;
                }
            }
        }
    }
}

/// Removes the objects of a sandbox whose processes are dead.
pub fn take_away(node: &Node, id: &str, slot: Option<u32>, keep_scratch: bool) -> Ended {
    let mut ended = take_files(node, id, slot, keep_scratch);
    if let Err(error) = node.cgroups.remove(id) {
        ended.left.push(format!("cgroup: {error}"));
    }
    ended
}

fn take_files(node: &Node, id: &str, slot: Option<u32>, keep_scratch: bool) -> Ended {
    let used = node.scratch.usage(id).ok();
    let mut ended = Ended {
        figures: node.cgroups.figures(id),
        disk: used.unwrap_or(0),
        left: Vec::new(),
    };
    if let Some(slot) = slot {
        node.remove_socket(slot);
    }
    let scratch = if keep_scratch {
        node.scratch.forget(id)
    } else {
        node.scratch.remove(id, used)
    };
    if let Err(error) = scratch {
        ended.left.push(format!("scratch: {error}"));
    }
    ended
}
