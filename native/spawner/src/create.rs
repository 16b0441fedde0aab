//! Making one sandbox: cgroups, writable layer, socket, namespaces, mounts, chronus. Whatever fails takes back what was made before it.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::time::Instant;

use bare::{CloneArgs, Stack, CLONE_INTO_CGROUP};
use wire::value::Writer;

use crate::cgroup::Limits;
use crate::child::{self, Plan};
use crate::layers::TreeSpec;
use crate::node::Node;
use crate::scratch::Record;
use crate::sysapi::{self, check};
use crate::{covers, seccomp};

/// Ids of one sandbox: 65,536 of its own, room for extra ones, and chronus' as the last.
pub const IDS_PER_SANDBOX: u32 = 65_792;
const PLAIN_IDS: u32 = 65_536;
pub const MAX_EXTRA_IDS: usize = 100;

/// How long a child may take from its birth to the exec of chronus.
const CHILD_DEADLINE_MS: libc::c_int = 10_000;
/// How long a child that has let go of its descriptors may take to be dead.
const DEATH_DEADLINE_MS: libc::c_int = 1_000;

/// What is asked for, checked by the server.
#[derive(Clone, Debug)]
pub struct Spec {
    pub id: String,
    /// Metadata digests, the top layer first.
    pub layers: Vec<String>,
    pub hostname: String,
    pub memory: u64,
    pub cpu_millis: u64,
    pub pids: u64,
    pub disk: u64,
    /// The snapshot that its writable layer begins with; None: an empty one.
    pub from: Option<String>,
    pub extra_ids: Vec<u32>,
    /// Bytes that chronus keeps of each stream after they were sent.
    pub history: u64,
}

/// A sandbox that runs.
#[derive(Debug)]
pub struct Created {
    pub pid: i32,
    pub pidfd: OwnedFd,
    /// Where the system calls arrive that its filter reports.
    pub denials: OwnedFd,
    /// Step to microseconds.
    pub timings: Vec<(&'static str, u64)>,
}

/// Low descriptor numbers of one creating thread, so that a child's copy of the table stays short however many sandboxes live.
pub struct Creator {
    base: RawFd,
    /// What its child runs on before it executes chronus.
    stack: Stack,
}

/// Its functions are shallow and hold a few hundred bytes each.
const STACK_BYTES: usize = 64 << 10;

/// Descriptors that a creator hands to its child, by place in its block.
const PLACES: RawFd = 5;
const FIRST_BLOCK: RawFd = 16;

impl Creator {
    /// The creator number `index` (0 or 1, …): must be made before other descriptors fill the low numbers.
    pub fn reserve(index: usize, null: &File) -> io::Result<Self> {
        let base = FIRST_BLOCK + index as RawFd * PLACES;
        let creator = Creator {
            base,
            stack: Stack::new(STACK_BYTES),
        };
        creator.clear(null.as_raw_fd())?;
        Ok(creator)
    }

    fn clear(&self, null: RawFd) -> io::Result<()> {
        (0..PLACES).try_for_each(|place| duplicate(null, self.base + place))
    }

    fn place(&self, place: RawFd, source: RawFd) -> io::Result<RawFd> {
        duplicate(source, self.base + place)?;
        Ok(self.base + place)
    }
}

fn duplicate(source: RawFd, target: RawFd) -> io::Result<()> {
    // SAFETY: plain integers.
    check(libc::c_long::from(unsafe {
        libc::dup3(source, target, libc::O_CLOEXEC)
    }))
    .map(drop)
}

/// Keeps capabilities when this thread changes its user id, so that it can be born into a sandbox's own id and come back.
pub fn keep_capabilities() -> io::Result<()> {
    const SECBIT_NO_SETUID_FIXUP: libc::c_int = 1 << 2;
    // SAFETY: plain integers.
    check(libc::c_long::from(unsafe {
        libc::prctl(libc::PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0)
    }))
    .map(drop)
}

/// Sets this thread's ids (libc's functions would change every thread's).
fn become_id(id: u32) -> io::Result<()> {
    // SAFETY: plain integers.
    unsafe {
        check(libc::syscall(libc::SYS_setresgid, id, id, id))?;
        check(libc::syscall(libc::SYS_setresuid, id, id, id)).map(drop)
    }
}

struct Clock {
    last: Instant,
    timings: Vec<(&'static str, u64)>,
}

impl Clock {
    fn mark(&mut self, step: &'static str) {
        let now = Instant::now();
        self.timings
            .push((step, (now - self.last).as_micros() as u64));
        self.last = now;
    }
}

/// Makes the sandbox in `slot`. On failure nothing of it is left, or it is said what; the sweep finds that.
pub fn create(node: &Node, creator: &Creator, spec: &Spec, slot: u32) -> io::Result<Created> {
    let result = assemble(node, creator, spec, slot);
    if result.is_err() {
        let _ = creator.clear(node.null.as_raw_fd());
        let left = crate::kill::take_away(node, &spec.id, Some(slot), false).left;
        if !left.is_empty() {
            eprintln!("dsec-spawner: taking {} back: {}", spec.id, left.join("; "));
        }
    }
    result
}

fn assemble(node: &Node, creator: &Creator, spec: &Spec, slot: u32) -> io::Result<Created> {
    let mut clock = Clock {
        last: Instant::now(),
        timings: Vec::with_capacity(8),
    };
    let base = node.uid_base + slot * IDS_PER_SANDBOX;
    let own_id = base + IDS_PER_SANDBOX - 1;
    let limits = Limits {
        memory: spec.memory,
        // None, and as much as the node has, is no limit; telling the kernel costs a walk over every group.
        cpu_millis: Some(spec.cpu_millis)
            .filter(|millis| (1..node.cores as u64 * 1000).contains(millis)),
        pids: spec.pids,
    };
    let cgroup = match node.cgroups.create(&spec.id, limits, own_id) {
        // An ended sandbox's groups go a moment later than the rest of it, and a creation that was cut off is repeated under its name.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            node.cgroups.remove(&spec.id)?;
            node.cgroups.create(&spec.id, limits, own_id)?
        }
        made => made?,
    };
    clock.mark("cgroups");
    match &spec.from {
        None => node.scratch.create(&spec.id, spec.disk)?,
        Some(snapshot) => node.scratch.create_from(&spec.id, snapshot, spec.disk)?,
    }
    clock.mark("scratch");
    let listener = listen(node, slot)?;
    let cookie = random_pair()?;
    let filter = seccomp::program(cookie);
    let configuration = configuration(cookie, spec.history)?;
    let (ours, theirs) = sysapi::socket_pair()?;
    clock.mark("socket");
    let cgroup_fd = cgroup
        .as_ref()
        .map_or(Ok(-1), |dir| creator.place(1, dir.as_raw_fd()))?;
    let shm_options = CString::new(format!("mode=1777,size={}", spec.memory / 2))?;
    let plan = Plan {
        own: (creator.base, creator.base + PLACES - 1),
        socket: creator.place(0, theirs.as_raw_fd())?,
        listener: creator.place(2, listener.as_raw_fd())?,
        cgroup: cgroup_fd,
        configuration: creator.place(3, configuration.as_raw_fd())?,
        chronus: creator.place(4, node.chronus.as_raw_fd())?,
        hostname: spec.hostname.as_bytes(),
        shm_options: &shm_options,
        filter: &filter,
        masks: &node.masks,
    };
    become_id(own_id)?;
    let born = clone_child(creator, &plan, cgroup.as_ref());
    if become_id(0).is_err() {
        // Never seen: this thread may set any id. The child must not outlive what it runs on.
        std::process::abort();
    }
    let (pid, pidfd, born_in_v2) = born?;
    drop((theirs, listener, configuration));
    clock.mark("clone");
    let newborn = Newborn {
        pid,
        pidfd: &pidfd,
        socket: ours,
        slot,
        base,
        born_in_v2,
    };
    let denials = raise(node, creator, spec, &newborn, &mut clock).map_err(|error| {
        let killed = was_killed(&newborn);
        reap(&pidfd);
        if !killed {
            return error;
        }
        // Whatever step it showed in first: the sandbox isn't to blame, and another one may live.
        io::Error::new(
            io::ErrorKind::NotConnected,
            format!("the sandbox's first process was killed while it was made: {error}"),
        )
    })?;
    Ok(Created {
        pid,
        pidfd,
        denials,
        timings: clock.timings,
    })
}

/// A child between its birth and the exec of chronus.
struct Newborn<'a> {
    pid: i32,
    pidfd: &'a OwnedFd,
    socket: OwnedFd,
    slot: u32,
    /// Host id of its root.
    base: u32,
    born_in_v2: bool,
}

/// Gives the child its ids, groups and mounts, and waits until chronus runs. Returns where its reported calls arrive.
fn raise(
    node: &Node,
    creator: &Creator,
    spec: &Spec,
    newborn: &Newborn<'_>,
    clock: &mut Clock,
) -> io::Result<OwnedFd> {
    let Newborn {
        pid, slot, base, ..
    } = *newborn;
    write_maps(pid, base, &spec.extra_ids)?;
    node.cgroups.attach(&spec.id, pid, newborn.born_in_v2)?;
    let processors = processors(spec.cpu_millis, node.cores);
    if processors < node.cores {
        pin(pid, slot, processors, node.cores)?;
    }
    let start_time =
        sysapi::start_time(pid).ok_or_else(|| io::Error::other("the child is gone"))?;
    node.scratch.write_record(
        &spec.id,
        Record {
            slot,
            pid,
            start_time,
        },
    )?;
    clock.mark("identity");
    let tree = node.layers.tree(TreeSpec {
        layers: spec.layers.clone(),
        volume: node.scratch.open_volume(&spec.id)?,
        userns: sysapi::user_namespace(newborn.pidfd.as_raw_fd(), pid)?,
        root_id: base,
        cover: covers::Key {
            memory: spec.memory,
            processors,
        },
    })?;
    clock.mark("mounts");
    let mut mounts = vec![
        tree.root.as_raw_fd(),
        tree.sys.as_raw_fd(),
        tree.dev.as_raw_fd(),
    ];
    mounts.extend(tree.covers.iter().map(AsRawFd::as_raw_fd));
    // Its table of descriptors was this process's until now, so the reserved numbers could not be taken back before.
    let Report::Unshared = next_report(newborn)? else {
        return Err(died("it was on its own"));
    };
    creator.clear(node.null.as_raw_fd())?;
    sysapi::send_fds(newborn.socket.as_raw_fd(), &mounts)?;
    drop(tree);
    let Report::Filtered(denials) = next_report(newborn)? else {
        return Err(died("its filter was loaded"));
    };
    let Report::Exec = next_report(newborn)? else {
        return Err(died("chronus ran"));
    };
    clock.mark("child");
    Ok(denials)
}

/// What the child tells, in this order: that it has its own descriptor table, that its filter is loaded, that chronus runs (its end of the socket
/// closes). Or which step failed, which is an error.
enum Report {
    Unshared,
    /// Where reported system calls arrive.
    Filtered(OwnedFd),
    Exec,
}

fn next_report(newborn: &Newborn<'_>) -> io::Result<Report> {
    let socket = &newborn.socket;
    // Its end of the socket is not enough: until it has its own table of descriptors, this process holds that open.
    match sysapi::wait_any(
        [socket.as_raw_fd(), newborn.pidfd.as_raw_fd()],
        CHILD_DEADLINE_MS,
    )? {
        [true, _] => {}
        [false, true] => return Err(died("it said how far it had come")),
        [false, false] => {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the sandbox's first process did not get to run chronus in time",
            ))
        }
    }
    match sysapi::receive(socket.as_raw_fd())? {
        None => Ok(Report::Exec),
        Some((_, Some(listener))) => Ok(Report::Filtered(listener)),
        Some((child::UNSHARED, None)) => Ok(Report::Unshared),
        Some((step, None)) => {
            let errno = sysapi::receive(socket.as_raw_fd())?.map_or(0, |(byte, _)| byte);
            let error = io::Error::from_raw_os_error(i32::from(errno));
            let step = child::STEPS
                .get(usize::from(step))
                .unwrap_or(&"an unknown step");
            Err(io::Error::new(error.kind(), format!("{step}: {error}")))
        }
    }
}

fn died(when: &str) -> io::Error {
    io::Error::other(format!("the sandbox's first process died before {when}"))
}

/// Whether a child has been ended by a signal. One whose socket is closed ends in any case, which is waited for.
fn was_killed(newborn: &Newborn<'_>) -> bool {
    let pidfd = newborn.pidfd;
    if sysapi::has_failed(newborn.socket.as_raw_fd()) {
        let _ = sysapi::wait_readable(pidfd.as_raw_fd(), DEATH_DEADLINE_MS);
    }
    // SAFETY: siginfo_t is plain data; P_PIDFD takes an open pidfd.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let found = libc::waitid(
            libc::P_PIDFD,
            pidfd.as_raw_fd() as libc::id_t,
            &mut info,
            libc::WEXITED | libc::WNOHANG | libc::WNOWAIT,
        );
        found == 0 && matches!(info.si_code, libc::CLD_KILLED | libc::CLD_DUMPED)
    }
}

/// Ends a child that may still use this process's memory.
fn reap(pidfd: &OwnedFd) {
    let _ = sysapi::pidfd_kill(pidfd.as_raw_fd());
    if crate::kill::wait_for_end(pidfd).is_none() {
        // It would go on in memory that is given to others: better a new spawner, which finds every sandbox again.
        eprintln!("dsec-spawner: a child does not end; starting anew");
        std::process::abort();
    }
}

fn clone_child(
    creator: &Creator,
    plan: &Plan,
    cgroup: Option<&OwnedFd>,
) -> io::Result<(i32, OwnedFd, bool)> {
    let namespaces = libc::CLONE_NEWUSER
        | libc::CLONE_NEWNS
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUTS;
    let mut pidfd: RawFd = -1;
    let mut arguments = CloneArgs {
        flags: (namespaces | libc::CLONE_PIDFD | libc::CLONE_FILES | libc::CLONE_VM) as u32 as u64,
        pidfd: (&raw mut pidfd) as u64,
        exit_signal: libc::SIGCHLD as u64,
        ..CloneArgs::default()
    };
    creator.stack.lend(&mut arguments);
    if let Some(dir) = cgroup {
        arguments.flags |= CLONE_INTO_CGROUP;
        arguments.cgroup = dir.as_raw_fd() as u64;
    }
    // SAFETY: the stack is this creator's, which has one child at a time; `assemble` keeps the plan until the child runs chronus or is dead.
    let mut born = unsafe { child::start(&arguments, plan) };
    let refused = born
        .as_ref()
        .is_err_and(|error| error.raw_os_error() != Some(libc::EAGAIN));
    if refused && cgroup.is_some() {
        arguments.flags &= !CLONE_INTO_CGROUP;
        arguments.cgroup = 0;
        // SAFETY: as above.
        born = unsafe { child::start(&arguments, plan) };
    }
    let pid = born?;
    // SAFETY: the kernel stored a descriptor of ours there.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    Ok((pid, pidfd, arguments.flags & CLONE_INTO_CGROUP != 0))
}

fn write_maps(pid: i32, base: u32, extra: &[u32]) -> io::Result<()> {
    let mut map = format!("0 {base} {PLAIN_IDS}\n");
    for (place, id) in extra.iter().enumerate() {
        map.push_str(&format!("{id} {} 1\n", base + PLAIN_IDS + place as u32));
    }
    for file in ["uid_map", "gid_map"] {
        File::options()
            .write(true)
            .open(format!("/proc/{pid}/{file}"))?
            .write_all(map.as_bytes())?;
    }
    Ok(())
}

fn listen(node: &Node, slot: u32) -> io::Result<UnixListener> {
    let name = CString::new(slot.to_string())?;
    match sysapi::unlink_at(node.sockets.as_raw_fd(), &name) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // Through the descriptor: a socket's path has 108 bytes at most, and the run directory isn't visible here.
    let listener =
        UnixListener::bind(format!("/proc/self/fd/{}/{slot}", node.sockets.as_raw_fd()))?;
    sysapi::chmod_at(node.sockets.as_raw_fd(), &name, 0o600)?;
    sysapi::chown_at(
        node.sockets.as_raw_fd(),
        &name,
        node.service_uid,
        node.service_uid,
    )?;
    Ok(listener)
}

fn random_pair() -> io::Result<[u64; 2]> {
    let mut bytes = [0_u8; 16];
    // SAFETY: bytes is writable for its length.
    let got = check(
        unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) } as libc::c_long,
    )?;
    if got != 16 {
        return Err(io::Error::other("getrandom gave less than was asked for"));
    }
    let (low, high) = bytes.split_at(8);
    Ok([
        u64::from_le_bytes(low.try_into().map_err(io::Error::other)?),
        u64::from_le_bytes(high.try_into().map_err(io::Error::other)?),
    ])
}

/// The pipe that chronus reads its configuration from.
fn configuration(cookie: [u64; 2], history: u64) -> io::Result<OwnedFd> {
    let (reading, writing) = sysapi::pipe()?;
    let map = Writer::new()
        .map(2)
        .text("cookie")
        .array(2)
        .unsigned(cookie[0])
        .unsigned(cookie[1])
        .text("history")
        .unsigned(history)
        .finish();
    File::from(writing).write_all(&map)?;
    Ok(reading)
}

/// Processors that a sandbox with this quota sees: rounded up, at most the node's.
fn processors(cpu_millis: u64, cores: usize) -> usize {
    match cpu_millis {
        0 => cores,
        millis => (millis.div_ceil(1000) as usize).clamp(1, cores),
    }
}

/// Confines a sandbox that sees fewer processors than there are to that many, starting at another one for each slot.
fn pin(pid: i32, slot: u32, processors: usize, cores: usize) -> io::Result<()> {
    // SAFETY: cpu_set_t is plain data; CPU_SET stays within it because cores is bounded by its size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        for place in 0..processors {
            libc::CPU_SET(
                (slot as usize + place) % cores.min(libc::CPU_SETSIZE as usize),
                &mut set,
            );
        }
        check(libc::c_long::from(libc::sched_setaffinity(
            pid,
            std::mem::size_of_val(&set),
            &set,
        )))
        .map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_round_up_within_the_node() {
        assert_eq!(processors(0, 8), 8);
        assert_eq!(processors(500, 8), 1);
        assert_eq!(processors(1001, 8), 2);
        assert_eq!(processors(64_000, 8), 8);
    }
}
