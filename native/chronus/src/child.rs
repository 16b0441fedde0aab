//! The child's side of a start: between fork and exec (or the builtin), as a copy of chronus with one thread.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use wire::message::{BuiltinArgs, Env};

use crate::builtin;
use crate::capabilities;
use crate::kernel::{check, errno, own};
use crate::pty;
use crate::report::{Report, Stage};
use crate::users::{self, Account, Unknown};

/// Where programs are looked for if the environment doesn't say.
const DEFAULT_PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
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

/// The child's descriptors, all of them above 2 in this process; None: /dev/null.
pub enum Stdio {
    Pipes {
        stdin: Option<RawFd>,
        stdout: RawFd,
        stderr: RawFd,
        /// Becomes [`STATUS_FD`].
        status: Option<RawFd>,
    },
    Terminal {
        handover: RawFd,
        rows: u16,
        cols: u16,
    },
}

/// Everything that a start is made of.
pub struct Launch<'a> {
    pub program: Program,
    pub user: &'a str,
    pub cwd: &'a [u8],
    pub env: &'a Env,
    pub no_new_privs: bool,
    pub stdio: Stdio,
    /// In a sandbox every step has to succeed; outside (tests) what the own user may not do is skipped.
    pub strict: bool,
}

/// A step that failed.
type Failed = (Stage, io::Error);

/// Runs the child to its end; `enter_group` is what is left to do where it could not be cloned into its cgroup.
pub fn run(launch: Launch<'_>, report: Report, enter_group: impl FnOnce()) -> ! {
    enter_group();
    let code = match prepare(&launch) {
        Err((stage, error)) => fail(report, stage, &error),
        Ok(account) => match launch.program {
            Program::Builtin(name, arguments) => builtin::run(&name, &arguments),
            Program::FirstOf(candidates) => {
                let error = execute(&candidates, &environment(launch.env, &account));
                fail(report, Stage::Execute, &error)
            }
        },
    };
    // SAFETY: ends the child without running what the parent registered.
    unsafe { libc::_exit(code) }
}

fn fail(report: Report, stage: Stage, error: &io::Error) -> i32 {
    report.fail(stage, errno(error));
    exit_code(stage, errno(error))
}

/// The exit code of a start that failed: a program that isn't there, or one that can't be run.
pub fn exit_code(stage: Stage, errno: i32) -> i32 {
    if stage == Stage::Execute && errno == libc::ENOENT {
        127
    } else {
        126
    }
}

fn prepare(launch: &Launch<'_>) -> Result<Account, Failed> {
    // SAFETY: a forked child leads no group yet, so this can't fail.
    unsafe { libc::setsid() };
    reset_signals();
    redirect(&launch.stdio).map_err(|error| (Stage::Stdio, error))?;
    let account = users::look_up(launch.user).map_err(|unknown| {
        let stage = if unknown == Unknown::User {
            Stage::UnknownUser
        } else {
            Stage::UnknownGroup
        };
        (stage, io::Error::from_raw_os_error(libc::EINVAL))
    })?;
    match become_user(&account) {
        Err(error) if launch.strict || errno(&error) != libc::EPERM => {
            return Err((Stage::Credentials, error))
        }
        _ => {}
    }
    if let Stdio::Terminal { rows, cols, .. } = launch.stdio {
        // As the user, so that the terminal is theirs.
        pty::open_in_child(HANDOVER_FD, rows, cols).map_err(|error| (Stage::Terminal, error))?;
    }
    change_directory(launch.cwd).map_err(|error| (Stage::Directory, error))?;
    if launch.no_new_privs {
        // SAFETY: a plain prctl; the unused arguments have to be 0.
        check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })
            .map_err(|error| (Stage::NoNewPrivs, error))?;
    }
    Ok(account)
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
fn redirect(stdio: &Stdio) -> io::Result<()> {
    match *stdio {
        Stdio::Pipes {
            stdin,
            stdout,
            stderr,
            status,
        } => {
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

fn change_directory(path: &[u8]) -> io::Result<()> {
    let path = c_string(path)?;
    // SAFETY: the path is a C string.
    check(unsafe { libc::chdir(path.as_ptr()) }).map(drop)
}

fn c_string(bytes: &[u8]) -> io::Result<CString> {
    CString::new(bytes).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// The environment as execve takes it, with what a program may expect added where it is missing.
fn environment(env: &Env, account: &Account) -> Vec<Vec<u8>> {
    let number = account.uid.to_string().into_bytes();
    let name = account.name.as_ref().unwrap_or(&number);
    let defaults: [(&[u8], &[u8]); 4] = [
        (b"HOME", &account.home),
        (b"USER", name),
        (b"LOGNAME", name),
        (b"PATH", DEFAULT_PATH),
    ];
    let missing = defaults
        .into_iter()
        .filter(|(key, _)| !env.contains_key(*key));
    let given = env
        .iter()
        .map(|(key, value)| (key.as_slice(), value.as_slice()));
    given
        .chain(missing)
        .map(|(key, value)| [key, b"=", value].concat())
        .collect()
}

/// Replaces the process by the first command line whose program exists; returns why none could be.
fn execute(candidates: &[Vec<Vec<u8>>], environment: &[Vec<u8>]) -> io::Error {
    let mut last = io::Error::from_raw_os_error(libc::ENOENT);
    for argv in candidates {
        last = execute_one(argv, environment);
        if errno(&last) != libc::ENOENT {
            break;
        }
    }
    last
}

fn execute_one(argv: &[Vec<u8>], environment: &[Vec<u8>]) -> io::Error {
    let c_strings = |list: &[Vec<u8>]| {
        list.iter()
            .map(|item| c_string(item))
            .collect::<io::Result<Vec<_>>>()
    };
    let (argv, environment) = match (c_strings(argv), c_strings(environment)) {
        (Ok(argv), Ok(environment)) if !argv.is_empty() => (argv, environment),
        _ => return io::Error::from_raw_os_error(libc::EINVAL),
    };
    let name = argv[0].to_bytes();
    if name.is_empty() {
        return io::Error::from_raw_os_error(libc::ENOENT);
    }
    if name.contains(&b'/') {
        return exec(&argv[0], &argv, &environment);
    }
    search(name, &argv, &environment)
}

/// Looks for a name along PATH, as execvp(3) does: what can't be run is passed over, but remembered.
fn search(name: &[u8], argv: &[CString], environment: &[CString]) -> io::Error {
    let path = environment
        .iter()
        .find_map(|entry| entry.to_bytes().strip_prefix(b"PATH="))
        .unwrap_or(DEFAULT_PATH);
    let mut denied = None;
    for directory in path.split(|byte| *byte == b':') {
        let directory = if directory.is_empty() {
            b"."
        } else {
            directory
        };
        let Ok(full) = c_string(&[directory, b"/", name].concat()) else {
            continue;
        };
        let error = exec(&full, argv, environment);
        match errno(&error) {
            libc::ENOENT | libc::ENOTDIR | libc::ENAMETOOLONG | libc::ELOOP => {}
            libc::EACCES => denied = Some(error),
            _ => return error,
        }
    }
    denied.unwrap_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))
}

fn exec(path: &CStr, argv: &[CString], environment: &[CString]) -> io::Error {
    let pointers = |list: &[CString]| {
        list.iter()
            .map(|item| item.as_ptr())
            .chain([std::ptr::null()])
            .collect::<Vec<_>>()
    };
    let (argv, environment) = (pointers(argv), pointers(environment));
    // SAFETY: all are C strings, both lists end with a null pointer, and everything outlives the call.
    unsafe { libc::execve(path.as_ptr(), argv.as_ptr(), environment.as_ptr()) };
    io::Error::last_os_error()
}
