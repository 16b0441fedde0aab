//! What the start of a sandbox's processes needs of the kernel.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use super::finding::{Feature, Finding, State};
use super::text;
use bare::{CloneArgs, CLONE_INTO_CGROUP};

use crate::sysapi::check;

const USER_NAMESPACES: Feature = Feature {
    name: "user namespaces",
    cost: "no sandbox can be isolated: none starts",
    todo: "a kernel with USER_NS; sysctl -w user.max_user_namespaces=65536",
};
const ENTER_CGROUP: Feature = Feature {
    name: "clone3 into a cgroup",
    cost: "a sandbox's first process is moved to its cgroup after its start: starts are slower, and a tree that forks at once is harder to kill",
    todo: "a kernel from 5.7 with a cgroup v2 tree mounted",
};
const SECCOMP: Feature = Feature {
    name: "seccomp notification",
    cost: "no sandbox starts: its system call filter can't report what it denies",
    todo: "a kernel from 5.0 with SECCOMP_FILTER",
};
const CORE_SCHEDULING: Feature = Feature {
    name: "core scheduling",
    cost: "nothing yet: this version doesn't keep sandboxes off each other's hyperthreads, which it is to be used for",
    todo: "a kernel from 5.14 with SCHED_CORE, or switch hyperthreading off",
};

/// A child that does nothing until it is dropped.
pub struct IdleChild {
    pid: libc::pid_t,
}

impl IdleChild {
    /// Starts it with these clone flags.
    pub fn start(flags: libc::c_int) -> io::Result<Self> {
        clone(CloneArgs {
            flags: flags as u32 as u64,
            exit_signal: libc::SIGCHLD as u64,
            ..CloneArgs::default()
        })
    }

    /// Starts it in a cgroup, given by its directory.
    fn start_in(cgroup: &OwnedFd) -> io::Result<Self> {
        clone(CloneArgs {
            flags: CLONE_INTO_CGROUP,
            exit_signal: libc::SIGCHLD as u64,
            cgroup: cgroup.as_raw_fd() as u64,
            ..CloneArgs::default()
        })
    }

    /// Gives its user namespace a range of ids, and returns that namespace.
    pub fn map_ids(&self) -> io::Result<File> {
        let proc = format!("/proc/{}", self.pid);
        for map in ["uid_map", "gid_map"] {
            fs::write(format!("{proc}/{map}"), "0 1000000 65536")?;
        }
        File::open(format!("{proc}/ns/user"))
    }
}

impl Drop for IdleChild {
    fn drop(&mut self) {
        // SAFETY: the child is ours and not collected yet; waitpid may leave out the status.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
        }
    }
}

fn clone(arguments: CloneArgs) -> io::Result<IdleChild> {
    // SAFETY: without CLONE_VM the child has its own copy of this memory, and it only makes system calls until it is killed.
    let pid = check(unsafe {
        let result = libc::syscall(
            libc::SYS_clone3,
            &arguments,
            std::mem::size_of::<CloneArgs>(),
        );
        if result == 0 {
            libc::prctl(
                libc::PR_SET_PDEATHSIG,
                libc::SIGKILL as libc::c_ulong,
                0,
                0,
                0,
            );
            loop {
                libc::pause();
            }
        }
        result
    })?;
    Ok(IdleChild {
        pid: pid as libc::pid_t,
    })
}

pub fn findings(v2_tree: Option<&str>) -> Vec<Finding> {
    vec![
        USER_NAMESPACES.tried(user_namespace(), State::Missing),
        ENTER_CGROUP.tried(enter_cgroup(v2_tree), State::Degraded),
        SECCOMP.tried(seccomp_notification(), State::Missing),
        core_scheduling(),
    ]
}

fn user_namespace() -> io::Result<String> {
    IdleChild::start(libc::CLONE_NEWUSER)?.map_ids()?;
    Ok(match text("/proc/sys/user/max_user_namespaces") {
        Some(most) => format!("made one; at most {most}"),
        None => "made one".to_owned(),
    })
}

fn enter_cgroup(v2_tree: Option<&str>) -> io::Result<String> {
    let tree = v2_tree.ok_or_else(|| io::Error::other("no cgroup v2 tree is mounted"))?;
    let own = super::groups::own_v2_group()
        .ok_or_else(|| io::Error::other("this process is in no cgroup v2 group"))?;
    let directory = OwnedFd::from(File::open(format!("{tree}{own}"))?);
    IdleChild::start_in(&directory).map(|_| "started one".to_owned())
}

/// seccomp(2), SECCOMP_GET_ACTION_AVAIL.
fn seccomp_notification() -> io::Result<String> {
    let action: u32 = libc::SECCOMP_RET_USER_NOTIF;
    // SAFETY: the call reads one u32.
    check(unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_GET_ACTION_AVAIL,
            0,
            &action,
        )
    })?;
    Ok(String::new())
}

/// prctl(2), PR_SCHED_CORE: asking for this process's own cookie changes nothing.
fn core_scheduling() -> Finding {
    const PR_SCHED_CORE: libc::c_int = 62;
    const GET: libc::c_ulong = 0;
    const OF_THREAD: libc::c_ulong = 0;
    let mut cookie: u64 = 0;
    // SAFETY: the call writes one u64.
    let result = unsafe { libc::prctl(PR_SCHED_CORE, GET, 0, OF_THREAD, &raw mut cookie) };
    match check(result.into()) {
        Ok(_) => CORE_SCHEDULING.found(""),
        // Without sibling threads there is nothing to share.
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {
            CORE_SCHEDULING.found("not needed: no hyperthreading")
        }
        Err(_) if text("/sys/devices/system/cpu/smt/active").as_deref() == Some("0") => {
            CORE_SCHEDULING.found("not needed: no hyperthreading")
        }
        Err(error) => CORE_SCHEDULING.lacking(State::Degraded, error.to_string()),
    }
}
