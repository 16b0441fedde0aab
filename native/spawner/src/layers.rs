//! The pinned mount namespace: read-only layers, the scratch filesystem and the prepared pieces of every sandbox's tree are mounted there once.
//!
//! It is a namespace of its own, so that cloning the spawner's doesn't copy its mounts, and it is held by a bind mount on `<run>/layers.ns`, so that
//! a spawner that dies loses nothing: the next one enters it again. Two threads live in it and assemble the mounts of each new sandbox as
//! detached descriptors. Layers are given by descriptor throughout, so no path of the host shows up inside.

use std::collections::HashMap;
use std::ffi::{CStr, CString, OsStr};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{mpsc, Arc, Mutex, MutexGuard, PoisonError};

use sha2::{Digest, Sha256};
use wire::digest::is_digest;

use crate::doctor::filesystems;
use crate::loops::{self, Access};
use crate::sysapi::{
    self, attach_mount, clone_mount, set_mount_attributes, FsContext, MOUNT_ATTR_IDMAP,
    MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC, MOUNT_ATTR_NOSUID, MOUNT_ATTR_RDONLY,
};
use crate::{covers, create};

/// The most that a layer's metadata file may be: the kernel parses it.
const MAX_METADATA: u64 = 4 << 30;

/// Devices of the /dev that all sandboxes share: name, major, minor.
const DEVICES: &[(&str, u32, u32)] = &[
    ("null", 1, 3),
    ("zero", 1, 5),
    ("full", 1, 7),
    ("random", 1, 8),
    ("urandom", 1, 9),
    ("tty", 5, 0),
];

/// /dev/fuse: the kernel's Documentation/admin-guide/devices.txt.
pub const FUSE_MAJOR: u32 = 10;
pub const FUSE_MINOR: u32 = 229;

/// Directories of /sys that sandboxes must not read. The last three tell of other sandboxes how much they have written, what their layers are, and where
/// the node keeps its files.
const MASKED: [&str; 5] = [
    "firmware",
    "devices/virtual/powercap",
    "devices/virtual/block",
    "fs/btrfs",
    "fs/erofs",
];

const QUIET: libc::c_ulong = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;

/// Everything that a sandbox's child attaches, detached and mapped to its ids.
pub struct Tree {
    pub root: OwnedFd,
    pub sys: OwnedFd,
    pub dev: OwnedFd,
    /// Mounts over files of /proc and /sys that would show the host's size, in the order of [`covers::PATHS`].
    pub covers: Vec<OwnedFd>,
}

/// What a sandbox's tree is made of. `layers`: metadata digests, the top one first.
pub struct TreeSpec {
    pub layers: Vec<String>,
    pub volume: OwnedFd,
    pub userns: OwnedFd,
    /// Host id of the sandbox's root.
    pub root_id: u32,
    pub cover: covers::Key,
}

type Job = Box<dyn FnOnce(&Pinned) + Send>;

/// Making an overlay waits for grace periods of the kernel: meanwhile another one can be made.
const THREADS: usize = 2;

/// A handle on the threads that live in the pinned namespace.
#[derive(Clone)]
pub struct Layers {
    jobs: mpsc::Sender<Job>,
}

/// How layers are mounted, as the command line has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mounts {
    /// From files and by descriptor, where the kernel can.
    Auto,
    /// From loop devices and by path, as kernels before 6.12 and 6.15 need it.
    Classic,
}

impl Mounts {
    pub fn name(self) -> &'static str {
        match self {
            Mounts::Auto => "auto",
            Mounts::Classic => "classic",
        }
    }
}

/// What layers are mounted by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Means {
    /// Block devices, for the kernel mounts no EROFS from files of this state directory.
    pub loops: bool,
    /// Paths, for it stacks only what is attached somewhere.
    pub paths: bool,
}

impl Means {
    /// Found by trying. Must be called in the host's mount namespace.
    pub fn of(mounts: Mounts, state_dir: &Path) -> Self {
        let classic = mounts == Mounts::Classic;
        Means {
            loops: classic || filesystems::mount_erofs(state_dir, false).is_err(),
            paths: classic || filesystems::stack_by_descriptor().is_err(),
        }
    }
}

/// The files of covers, by what they were made for.
type Covers = HashMap<covers::Key, Vec<CString>>;

/// What those threads share.
struct Pinned {
    layers: Mutex<HashMap<String, Mounted>>,
    means: Means,
    covers: Mutex<Covers>,
    dev: OwnedFd,
    sys: OwnedFd,
}

/// One layer. Those whose data comes through blobfs are mounted apart, so that a later spawner knows them.
struct Mounted {
    handle: Arc<OwnedFd>,
    place: PathBuf,
}

/// Where a layer's data blob is.
pub enum Data {
    None,
    /// A file of the service's, whole.
    File(File),
    /// A file of blobfs'.
    Lazy(File),
}

/// The mount that blobfs serves: the connection to the kernel and the root directory.
pub struct BlobMount {
    pub connection: OwnedFd,
    pub root: OwnedFd,
}

/// Does the jobs as they come, as one of several.
fn work(inbox: &Mutex<mpsc::Receiver<Job>>, state: &Pinned) {
    loop {
        let job = lock(inbox).recv();
        match job {
            Ok(job) => job(state),
            Err(_) => return,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Pairs of limits whose covers are kept at once, some 10 KB each.
const MAX_COVERS: usize = 256;

/// Where things are in the pinned namespace.
const LAYERS: &str = "/layers";
const LAZY: &str = "/lazy";
const BLOBS: &str = "/blobs";
/// A node for /dev/fuse: the namespace has no other devices.
const FUSE_DEVICE: &str = "/fuse";
const SCRATCH: &str = "/scratch";
const DEV: &str = "/dev";
const SYS: &str = "/sys";
const PROC: &str = "/proc";
const COVERS: &str = "/covers";
/// Where layers are attached while they are stacked, if that is needed.
const STACK: &str = "/stack";

/// How overlays are mounted. Volatile: scratch needs no fsync. No metacopy and no followed redirects: an upper layer is its owner's word.
const OVERLAY_FLAG: &CStr = c"volatile";
const OVERLAY_OPTIONS: [(&CStr, &CStr); 4] = [
    (c"redirect_dir", c"nofollow"),
    (c"metacopy", c"off"),
    (c"index", c"off"),
    (c"xino", c"auto"),
];

fn text(value: impl AsRef<OsStr>) -> io::Result<CString> {
    CString::new(value.as_ref().as_bytes()).map_err(io::Error::other)
}

/// A handle on a directory that something is mounted on.
fn point(path: &Path) -> io::Result<OwnedFd> {
    sysapi::open_at(
        libc::AT_FDCWD,
        &text(path)?,
        libc::O_PATH | libc::O_DIRECTORY,
    )
}

/// The result, with what was done before an error's own words.
pub fn named<T>(what: &str, result: io::Result<T>) -> io::Result<T> {
    result.map_err(|error| io::Error::new(error.kind(), format!("{what}: {error}")))
}

/// Leaves a mount namespace with one small tmpfs as its root and a proc: what it costs to clone is what it holds. The proc shows a process to those
/// only who may trace it, because a copy of it stays in every sandbox's namespace, below everything that a sandbox can reach.
pub fn enter_small_root(staging: &Path) -> io::Result<()> {
    let stage = text(staging)?;
    sysapi::mount(None, c"/", None, libc::MS_REC | libc::MS_PRIVATE, None)?;
    sysapi::mount(
        Some(c"dsec"),
        &stage,
        Some(c"tmpfs"),
        libc::MS_NOSUID,
        Some(c"mode=755"),
    )?;
    for name in [PROC, LAYERS, SCRATCH, DEV, SYS, COVERS] {
        std::fs::create_dir(staging.join(&name[1..]))?;
    }
    sysapi::mount(
        Some(c"proc"),
        &text(staging.join(&PROC[1..]))?,
        Some(c"proc"),
        QUIET,
        Some(c"hidepid=ptraceable"),
    )?;
    std::env::set_current_dir(staging)?;
    sysapi::pivot_root_here()?;
    sysapi::unmount(c".", libc::MNT_DETACH)?;
    std::env::set_current_dir("/")
}

impl Layers {
    /// Enters the namespace held at `pin`, or makes it: then `scratch` (a block device with a btrfs) is mounted in it. Must be called in the host's
    /// mount namespace, before the caller makes its own. Returns the root of the scratch filesystem as well.
    pub fn open(
        pin: &Path,
        staging: &Path,
        means: Means,
        scratch: impl FnOnce() -> io::Result<File>,
    ) -> io::Result<(Self, OwnedFd)> {
        let (jobs, inbox) = mpsc::channel::<Job>();
        let (ready, opened) = mpsc::channel::<io::Result<OwnedFd>>();
        let (pinned, go_on) = mpsc::channel::<()>();
        let (made, is_made) = mpsc::channel::<()>();
        let existing = open_pin(pin);
        let device = if existing.is_none() {
            Some(scratch()?)
        } else {
            None
        };
        let fresh = existing.is_none();
        let (tell_tid, tid) = mpsc::channel::<i32>();
        let staging = staging.to_owned();
        std::thread::Builder::new()
            .name("layers".into())
            .spawn(move || {
                // SAFETY: gettid has no arguments and can't fail.
                let _ = tell_tid.send(unsafe { libc::gettid() });
                let entered = match (existing, device) {
                    (Some(namespace), _) => enter(namespace),
                    (None, Some(device)) => {
                        let made_it = found(&staging).and_then(|()| mount_scratch(&device));
                        made_it.and_then(|()| {
                            let _ = made.send(());
                            go_on.recv().map_err(io::Error::other)
                        })
                    }
                    (None, None) => Err(io::Error::other("no device for the scratch filesystem")),
                }
                .and_then(|()| create::keep_capabilities());
                let state = entered.and_then(|()| {
                    let root = sysapi::open_at(
                        libc::AT_FDCWD,
                        &text(SCRATCH)?,
                        libc::O_RDONLY | libc::O_DIRECTORY,
                    )?;
                    Ok((Pinned::recover(means)?, root))
                });
                match state {
                    Ok((state, root)) => {
                        let (state, inbox) = (Arc::new(state), Arc::new(Mutex::new(inbox)));
                        let others: io::Result<Vec<_>> = (1..THREADS)
                            .map(|_| {
                                // A thread is born into the namespace and with the capabilities of the one that starts it.
                                let (state, inbox) = (state.clone(), inbox.clone());
                                std::thread::Builder::new()
                                    .name("layers".into())
                                    .spawn(move || work(&inbox, &state))
                            })
                            .collect();
                        let _ = ready.send(others.map(|_| root));
                        work(&inbox, &state);
                    }
                    Err(error) => drop(ready.send(Err(error))),
                }
            })?;
        let tid = tid.recv().map_err(io::Error::other)?;
        // Pinned when everything is in it: what a death leaves unpinned, the kernel takes down, and the next start begins anew. The bind must be made by
        // a thread of the host's namespace. If the other thread has failed, its answer says how.
        if fresh && is_made.recv().is_ok() {
            File::create(pin)?;
            named(
                "pinning the layers' namespace",
                sysapi::mount(
                    Some(&text(format!("/proc/self/task/{tid}/ns/mnt"))?),
                    &text(pin)?,
                    None,
                    libc::MS_BIND,
                    None,
                ),
            )?;
            let _ = pinned.send(());
        }
        let root = opened.recv().map_err(io::Error::other)??;
        Ok((Layers { jobs }, root))
    }

    fn ask<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Pinned) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let (answer, result) = mpsc::channel();
        self.jobs
            .send(Box::new(move |state| drop(answer.send(work(state)))))
            .map_err(|_| io::Error::other("the layers thread is gone"))?;
        result
            .recv()
            .map_err(|_| io::Error::other("the layers thread is gone"))?
    }

    /// Mounts a layer once. `metadata` must be a file that nobody but root can change; the data may be anybody's.
    pub fn mount(&self, digest: String, metadata: File, data: Data) -> io::Result<()> {
        self.ask(move |state| state.mount(digest, &metadata, &data))
    }

    pub fn unmount(&self, digest: String) -> io::Result<()> {
        self.ask(move |state| {
            let removed = lock(&state.layers).remove(&digest);
            removed.map_or(Ok(()), |layer| detach(&layer.place))
        })
    }

    /// Whether a layer is mounted whose data comes through blobfs.
    pub fn any_lazy(&self) -> io::Result<bool> {
        self.ask(|state| Ok(lock(&state.layers).values().any(Mounted::is_lazy)))
    }

    /// Mounts a new filesystem for blobfs.
    pub fn mount_blobs(&self) -> io::Result<BlobMount> {
        self.ask(|_| mount_blobs())
    }

    /// The root directory of the one that is mounted, and the number of its connection, if there is one.
    pub fn find_blobs(&self) -> io::Result<Option<(OwnedFd, u32)>> {
        self.ask(|_| match blobs_connection()? {
            Some(number) => Ok(Some((point(Path::new(BLOBS))?, number))),
            None => Ok(None),
        })
    }

    /// Aborts what blobfs served: whoever waits for a read gets EIO. The layers over it are mounted no more; sandboxes that have them keep what
    /// is in memory. Returns whether there were any.
    pub fn abort_blobs(&self) -> io::Result<bool> {
        self.ask(|state| {
            if blobs_connection()?.is_some() {
                sysapi::unmount(&text(BLOBS)?, libc::MNT_FORCE | libc::MNT_DETACH)?;
            }
            let mut layers = lock(&state.layers);
            let count = layers.len();
            layers.retain(|_, layer| {
                if !layer.is_lazy() {
                    return true;
                }
                // Nothing waits for it any more, so that the rest need not wait for it either.
                if let Err(error) = detach(&layer.place) {
                    eprintln!("dsec-spawner: {}: {error}", layer.place.display());
                }
                false
            });
            Ok(layers.len() < count)
        })
    }

    /// The layers that are mounted, and whether their data comes through blobfs.
    pub fn mounted(&self) -> io::Result<Vec<(String, bool)>> {
        self.ask(|state| {
            Ok(lock(&state.layers)
                .iter()
                .map(|(digest, layer)| (digest.clone(), layer.is_lazy()))
                .collect())
        })
    }

    /// Assembles the mounts of one sandbox.
    pub fn tree(&self, spec: TreeSpec) -> io::Result<Tree> {
        self.ask(move |state| state.tree(&spec))
    }
}

/// Runs `work` with this thread's filesystem ids set to `id`; its capabilities stay (see [`create::keep_capabilities`]).
fn with_file_ids<T>(id: u32, work: impl FnOnce() -> T) -> T {
    let set = |id: u32| {
        // SAFETY: plain integers; these calls concern the calling thread only.
        unsafe {
            libc::syscall(libc::SYS_setfsgid, id);
            libc::syscall(libc::SYS_setfsuid, id);
        }
    };
    set(id);
    let result = work();
    set(0);
    result
}

/// Whether a namespace is held at `pin`: not every file there is one.
pub fn is_pinned(pin: &Path) -> bool {
    open_pin(pin).is_some()
}

fn open_pin(pin: &Path) -> Option<File> {
    const NSFS_MAGIC: i64 = 0x6e73_6673;
    let file = File::open(pin).ok()?;
    // SAFETY: statfs is plain data, and the descriptor is open.
    let kind = unsafe {
        let mut stat: libc::statfs = std::mem::zeroed();
        libc::fstatfs(file.as_raw_fd(), &mut stat);
        stat.f_type
    };
    (kind == NSFS_MAGIC).then_some(file)
}

fn enter(namespace: File) -> io::Result<()> {
    sysapi::unshare(libc::CLONE_FS)?;
    // SAFETY: the descriptor is open.
    sysapi::check(libc::c_long::from(unsafe {
        libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNS)
    }))?;
    std::env::set_current_dir("/")
}

/// Makes the namespace of the calling thread.
fn found(staging: &Path) -> io::Result<()> {
    sysapi::unshare(libc::CLONE_NEWNS)?;
    named("the layers' root", enter_small_root(staging))?;
    std::fs::create_dir(format!("{DEV}/template"))?;
    make_dev()?;
    sysapi::mount(
        Some(c"covers"),
        &text(COVERS)?,
        Some(c"tmpfs"),
        QUIET,
        Some(c"mode=755"),
    )?;
    make_sys()
}

fn mount_scratch(device: &File) -> io::Result<()> {
    let source = text(format!("/proc/self/fd/{}", device.as_raw_fd()))?;
    named(
        "mounting the scratch filesystem",
        sysapi::mount(
            Some(&source),
            &text(SCRATCH)?,
            Some(c"btrfs"),
            libc::MS_NOATIME,
            Some(&text(crate::scratch::MOUNT_OPTIONS)?),
        ),
    )
}

/// The /dev that all sandboxes share, read-only: device nodes can't be made inside a user namespace, and one mount is cheaper than seven.
fn make_dev() -> io::Result<()> {
    let point = PathBuf::from(format!("{DEV}/template"));
    sysapi::mount(
        Some(c"dev"),
        &text(&point)?,
        Some(c"tmpfs"),
        libc::MS_NOSUID | libc::MS_NOEXEC,
        Some(c"mode=755,size=64k"),
    )?;
    for (name, major, minor) in DEVICES {
        let path = text(point.join(name))?;
        // SAFETY: path is NUL-terminated and outlives the calls.
        sysapi::check(libc::c_long::from(unsafe {
            libc::mknod(
                path.as_ptr(),
                libc::S_IFCHR | 0o666,
                libc::makedev(*major, *minor),
            )
        }))?;
        sysapi::chmod_at(libc::AT_FDCWD, &path, 0o666)?;
    }
    for (name, target) in [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
        ("ptmx", "pts/ptmx"),
    ] {
        std::os::unix::fs::symlink(target, point.join(name))?;
    }
    for name in ["pts", "shm", "mqueue"] {
        std::fs::create_dir(point.join(name))?;
    }
    Ok(())
}

/// The /sys that all sandboxes share, read-only. A sysfs shows the devices of the network namespace that it is mounted in, and each of its own would cost
/// a sandbox a superblock and the kernel a search among all of them; so it is mounted in an empty namespace, which looks like the sandboxes' own.
fn make_sys() -> io::Result<()> {
    sysapi::unshare(libc::CLONE_NEWNET)?;
    let flags = QUIET | libc::MS_RDONLY;
    named(
        "a sysfs for sandboxes",
        sysapi::mount(Some(c"sysfs"), &text(SYS)?, Some(c"sysfs"), flags, None),
    )?;
    let empty = text(format!("{DEV}/template/mqueue"))?;
    for path in MASKED {
        let target = PathBuf::from(SYS).join(path);
        if target.exists() {
            sysapi::mount(Some(&empty), &text(&target)?, None, libc::MS_BIND, None)?;
        }
    }
    Ok(())
}

impl Mounted {
    fn is_lazy(&self) -> bool {
        self.place.starts_with(LAZY)
    }
}

fn detach(place: &Path) -> io::Result<()> {
    sysapi::unmount(&text(place)?, libc::MNT_DETACH)?;
    std::fs::remove_dir(place)
}

/// The places in a directory that something is mounted on. The others, of a spawner that died between making one and mounting, or between unmounting and
/// removing it, are removed.
fn mounted_in(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let own = directory.metadata()?.dev();
    let mut mounted = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let place = entry?.path();
        if place.metadata()?.dev() == own {
            std::fs::remove_dir(&place)?;
        } else {
            mounted.push(place);
        }
    }
    Ok(mounted)
}

/// Mounts FUSE read-only, for root only: files in it are passed on by descriptor.
fn mount_blobs() -> io::Result<BlobMount> {
    let device = text(FUSE_DEVICE)?;
    if !Path::new(FUSE_DEVICE).exists() {
        // SAFETY: the path is NUL-terminated and outlives the call.
        sysapi::check(libc::c_long::from(unsafe {
            libc::mknod(
                device.as_ptr(),
                libc::S_IFCHR | 0o600,
                libc::makedev(FUSE_MAJOR, FUSE_MINOR),
            )
        }))?;
    }
    let connection = sysapi::open_at(libc::AT_FDCWD, &device, libc::O_RDWR)?;
    let context = FsContext::open(c"fuse")?;
    context.set(c"source", c"dsec-blobs")?;
    context.set(c"fd", &text(connection.as_raw_fd().to_string())?)?;
    for (key, value) in [
        (c"rootmode", c"40555"),
        (c"user_id", c"0"),
        (c"group_id", c"0"),
    ] {
        context.set(key, value)?;
    }
    let attributes = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC;
    let mount = named("mounting FUSE", context.mount(attributes))?;
    std::fs::create_dir_all(BLOBS)?;
    attach_mount(mount.as_raw_fd(), &text(BLOBS)?)?;
    Ok(BlobMount {
        connection,
        root: point(Path::new(BLOBS))?,
    })
}

/// The number of the connection behind [`BLOBS`]: its device's minor number. None: nothing is mounted there.
fn blobs_connection() -> io::Result<Option<u32>> {
    let mounts = std::fs::read_to_string("/proc/thread-self/mountinfo")?;
    Ok(mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(2);
        let device = fields.next()?;
        (fields.nth(1)? == BLOBS).then(|| device.split_once(':')?.1.parse().ok())?
    }))
}

impl Pinned {
    /// Finds what is mounted in the namespace already, and takes down what an earlier spawner was about to stack.
    fn recover(means: Means) -> io::Result<Self> {
        std::fs::create_dir_all(STACK)?;
        for entry in std::fs::read_dir(STACK)?.flatten() {
            clear_stage(&entry.path())?;
        }
        remove_covers()?;
        let mut layers = HashMap::new();
        for directory in [LAYERS, LAZY] {
            std::fs::create_dir_all(directory)?;
            for place in mounted_in(Path::new(directory))? {
                let name = place.file_name().unwrap_or_default();
                let digest = name.to_string_lossy().into_owned();
                let handle = Arc::new(point(&place)?);
                layers.insert(digest, Mounted { handle, place });
            }
        }
        Ok(Pinned {
            layers: Mutex::new(layers),
            means,
            covers: Mutex::default(),
            dev: point(&Path::new(DEV).join("template"))?,
            sys: point(Path::new(SYS))?,
        })
    }

    fn mount(&self, digest: String, metadata: &File, data: &Data) -> io::Result<()> {
        if lock(&self.layers).contains_key(&digest) {
            return Ok(());
        }
        // Not with the table locked: it may wait for blobfs, and whoever lets it go needs the table.
        let mount = self.mount_erofs(&digest, metadata, data)?;
        let mut layers = lock(&self.layers);
        if layers.contains_key(&digest) {
            return Ok(());
        }
        let directory = match data {
            Data::None | Data::File(_) => LAYERS,
            Data::Lazy(_) => LAZY,
        };
        let place = Path::new(directory).join(&digest);
        std::fs::create_dir(&place)?;
        attach_mount(mount.as_raw_fd(), &text(&place)?)
            .inspect_err(|_| drop(std::fs::remove_dir(&place)))?;
        let handle = Arc::new(point(&place)?);
        layers.insert(digest, Mounted { handle, place });
        Ok(())
    }

    /// A detached mount of a layer's files, or of loop devices over them.
    fn mount_erofs(&self, digest: &str, metadata: &File, data: &Data) -> io::Result<OwnedFd> {
        let context = FsContext::open(c"erofs")?;
        // The devices must outlive the mount call: after it, the mount holds them.
        let mut devices = Vec::new();
        let mut give = |key: &CStr, file: &File| {
            let mut descriptor = file.as_raw_fd();
            if self.means.loops {
                let device = loops::attach(file, digest.as_bytes(), Path::new("/"), Access::Read);
                let device = named("a loop device for the layer", device)?;
                descriptor = device.as_raw_fd();
                devices.push(device);
            }
            context.set(key, &text(format!("/proc/self/fd/{descriptor}"))?)
        };
        // Read-only devices are mounted only if that is asked for.
        context.set_flag(c"ro")?;
        give(c"source", metadata)?;
        match data {
            Data::None => {}
            Data::File(blob) => give(c"device", blob)?,
            Data::Lazy(blob) => {
                give(c"device", blob)?;
                // Past the page cache of blobfs' file: what is read isn't kept twice, and a read that is cut short because its reader is killed can't be
                // filled up with zeros for everybody (Linux 7.0-rc1 still did that). A loop device does so by itself.
                if !self.means.loops {
                    context.set_flag(c"directio")?;
                }
            }
        }
        context
            .mount(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV)
            .map_err(|error| {
                io::Error::new(
                    error.kind(),
                    format!("mounting the layer: {error}; {}", context.log()),
                )
            })
    }

    fn tree(&self, spec: &TreeSpec) -> io::Result<Tree> {
        let userns = spec.userns.as_raw_fd();
        // overlayfs acts on the writable layer with the ids of whoever mounts it, and those must have a place in the sandbox's map.
        let root = with_file_ids(spec.root_id, || self.overlay(spec, userns))?;
        let dev = clone_mount(self.dev.as_raw_fd(), c"")?;
        let attributes = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC;
        let mapped = attributes | MOUNT_ATTR_IDMAP;
        // Before Linux 6.3 a tmpfs can't be mapped: then the devices belong to nobody, and work.
        set_mount_attributes(dev.as_raw_fd(), mapped, Some(userns)).or_else(|error| match error
            .raw_os_error()
        {
            Some(libc::EINVAL) => set_mount_attributes(dev.as_raw_fd(), attributes, None),
            _ => Err(error),
        })?;
        Ok(Tree {
            root,
            sys: sysapi::clone_mounts(self.sys.as_raw_fd())?,
            dev,
            covers: self.covers(&spec.cover)?,
        })
    }

    fn overlay(&self, spec: &TreeSpec, userns: RawFd) -> io::Result<OwnedFd> {
        let volume = named(
            "the writable layer",
            clone_mount(spec.volume.as_raw_fd(), c"."),
        )?;
        set_mount_attributes(volume.as_raw_fd(), MOUNT_ATTR_IDMAP, Some(userns))?;
        let mut layers = Vec::with_capacity(spec.layers.len());
        for digest in &spec.layers {
            let layer = lock(&self.layers)
                .get(digest)
                .map(|layer| layer.handle.clone());
            let layer = layer.ok_or_else(|| {
                io::Error::new(
                    io::ErrorKind::NotFound,
                    format!("layer {digest} is not mounted"),
                )
            })?;
            let mapped = clone_mount(layer.as_raw_fd(), c"")?;
            named(
                "mapping the layer's ids",
                set_mount_attributes(mapped.as_raw_fd(), MOUNT_ATTR_IDMAP, Some(userns)),
            )?;
            layers.push(mapped);
        }
        if self.means.paths {
            stack_by_path(&volume, &layers)
        } else {
            stack(&volume, &layers)
        }
    }

    /// Detached mounts of the covers for these limits, whose files are made on first use.
    fn covers(&self, key: &covers::Key) -> io::Result<Vec<OwnedFd>> {
        let attributes =
            MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC;
        // Locked until they are mounted: files of other limits may take their place.
        let mut known = lock(&self.covers);
        cover_files(&mut known, key)?
            .iter()
            .map(|path| {
                let mount = clone_mount(libc::AT_FDCWD, path)?;
                set_mount_attributes(mount.as_raw_fd(), attributes, None)?;
                Ok(mount)
            })
            .collect()
    }
}

fn cover_files<'a>(known: &'a mut Covers, key: &covers::Key) -> io::Result<&'a [CString]> {
    if !known.contains_key(key) {
        if known.len() >= MAX_COVERS {
            known.clear();
            remove_covers()?;
        }
        let directory = Path::new(COVERS).join(key.name());
        std::fs::create_dir_all(&directory)?;
        let mut paths = Vec::new();
        for (name, content) in key.files()? {
            let path = directory.join(name);
            std::fs::write(&path, content)?;
            paths.push(text(&path)?);
        }
        known.insert(key.clone(), paths);
    }
    Ok(&known[key])
}

/// Removes the files of all covers. Those that are mounted in sandboxes live on there.
fn remove_covers() -> io::Result<()> {
    for entry in std::fs::read_dir(COVERS)? {
        std::fs::remove_dir_all(entry?.path())?;
    }
    Ok(())
}

/// A detached overlay of these detached layers, the top one first, with the writable one in `volume`.
fn stack(volume: &OwnedFd, layers: &[OwnedFd]) -> io::Result<OwnedFd> {
    let below = |name| {
        let flags = libc::O_PATH | libc::O_DIRECTORY;
        sysapi::open_at(volume.as_raw_fd(), name, flags)
    };
    let context = FsContext::open(c"overlay")?;
    for layer in layers {
        context.set_fd(c"lowerdir+", layer.as_raw_fd())?;
    }
    context.set_fd(c"upperdir", below(c"u")?.as_raw_fd())?;
    context.set_fd(c"workdir", below(c"w")?.as_raw_fd())?;
    context.set_flag(OVERLAY_FLAG)?;
    // An id of its own would be written into the layer, and nobody asks for it.
    let own = [(c"source", c"overlay"), (c"uuid", c"null")];
    for (key, value) in OVERLAY_OPTIONS.into_iter().chain(own) {
        context.set(key, value)?;
    }
    context.mount(MOUNT_ATTR_NODEV).map_err(|error| {
        io::Error::new(error.kind(), format!("overlay: {error}; {}", context.log()))
    })
}

/// The same on kernels that stack attached layers only: they are attached to a place of the namespace's until the overlay has its own copies.
fn stack_by_path(volume: &OwnedFd, layers: &[OwnedFd]) -> io::Result<OwnedFd> {
    let stage = Stage::new()?;
    let volume = stage.attach("v", volume)?;
    let lower: io::Result<Vec<String>> = (0..)
        .zip(layers)
        .map(|(index, layer)| stage.attach(&index.to_string(), layer))
        .collect();
    let mut options = format!(
        "{},lowerdir={},upperdir={volume}/u,workdir={volume}/w",
        OVERLAY_FLAG.to_string_lossy(),
        lower?.join(":")
    );
    for (key, value) in OVERLAY_OPTIONS {
        options += &format!(",{}={}", key.to_string_lossy(), value.to_string_lossy());
    }
    let target = text(stage.directory("o")?)?;
    let kind = Some(c"overlay");
    named(
        "overlay",
        sysapi::mount(kind, &target, kind, libc::MS_NODEV, Some(&text(options)?)),
    )?;
    clone_mount(libc::AT_FDCWD, &target)
}

/// Where the mounts of one sandbox are attached for a moment.
struct Stage(PathBuf);

impl Stage {
    fn new() -> io::Result<Self> {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let number = LAST.fetch_add(1, Ordering::Relaxed);
        let place = Path::new(STACK).join(number.to_string());
        std::fs::create_dir(&place)?;
        Ok(Stage(place))
    }

    fn directory(&self, name: &str) -> io::Result<PathBuf> {
        let path = self.0.join(name);
        std::fs::create_dir(&path)?;
        Ok(path)
    }

    fn attach(&self, name: &str, mount: &OwnedFd) -> io::Result<String> {
        let path = self.directory(name)?;
        attach_mount(mount.as_raw_fd(), &text(&path)?)?;
        Ok(path.to_string_lossy().into_owned())
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // What stays is taken down by the next spawner.
        if let Err(error) = clear_stage(&self.0) {
            eprintln!("dsec-spawner: {}: {error}", self.0.display());
        }
    }
}

fn clear_stage(place: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(place)?.flatten() {
        let path = entry.path();
        let point = text(&path)?;
        while sysapi::unmount(&point, libc::MNT_DETACH).is_ok() {}
        std::fs::remove_dir(&path)?;
    }
    std::fs::remove_dir(place)
}

/// A file under a name of its own, which goes unless it is published.
struct Partial(PathBuf);

impl Partial {
    /// Beside `target`. Two threads may be at the same file.
    fn beside(target: &Path) -> (Self, io::Result<File>) {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let number = LAST.fetch_add(1, Ordering::Relaxed);
        let path = target.with_extension(format!("{number}.part"));
        let file = File::options().write(true).create_new(true).open(&path);
        (Partial(path), file)
    }

    fn publish(self, target: &Path) -> io::Result<()> {
        std::fs::rename(&self.0, target)
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // Once published it isn't there any more. What can't be removed goes with the next start.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Opens a plain file in a directory of somebody else's: no link is followed, and nothing else that has been put there is waited for.
pub fn open_plain(path: &Path) -> io::Result<File> {
    let file = File::options()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        let kind = io::ErrorKind::InvalidData;
        Err(io::Error::new(kind, "not a plain file"))
    }
}

/// Copies a layer's metadata to `target`, root's own, while its digest is checked: what the kernel will parse can't be changed afterwards. A target that is
/// there was checked since the namespace of layers was made (see [`clear_metadata`]).
pub fn import_metadata(source: &Path, target: &Path, digest: &str) -> io::Result<File> {
    if let Ok(file) = File::open(target) {
        return Ok(file);
    }
    let source = named(&format!("layer {digest}"), open_plain(source))?;
    let mut input = source.take(MAX_METADATA + 1);
    let (partial, output) = Partial::beside(target);
    let mut output = output?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0_u8; 1 << 18];
    let mut total = 0_u64;
    loop {
        let read = input.read(&mut buffer)?;
        if read == 0 {
            break;
        }
        total += read as u64;
        hasher.update(&buffer[..read]);
        output.write_all(&buffer[..read])?;
    }
    let found: String = hasher
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    if total > MAX_METADATA || found != digest {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("layer {digest}: its metadata has the digest {found}"),
        ));
    }
    partial.publish(target)?;
    File::open(target)
}

/// Removes checked metadata that can't be relied on: what a spawner was copying when it died; and all of it where the layers' namespace is to be made
/// anew, for then the machine may have crashed before the copies were on the disk.
pub fn clear_metadata(directory: &Path, is_fresh: bool) -> io::Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        if is_fresh || !is_digest(&entry.file_name().to_string_lossy()) {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Directory;

    #[test]
    fn metadata_with_another_digest_is_not_imported() {
        let home = Directory::make("layers-layers");
        std::fs::write(home.join("source"), b"content").unwrap();
        let digest = "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73";
        assert!(
            import_metadata(&home.join("source"), &home.join("wrong"), &"0".repeat(64)).is_err()
        );
        assert!(import_metadata(&home.join("source"), &home.join("right"), digest).is_ok());
        assert_eq!(names(&home), ["right", "source"]);
    }

    #[test]
    fn metadata_is_a_plain_file_or_nothing() {
        let home = Directory::make("layers-plain");
        let digest = "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73";
        std::fs::write(home.join("content"), b"content").unwrap();
        std::os::unix::fs::symlink(home.join("content"), home.join("link")).unwrap();
        let fifo = text(home.join("fifo")).unwrap();
        // SAFETY: the path is NUL-terminated.
        assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) }, 0);
        for source in ["link", "fifo", "nothing", "."] {
            let imported = import_metadata(&home.join(source), &home.join("target"), digest);
            assert!(imported.is_err(), "{source}");
        }
        assert_eq!(names(&home), ["content", "fifo", "link"]);
    }

    #[test]
    fn metadata_of_another_namespace_or_half_copied_is_not_relied_on() {
        let home = Directory::make("layers-meta");
        let whole = "a".repeat(64);
        for name in [whole.clone(), format!("{whole}.7.part")] {
            std::fs::write(home.join(name), b"content").unwrap();
        }
        clear_metadata(&home, false).unwrap();
        assert_eq!(names(&home), [whole]);
        clear_metadata(&home, true).unwrap();
        assert!(names(&home).is_empty());
    }

    #[test]
    fn a_place_that_nothing_is_mounted_on_is_no_layer() {
        let home = Directory::make("layers-places");
        std::fs::create_dir_all(home.join("empty")).unwrap();
        // Another filesystem.
        std::os::unix::fs::symlink("/proc", home.join("mounted")).unwrap();
        assert_eq!(mounted_in(&home).unwrap(), [home.join("mounted")]);
        assert_eq!(names(&home), ["mounted"]);
    }

    fn names(directory: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(directory).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }
}
