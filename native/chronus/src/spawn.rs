//! Starting a program in a child that shares chronus' memory until it executes: [`bare`] says why, and what such a child may do.
//!
//! The kernel clears a word of the child's area when the child lets go of the memory; until then the area, and all that the child was given, stays.

use std::ffi::CString;
use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering};

use bare::{call, CloneArgs, Stack, CLONE_INTO_CGROUP};

use wire::capabilities::{sets, Header};

use crate::child::STATUS_FD;
use crate::execution::Execution;
use crate::report::{Report, Stage};
use crate::users::Account;

/// The child's functions are shallow.
const STACK_BYTES: usize = 16 << 10;
/// Areas that are kept for the next children.
const AREAS_KEPT: usize = 2;

/// Where the child's standard descriptors come from, all above 2; None: /dev/null.
#[derive(Clone, Copy)]
pub struct Pipes {
    pub stdin: Option<RawFd>,
    pub stdout: RawFd,
    pub stderr: RawFd,
    /// Becomes [`STATUS_FD`].
    pub status: Option<RawFd>,
}

/// Everything that a child is given.
pub struct Plan {
    pub execution: Execution,
    pub account: Account,
    pub cwd: CString,
    pub no_new_privs: bool,
    pub pipes: Pipes,
    /// The sets of capabilities that the command begins with.
    pub capabilities: u64,
    /// In a sandbox every step has to succeed; outside (tests) what the own user may not do is skipped.
    pub strict: bool,
    pub report: Report,
}

struct Area {
    /// Not 0 while a child uses this area.
    used: AtomicU32,
    stack: Stack,
    plan: Option<Plan>,
}

/// The areas of children that have not executed yet, and some that are free.
#[derive(Default)]
pub struct Areas {
    // Boxed: a child holds pointers into them.
    #[allow(clippy::vec_box)]
    areas: Vec<Box<Area>>,
}

impl Areas {
    /// Starts a child; `cgroup` is the directory that it is born into. Gives the plan back where the kernel refuses.
    pub fn start(
        &mut self,
        plan: Plan,
        cgroup: Option<RawFd>,
        cookie: (u64, u64),
    ) -> Result<i32, (io::Error, Box<Plan>)> {
        let place = match self.areas.iter().position(|area| area.is_free()) {
            Some(place) => place,
            None => {
                self.areas.push(Box::new(Area {
                    used: AtomicU32::new(0),
                    stack: Stack::new(STACK_BYTES),
                    plan: None,
                }));
                self.areas.len() - 1
            }
        };
        let area = &mut self.areas[place];
        let plan = area.plan.insert(plan);
        let mut arguments = CloneArgs {
            flags: (libc::CLONE_VM | libc::CLONE_CHILD_CLEARTID) as u64,
            child_tid: area.used.as_ptr() as u64,
            exit_signal: libc::SIGCHLD as u64,
            ..CloneArgs::default()
        };
        if let Some(directory) = cgroup {
            arguments.flags |= CLONE_INTO_CGROUP;
            arguments.cgroup = directory as u64;
        }
        area.stack.lend(&mut arguments);
        area.used.store(1, Ordering::Relaxed);
        // SAFETY: the area is this child's until the kernel clears its word, which `is_free` looks at before anything of it is used again or dropped.
        let started = unsafe { bare::start(&arguments, cookie, enter, &raw const *plan) };
        started.map_err(|error| {
            area.used.store(0, Ordering::Relaxed);
            let plan = area.plan.take();
            (error, Box::new(plan.unwrap_or_else(|| unreachable!())))
        })
    }

    /// Whether some child shares this process's memory now. Lets go of what the others were given.
    pub fn any_used(&mut self) -> bool {
        for area in &mut self.areas {
            if area.is_free() {
                area.plan = None;
            }
        }
        let mut kept = 0;
        self.areas.retain(|area| {
            kept += usize::from(area.is_free());
            !area.is_free() || kept <= AREAS_KEPT
        });
        self.areas.iter().any(|area| !area.is_free())
    }
}

impl Area {
    fn is_free(&self) -> bool {
        self.used.load(Ordering::Acquire) == 0
    }
}

/// The child's first function. Never returns: executes the program, or tells why not and ends.
unsafe extern "C" fn enter(plan: *const Plan) -> ! {
    // SAFETY: `Areas::start` keeps the plan until this child has let go of the memory.
    let plan = unsafe { &*plan };
    // SAFETY: this is a fresh child as `prepare` wants it.
    let (stage, errno) = match unsafe { prepare(plan) } {
        Ok(()) => (Stage::Execute, plan.execution.execute()),
        Err(failed) => failed,
    };
    plan.report.fail(stage, errno);
    // SAFETY: ends this process.
    unsafe {
        call!(libc::SYS_exit_group, crate::child::exit_code(stage, errno));
        std::arch::asm!("ud2", options(noreturn))
    }
}

/// What [`crate::child`] does in a copy of chronus, by bare system calls.
unsafe fn prepare(plan: &Plan) -> Result<(), (Stage, i32)> {
    // SAFETY: bare system calls on what the plan holds, which lives as long as this child.
    unsafe {
        // A fresh child leads no group yet, so this can't fail.
        call!(libc::SYS_setsid);
        reset_signals();
        redirect(plan.pipes).map_err(|errno| (Stage::Stdio, errno))?;
        match become_user(&plan.account, plan.capabilities) {
            Err(errno) if plan.strict || errno != libc::EPERM => {
                return Err((Stage::Credentials, errno))
            }
            _ => {}
        }
        call!(libc::SYS_chdir, plan.cwd.as_ptr())
            .result()
            .map_err(|errno| (Stage::Directory, errno))?;
        if plan.no_new_privs {
            call!(libc::SYS_prctl, libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
                .result()
                .map_err(|errno| (Stage::NoNewPrivs, errno))?;
        }
        Ok(())
    }
}

/// Undoes what chronus set for itself: it ignores SIGPIPE and blocks every signal. Handlers are a process's own, though its memory isn't.
unsafe fn reset_signals() {
    /// The kernel's sigaction: SIG_DFL, no flags, no restorer, an empty mask.
    const DEFAULT: [u64; 4] = [0; 4];
    const NONE: [u64; 1] = [0];
    const SET_BYTES: usize = 8;
    // SAFETY: both structures are as the kernel wants them, and outlive the calls.
    unsafe {
        call!(
            libc::SYS_rt_sigaction,
            libc::SIGPIPE,
            DEFAULT.as_ptr(),
            0,
            SET_BYTES
        );
        call!(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            NONE.as_ptr(),
            0,
            SET_BYTES
        );
    }
}

/// Puts the descriptors where they belong and closes all others.
unsafe fn redirect(pipes: Pipes) -> Result<(), i32> {
    // SAFETY: bare system calls on descriptors of this child's own table.
    unsafe {
        // Out of the way of what is put below.
        let status = match pipes.status {
            Some(fd) => Some(call!(libc::SYS_fcntl, fd, libc::F_DUPFD, STATUS_FD + 1).result()?),
            None => None,
        };
        match pipes.stdin {
            Some(fd) => {
                call!(libc::SYS_dup2, fd, 0).result()?;
            }
            None => nothing()?,
        }
        call!(libc::SYS_dup2, pipes.stdout, 1).result()?;
        call!(libc::SYS_dup2, pipes.stderr, 2).result()?;
        let Some(status) = status else {
            return call!(libc::SYS_close_range, 3, u32::MAX, 0)
                .result()
                .map(drop);
        };
        call!(libc::SYS_dup2, status, STATUS_FD).result()?;
        call!(libc::SYS_close_range, 3, STATUS_FD - 1, 0).result()?;
        call!(libc::SYS_close_range, STATUS_FD + 1, u32::MAX, 0)
            .result()
            .map(drop)
    }
}

/// Makes descriptor 0 one that is at its end: /dev/null, or an empty pipe where the sandbox has none.
unsafe fn nothing() -> Result<(), i32> {
    let flags = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOCTTY;
    // SAFETY: a path that is a C string, and room for two descriptors.
    unsafe {
        let source = match call!(libc::SYS_open, c"/dev/null".as_ptr(), flags).result() {
            Ok(null) => null,
            Err(_) => {
                let mut ends = [0_i32; 2];
                call!(libc::SYS_pipe2, ends.as_mut_ptr(), 0).result()?;
                call!(libc::SYS_close, ends[1]);
                ends[0] as isize
            }
        };
        call!(libc::SYS_dup2, source, 0).result().map(drop)
    }
}

unsafe fn become_user(account: &Account, capabilities: u64) -> Result<(), i32> {
    let (uid, gid) = (account.uid, account.gid);
    let bits = if uid == 0 { capabilities } else { 0 };
    // SAFETY: the list is readable for its length; the sets are what capset reads.
    unsafe {
        call!(
            libc::SYS_setgroups,
            account.groups.len(),
            account.groups.as_ptr()
        )
        .result()?;
        call!(libc::SYS_setresgid, gid, gid, gid).result()?;
        call!(libc::SYS_setresuid, uid, uid, uid).result()?;
        let (header, words) = (Header::OWN, sets(bits));
        call!(libc::SYS_capset, &raw const header, words.as_ptr())
            .result()
            .map(drop)
    }
}
