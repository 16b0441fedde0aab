//! The filesystem that blobfs serves: who has its connection to the kernel. The spawner keeps the descriptor too, so that a blobfs that dies can be
//! followed by another one, and reads wait meanwhile; a spawner that dies gets it back from blobfs.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::keeper::{Keeper, GRACE};
use crate::layers::{BlobMount, Layers, FUSE_MAJOR, FUSE_MINOR};
use crate::sysapi;

const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How long a layer that is to be mounted waits for a blobfs.
const PATIENCE: Duration = Duration::from_secs(10);
/// The connection of a blobfs that was killed is seen to break a moment later.
const HANDOVER: Duration = Duration::from_secs(2);

struct State {
    /// None: nothing is mounted, or an earlier spawner mounted it and its blobfs hasn't come yet.
    connection: Option<Arc<OwnedFd>>,
    root: Option<Arc<OwnedFd>>,
    /// Number of the connection in the kernel, once it is known.
    number: Option<u32>,
    /// The peer that serves it.
    holder: Option<usize>,
    /// Since when nobody has.
    alone_since: Instant,
    was_taken: bool,
    /// Whether the keeper holds it too.
    is_kept: bool,
}

pub struct Fuse {
    layers: Layers,
    keeper: Keeper,
    state: Mutex<State>,
    /// `holder` has changed.
    changed: Condvar,
}

/// What `fuse_take` answers with.
pub struct Taken {
    pub connection: Arc<OwnedFd>,
    pub fresh: bool,
}

fn refusal(kind: io::ErrorKind, message: &str) -> io::Error {
    io::Error::new(kind, message)
}

impl Fuse {
    /// Finds what an earlier spawner mounted. `held`: the connection that the keeper has.
    pub fn open(layers: Layers, keeper: Keeper, held: Option<OwnedFd>) -> io::Result<Self> {
        let (root, number) = layers.find_blobs()?.unzip();
        let held = held
            .map(File::from)
            .filter(|held| number.is_some() && is_of(held, number));
        Ok(Fuse {
            layers,
            keeper,
            state: Mutex::new(State {
                is_kept: held.is_some(),
                connection: held.map(|held| Arc::new(held.into())),
                root: root.map(Arc::new),
                number,
                holder: None,
                alone_since: Instant::now(),
                was_taken: number.is_some(),
            }),
            changed: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there is a holder, or none.
    fn wait(&self, holder: bool, patience: Duration) -> MutexGuard<'_, State> {
        let waits = |state: &mut State| state.holder.is_some() != holder;
        self.changed
            .wait_timeout_while(self.lock(), patience, waits)
            .unwrap_or_else(PoisonError::into_inner)
            .0
    }

    /// Gives the connection to a blobfs that has none; mounts the filesystem where that is still to be done.
    pub fn take(&self, peer: usize) -> io::Result<Taken> {
        let mut state = self.wait(false, HANDOVER);
        if state.holder.is_some() {
            return Err(refusal(
                io::ErrorKind::AlreadyExists,
                "another blobfs serves this node: end it first",
            ));
        }
        if state.connection.is_none() {
            // An earlier one has nobody left who could serve it.
            self.layers.abort_blobs()?;
            let BlobMount { connection, root } = self.layers.mount_blobs().map_err(explained)?;
            state.connection = Some(Arc::new(connection));
            state.root = Some(Arc::new(root));
            state.number = self.layers.find_blobs()?.map(|(_, number)| number);
            state.was_taken = false;
            state.is_kept = false;
        }
        let connection = state.connection.clone();
        let connection = connection.ok_or_else(|| io::Error::other("no connection"))?;
        state.holder = Some(peer);
        let fresh = !std::mem::replace(&mut state.was_taken, true);
        self.changed.notify_all();
        Ok(Taken { connection, fresh })
    }

    /// Takes the connection from a blobfs that outlived an earlier spawner.
    pub fn give(&self, peer: usize, descriptor: OwnedFd) -> io::Result<()> {
        let descriptor = File::from(descriptor);
        let meta = descriptor.metadata()?;
        let device = libc::makedev(FUSE_MAJOR, FUSE_MINOR);
        if !meta.file_type().is_char_device() || meta.rdev() != device {
            return Err(refusal(
                io::ErrorKind::InvalidInput,
                "fuse_give: the descriptor is not one of /dev/fuse",
            ));
        }
        let mut state = self.wait(false, HANDOVER);
        let is_ours = state.number.is_some() && is_of(&descriptor, state.number);
        if state.holder.is_some() || !is_ours {
            return Err(refusal(
                io::ErrorKind::AlreadyExists,
                "the filesystem of this connection is no longer mounted, or another blobfs serves it: start again",
            ));
        }
        if state.connection.is_none() {
            state.connection = Some(Arc::new(descriptor.into()));
        }
        state.holder = Some(peer);
        self.changed.notify_all();
        Ok(())
    }

    /// A peer is gone, whoever it was.
    pub fn left(&self, peer: usize) {
        let mut state = self.lock();
        if state.holder == Some(peer) {
            state.holder = None;
            state.alone_since = Instant::now();
            self.changed.notify_all();
        }
    }

    /// The file that blobfs shows under this digest. Waits for a blobfs, and for its answer: not longer than [`PATIENCE`] and [`GRACE`].
    pub fn file(&self, digest: &str) -> io::Result<File> {
        let mut state = self.wait(true, PATIENCE);
        if let (Some(connection), false) = (&state.connection, state.is_kept) {
            self.keeper.keep(connection.as_fd())?;
            state.is_kept = true;
        }
        let root = state.root.clone().filter(|_| state.holder.is_some());
        drop(state);
        let root = root.ok_or_else(|| {
            refusal(
                io::ErrorKind::NotConnected,
                "no blobfs serves this node, so layers can't be loaded on demand",
            )
        })?;
        let name = std::ffi::CString::new(digest)?;
        let flags = libc::O_RDONLY | libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file = sysapi::open_at(root.as_raw_fd(), &name, flags).map_err(|error| {
            io::Error::new(error.kind(), format!("blob {digest} in blobfs: {error}"))
        })?;
        Ok(File::from(file))
    }

    /// Watches that layers over blobfs are served; forever. `aborted` is called after readers have been let go.
    pub fn guard(&self, aborted: impl Fn()) {
        loop {
            std::thread::sleep(LOOK_EVERY);
            match self.abort_if_alone() {
                Ok(false) => {}
                Ok(true) => {
                    eprintln!(
                        "dsec-spawner: no blobfs for {} s: layers that are loaded on demand fail",
                        GRACE.as_secs()
                    );
                    aborted();
                }
                Err(error) => eprintln!("dsec-spawner: aborting the blobs' connection: {error}"),
            }
        }
    }

    fn abort_if_alone(&self) -> io::Result<bool> {
        let mut state = self.lock();
        let is_alone = state.number.is_some() && state.holder.is_none();
        if !is_alone || state.alone_since.elapsed() < GRACE || !self.layers.any_lazy()? {
            return Ok(false);
        }
        self.layers.abort_blobs()?;
        state.connection = None;
        state.root = None;
        state.number = None;
        Ok(true)
    }
}

/// Whether a descriptor is of this connection, as far as the kernel shows it.
fn is_of(descriptor: &File, number: Option<u32>) -> bool {
    let found = connection_of(descriptor);
    found.is_none() || found == number
}

/// The number of a descriptor's connection; older kernels don't show it.
fn connection_of(descriptor: &File) -> Option<u32> {
    let path = format!("/proc/thread-self/fdinfo/{}", descriptor.as_raw_fd());
    let info = std::fs::read_to_string(path).ok()?;
    let line = info
        .lines()
        .find_map(|line| line.strip_prefix("fuse_connection:"))?;
    line.trim().parse().ok()
}

/// Where the kernel has no FUSE, it says "no such device" to the node or to the filesystem's name.
fn explained(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(libc::ENODEV | libc::ENXIO) => refusal(
            io::ErrorKind::Unsupported,
            "the kernel has no FUSE (modprobe fuse), so layers can't be loaded on demand",
        ),
        _ => error,
    }
}
