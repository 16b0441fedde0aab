//! One process that is kept alive: whether it lives, and when it is due to be started again.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use super::backoff::Backoff;

#[derive(Debug)]
enum Life {
    Alive { pid: libc::pid_t, since: Instant },
    Due(Instant),
}

#[derive(Debug)]
pub struct Child {
    /// For messages.
    name: &'static str,
    /// Whether what it started goes with it.
    takes_group: bool,
    life: Life,
    /// How long it lived the last time.
    lived: Duration,
    backoff: Backoff,
}

impl Child {
    /// Its own children are meant to outlive it.
    pub fn whose_children_stay(name: &'static str) -> Self {
        let life = Life::Due(Instant::now());
        Child {
            name,
            takes_group: false,
            life,
            lived: Duration::ZERO,
            backoff: Backoff::new(),
        }
    }

    /// Its process group ends with it.
    pub fn with_its_group(name: &'static str) -> Self {
        Child {
            takes_group: true,
            ..Child::whose_children_stay(name)
        }
    }

    fn pid(&self) -> Option<libc::pid_t> {
        match self.life {
            Life::Alive { pid, .. } => Some(pid),
            Life::Due(_) => None,
        }
    }

    pub fn is_alive(&self) -> bool {
        self.pid().is_some()
    }

    /// When to start it; None while it lives.
    pub fn due_at(&self) -> Option<Instant> {
        match self.life {
            Life::Alive { .. } => None,
            Life::Due(at) => Some(at),
        }
    }

    pub fn is_due(&self, now: Instant) -> bool {
        self.due_at().is_some_and(|at| at <= now)
    }

    pub fn started(&mut self, pid: libc::pid_t, now: Instant) {
        self.life = Life::Alive { pid, since: now };
        self.lived = Duration::ZERO;
    }

    /// If it has ended: collects it, and ends what is to go with it. Returns how it ended, in words.
    pub fn collect(&mut self) -> Result<Option<String>, String> {
        let Life::Alive { pid, since } = self.life else {
            return Ok(None);
        };
        if !has_ended(pid)? {
            return Ok(None);
        }
        // Now: once it is collected, its number may be somebody else's.
        self.kill_group();
        let status = wait(pid)?;
        self.lived = since.elapsed();
        self.life = Life::Due(Instant::now());
        Ok(Some(format!("{} ended ({status})", self.name)))
    }

    /// Says what happened to it and lets it be due after a pause, which grows with every short life.
    pub fn start_again(&mut self, what: &str) {
        let pause = self.backoff.after(self.lived);
        eprintln!(
            "dsec-spawner: {what}; starting again in {:.1} s",
            pause.as_secs_f64()
        );
        self.life = Life::Due(Instant::now() + pause);
    }

    /// Asks it to end.
    pub fn terminate(&self) {
        self.pid()
            .into_iter()
            .for_each(|pid| signal(pid, libc::SIGTERM));
    }

    /// Ends it.
    pub fn kill(&self) {
        self.pid()
            .into_iter()
            .for_each(|pid| signal(pid, libc::SIGKILL));
        self.kill_group();
    }

    fn kill_group(&self) {
        if self.takes_group {
            self.pid()
                .into_iter()
                .for_each(|pid| signal(-pid, libc::SIGKILL));
        }
    }
}

/// To a child that isn't collected yet, or its group: so the number is right. Without a result: it may have ended, which is no failure.
fn signal(pid: libc::pid_t, number: libc::c_int) {
    // SAFETY: plain integers.
    unsafe { libc::kill(pid, number) };
}

/// Whether a child waits to be collected.
fn has_ended(pid: libc::pid_t) -> Result<bool, String> {
    // SAFETY: all-zero is a valid siginfo_t.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: info is a valid siginfo_t; the call fills its member for children, or leaves it zero.
    let (result, ended) = unsafe {
        let result = libc::waitid(libc::P_PID, pid as libc::id_t, &mut info, flags);
        (result, info.si_pid() == pid)
    };
    if result < 0 {
        return Err(format!("waitid: {}", io::Error::last_os_error()));
    }
    Ok(ended)
}

fn wait(pid: libc::pid_t) -> Result<ExitStatus, String> {
    let mut status = 0;
    // SAFETY: status is a valid int.
    if unsafe { libc::waitpid(pid, &mut status, 0) } != pid {
        return Err(format!("waitpid: {}", io::Error::last_os_error()));
    }
    Ok(ExitStatus::from_raw(status))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_died_is_due_after_its_pause_and_not_before() {
        let mut child = Child::with_its_group("it");
        assert!(child.is_due(Instant::now()));
        child.start_again("it ended");
        let due = child
            .due_at()
            .map(|at| at.saturating_duration_since(Instant::now()));
        assert!(due.is_some_and(|pause| pause > Duration::from_millis(50)));
        child.start_again("it can't be started");
        let due = child
            .due_at()
            .map(|at| at.saturating_duration_since(Instant::now()));
        assert!(due.is_some_and(|pause| pause > Duration::from_millis(150)));
    }

    #[test]
    fn a_child_that_ends_is_collected_once_with_its_status() {
        let Ok(process) = std::process::Command::new("/bin/false").spawn() else {
            panic!("/bin/false can't be run");
        };
        let mut child = Child::whose_children_stay("it");
        child.started(process.id() as libc::pid_t, Instant::now());
        let told = loop {
            match child.collect() {
                Ok(None) => std::thread::yield_now(),
                told => break told,
            }
        };
        assert_eq!(told, Ok(Some("it ended (exit status: 1)".to_owned())));
        assert!(!child.is_alive());
        assert_eq!(child.collect(), Ok(None));
    }
}
