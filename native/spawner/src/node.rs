//! What every privileged act needs, opened once at start: the directories by descriptor, the groups, the scratch filesystem, the layers.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::cgroup::Cgroups;
use crate::child::MASKS;
use crate::fuse::Fuse;
use crate::keeper::{self, Keeper};
use crate::layers::{self, named, Data, Layers, Means};
use crate::options::Options;
use crate::scratch::{self, Scratch};
use crate::sysapi;

pub struct Node {
    pub cgroups: Cgroups,
    pub scratch: Scratch,
    pub layers: Layers,
    pub fuse: Fuse,
    /// `<run>/c`
    pub sockets: OwnedFd,
    /// chronus, to be exec'd by descriptor.
    pub chronus: OwnedFd,
    /// dsec-mklayer, likewise.
    pub mklayer: OwnedFd,
    /// `<state>/packs`, root's: layers that are being made of snapshots.
    pub packs: OwnedFd,
    pub null: File,
    pub uid_base: u32,
    pub service_uid: u32,
    pub cores: usize,
    pub memory: u64,
    /// Which of [`MASKS`] exist here.
    pub masks: Vec<bool>,
    /// `<state>/images/blobs`, the service's.
    blobs: OwnedFd,
    /// `<run>/meta`, root's.
    metadata: OwnedFd,
}

/// Where the scratch image is.
pub fn scratch_image(options: &Options) -> PathBuf {
    options.state_dir.join("scratch/scratch.img")
}

/// Where the namespace of layers is pinned.
pub fn pin(options: &Options) -> PathBuf {
    pin_below(&options.run_dir)
}

/// Likewise, of the instance with this run directory.
pub fn pin_below(run: &Path) -> PathBuf {
    run.join("layers.ns")
}

/// Makes a directory of root's with this mode, or corrects the mode of one that is there.
fn directory(path: &Path, mode: u32) -> io::Result<()> {
    named(
        &path.display().to_string(),
        std::fs::create_dir_all(path.parent().unwrap_or(path))
            .and_then(|()| {
                make_directory(libc::AT_FDCWD, &CString::new(path.as_os_str().as_bytes())?)
            })
            .and_then(|(directory, _)| {
                if directory.metadata()?.uid() != 0 {
                    return Err(io::Error::other("it isn't root's: remove it"));
                }
                directory.set_permissions(std::fs::Permissions::from_mode(mode))
            }),
    )
}

/// Makes a directory of the service's, or takes the one that is there. It is made among files of the service's, which may swap its own for links meanwhile.
fn service_directory(parent: RawFd, path: &CStr, service: u32) -> io::Result<OwnedFd> {
    let (directory, made) = make_directory(parent, path)?;
    if made {
        std::os::unix::fs::fchown(&directory, Some(service), Some(service))?;
    }
    Ok(directory.into())
}

/// Opens a directory, made if it is missing, never through a link. Says whether it was made.
fn make_directory(parent: RawFd, path: &CStr) -> io::Result<(File, bool)> {
    let made = match sysapi::make_dir_at(parent, path, 0o755) {
        Ok(()) => true,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
        Err(error) => return Err(error),
    };
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW;
    Ok((sysapi::open_at(parent, path, flags)?.into(), made))
}

/// The directory of the sandboxes' sockets is a tmpfs of its own where the run directory is on a disk: there a socket's inode costs a twentieth of a
/// whole creation.
fn sockets_in_memory(path: &Path) -> io::Result<()> {
    directory(path, 0o711)?;
    let target = CString::new(path.as_os_str().as_bytes())?;
    if filesystem(&target)? == libc::TMPFS_MAGIC {
        return Ok(());
    }
    let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    named(
        "a tmpfs for sockets",
        sysapi::mount(
            Some(c"dsec"),
            &target,
            Some(c"tmpfs"),
            flags,
            Some(c"mode=711"),
        ),
    )
}

fn filesystem(path: &CStr) -> io::Result<i64> {
    // SAFETY: statfs is plain data, and path is NUL-terminated.
    unsafe {
        let mut stat: libc::statfs = std::mem::zeroed();
        sysapi::check(libc::c_long::from(libc::statfs(path.as_ptr(), &mut stat)))?;
        Ok(stat.f_type)
    }
}

fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    named(
        &path.display().to_string(),
        File::open(path).map(OwnedFd::from),
    )
}

impl Node {
    /// Opens everything. Must be called before the spawner leaves the host's mount namespace, which [`leave_host_mounts`] does afterwards.
    pub fn open(options: &Options) -> io::Result<Self> {
        let run = &options.run_dir;
        // Where it is there, its mode is the supervisor's choice: the service makes files in it.
        if !run.exists() {
            directory(run, 0o755)?;
        }
        let metadata = run.join("meta");
        directory(&metadata, 0o700)?;
        named(
            "checked metadata",
            layers::clear_metadata(&metadata, !layers::is_pinned(&pin(options))),
        )?;
        directory(&run.join("bin"), 0o755)?;
        sockets_in_memory(&run.join("c"))?;
        directory(&options.state_dir.join("scratch"), 0o700)?;
        let state = open_directory(&options.state_dir)?;
        let below = |parent: &OwnedFd, name: &CStr| {
            named(
                &name.to_string_lossy(),
                service_directory(parent.as_raw_fd(), name, options.service_uid),
            )
        };
        below(&state, c"blobfs")?;
        let blobs = below(&below(&state, c"images")?, c"blobs")?;
        directory(&options.state_dir.join("packs"), 0o711)?;
        let chronus = install(&options.chronus, &run.join("bin/chronus"))?;
        let mklayer = install(&options.mklayer, &run.join("bin/dsec-mklayer"))?;
        let means = Means::of(options.mounts, &options.state_dir);
        let image = scratch_image(options);
        let megabytes = options.scratch_mb;
        let staging = run.join("stage");
        directory(&staging, 0o700)?;
        let (layers, scratch_root) = Layers::open(&pin(options), &staging, means, move || {
            named(
                "the scratch filesystem",
                scratch::make_image(&image, megabytes),
            )?;
            named(
                "a loop device for the scratch filesystem",
                scratch::attach_loop(&image),
            )
        })?;
        let cgroups = named(
            "control groups",
            Cgroups::open(&options.cgroup, means.loops),
        )?;
        let null = File::options().read(true).write(true).open("/dev/null")?;
        let (keeper, held) = named(
            "the keeper of blobs",
            Keeper::open(
                &keeper::socket(options),
                options.absence_s,
                null.try_clone()?,
            ),
        )?;
        let fuse = named(
            "the blobs' filesystem",
            Fuse::open(layers.clone(), keeper, held),
        )?;
        Ok(Node {
            cgroups,
            scratch: named(
                "quotas of the scratch filesystem",
                Scratch::open(scratch_root),
            )?,
            layers,
            fuse,
            sockets: open_directory(&run.join("c"))?,
            chronus,
            mklayer,
            packs: open_directory(&options.state_dir.join("packs"))?,
            null,
            uid_base: options.uid_base,
            service_uid: options.service_uid,
            cores: std::thread::available_parallelism()?.get(),
            memory: total_memory()?,
            masks: MASKS
                .iter()
                .map(|mask| Path::new("/").join(&*mask.path.to_string_lossy()).exists())
                .collect(),
            blobs,
            metadata: open_directory(&metadata)?,
        })
    }

    /// Mounts a layer whose blobs the service has stored. The service is not trusted: metadata is copied and checked, data must be its own plain file,
    /// or (`lazy`) one that blobfs shows; that waits for blobfs.
    pub fn mount_layer(&self, meta: &str, blob: Option<&str>, lazy: bool) -> io::Result<()> {
        let below = |dir: &OwnedFd, name: &str| {
            PathBuf::from(format!("/proc/self/fd/{}/{name}", dir.as_raw_fd()))
        };
        let metadata = layers::import_metadata(
            &below(&self.blobs, meta),
            &below(&self.metadata, meta),
            meta,
        )?;
        let (data, flight) = match blob {
            None => (Data::None, None),
            Some(digest) if lazy => {
                let (file, flight) = self.fuse.file(digest)?;
                (Data::Lazy(file), Some(flight))
            }
            Some(digest) => {
                let file = self.service_file(&below(&self.blobs, digest), digest)?;
                (Data::File(file), None)
            }
        };
        self.layers.mount(meta.to_owned(), metadata, data)?;
        if flight.is_none_or(|flight| flight.stands()) {
            return Ok(());
        }
        // It came too late to be given up with the others.
        self.layers.unmount(meta.to_owned())?;
        Err(io::Error::new(
            io::ErrorKind::NotConnected,
            "blobfs was given up while the layer was being mounted",
        ))
    }

    fn service_file(&self, path: &Path, digest: &str) -> io::Result<File> {
        let file = named(&format!("blob {digest}"), layers::open_plain(path))?;
        if file.metadata()?.uid() == self.service_uid {
            Ok(file)
        } else {
            Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("blob {digest} is not the service's"),
            ))
        }
    }

    pub fn unmount_layer(&self, meta: &str) -> io::Result<()> {
        self.layers.unmount(meta.to_owned())?;
        match sysapi::unlink_at(self.metadata.as_raw_fd(), &CString::new(meta)?) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Removes the socket of a slot; one that isn't there is fine.
    pub fn remove_socket(&self, slot: u32) {
        let _ = CString::new(slot.to_string())
            .map(|name| sysapi::unlink_at(self.sockets.as_raw_fd(), &name));
    }
}

/// Moves the calling thread (and those it starts) into a mount namespace that is cheap to clone.
pub fn leave_host_mounts(options: &Options) -> io::Result<()> {
    sysapi::unshare(libc::CLONE_NEWNS)?;
    named(
        "a mount namespace for the spawner",
        layers::enter_small_root(&options.run_dir.join("stage")),
    )
}

/// Copies a program to a place where nobody but root may read it: a program that its user can't read is never dumpable, whatever namespace it runs in.
fn install(source: &Path, target: &Path) -> io::Result<OwnedFd> {
    let partial = target.with_extension("part");
    named(
        &format!("the program {}", source.display()),
        std::fs::copy(source, &partial),
    )?;
    std::fs::set_permissions(&partial, std::fs::Permissions::from_mode(0o711))?;
    std::fs::rename(&partial, target)?;
    let file = File::options()
        .read(true)
        .custom_flags(libc::O_PATH)
        .open(target)?;
    Ok(OwnedFd::from(file))
}

fn total_memory() -> io::Result<u64> {
    let table = std::fs::read_to_string("/proc/meminfo")?;
    table
        .lines()
        .find_map(|line| {
            line.strip_prefix("MemTotal:")?
                .split_ascii_whitespace()
                .next()?
                .parse::<u64>()
                .ok()
        })
        .map(|kilobytes| kilobytes * 1024)
        .ok_or_else(|| io::Error::other("no MemTotal in /proc/meminfo"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_directory_is_made_or_given_away_through_a_link() {
        let home = std::env::temp_dir().join(format!("dsec-node-{}", std::process::id()));
        let victim = home.join("victim");
        std::fs::create_dir_all(&victim).unwrap();
        std::fs::set_permissions(&victim, std::fs::Permissions::from_mode(0o750)).unwrap();
        let before = victim.metadata().unwrap();
        for (name, target) in [("full", "victim"), ("dangling", "none")] {
            std::os::unix::fs::symlink(target, home.join(name)).unwrap();
            let parent = open_directory(&home).unwrap();
            let name = CString::new(name).unwrap();
            assert!(service_directory(parent.as_raw_fd(), &name, before.uid()).is_err());
            assert!(directory(&home.join(name.to_str().unwrap()), 0o711).is_err());
        }
        let after = victim.metadata().unwrap();
        assert_eq!(
            (before.uid(), before.mode(), home.join("none").exists()),
            (after.uid(), after.mode(), false)
        );
        std::fs::remove_dir_all(&home).unwrap();
    }
}
