//! Processes of the service's user: no privilege at all, and a read-only view of the code. The service is one of them.

use std::ffi::{CStr, CString, OsStr, OsString};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use wire::capabilities::{bound, Header, Words};

use crate::options::Options;

/// Variables of our own environment that the service gets. Others may hold secrets of whoever started us, or name places that it can't reach.
const PASSED_VARIABLES: [&str; 7] = [
    "PATH",
    "LANG",
    "LANGUAGE",
    "TZ",
    "LD_LIBRARY_PATH",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
];
const PASSED_PREFIXES: [&str; 2] = ["DSEC_", "LC_"];
const PASSED_SUFFIXES: [&str; 2] = ["_proxy", "_PROXY"];

/// Nothing is regained at exec or by a change of uid, and no ambient capability is raised; none of it can be undone.
/// capabilities(7), include/uapi/linux/securebits.h.
const SECUREBITS: libc::c_ulong = NOROOT
    | NOROOT_LOCKED
    | SETUID_FIXUP_LOCKED
    | KEEP_CAPS_LOCKED
    | NO_AMBIENT
    | NO_AMBIENT_LOCKED;
const NOROOT: libc::c_ulong = 1 << 0;
const NOROOT_LOCKED: libc::c_ulong = 1 << 1;
const SETUID_FIXUP_LOCKED: libc::c_ulong = 1 << 3;
const KEEP_CAPS_LOCKED: libc::c_ulong = 1 << 5;
const NO_AMBIENT: libc::c_ulong = 1 << 6;
const NO_AMBIENT_LOCKED: libc::c_ulong = 1 << 7;

/// What the new process does before it becomes the service, worked out beforehand: after the fork there is only time for system calls.
struct Descent {
    uid: u32,
    gid: u32,
    code: CString,
    app: CString,
    run: CString,
    state: CString,
    /// Kept open, so that whoever comes after a killed supervisor waits for the service's end.
    lock: RawFd,
    supervisor: libc::pid_t,
}

/// Starts a process with this command and returns its pid, which is also its process group.
///
/// # Errors
/// Its program can't be executed, or one of the steps before failed (its name is on stderr).
pub fn start(
    options: &Options,
    argv: &[OsString],
    gid: u32,
    lock: &impl AsRawFd,
) -> Result<libc::pid_t, String> {
    let app = options.run_dir.join("app");
    let view = View {
        code: &options.code,
        app: &app,
        apart: [&options.run_dir, &options.state_dir],
    };
    let (program, arguments) = argv.split_first().ok_or("an empty command")?;
    let descent = Descent {
        uid: options.service_uid,
        gid,
        code: c_path(&options.code)?,
        app: c_path(&app)?,
        run: c_path(&options.run_dir)?,
        state: c_path(&options.state_dir)?,
        lock: lock.as_raw_fd(),
        // SAFETY: takes nothing, always succeeds.
        supervisor: unsafe { libc::getpid() },
    };
    let mut command = Command::new(view.moved(program));
    command
        .args(arguments.iter().map(|argument| view.moved(argument)))
        .env_clear()
        .envs(environment(std::env::vars_os(), &view))
        .env("HOME", &options.state_dir)
        .env("PYTHONPATH", &app)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .stdin(Stdio::null());
    // SAFETY: between fork and exec the closure makes system calls only, and on failure one write to stderr.
    unsafe { command.pre_exec(move || descend(&descent)) };
    let child = command
        .spawn()
        .map_err(|error| format!("{} can't be started: {error}", program.to_string_lossy()))?;
    pid_of(&child)
}

/// The pid of a child that is waited for by number.
pub fn pid_of(child: &std::process::Child) -> Result<libc::pid_t, String> {
    libc::pid_t::try_from(child.id()).map_err(|_| format!("pid {} is out of range", child.id()))
}

/// A path as the kernel takes it.
fn c_path(path: &Path) -> Result<CString, String> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| format!("{path:?} has a NUL byte"))
}

/// Where the service sees its code: what lies below `code` is shown below `app`, but for the directories that it shares with root.
struct View<'a> {
    code: &'a Path,
    app: &'a Path,
    apart: [&'a PathBuf; 2],
}

impl View<'_> {
    /// The same file as the service sees it. Symlinks aren't followed: what tells a virtual environment is where its `python` lies.
    fn moved(&self, path: &OsStr) -> OsString {
        let path = Path::new(path);
        if self.apart.iter().any(|kept| path.starts_with(kept)) {
            return path.into();
        }
        match path.strip_prefix(self.code) {
            Ok(below) if below.as_os_str().is_empty() => self.app.into(),
            Ok(below) => self.app.join(below).into(),
            Err(_) => path.into(),
        }
    }

    /// A list of paths with colons between them, each moved.
    fn moved_list(&self, list: &OsStr) -> OsString {
        let moved: Vec<Vec<u8>> = list
            .as_bytes()
            .split(|byte| *byte == b':')
            .map(|path| self.moved(OsStr::from_bytes(path)).into_vec())
            .collect();
        OsString::from_vec(moved.join(&b':'))
    }
}

fn environment(
    ours: impl Iterator<Item = (OsString, OsString)>,
    view: &View,
) -> Vec<(OsString, OsString)> {
    ours.filter(|(name, _)| name.to_str().is_some_and(is_passed))
        .map(|(name, value)| (name, view.moved_list(&value)))
        .collect()
}

fn is_passed(name: &str) -> bool {
    PASSED_VARIABLES.contains(&name)
        || PASSED_PREFIXES
            .iter()
            .any(|prefix| name.starts_with(prefix))
        || PASSED_SUFFIXES.iter().any(|suffix| name.ends_with(suffix))
}

// --- in the new process

fn descend(descent: &Descent) -> io::Result<()> {
    step(c"reset its signals", c"", reset_signals())?;
    step(c"make a process group", c"", own_group())?;
    step(c"make a mount namespace", c"", own_mounts())?;
    step(
        c"show the code",
        &descent.code,
        show_code(&descent.code, &descent.app),
    )?;
    step(c"keep the lock", c"", keep_open(descent.lock))?;
    step(
        c"drop privileges",
        c"",
        drop_privileges(descent.uid, descent.gid),
    )?;
    step(
        c"end with the supervisor",
        c"",
        end_with(descent.supervisor),
    )?;
    step(
        c"use, as the service's user,",
        &descent.run,
        may_use(&descent.run),
    )?;
    step(
        c"use, as the service's user,",
        &descent.state,
        may_use(&descent.state),
    )?;
    step(
        c"enter, as the service's user,",
        &descent.app,
        enter(&descent.app),
    )
}

/// Names the step that failed: through exec's pipe only an errno gets to the parent.
fn step(what: &CStr, path: &CStr, result: io::Result<()>) -> io::Result<()> {
    if result.is_err() {
        for part in [
            c"dsec-spawner: a new process can't ",
            what,
            c" ",
            path,
            c"\n",
        ] {
            // SAFETY: the bytes are readable for the length given.
            unsafe { libc::write(2, part.as_ptr().cast(), part.count_bytes()) };
        }
    }
    result
}

fn succeed(value: libc::c_int) -> io::Result<()> {
    if value < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Undoes what the supervisor (or a shell that started it in the background) did to its own signals.
pub fn reset_signals() -> io::Result<()> {
    let mut none = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initializes the set before it is read; the handler is a constant of the kernel's.
    unsafe {
        for number in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            libc::signal(number, libc::SIG_DFL);
        }
        libc::sigemptyset(none.as_mut_ptr());
        succeed(libc::sigprocmask(
            libc::SIG_SETMASK,
            none.as_ptr(),
            std::ptr::null_mut(),
        ))
    }
}

/// Signals of the supervisor's terminal must not reach its children past it; and theirs can be killed with them.
pub fn own_group() -> io::Result<()> {
    // SAFETY: plain integers.
    succeed(unsafe { libc::setpgid(0, 0) })
}

fn own_mounts() -> io::Result<()> {
    // SAFETY: plain integers; constant NUL-terminated strings; mount's source, type and data are allowed to be null here.
    unsafe {
        succeed(libc::unshare(libc::CLONE_NEWNS))?;
        // Not private: what is unmounted on the host must not live on here.
        let flags = libc::MS_REC | libc::MS_SLAVE;
        succeed(libc::mount(
            std::ptr::null(),
            c"/".as_ptr(),
            std::ptr::null(),
            flags,
            std::ptr::null(),
        ))
    }
}

/// A checkout often lies in a home directory that the service's user can't pass: it sees the code, read-only, at `app`.
fn show_code(code: &CStr, app: &CStr) -> io::Result<()> {
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV,
        attr_clr: 0,
        propagation: 0,
        userns_fd: 0,
    };
    let size = std::mem::size_of::<libc::mount_attr>();
    // SAFETY: the paths are NUL-terminated, the attributes a valid mount_attr of the size given; all outlive the calls.
    unsafe {
        let flags = libc::MS_BIND | libc::MS_REC;
        succeed(libc::mount(
            code.as_ptr(),
            app.as_ptr(),
            std::ptr::null(),
            flags,
            std::ptr::null(),
        ))?;
        let result = libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            app.as_ptr(),
            libc::AT_RECURSIVE,
            &attributes,
            size,
        );
        succeed(result as libc::c_int)
    }
}

fn keep_open(descriptor: RawFd) -> io::Result<()> {
    // SAFETY: plain integers.
    succeed(unsafe { libc::fcntl(descriptor, libc::F_SETFD, 0) })
}

/// Leaves no capability in any set, and no way to get one back.
fn drop_privileges(uid: u32, gid: u32) -> io::Result<()> {
    let header = Header::OWN;
    let none = [Words::default(); 2];
    bound(0)?;
    // SAFETY: plain integers, and for capset a valid header with the two sets that version 3 has.
    unsafe {
        succeed(libc::prctl(
            libc::PR_CAP_AMBIENT,
            libc::PR_CAP_AMBIENT_CLEAR_ALL,
            0,
            0,
            0,
        ))?;
        succeed(libc::prctl(libc::PR_SET_SECUREBITS, SECUREBITS, 0, 0, 0))?;
        succeed(libc::setgroups(0, std::ptr::null()))?;
        succeed(libc::setresgid(gid, gid, gid))?;
        succeed(libc::setresuid(uid, uid, uid))?;
        succeed(libc::syscall(libc::SYS_capset, &header, &none) as libc::c_int)?;
        succeed(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    }
}

/// SIGTERM when the supervisor dies, however it dies. After the last change of uid: such a change takes it back (prctl(2)).
pub fn end_with(supervisor: libc::pid_t) -> io::Result<()> {
    // SAFETY: plain integers.
    unsafe {
        succeed(libc::prctl(
            libc::PR_SET_PDEATHSIG,
            libc::SIGTERM as libc::c_ulong,
            0,
            0,
            0,
        ))?;
        // It may have died before.
        if libc::getppid() != supervisor {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
    }
    Ok(())
}

fn may_use(directory: &CStr) -> io::Result<()> {
    // SAFETY: a NUL-terminated path that outlives the call.
    succeed(unsafe { libc::access(directory.as_ptr(), libc::R_OK | libc::W_OK | libc::X_OK) })
}

fn enter(directory: &CStr) -> io::Result<()> {
    // SAFETY: a NUL-terminated path that outlives the calls.
    unsafe {
        succeed(libc::chdir(directory.as_ptr()))?;
        succeed(libc::access(c".".as_ptr(), libc::R_OK | libc::X_OK))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moved(path: &str) -> OsString {
        view(
            &[
                PathBuf::from("/run/dsec"),
                PathBuf::from("/home/me/code/.cache/state"),
            ],
            |view| view.moved_list(OsStr::new(path)),
        )
    }

    fn view<T>(apart: &[PathBuf; 2], look: impl FnOnce(&View) -> T) -> T {
        look(&View {
            code: Path::new("/home/me/code"),
            app: Path::new("/run/dsec/app"),
            apart: [&apart[0], &apart[1]],
        })
    }

    #[test]
    fn what_lies_below_the_code_is_seen_below_app() {
        assert_eq!(
            moved("/home/me/code/.venv/bin/python"),
            "/run/dsec/app/.venv/bin/python"
        );
        assert_eq!(moved("/home/me/code"), "/run/dsec/app");
        assert_eq!(moved("/home/me/codes"), "/home/me/codes");
        assert_eq!(
            moved("/usr/bin:/home/me/code/bin:"),
            "/usr/bin:/run/dsec/app/bin:"
        );
        assert_eq!(
            moved("https://host:80/home/me/code"),
            "https://host:80/home/me/code"
        );
    }

    #[test]
    fn a_state_directory_inside_the_checkout_stays_where_it_is() {
        assert_eq!(
            moved("/home/me/code/.cache/state/x"),
            "/home/me/code/.cache/state/x"
        );
    }

    #[test]
    fn secrets_of_whoever_started_it_are_not_passed_on() {
        for name in ["PATH", "DSEC_BIN", "LC_ALL", "https_proxy", "NO_PROXY"] {
            assert!(is_passed(name), "{name}");
        }
        for name in [
            "AWS_SECRET_ACCESS_KEY",
            "HOME",
            "SUDO_USER",
            "PYTHONPATH",
            "LD_PRELOAD",
            "TMPDIR",
        ] {
            assert!(!is_passed(name), "{name}");
        }
    }
}
