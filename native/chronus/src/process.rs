//! Processes: starting one in a cgroup of its own, and ending all of it.

use std::collections::HashSet;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use bare::CLONE_INTO_CGROUP;

use crate::cgroup::{Group, Groups};
use crate::child::{self, Body, Child, Launch, Program, Stdio};
use crate::execution::Execution;
use crate::kernel::{self, check, check_size, errno};
use crate::report::{Report, Reports, Stage};
use crate::spawn::{Areas, Plan};
use crate::users::{Lookup, Unresolved, Users};

/// Under memory pressure a command goes before chronus does.
const COMMAND_OOM_SCORE: &[u8] = b"500";
const OWN_OOM_SCORE: &[u8] = b"0";

/// A child that leads a session, and with it everything that it starts.
#[derive(Debug, Clone, Copy)]
pub struct Process {
    pub pid: i32,
    group: Option<Group>,
    report: Report,
}

/// How a leader ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// Exit status, or 128 + signal.
    pub code: i64,
    pub signal: Option<u8>,
}

impl Status {
    pub fn killed_by(signal: u8) -> Status {
        Status {
            code: 128 + i64::from(signal),
            signal: Some(signal),
        }
    }

    /// From what waitpid(2) gives.
    pub fn from_wait(status: libc::c_int) -> Status {
        if libc::WIFSIGNALED(status) {
            let signal = libc::WTERMSIG(status);
            Status {
                code: 128 + i64::from(signal),
                signal: u8::try_from(signal).ok(),
            }
        } else {
            Status {
                code: i64::from(libc::WEXITSTATUS(status)),
                signal: None,
            }
        }
    }
}

/// Why a program was not started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StartError {
    pub stage: Stage,
    pub errno: i32,
}

impl From<Unresolved> for StartError {
    fn from(unresolved: Unresolved) -> StartError {
        let (stage, errno) = match unresolved {
            Unresolved::User => (Stage::UnknownUser, libc::EINVAL),
            Unresolved::Group => (Stage::UnknownGroup, libc::EINVAL),
            Unresolved::Unreadable(errno) => (Stage::Users, errno),
        };
        StartError { stage, errno }
    }
}

/// What starting takes.
pub struct Starter {
    groups: Option<Groups>,
    reports: Reports,
    cookie: (u64, u64),
    /// clone3 into a cgroup isn't possible here (an old kernel, a filter, a hierarchy that refuses): fork, then move.
    fork_only: bool,
    strict: bool,
    /// What a command of root's begins with.
    capabilities: u64,
    /// Where programs are started that share this process's memory for a moment.
    areas: Areas,
    /// /proc/self/oom_score_adj, opened while this process could.
    oom_score: Option<OwnedFd>,
    users: Users,
    /// The own score is the commands' now.
    raised: bool,
    /// Something was started since that was last looked at.
    started: bool,
}

impl Starter {
    pub fn new(
        groups: Option<Groups>,
        cookie: (u64, u64),
        strict: bool,
        capabilities: u64,
        oom_score: Option<OwnedFd>,
    ) -> Starter {
        Starter {
            groups,
            reports: Reports::default(),
            cookie,
            fork_only: false,
            strict,
            capabilities,
            areas: Areas::default(),
            oom_score,
            users: Users::new(),
            raised: false,
            started: false,
        }
    }

    /// Who a command runs as. [`Lookup::Awaited`]: it can be asked for again when [`Starter::finish_reading`] says so.
    pub fn look_up(&mut self, user: &str) -> Lookup {
        self.users.look_up(user, self.cookie)
    }

    /// A child that is nobody's leader is dead. True if it has read the files of users: all who wait for them are to be started, and then
    /// [`Starter::settle_users`] is to be called.
    pub fn finish_reading(&mut self, pid: i32) -> bool {
        self.users.finish(pid)
    }

    pub fn settle_users(&mut self) {
        self.users.settle();
    }

    /// Starts a child; what goes wrong in it later is told by [`Starter::bury`].
    pub fn start(&mut self, launch: Launch<'_>) -> Result<Process, StartError> {
        let at = |stage| {
            move |error: &io::Error| StartError {
                stage,
                errno: errno(error),
            }
        };
        let invalid = |stage| StartError {
            stage,
            errno: libc::EINVAL,
        };
        let account = launch.account;
        let body = match launch.program {
            Program::Builtin(name, arguments) => Body::Builtin(name, arguments),
            Program::FirstOf(lines) => Body::Execute(
                Execution::new(&lines, launch.env, &account).ok_or(invalid(Stage::Execute))?,
            ),
        };
        let cwd = CString::new(launch.cwd).map_err(|_| invalid(Stage::Directory))?;
        let report = self
            .reports
            .take()
            .map_err(|error| at(Stage::Fork)(&error))?;
        let child = Child {
            body,
            account,
            cwd,
            no_new_privs: launch.no_new_privs,
            stdio: launch.stdio,
            strict: self.strict,
            report,
        };
        self.start_in_group(child).map_err(|error| {
            self.reports.give_back(report);
            at(Stage::Fork)(&error)
        })
    }

    fn start_in_group(&mut self, child: Child) -> io::Result<Process> {
        let created = self.groups.as_mut().map(Groups::create).transpose()?;
        let group = created.as_ref().map(|(group, _)| *group);
        let report = child.report;
        self.raise_score();
        let started = self.clone_or_fork(child, created);
        match started {
            Ok(pid) => Ok(Process { pid, group, report }),
            Err(error) => {
                if let (Some(groups), Some(group)) = (&mut self.groups, group) {
                    groups.retire(group);
                }
                Err(error)
            }
        }
    }

    /// Best effort: children inherit the score that chronus has when they are born, because they may not set their own before they execute.
    fn raise_score(&mut self) {
        self.started = true;
        if !self.raised {
            self.set_oom_score(COMMAND_OOM_SCORE);
            self.raised = true;
        }
    }

    /// Gives chronus its own score back if nothing was started since the last call and no child shares its memory any more, whose score would change too.
    /// To be called now and then rather than after each start: for one that has shared its memory the kernel looks at every process of the machine, to
    /// find those that still do.
    pub fn settle_score(&mut self) {
        let started = std::mem::take(&mut self.started);
        if self.raised && !started && !self.areas.any_used() {
            self.set_oom_score(OWN_OOM_SCORE);
            self.raised = false;
        }
    }

    /// Lets go of what children were given that have executed by now. Whether [`Starter::settle_score`] has something to do.
    pub fn tidy(&mut self) -> bool {
        self.areas.any_used() || self.raised
    }

    fn set_oom_score(&self, score: &[u8]) {
        if let Some(file) = &self.oom_score {
            // SAFETY: writes a few bytes at the start of the file.
            unsafe { libc::pwrite(file.as_raw_fd(), score.as_ptr().cast(), score.len(), 0) };
        }
    }

    fn clone_or_fork(
        &mut self,
        child: Child,
        created: Option<(Group, OwnedFd)>,
    ) -> io::Result<i32> {
        let directory = created.as_ref().map(|(_, directory)| directory);
        let child = match self.spawn(child, directory) {
            Ok(pid) => return pid,
            Err(child) => *child,
        };
        match self.fork(directory)? {
            Forked::Parent { pid } => Ok(pid),
            Forked::Child { in_group } => child::run(child, || {
                let group = created.as_ref().map(|(group, _)| *group);
                if let (false, Some(groups), Some(group)) = (in_group, &self.groups, group) {
                    // Without its cgroup the command still runs; killing it falls back to its session.
                    let _cannot_be_told = groups.enter(group);
                }
            }),
        }
    }

    /// Starts a program with pipes without a copy of this process. Gives back what needs one.
    fn spawn(
        &mut self,
        child: Child,
        directory: Option<&OwnedFd>,
    ) -> Result<io::Result<i32>, Box<Child>> {
        let (false, Stdio::Pipes(pipes)) = (self.fork_only, child.stdio) else {
            return Err(Box::new(child));
        };
        let (stdio, report, strict) = (child.stdio, child.report, child.strict);
        let Body::Execute(execution) = child.body else {
            return Err(Box::new(child));
        };
        let plan = Plan {
            execution,
            account: child.account,
            cwd: child.cwd,
            no_new_privs: child.no_new_privs,
            pipes,
            capabilities: self.capabilities,
            strict,
            report,
        };
        match self
            .areas
            .start(plan, directory.map(AsRawFd::as_raw_fd), self.cookie)
        {
            Ok(pid) => Ok(Ok(pid)),
            Err((error, plan)) if clone_is_refused(&error) => {
                self.fork_only = true;
                Err(Box::new(Child {
                    body: Body::Execute(plan.execution),
                    account: plan.account,
                    cwd: plan.cwd,
                    no_new_privs: plan.no_new_privs,
                    stdio,
                    strict,
                    report,
                }))
            }
            Err((error, _)) => Ok(Err(error)),
        }
    }

    fn fork(&mut self, directory: Option<&OwnedFd>) -> io::Result<Forked> {
        if let (false, Some(directory)) = (self.fork_only, directory) {
            match self.clone_into(directory) {
                Ok(forked) => return Ok(forked),
                Err(error) if clone_is_refused(&error) => self.fork_only = true,
                Err(error) => return Err(error),
            }
        }
        // SAFETY: this process has one thread.
        match check(unsafe { libc::fork() })? {
            0 => Ok(Forked::Child { in_group: false }),
            pid => Ok(Forked::Parent { pid }),
        }
    }

    /// fork(2) into a cgroup. The sandbox's seccomp filter lets clone3 through only with the cookie, which glibc's wrapper can't pass.
    fn clone_into(&self, directory: &OwnedFd) -> io::Result<Forked> {
        // SAFETY: clone_args is plain data; zero means unused.
        let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
        arguments.flags = CLONE_INTO_CGROUP;
        arguments.exit_signal = libc::SIGCHLD as u64;
        arguments.cgroup = directory.as_raw_fd() as u64;
        let unused: libc::c_long = 0;
        // SAFETY: without CLONE_VM this is a fork; this process has one thread.
        let pid = check_size(unsafe {
            libc::syscall(
                libc::SYS_clone3,
                &arguments,
                size_of::<libc::clone_args>(),
                unused,
                unused,
                self.cookie.0,
                self.cookie.1,
            )
        } as isize)?;
        Ok(match pid {
            0 => Forked::Child { in_group: true },
            pid => Forked::Parent { pid: pid as i32 },
        })
    }

    /// Sends a signal to the leader's process group; KILL with `tree` to every process of the command.
    pub fn send(&self, process: &Process, signal: i32, tree: bool) {
        if tree && signal == libc::SIGKILL {
            self.kill(process);
        } else {
            self.signal(process, signal);
        }
    }

    /// Sends a signal to the leader's process group. False when nobody is there.
    fn signal(&self, process: &Process, signal: i32) -> bool {
        // SAFETY: kill has no memory effects; the leader is not reaped yet, so the number is still its own.
        unsafe {
            // A leader that hasn't come to setsid yet has no group of its own.
            libc::kill(-process.pid, signal) == 0 || libc::kill(process.pid, signal) == 0
        }
    }

    /// Kills every process of the command.
    pub fn kill(&self, process: &Process) {
        let by_group = matches!((&self.groups, process.group), (Some(groups), Some(group)) if groups.kill(group).is_ok());
        if !by_group {
            kill_session(process.pid);
        }
    }

    /// The leader is dead and reaped: says whether its program had started, and lets go of its cgroup. With `kill_rest` survivors die.
    pub fn bury(&mut self, process: &Process, kill_rest: bool) -> (Option<StartError>, Survivors) {
        let failed = self
            .reports
            .give_back(process.report)
            .map(|(stage, errno)| StartError { stage, errno });
        let emptied = match (&mut self.groups, process.group) {
            (Some(groups), Some(group)) => groups.retire(group),
            _ => false,
        };
        if emptied {
            return (failed, Survivors::None);
        }
        if kill_rest {
            self.kill(process);
        }
        let survivors = if process.group.is_some() {
            Survivors::Some
        } else {
            Survivors::None
        };
        (failed, survivors)
    }

    /// Removes cgroups that have become empty. True when some are left.
    pub fn sweep_groups(&mut self) -> bool {
        self.groups.as_mut().is_some_and(Groups::sweep)
    }

    pub fn has_retired_groups(&self) -> bool {
        self.groups.as_ref().is_some_and(Groups::has_retired)
    }
}

/// clone3, or being born into a cgroup, isn't possible here: an old kernel, a filter, a hierarchy that refuses.
fn clone_is_refused(error: &io::Error) -> bool {
    matches!(
        errno(error),
        libc::ENOSYS | libc::EPERM | libc::EINVAL | libc::EOPNOTSUPP | libc::EBUSY | libc::EACCES
    )
}

enum Forked {
    Parent { pid: i32 },
    Child { in_group: bool },
}

/// Whether a dead leader's cgroup still holds processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Survivors {
    None,
    Some,
}

/// Kills a session leader's session and the descendants that left it, where there is no cgroup to say who they are.
fn kill_session(leader: i32) {
    let table = process_table();
    let mut condemned: HashSet<i32> = HashSet::from([leader]);
    loop {
        let more: Vec<i32> = table
            .iter()
            .filter(|entry| {
                !condemned.contains(&entry.pid)
                    && (entry.session == leader || condemned.contains(&entry.parent))
            })
            .map(|entry| entry.pid)
            .collect();
        if more.is_empty() {
            break;
        }
        condemned.extend(more);
    }
    // SAFETY: kill has no memory effects. The leader's number may be free by now, but its group's isn't while a member lives.
    unsafe { libc::kill(-leader, libc::SIGKILL) };
    for pid in condemned.into_iter().filter(|pid| {
        *pid != leader
            || table
                .iter()
                .any(|entry| entry.pid == leader && entry.session == leader)
    }) {
        // SAFETY: as above.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
}

struct Entry {
    pid: i32,
    parent: i32,
    session: i32,
}

fn process_table() -> Vec<Entry> {
    let Ok(directory) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    let pids = directory.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    pids.filter_map(|pid| parse_stat(pid, &std::fs::read(format!("/proc/{pid}/stat")).ok()?))
        .collect()
}

/// proc(5): "pid (comm) state ppid pgrp session …", where comm may hold anything.
fn parse_stat(pid: i32, stat: &[u8]) -> Option<Entry> {
    let after_name = &stat[stat.iter().rposition(|byte| *byte == b')')? + 1..];
    let mut fields = std::str::from_utf8(after_name)
        .ok()?
        .split_ascii_whitespace();
    let parent = fields.nth(1)?.parse().ok()?;
    let session = fields.nth(1)?.parse().ok()?;
    Some(Entry {
        pid,
        parent,
        session,
    })
}

/// The next dead child, if there is one: its pid and how it ended. Orphans that fell to chronus are among them.
pub fn reap() -> Option<(i32, Status)> {
    let mut status = 0;
    // SAFETY: waitpid writes one int.
    let pid = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) };
    (pid > 0).then(|| (pid, Status::from_wait(status)))
}

/// What was to be started, to explain why it wasn't.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    pub program: Vec<u8>,
    pub user: String,
    pub cwd: Vec<u8>,
}

/// Names in messages are cut to this many bytes.
const SHOWN_MAX: usize = 1 << 10;

impl Attempt {
    pub fn new(program: &[u8], user: &str, cwd: &[u8]) -> Attempt {
        Attempt {
            program: program.to_vec(),
            user: user.to_owned(),
            cwd: cwd.to_vec(),
        }
    }

    /// What a start error says to the caller.
    pub fn explain(&self, error: StartError) -> String {
        let reason = kernel::describe(error.errno);
        let shown =
            |name: &[u8]| String::from_utf8_lossy(&name[..name.len().min(SHOWN_MAX)]).into_owned();
        let user = shown(self.user.as_bytes());
        match error.stage {
            Stage::Fork => format!("fork: {reason}"),
            Stage::Stdio => format!("standard descriptors: {reason}"),
            Stage::Users => {
                format!("user {user}: the sandbox's /etc/passwd or /etc/group: {reason}")
            }
            Stage::UnknownUser => format!("user {user}: not in the sandbox's /etc/passwd"),
            Stage::UnknownGroup => {
                format!("user {user}: its group is not in the sandbox's /etc/group")
            }
            Stage::Credentials => format!("become user {user}: {reason}"),
            Stage::Terminal => format!("open a terminal: {reason}"),
            Stage::Directory => format!("chdir {}: {reason}", shown(&self.cwd)),
            Stage::NoNewPrivs => format!("no_new_privs: {reason}"),
            Stage::Execute => format!("exec {}: {reason}", shown(&self.program)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_name_can_not_confuse_the_table() {
        let entry = parse_stat(7, b"7 (a) S 1 (b) c) R 3 5 4 0 -1").unwrap();
        assert_eq!((entry.pid, entry.parent, entry.session), (7, 3, 4));
        assert!(parse_stat(7, b"7 (x").is_none());
    }

    #[test]
    fn a_signal_is_128_and_its_number() {
        assert_eq!(
            Status::from_wait(9),
            Status {
                code: 137,
                signal: Some(9)
            }
        );
        assert_eq!(
            Status::from_wait(3 << 8),
            Status {
                code: 3,
                signal: None
            }
        );
    }
}
