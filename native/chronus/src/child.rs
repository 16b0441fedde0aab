//! The child's side of a start: between fork and exec (or the builtin), as a copy of chronus with one thread. Builtins need one, and terminals; programs
//! with pipes start without ([`crate::spawn`]).

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use wire::message::{BuiltinArgs, Env};

use crate::builtin;
use crate::capabilities;
use crate::execution::Execution;
use crate::kernel::{check, errno, own};
use crate::pty;
use crate::report::{Report, Stage};
use crate::spawn::Pipes;
use crate::users::Account;

/// Descriptor of the status pipe, inside a session's shell (the highest that every shell can name) or a builtin that says when it is ready.
pub const STATUS_FD: RawFd = 9;
/// Where the socket stands on which a terminal is handed over, while it is needed.
const HANDOVER_FD: RawFd = 3;

/// What the child becomes.
pub enum Program {
    /// The first of these command lines that exists.
    FirstOf(Vec<Vec<Vec<u8>>>),
    Builtin(String, Box<BuiltinArgs>),
}

/// What becomes of a child that is prepared.
pub enum Body {
    Execute(Execution),
    Builtin(String, Box<BuiltinArgs>),
}

/// The child's descriptors.
#[derive(Clone, Copy)]
pub enum Stdio {
    Pipes(Pipes),
    Terminal {
        handover: RawFd,
        rows: u16,
        cols: u16,
    },
}

/// Everything that a start is made of.
pub struct Launch<'a> {
    pub program: Program,
    pub account: Account,
    pub cwd: &'a [u8],
    pub env: &'a Env,
    pub no_new_privs: bool,
    pub stdio: Stdio,
}

/// A start, resolved and checked.
pub struct Child {
    pub body: Body,
    pub account: Account,
    pub cwd: CString,
    pub no_new_privs: bool,
    pub stdio: Stdio,
    /// In a sandbox every step has to succeed; outside (tests) what the own user may not do is skipped.
    pub strict: bool,
    pub report: Report,
}

/// A step that failed.
type Failed = (Stage, io::Error);

/// Runs the child to its end; `enter_group` is what is left to do where it could not be cloned into its cgroup.
pub fn run(child: Child, enter_group: impl FnOnce()) -> ! {
    enter_group();
    let report = child.report;
    let code = match (prepare(&child), child.body) {
        (Err((stage, error)), _) => fail(report, stage, errno(&error)),
        (Ok(()), Body::Builtin(name, arguments)) => builtin::run(&name, &arguments),
        (Ok(()), Body::Execute(execution)) => fail(report, Stage::Execute, execution.execute()),
    };
    // SAFETY: ends the child without running what the parent registered.
    unsafe { libc::_exit(code) }
}

fn fail(report: Report, stage: Stage, errno: i32) -> i32 {
    report.fail(stage, errno);
    exit_code(stage, errno)
}

/// The exit code of a start that failed: a program that isn't there, or one that can't be run.
pub fn exit_code(stage: Stage, errno: i32) -> i32 {
    if stage == Stage::Execute && errno == libc::ENOENT {
        127
    } else {
        126
    }
}

fn prepare(child: &Child) -> Result<(), Failed> {
    // SAFETY: a forked child leads no group yet, so this can't fail.
    unsafe { libc::setsid() };
    reset_signals();
    redirect(child.stdio).map_err(|error| (Stage::Stdio, error))?;
    match become_user(&child.account) {
        Err(error) if child.strict || errno(&error) != libc::EPERM => {
            return Err((Stage::Credentials, error))
        }
        _ => {}
    }
    if let Stdio::Terminal { rows, cols, .. } = child.stdio {
        // As the user, so that the terminal is theirs.
        pty::open_in_child(HANDOVER_FD, rows, cols).map_err(|error| (Stage::Terminal, error))?;
    }
    // SAFETY: the path is a C string.
    check(unsafe { libc::chdir(child.cwd.as_ptr()) }).map_err(|error| (Stage::Directory, error))?;
    if child.no_new_privs {
        // SAFETY: a plain prctl; the unused arguments have to be 0.
        check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })
            .map_err(|error| (Stage::NoNewPrivs, error))?;
    }
    Ok(())
}

/// Undoes what chronus set for itself: it blocks every signal, and Rust's runtime ignores SIGPIPE.
fn reset_signals() {
    // SAFETY: the set is filled before it is used; default dispositions need no handler.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut());
    }
}

fn duplicate(from: RawFd, to: RawFd) -> io::Result<()> {
    // SAFETY: dup2 of descriptors of this process; a bad one is an error.
    check(unsafe { libc::dup2(from, to) }).map(drop)
}

/// Puts the descriptors where they belong and closes all others.
fn redirect(stdio: Stdio) -> io::Result<()> {
    match stdio {
        Stdio::Pipes(Pipes {
            stdin,
            stdout,
            stderr,
            status,
        }) => {
            // Out of the way of what is put below.
            // SAFETY: duplicates a descriptor of this process.
            let status = status
                .map(|fd| own(unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, STATUS_FD + 1) }))
                .transpose()?;
            match stdin {
                Some(fd) => duplicate(fd, 0)?,
                None => duplicate(nothing()?.as_raw_fd(), 0)?,
            }
            duplicate(stdout, 1)?;
            duplicate(stderr, 2)?;
            match status {
                None => close_range(3, u32::MAX),
                Some(status) => {
                    duplicate(status.as_raw_fd(), STATUS_FD)?;
                    std::mem::forget(status);
                    close_range(3, STATUS_FD as u32 - 1)?;
                    close_range(STATUS_FD as u32 + 1, u32::MAX)
                }
            }
        }
        Stdio::Terminal { handover, .. } => {
            duplicate(handover, HANDOVER_FD)?;
            close_range(HANDOVER_FD as u32 + 1, u32::MAX)
        }
    }
}

/// A descriptor that is at its end: /dev/null, or an empty pipe where the sandbox has none.
fn nothing() -> io::Result<OwnedFd> {
    // SAFETY: opens a path.
    if let Ok(null) = own(unsafe {
        libc::open(
            c"/dev/null".as_ptr(),
            libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC,
        )
    }) {
        return Ok(null);
    }
    crate::kernel::pipe().map(|(reader, _closed_here)| reader)
}

fn close_range(first: u32, last: u32) -> io::Result<()> {
    // SAFETY: the child doesn't use the descriptors in this range any more.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } as libc::c_int).map(drop)
}

fn become_user(account: &Account) -> io::Result<()> {
    let groups: Vec<libc::gid_t> = account.groups.clone();
    // SAFETY: the list is readable for its length. The raw calls: glibc's would look for threads that a fork doesn't have.
    unsafe {
        check(libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) as libc::c_int)?;
        check(
            libc::syscall(libc::SYS_setresgid, account.gid, account.gid, account.gid)
                as libc::c_int,
        )?;
        check(
            libc::syscall(libc::SYS_setresuid, account.uid, account.uid, account.uid)
                as libc::c_int,
        )?;
    }
    capabilities::drop_for(account.uid)
}
