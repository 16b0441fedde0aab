//! The parent of the spawner, the service, blobfs and the fetcher: starts them, starts again what dies, and takes the instance down.

mod backoff;
mod child;
mod directories;
mod service;
mod signals;

use std::ffi::OsString;
use std::fs;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::claims::{self, Claim};
use crate::options::Options;
use child::Child;
use directories::{remove_directory, remove_file};
use signals::Signals;

/// What requests under way may take to finish when the service is told to end.
const SERVICE_PATIENCE: Duration = Duration::from_secs(20);
/// The daemon has nothing to finish: what it is in the midst of, its next start or the sweep finds by name.
const SPAWNER_PATIENCE: Duration = Duration::from_secs(5);
/// Likewise: blobfs checks what it finds, and a fetcher's requests are asked again.
const COMPANION_PATIENCE: Duration = Duration::from_secs(5);
/// How often a start is looked at: no event says "listens now".
const START_POLL: Duration = Duration::from_millis(20);

/// Runs the instance until it is told to end. Returns the exit status.
///
/// SIGINT ends the service, then everything that the instance has in the kernel; a second one waits for nothing. SIGTERM and SIGHUP end the
/// processes and leave the rest for the next start.
///
/// # Errors
/// The instance can't be brought up (then nothing runs), or something of it can't be removed.
pub fn run(options: &Options) -> Result<i32, String> {
    let signals = Signals::take()?;
    let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let gid = directories::primary_group(&passwd, options.service_uid);
    // Before anything is touched: all of it may be another's.
    let claim = claims::take(options, claims::Purpose::Start)?;
    if let Err(reason) = prepare(options, gid) {
        claim.end()?;
        return Err(reason);
    }
    // With a pinned namespace, sandboxes of an earlier run may live: a start that fails must not end them.
    let is_first = !crate::layers::is_pinned(&crate::node::pin(options));
    let mut supervisor = Supervisor {
        options,
        gid,
        claim,
        signals,
        spawner: Child::whose_children_stay("the spawner"),
        service: Child::with_its_group("the service"),
        companions: companions(options),
        stage: Stage::Spawner,
        ending: Ending::Leave,
    };
    let result = supervisor.supervise();
    if result.is_err() && is_first {
        supervisor.ending = Ending::Sweep;
    }
    let removed = supervisor.take_down();
    let removed = removed.and_then(|status| supervisor.claim.end().map(|()| status));
    match (result, removed) {
        (Err(reason), Err(other)) => Err(format!("{reason}; and then: {other}")),
        (Err(reason), Ok(_)) => Err(reason),
        (Ok(()), removed) => removed,
    }
}

fn prepare(options: &Options, gid: u32) -> Result<(), String> {
    directories::prepare_state(&options.state_dir, (options.service_uid, gid))?;
    directories::prepare_run(&options.run_dir, (options.service_uid, gid))?;
    options.log.as_deref().map_or(Ok(()), directories::write_to)
}

/// What is to become of sandboxes, layers and scratch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    Leave,
    Sweep,
    /// Likewise, without waiting for anybody.
    SweepNow,
}

/// How far the start has come. Until it is through, a death is final: whoever started us wants to see the reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Waiting for the spawner to listen.
    Spawner,
    /// Waiting for the service to say that it is ready.
    Service,
    Up,
}

struct Supervisor<'a> {
    options: &'a Options,
    /// Of the service.
    gid: u32,
    claim: Claim,
    signals: Signals,
    spawner: Child,
    service: Child,
    /// What the service works with.
    companions: Vec<Companion>,
    stage: Stage,
    ending: Ending,
}

/// A process of the service's user beside the service. Nobody waits for it at the start: its absence is told by whoever needs it.
struct Companion {
    child: Child,
    argv: Vec<OsString>,
}

fn companions(options: &Options) -> Vec<Companion> {
    let mut companions = Vec::new();
    if Path::new("/dev/fuse").exists() {
        let mut argv: Vec<OsString> = vec![options.blobfs.clone().into()];
        for (name, value) in [
            ("--run-dir", options.run_dir.clone().into()),
            ("--state-dir", options.state_dir.clone().into()),
            ("--cache-bytes", options.cache_bytes.to_string().into()),
        ] {
            argv.extend([OsString::from(name), value]);
        }
        companions.push(Companion {
            child: Child::with_its_group("blobfs"),
            argv,
        });
    }
    if !options.fetcher.is_empty() {
        companions.push(Companion {
            child: Child::with_its_group("the fetcher"),
            argv: options.fetcher.clone(),
        });
    }
    companions
}

impl Supervisor<'_> {
    /// Keeps all alive until a signal says how to end.
    fn supervise(&mut self) -> Result<(), String> {
        loop {
            self.start_what_is_due()?;
            match self.signals.next(self.timeout())? {
                Some(libc::SIGCHLD) => self.take_note_of_deaths()?,
                Some(libc::SIGINT) => {
                    self.ending = Ending::Sweep;
                    return Ok(());
                }
                Some(_) => return Ok(()),
                None => {}
            }
            self.advance();
        }
    }

    fn start_what_is_due(&mut self) -> Result<(), String> {
        let now = Instant::now();
        if self.spawner.is_due(now) {
            match start_spawner(self.options) {
                Ok(pid) => self.spawner.started(pid, now),
                Err(reason) if self.stage == Stage::Spawner => return Err(reason),
                Err(reason) => self.spawner.start_again(&reason),
            }
        }
        if self.stage == Stage::Spawner {
            return Ok(());
        }
        for Companion { child, argv } in &mut self.companions {
            if child.is_due(now) {
                directories::share_run(&self.options.run_dir, self.gid)?;
                match service::start(self.options, argv, self.gid, &self.claim) {
                    Ok(pid) => child.started(pid, now),
                    Err(reason) => child.start_again(&reason),
                }
            }
        }
        if self.service.is_due(now) {
            directories::share_run(&self.options.run_dir, self.gid)?;
            match service::start(self.options, &self.options.argv, self.gid, &self.claim) {
                Ok(pid) => self.service.started(pid, now),
                Err(reason) if self.stage == Stage::Service => return Err(reason),
                // The code may just be being replaced.
                Err(reason) => self.service.start_again(&reason),
            }
        }
        Ok(())
    }

    fn advance(&mut self) {
        let run = &self.options.run_dir;
        self.stage = match self.stage {
            // Whatever it does with a caller who isn't the service: it listens.
            Stage::Spawner if UnixStream::connect(run.join("spawner.sock")).is_ok() => {
                Stage::Service
            }
            Stage::Service if run.join("ready").exists() => Stage::Up,
            stage => stage,
        }
    }

    /// Until there is something to do that no signal announces; None: there won't be.
    fn timeout(&self) -> Option<Duration> {
        if self.stage != Stage::Up {
            return Some(START_POLL);
        }
        let companions = self.companions.iter().map(|one| &one.child);
        let all = companions.chain([&self.spawner, &self.service]);
        let next = all.filter_map(Child::due_at).min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    fn take_note_of_deaths(&mut self) -> Result<(), String> {
        // What it told before it died counts, also if nobody looked in between.
        self.advance();
        if let Some(what) = self.spawner.collect()? {
            if self.stage == Stage::Spawner {
                return Err(format!(
                    "{what} before it listened; its reason stands above"
                ));
            }
            self.spawner.start_again(&what);
        }
        if let Some(what) = self.service.collect()? {
            remove_file(&self.options.run_dir.join("ready"))?;
            if self.stage == Stage::Service {
                return Err(format!(
                    "{what} before it was ready; its reason stands above"
                ));
            }
            self.service.start_again(&what);
        }
        for Companion { child, .. } in &mut self.companions {
            if let Some(what) = child.collect()? {
                child.start_again(&what);
            }
        }
        Ok(())
    }

    /// Ends all processes, the service first and the spawner last; then, if wanted, all that the instance has in the kernel. Returns the exit status.
    fn take_down(&mut self) -> Result<i32, String> {
        self.end(|it| &mut it.service, SERVICE_PATIENCE)?;
        for index in 0..self.companions.len() {
            self.end(|it| &mut it.companions[index].child, COMPANION_PATIENCE)?;
        }
        self.end(|it| &mut it.spawner, SPAWNER_PATIENCE)?;
        let run = &self.options.run_dir;
        for name in ["ready", "blobfs.sock", "fetch.sock"] {
            remove_file(&run.join(name))?;
        }
        remove_directory(&run.join("app"))?;
        let status = match self.ending {
            Ending::Leave => 0,
            Ending::Sweep | Ending::SweepNow => crate::sweep::sweep(self.options)?,
        };
        Ok(status)
    }

    /// Tells a child to end and waits for it; when its time is up, or at once if nobody is to be waited for, it is killed.
    fn end(
        &mut self,
        child: impl Fn(&mut Self) -> &mut Child,
        patience: Duration,
    ) -> Result<(), String> {
        child(self).terminate();
        let deadline = Instant::now() + patience;
        let mut killed = false;
        while child(self).is_alive() {
            let left = deadline.saturating_duration_since(Instant::now());
            if !killed && (left.is_zero() || self.ending == Ending::SweepNow) {
                child(self).kill();
                killed = true;
            }
            // Once it is killed, only the kernel can take time.
            match self.signals.next((!killed).then_some(left))? {
                Some(libc::SIGINT) => self.hasten(),
                Some(libc::SIGCHLD) => {
                    self.service.collect()?;
                    self.spawner.collect()?;
                    for Companion { child, .. } in &mut self.companions {
                        child.collect()?;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// A SIGINT while it is ending already.
    fn hasten(&mut self) {
        self.ending = match self.ending {
            Ending::Leave => Ending::Sweep,
            Ending::Sweep | Ending::SweepNow => Ending::SweepNow,
        };
    }
}

/// Starts the daemon: this very program, whatever has become of its file.
fn start_spawner(options: &Options) -> Result<libc::pid_t, String> {
    // SAFETY: takes nothing, always succeeds.
    let supervisor = unsafe { libc::getpid() };
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0(std::env::current_exe().unwrap_or_else(|_| "dsec-spawner".into()))
        .arg("serve")
        .args(options.to_args())
        .stdin(Stdio::null());
    // SAFETY: between fork and exec the closure makes system calls only.
    unsafe {
        command.pre_exec(move || {
            service::reset_signals()?;
            service::own_group()?;
            service::end_with(supervisor)
        });
    }
    let child = command
        .spawn()
        .map_err(|error| format!("the spawner can't be started: {error}"))?;
    service::pid_of(&child)
}
