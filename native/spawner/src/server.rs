//! The daemon: one socket for the service, threads that create, threads that end, and one that watches for deaths.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{mpsc, Arc, Mutex, PoisonError};
use std::time::Duration;

use wire::{passing, process};

use crate::create::{self, Creator, Spec};
use crate::denials::Denials;
use crate::doctor;
use crate::endings::Endings;
use crate::kill;
use crate::node::{self, Node};
use crate::options::Options;
use crate::registry::{Refusal, Registry, State};
use crate::snapshot::{self, Packs};
use crate::sysapi::{self, check};
use crate::verbs::{self, Facts, Listed, Verb};

/// The most that a request may be.
const MAX_REQUEST: u32 = 4 << 20;
/// Creations and endings wait for the kernel (grace periods, dying processes) as long as they compute: more threads than processors keep these busy.
const CREATORS: usize = 6;
const ENDERS: usize = 8;

/// Layers made at the same time, each with one processor busy.
const PACKERS: usize = 2;
/// Snapshots wait for the disk.
const SNAPPERS: usize = 2;

/// How often quota groups of deleted subvolumes are tried again: deletions come through with the filesystem's commits, every 30 s.
const ORPHANS_EVERY: Duration = Duration::from_secs(10);

/// Whoever takes nothing for so long is stopped: it is cut off, for its answers and events are sent by threads that others wait for.
const SEND_PATIENCE: Duration = Duration::from_secs(10);

/// A connection's writing half: answers come from several threads, each frame whole.
#[derive(Clone)]
struct Peer(Arc<Mutex<UnixStream>>);

impl Peer {
    /// `patience`: how long one frame may wait until the other end takes it.
    fn new(stream: UnixStream, patience: Duration) -> io::Result<Self> {
        stream.set_write_timeout(Some(patience))?;
        Ok(Peer(Arc::new(Mutex::new(stream))))
    }

    fn send(&self, body: &[u8]) {
        self.send_with(body, None);
    }

    fn send_with(&self, body: &[u8], descriptor: Option<RawFd>) {
        let stream = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A peer that is gone gets nothing; it asks again when it is back. One that took only a part can't understand what would follow.
        if passing::send_frame(&*stream, body, descriptor).is_err() {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Tells it from all others that live.
    fn key(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }
}

struct Server {
    node: Node,
    registry: Registry,
    run_dir: String,
    features: Vec<(String, String)>,
    creates: Mutex<mpsc::Sender<(Peer, u64, Box<Spec>)>>,
    ends: Mutex<mpsc::Sender<(Peer, u64, String, bool)>>,
    others: Mutex<mpsc::Sender<(Peer, u64, Verb)>>,
    /// What may have to wait for blobfs.
    lazy: Mutex<mpsc::Sender<(Peer, u64, Verb)>>,
    /// What may take long because of what a sandbox has written.
    diffs: Mutex<mpsc::Sender<(Peer, u64, Verb)>>,
    snapshots: Mutex<mpsc::Sender<(Peer, u64, Verb)>>,
    orders: Mutex<mpsc::Sender<(Peer, u64, Box<snapshot::Order>)>>,
    packs: Packs,
    endings: Endings,
    denials: Denials,
    watch: OwnedFd,
    watched: Mutex<std::collections::HashMap<u64, (String, Arc<OwnedFd>)>>,
    peers: Mutex<Vec<Peer>>,
}

/// Runs until SIGTERM or SIGINT, which leave sandboxes as they are.
pub fn run(options: &Options) -> io::Result<()> {
    // Started again through /proc/self/exe it would be called "exe".
    // SAFETY: a constant NUL-terminated string.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"dsec-spawner".as_ptr()) };
    // One arena of memory: a child's copy of this process shall be small.
    // SAFETY: plain integers, before any thread is started.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    process::raise_descriptor_limit()?;
    let null = File::options().read(true).write(true).open("/dev/null")?;
    let creators = (0..CREATORS)
        .map(|index| Creator::reserve(index, &null))
        .collect::<io::Result<Vec<_>>>()?;
    let node = Node::open(options)?;
    let features = doctor::features(options);
    let listener = bind(options)?;
    node::leave_host_mounts(options)?;
    node.cgroups.enter_devices()?;
    let (creates, to_create) = mpsc::channel();
    let (ends, to_end) = mpsc::channel();
    let (others, to_do) = mpsc::channel();
    let (lazy, to_do_lazily) = mpsc::channel();
    let (diffs, to_list) = mpsc::channel();
    let (snapshots, to_snap) = mpsc::channel();
    let (orders, to_pack) = mpsc::channel();
    let server = Arc::new(Server {
        node,
        registry: Registry::with_slots(options.max_sandboxes),
        run_dir: options.run_dir.to_string_lossy().into_owned(),
        features,
        creates: Mutex::new(creates),
        ends: Mutex::new(ends),
        others: Mutex::new(others),
        lazy: Mutex::new(lazy),
        diffs: Mutex::new(diffs),
        snapshots: Mutex::new(snapshots),
        orders: Mutex::new(orders),
        packs: Packs::default(),
        endings: Endings::default(),
        denials: Denials::new(epoll()?),
        watch: epoll()?,
        watched: Mutex::default(),
        peers: Mutex::default(),
    });
    server.node.cgroups.thaw_all();
    for (id, pidfd) in server.registry.recover(&server.node) {
        server.watch(&id, pidfd)?;
    }
    server.remove_stale_sockets();
    server.node.scratch.recover()?;
    let janitor = server.clone();
    start("quota", move || loop {
        std::thread::sleep(ORPHANS_EVERY);
        janitor.node.scratch.remove_orphans();
    })?;
    let to_create = Arc::new(Mutex::new(to_create));
    for creator in creators {
        let (server, inbox) = (server.clone(), to_create.clone());
        start("create", move || {
            if let Err(error) = create::keep_capabilities() {
                fail(&format!("keeping capabilities: {error}"));
            }
            while let Some((peer, id, spec)) = next(&inbox) {
                server.create(&creator, &peer, id, &spec);
            }
        })?;
    }
    let to_end = Arc::new(Mutex::new(to_end));
    for _ in 0..ENDERS {
        let (server, inbox) = (server.clone(), to_end.clone());
        start("end", move || {
            while let Some((peer, id, sandbox, keep)) = next(&inbox) {
                server.end(&peer, id, &sandbox, keep);
            }
        })?;
    }
    let remover = server.clone();
    start("groups", move || loop {
        for id in remover.endings.next() {
            // A creation that is made anew under this name removes what is left of the first one by itself.
            if remover.registry.get(&id).is_some() {
                continue;
            }
            // What can't be removed now has no sandbox any more: the edge's sweep finds it.
            if let Err(error) = remover.node.cgroups.remove(&id) {
                eprintln!("dsec-spawner: ending {id}: its groups: {error}");
            }
        }
    })?;
    for (name, to_do) in [("other", to_do), ("lazy", to_do_lazily), ("diff", to_list)] {
        let other = server.clone();
        start(name, move || {
            while let Ok((peer, id, verb)) = to_do.recv() {
                peer.send(&other.other(id, verb));
            }
        })?;
    }
    let guard = server.clone();
    start("blobs", move || {
        guard
            .node
            .fuse
            .guard(|| guard.tell_all(&verbs::blobs_aborted()))
    })?;
    let to_snap = Arc::new(Mutex::new(to_snap));
    for _ in 0..SNAPPERS {
        let (server, inbox) = (server.clone(), to_snap.clone());
        start("snapshot", move || {
            while let Some((peer, id, verb)) = next(&inbox) {
                peer.send(&server.other(id, verb));
            }
        })?;
    }
    let to_pack = Arc::new(Mutex::new(to_pack));
    for _ in 0..PACKERS {
        let (server, inbox) = (server.clone(), to_pack.clone());
        start("pack", move || {
            while let Some((peer, id, order)) = next(&inbox) {
                peer.send(&match server.packs.make(&server.node, &order) {
                    Ok(report) => verbs::packed(id, &report),
                    Err(refused) => verbs::error(id, refused.code, &refused.message),
                });
            }
        })?;
    }
    let refuser = server.clone();
    start("deny", move || {
        refuser
            .denials
            .answer(|denial| refuser.tell_all(&verbs::denied(denial)))
    })?;
    let watcher = server.clone();
    start("watch", move || watcher.watch_deaths())?;
    for connection in listener.incoming().flatten() {
        let server = server.clone();
        start("peer", move || server.serve(connection))?;
    }
    Ok(())
}

fn start(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new()
        .name(name.into())
        .spawn(work)
        .map(drop)
}

fn next<T>(inbox: &Mutex<mpsc::Receiver<T>>) -> Option<T> {
    inbox
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .recv()
        .ok()
}

fn fail(message: &str) -> ! {
    eprintln!("dsec-spawner: {message}");
    std::process::exit(1)
}

fn epoll() -> io::Result<OwnedFd> {
    // SAFETY: the new descriptor is nobody else's.
    unsafe {
        let fd = check(libc::c_long::from(libc::epoll_create1(libc::EPOLL_CLOEXEC)))?;
        Ok(std::os::fd::FromRawFd::from_raw_fd(fd as i32))
    }
}

fn bind(options: &Options) -> io::Result<UnixListener> {
    let path = options.run_dir.join("spawner.sock");
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&path)?;
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
    std::os::unix::fs::chown(&path, Some(options.service_uid), Some(options.service_uid))?;
    Ok(listener)
}

fn peer_uid(stream: &UnixStream) -> io::Result<u32> {
    // SAFETY: ucred is plain data of the length given.
    unsafe {
        let mut credentials: libc::ucred = std::mem::zeroed();
        let mut length = std::mem::size_of::<libc::ucred>() as libc::socklen_t;
        check(libc::c_long::from(libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &mut length,
        )))?;
        Ok(credentials.uid)
    }
}

fn code_of(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => "not_found",
        io::ErrorKind::InvalidData => "invalid_layer",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "no_space",
        io::ErrorKind::TimedOut => "timeout",
        io::ErrorKind::AlreadyExists => "conflict",
        io::ErrorKind::NotConnected => "unavailable",
        io::ErrorKind::Unsupported => "unsupported",
        _ => "failed",
    }
}

impl Server {
    fn serve(&self, stream: UnixStream) {
        // Only the service (and root, for whom nothing is closed) may ask.
        if !peer_uid(&stream).is_ok_and(|uid| uid == self.node.service_uid || uid == 0) {
            return;
        }
        let writing = stream.try_clone();
        let Ok(peer) = writing.and_then(|writing| Peer::new(writing, SEND_PATIENCE)) else {
            return;
        };
        self.peers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(peer.clone());
        while let Ok(Some((frame, descriptor))) = passing::receive_frame(&stream, MAX_REQUEST) {
            let (id, verb) = verbs::parse(&frame);
            match verb {
                Ok(Verb::FuseTake) => self.fuse_take(&peer, id),
                Ok(Verb::FuseGive) => peer.send(&self.fuse_give(&peer, id, descriptor)),
                Ok(verb) => self.dispatch(&peer, id, verb),
                Err(verbs::Bad(name)) => peer.send(&verbs::error(
                    id,
                    "invalid_argument",
                    &format!("{name} is missing or not allowed"),
                )),
            }
        }
        self.tell_no_more(&peer);
        self.node.fuse.left(peer.key());
    }

    fn fuse_take(&self, peer: &Peer, id: u64) {
        match self.node.fuse.take(peer.key()) {
            Ok(taken) => {
                self.tell_no_more(peer);
                let answer = verbs::done(id);
                peer.send_with(&answer, Some(taken.connection.as_raw_fd()));
                if taken.aborted {
                    self.tell_all(&verbs::blobs_aborted());
                }
            }
            Err(error) => peer.send(&verbs::error(id, code_of(&error), &error.to_string())),
        }
    }

    fn fuse_give(&self, peer: &Peer, id: u64, descriptor: Option<OwnedFd>) -> Vec<u8> {
        let Some(descriptor) = descriptor else {
            return verbs::error(id, "invalid_argument", "no descriptor came with fuse_give");
        };
        match self.node.fuse.give(peer.key(), descriptor) {
            Ok(()) => {
                self.tell_no_more(peer);
                verbs::done(id)
            }
            Err(error) => verbs::error(id, code_of(&error), &error.to_string()),
        }
    }

    fn dispatch(&self, peer: &Peer, id: u64, verb: Verb) {
        let peer = peer.clone();
        // The receiving threads live as long as the process.
        let _ = match verb {
            Verb::Create(spec) => self
                .creates
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .send((peer, id, spec))
                .is_ok(),
            Verb::Kill {
                sandbox,
                keep_scratch,
            } => self
                .ends
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .send((peer, id, sandbox, keep_scratch))
                .is_ok(),
            Verb::SnapshotPack(order) => self
                .orders
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .send((peer, id, order))
                .is_ok(),
            verb => match verb {
                Verb::LayerMount { lazy: true, .. } => &self.lazy,
                Verb::Diff { .. } => &self.diffs,
                Verb::Snapshot { .. } | Verb::SnapshotRemove { .. } => &self.snapshots,
                _ => &self.others,
            }
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .send((peer, id, verb))
            .is_ok(),
        };
    }

    fn socket_path(&self, slot: u32) -> String {
        format!("{}/c/{slot}", self.run_dir)
    }

    fn create(&self, creator: &Creator, peer: &Peer, id: u64, spec: &Spec) {
        let slot = match self.registry.begin(&spec.id) {
            Ok(slot) => slot,
            Err(Refusal::Exists) => {
                return peer.send(&verbs::error(
                    id,
                    "conflict",
                    &format!("{} exists", spec.id),
                ))
            }
            Err(Refusal::NoSlot) => {
                return peer.send(&verbs::error(
                    id,
                    "no_capacity",
                    "as many sandboxes live as --max-sandboxes allows",
                ))
            }
        };
        match create::create(&self.node, creator, spec, slot) {
            Ok(made) => {
                let answer = verbs::created(id, slot, &self.socket_path(slot), &made);
                let watched = self.denials.watch(&spec.id, made.denials);
                let pidfd = Arc::new(made.pidfd);
                self.registry.created(&spec.id, made.pid, pidfd.clone());
                if let Err(error) = watched.and_then(|()| self.watch(&spec.id, pidfd)) {
                    eprintln!("dsec-spawner: watching {}: {error}", spec.id);
                }
                self.endings.begin();
                peer.send(&answer);
            }
            Err(error) => {
                self.registry.remove(&spec.id);
                peer.send(&verbs::error(id, code_of(&error), &error.to_string()));
            }
        }
    }

    fn end(&self, peer: &Peer, id: u64, sandbox: &str, keep_scratch: bool) {
        let entry = self.registry.begin_end(sandbox);
        let pidfd = entry.pidfd.as_deref();
        let ended = match kill::end(&self.node, sandbox, entry.slot, pidfd, keep_scratch) {
            Ok(ended) => ended,
            Err(reason) => {
                self.registry.not_ended(sandbox);
                eprintln!("dsec-spawner: ending {sandbox}: {reason}");
                return peer.send(&verbs::error(id, "failed", &reason.to_string()));
            }
        };
        self.endings.leave(sandbox);
        self.registry.remove(sandbox);
        if ended.left.is_empty() {
            peer.send(&verbs::ended(id, ended.figures, ended.disk));
        } else {
            eprintln!("dsec-spawner: ending {sandbox}: {}", ended.left.join("; "));
            peer.send(&verbs::error(id, "failed", &ended.left.join("; ")));
        }
    }

    fn other(&self, id: u64, verb: Verb) -> Vec<u8> {
        let result = match verb {
            Verb::Hello => Ok(self.hello(id)),
            Verb::LayerMount { meta, blob, lazy } => self
                .node
                .mount_layer(&meta, blob.as_deref(), lazy)
                .map(|()| verbs::done(id)),
            Verb::LayerUnmount { meta } => self.node.unmount_layer(&meta).map(|()| verbs::done(id)),
            Verb::Layers => self
                .node
                .layers
                .mounted()
                .map(|mounted| verbs::layers(id, &mounted)),
            Verb::Usage { sandboxes } => {
                let disk: Vec<(String, u64)> = sandboxes
                    .into_iter()
                    .filter_map(|name| {
                        self.node
                            .scratch
                            .usage(&name)
                            .ok()
                            .map(|bytes| (name, bytes))
                    })
                    .collect();
                Ok(verbs::usage(id, &disk))
            }
            Verb::List => Ok(verbs::list_answer(id, &self.list())),
            Verb::Diff {
                sandbox,
                after,
                limit,
            } => self
                .node
                .scratch
                .diff(&sandbox, &after, limit as usize)
                .map(|page| verbs::diff(id, &page)),
            Verb::Snapshot { sandbox, snapshot } => self
                .snapshot(&sandbox, &snapshot)
                .map(|taken| verbs::snapshot_taken(id, taken)),
            Verb::SnapshotRemove { snapshot } => self
                .packs
                .remove(&self.node, &snapshot)
                .map(|()| verbs::done(id)),
            Verb::Snapshots => snapshot::list(&self.node).map(|names| verbs::snapshots(id, &names)),
            Verb::Create(_)
            | Verb::Kill { .. }
            | Verb::FuseTake
            | Verb::FuseGive
            | Verb::SnapshotPack(_) => Err(io::Error::other("this verb is done elsewhere")),
        };
        result.unwrap_or_else(|error| verbs::error(id, code_of(&error), &error.to_string()))
    }

    fn hello(&self, id: u64) -> Vec<u8> {
        let (scratch, scratch_used) = self.node.scratch.space();
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        verbs::hello(
            id,
            &Facts {
                kernel: kernel.trim(),
                cores: self.node.cores as u64,
                memory: self.node.memory,
                cgroup: self.node.cgroups.mode.name(),
                scratch,
                scratch_used,
                uid_base: u64::from(self.node.uid_base),
                quotas: self.node.scratch.quotas.name(),
                features: &self.features,
            },
        )
    }

    fn snapshot(&self, sandbox: &str, name: &str) -> io::Result<snapshot::Taken> {
        let entry = self.registry.get(sandbox);
        if entry.is_none_or(|entry| entry.state != State::Live) {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                format!("no sandbox {sandbox} runs"),
            ));
        }
        snapshot::take(&self.node, sandbox, name)
    }

    fn list(&self) -> Vec<Listed> {
        let kept = self.node.scratch.list().unwrap_or_default();
        let mut listed: Vec<Listed> = self
            .registry
            .list()
            .into_iter()
            .map(|(id, entry)| Listed {
                slot: entry.slot,
                pid: entry.pid,
                alive: entry.state == crate::registry::State::Live,
                socket: entry
                    .slot
                    .map_or(String::new(), |slot| self.socket_path(slot)),
                scratch: kept.contains(&id),
                sandbox: id,
            })
            .collect();
        let known: std::collections::HashSet<String> =
            listed.iter().map(|one| one.sandbox.clone()).collect();
        let mut strays = kept;
        let groups = self.node.cgroups.list().into_iter();
        let waiting = self.endings.waiting();
        strays.extend(groups.filter(|id| !waiting.contains(id)));
        strays.sort();
        strays.dedup();
        for id in strays.into_iter().filter(|id| !known.contains(id)) {
            let scratch = self.node.scratch.open_volume(&id).is_ok();
            listed.push(Listed {
                sandbox: id,
                slot: None,
                pid: 0,
                alive: false,
                socket: String::new(),
                scratch,
            });
        }
        listed
    }

    fn watch(&self, id: &str, pidfd: Arc<OwnedFd>) -> io::Result<()> {
        let fd = pidfd.as_raw_fd();
        self.watched
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(fd as u64, (id.to_owned(), pidfd));
        let mut event = libc::epoll_event {
            events: (libc::EPOLLIN | libc::EPOLLONESHOT) as u32,
            u64: fd as u64,
        };
        // SAFETY: event is one valid epoll_event.
        check(libc::c_long::from(unsafe {
            libc::epoll_ctl(self.watch.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &mut event)
        }))
        .map(drop)
    }

    fn watch_deaths(&self) {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
        loop {
            // SAFETY: events has room for 64 entries.
            let ready =
                unsafe { libc::epoll_wait(self.watch.as_raw_fd(), events.as_mut_ptr(), 64, -1) };
            for event in events.iter().take(usize::try_from(ready).unwrap_or(0)) {
                let key = event.u64;
                let gone = self
                    .watched
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .remove(&key);
                if let Some((id, pidfd)) = gone {
                    // SAFETY: removes a descriptor that is still open.
                    unsafe {
                        libc::epoll_ctl(
                            self.watch.as_raw_fd(),
                            libc::EPOLL_CTL_DEL,
                            pidfd.as_raw_fd(),
                            std::ptr::null_mut(),
                        )
                    };
                    self.report_death(&id, &pidfd);
                }
            }
        }
    }

    fn report_death(&self, id: &str, pidfd: &OwnedFd) {
        if self.registry.died(id) {
            let status = kill::wait_for_end(pidfd).unwrap_or(0);
            self.tell_all(&verbs::exited(id, status));
        }
    }

    fn tell_all(&self, event: &[u8]) {
        for peer in self
            .peers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
        {
            peer.send(event);
        }
    }

    /// It gets answers only, from now on.
    fn tell_no_more(&self, peer: &Peer) {
        self.peers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|one| !Arc::ptr_eq(&one.0, &peer.0));
    }

    /// Sockets whose sandbox is gone (its ending was cut short).
    fn remove_stale_sockets(&self) {
        for name in sysapi::names_in(self.node.sockets.as_raw_fd()).unwrap_or_default() {
            match name.parse::<u32>() {
                Ok(slot) if !self.registry.has_slot(slot) => self.node.remove_socket(slot),
                _ => {}
            }
        }
    }
}

/// Whether a daemon answers at this run directory.
pub fn is_running(run_dir: &Path) -> bool {
    UnixStream::connect(run_dir.join("spawner.sock")).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_takes_nothing_is_cut_off() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let peer = Peer::new(ours, Duration::from_millis(10)).unwrap();
        // More than a socket holds.
        let frame = vec![0; 8 << 20];
        peer.send(&frame);
        let stream = peer.0.lock().unwrap();
        assert!(passing::send_frame(&*stream, b"", None).is_err());
        let received = passing::receive_frame(&theirs, u32::MAX);
        assert!(received.is_err(), "its frame ends in the middle");
    }
}
