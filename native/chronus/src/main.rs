//! Chronus: process 1 of every sandbox. It starts commands, keeps their output, and serves one connection to the edge.
//!
//! It inherits fd 3, a listening Unix socket; fd 4, its directory in the v2 cgroup tree (may be absent); and fd 5, a pipe with its
//! configuration. It owns no path, socket or log inside the sandbox. See `docs/wire.md`.

#![cfg_attr(not(test), no_main)]

mod buffer;
mod builtin;
mod capabilities;
mod cgroup;
mod child;
mod command;
mod connection;
mod execution;
mod input;
mod kernel;
mod lifecycle;
mod process;
mod pty;
mod reader;
mod report;
mod server;
mod session;
mod spawn;
mod stdio;
mod timers;
mod tunnel;
mod users;
mod waiting;

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use wire::message::Config;

use crate::cgroup::Groups;
use crate::kernel::{check, own};
use crate::process::Starter;
use crate::server::Chronus;

const LISTENER_FD: RawFd = 3;
const CGROUP_FD: RawFd = 4;
const CONFIG_FD: RawFd = 5;
/// A configuration is a few dozen bytes.
const CONFIG_MAX: u64 = 64 << 10;
/// Allocations from this size on are mapped for themselves, so that freeing an output block gives its memory back at once.
const MAP_THRESHOLD: libc::c_int = 128 << 10;

/// Called by the C library. What Rust's own start does (looking for the stack's bounds in /proc, a handler for its overflow, three standard
/// descriptors that are there already) costs every sandbox a tenth of a millisecond.
#[cfg_attr(not(test), export_name = "main")]
#[cfg_attr(test, allow(dead_code))]
extern "C" fn start(_argc: libc::c_int, _argv: *const *const libc::c_char) -> libc::c_int {
    // SAFETY: a plain call; writing to a connection that is gone is an error here, not the end.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    let (Ok(error) | Err(error)) = run();
    eprintln!("chronus: {error}");
    libc::EXIT_FAILURE
}

/// Sets up and serves; an error either way, since serving has no end of its own.
fn run() -> io::Result<io::Error> {
    let listener = inherited(LISTENER_FD)?;
    let groups = inherited(CGROUP_FD).ok().map(Groups::new);
    let config = read_config()?;
    let is_init = std::process::id() == 1;
    let oom_score = open_oom_score();
    let confined = confine();
    if is_init {
        confined?;
    }
    let children = block_signals()?;
    let starter = Starter::new(
        groups,
        config.cookie,
        is_init,
        capabilities::of_commands()?,
        oom_score,
    );
    Ok(Chronus::new(listener, children, starter, config.history)?.serve())
}

/// Takes over an inherited descriptor, and keeps it from the commands.
fn inherited(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: a flag change; a descriptor that isn't there gives EBADF.
    check(unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) })?;
    // SAFETY: it is open, and nothing else in this process knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The configuration on fd 5; without one the defaults hold.
fn read_config() -> io::Result<Config> {
    let Ok(pipe) = inherited(CONFIG_FD) else {
        return Ok(Config::default());
    };
    let mut bytes = Vec::new();
    File::from(pipe).take(CONFIG_MAX).read_to_end(&mut bytes)?;
    Config::read(&bytes).map_err(|_| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            "the configuration on fd 5 is not its map",
        )
    })
}

/// A handle on the own OOM score. It can only be had while the process counts as dumpable: afterwards the file belongs to nobody inside.
fn open_oom_score() -> Option<OwnedFd> {
    // SAFETY: plain prctl and open.
    unsafe {
        libc::prctl(libc::PR_SET_DUMPABLE, 1);
        own(libc::open(
            c"/proc/self/oom_score_adj".as_ptr(),
            libc::O_WRONLY | libc::O_CLOEXEC,
        ))
        .ok()
    }
}

/// Closes this process to the sandbox, and its children to more rights than commands have.
fn confine() -> io::Result<()> {
    // SAFETY: plain calls that change this process only.
    unsafe {
        check(libc::prctl(libc::PR_SET_DUMPABLE, 0))?;
        // Orphans come here for reaping, as they do to a process 1.
        check(libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1))?;
        libc::umask(0o022);
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAP_THRESHOLD);
    }
    capabilities::confine_children()
}

/// Blocks every signal, for good; deaths of children are read from the descriptor that is returned.
fn block_signals() -> io::Result<OwnedFd> {
    // SAFETY: the sets are filled before they are used.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        check(libc::sigprocmask(
            libc::SIG_SETMASK,
            &all,
            std::ptr::null_mut(),
        ))?;
        let mut child: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut child);
        libc::sigaddset(&mut child, libc::SIGCHLD);
        let children = own(libc::signalfd(
            -1,
            &child,
            libc::SFD_NONBLOCK | libc::SFD_CLOEXEC,
        ))?;
        debug_assert!(children.as_raw_fd() > 2);
        Ok(children)
    }
}
