//! The filesystem that blobfs serves: who has its connection to the kernel. The spawner keeps the descriptor too, so that a blobfs that dies can be
//! followed by another one, and reads wait meanwhile; a spawner that dies gets it back from blobfs.

use std::fs::File;
use std::io::{self, Write};
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

#[derive(Default)]
struct State {
    /// None: nothing is mounted, or an earlier spawner mounted it and its blobfs hasn't come yet.
    connection: Option<Arc<OwnedFd>>,
    root: Option<Arc<OwnedFd>>,
    /// Number of the connection in the kernel, once it is known.
    number: Option<u32>,
    /// The peer that serves it.
    holder: Option<usize>,
    vacancy: Vacancy,
    was_taken: bool,
    /// Whether the keeper was given it.
    is_kept: bool,
    /// Layers about to be mounted that may wait for blobfs.
    in_flight: usize,
}

impl State {
    /// The filesystem is mounted no more.
    fn forget(&mut self) {
        self.connection = None;
        self.root = None;
        self.number = None;
        self.vacancy = Vacancy::default();
        self.was_taken = false;
        self.is_kept = false;
    }
}

/// Since when nobody has served. Who is gone again within [`GRACE`] hasn't: readers would wait for ever for a blobfs that dies each time it starts.
#[derive(Default)]
struct Vacancy {
    since: Option<Instant>,
    /// When the last one came.
    came: Option<Instant>,
}

impl Vacancy {
    fn begun(now: Instant) -> Self {
        Vacancy {
            since: Some(now),
            came: None,
        }
    }

    fn comes(&mut self, now: Instant) {
        self.came = Some(now);
    }

    fn goes(&mut self, now: Instant) {
        let has_served = |came: Instant| now.saturating_duration_since(came) >= GRACE;
        if self.since.is_none() || self.came.is_some_and(has_served) {
            self.since = Some(now);
        }
    }

    /// Asked while nobody is there: whether that has been so for too long.
    fn is_over(&self, now: Instant) -> bool {
        self.since
            .is_some_and(|since| now.saturating_duration_since(since) >= GRACE)
    }
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
    /// Whether layers over an earlier filesystem, which nobody can serve any more, were given up for it.
    pub aborted: bool,
}

/// A layer over blobfs that is about to be mounted: until this is dropped it counts as one that is, so that whoever mounts it is let go too when nobody
/// serves.
pub struct Flight<'a> {
    fuse: &'a Fuse,
    root: Arc<OwnedFd>,
}

impl Flight<'_> {
    /// Whether the filesystem that its file is of is still mounted.
    pub fn stands(&self) -> bool {
        let state = self.fuse.lock();
        let is_it = |root: &Arc<OwnedFd>| Arc::ptr_eq(root, &self.root);
        state.root.as_ref().is_some_and(is_it)
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        self.fuse.lock().in_flight -= 1;
    }
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
                vacancy: number.map_or_else(Vacancy::default, |_| Vacancy::begun(Instant::now())),
                was_taken: number.is_some(),
                number,
                ..State::default()
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
        let mut aborted = false;
        let usable =
            |held: &Arc<OwnedFd>| !is_dead(held) && (!state.was_taken || ask_again(held).is_ok());
        let standing = state.connection.clone().filter(usable);
        let connection = match standing {
            Some(connection) => connection,
            None => {
                // An earlier one has nobody left who could serve it, or what its last holder had read would never be answered.
                aborted = self.layers.abort_blobs()?;
                state.forget();
                let BlobMount { connection, root } =
                    self.layers.mount_blobs().map_err(explained)?;
                let connection = Arc::new(connection);
                state.number = self.layers.find_blobs()?.map(|(_, number)| number);
                state.root = Some(Arc::new(root));
                state.connection = Some(connection.clone());
                connection
            }
        };
        state.holder = Some(peer);
        state.vacancy.comes(Instant::now());
        state.was_taken = true;
        self.changed.notify_all();
        Ok(Taken {
            connection,
            aborted,
        })
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
        let descriptor = OwnedFd::from(descriptor);
        let is_ours = is_ours && !is_dead(&descriptor);
        if state.holder.is_some() || !is_ours {
            return Err(refusal(
                io::ErrorKind::AlreadyExists,
                "the filesystem of this connection is no longer mounted, or another blobfs serves it: start again",
            ));
        }
        if state.connection.is_none() {
            state.connection = Some(Arc::new(descriptor));
        }
        state.holder = Some(peer);
        // It has served an earlier spawner.
        state.vacancy = Vacancy::default();
        state.vacancy.comes(Instant::now());
        self.changed.notify_all();
        Ok(())
    }

    /// A peer is gone, whoever it was.
    pub fn left(&self, peer: usize) {
        let mut state = self.lock();
        if state.holder == Some(peer) {
            state.holder = None;
            state.vacancy.goes(Instant::now());
            self.changed.notify_all();
        }
    }

    /// The file that blobfs shows under this digest. Waits for a blobfs, and for its answer: not longer than [`PATIENCE`] and [`GRACE`].
    pub fn file(&self, digest: &str) -> io::Result<(File, Flight<'_>)> {
        let mut state = self.wait(true, PATIENCE);
        self.let_keep(&mut state);
        let root = state.root.clone().filter(|_| state.holder.is_some());
        let root = root.ok_or_else(|| {
            refusal(
                io::ErrorKind::NotConnected,
                "no blobfs serves this node, so layers can't be loaded on demand",
            )
        })?;
        state.in_flight += 1;
        drop(state);
        let flight = Flight { fuse: self, root };
        let root = &flight.root;
        let name = std::ffi::CString::new(digest)?;
        let flags = libc::O_RDONLY | libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file = sysapi::open_at(root.as_raw_fd(), &name, flags).map_err(|error| {
            io::Error::new(error.kind(), format!("blob {digest} in blobfs: {error}"))
        })?;
        Ok((File::from(file), flight))
    }

    /// Gives the keeper the connection, unless it has it. Without a keeper layers are mounted all the same: their reads end if spawner and blobfs die
    /// together.
    fn let_keep(&self, state: &mut State) {
        let Some(connection) = &state.connection else {
            return;
        };
        if state.is_kept && self.keeper.is_there() {
            return;
        }
        if let Err(error) = self.keeper.keep(connection.as_fd()) {
            eprintln!("dsec-spawner: the keeper of blobs: {error}");
        }
        state.is_kept = true;
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
        if !is_alone || !state.vacancy.is_over(Instant::now()) {
            return Ok(false);
        }
        if state.in_flight == 0 && !self.layers.any_lazy()? {
            return Ok(false);
        }
        self.layers.abort_blobs()?;
        state.forget();
        Ok(true)
    }
}

/// Whether the kernel has ended this connection: then it answers nothing else to poll(2).
fn is_dead(connection: &OwnedFd) -> bool {
    sysapi::has_failed(connection.as_raw_fd())
}

/// Has the kernel ask again for everything that an earlier holder has read and not answered.
///
/// # Errors
/// Kernels before 6.9 can't.
fn ask_again(connection: &OwnedFd) -> io::Result<()> {
    /// A notification stands in the place of an error, with the unique number 0: include/uapi/linux/fuse.h.
    const FUSE_NOTIFY_RESEND: i32 = 7;
    const LENGTH: usize = 16;
    let mut header = [0; LENGTH];
    header[..4].copy_from_slice(&(LENGTH as u32).to_ne_bytes());
    header[4..8].copy_from_slice(&FUSE_NOTIFY_RESEND.to_ne_bytes());
    File::from(connection.try_clone()?).write_all(&header)
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

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn readers_wait_from_the_death_of_one_that_served() {
        let start = Instant::now();
        let mut vacancy = Vacancy::default();
        vacancy.comes(start);
        assert!(!vacancy.is_over(start + GRACE * 10), "one is there");
        let death = start + GRACE * 10;
        vacancy.goes(death);
        assert!(!vacancy.is_over(death + GRACE / 2));
        assert!(vacancy.is_over(death + GRACE));
    }

    #[test]
    fn one_that_dies_each_time_it_starts_has_not_served() {
        let start = Instant::now();
        let mut vacancy = Vacancy::begun(start);
        let mut now = start;
        while now < start + GRACE {
            assert!(!vacancy.is_over(now));
            vacancy.comes(now);
            now += GRACE / 8;
            vacancy.goes(now);
        }
        assert!(vacancy.is_over(now));
        vacancy.comes(now);
        vacancy.goes(now + GRACE);
        assert!(!vacancy.is_over(now + GRACE), "this one has");
    }

    #[test]
    fn asking_again_is_one_notification_without_content() {
        let (ours, theirs) = sysapi::socket_pair().unwrap();
        ask_again(&ours).unwrap();
        drop(ours);
        let mut sent = Vec::new();
        File::from(theirs).read_to_end(&mut sent).unwrap();
        let expected = [16_u64 | 7 << 32, 0].map(u64::to_le_bytes).concat();
        assert_eq!(sent, expected);
    }

    #[test]
    fn a_connection_that_the_kernel_ended_is_dead() {
        let (ours, theirs) = sysapi::socket_pair().unwrap();
        assert!(!is_dead(&ours));
        drop(theirs);
        assert!(is_dead(&ours));
    }
}
