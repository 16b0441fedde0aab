//! Where sandboxes write: one btrfs per node in an allocated file (on a sparse one a full host disk would lose writes silently), a subvolume per
//! sandbox with a quota that holds. It is scratch: a fresh start makes it anew. Subvolumes of sandboxes that wrote little are used again.

use std::collections::HashSet;
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::changes::{self, Page};
use crate::loops::{self, Access};
use crate::spares::{self, Spares};
use crate::sysapi::{self, ioctl};

/// No barrier and no checksums, because after a crash of the machine the whole filesystem is made anew; commits as often as deleted subvolumes
/// shall be freed.
pub const MOUNT_OPTIONS: &str = "nobarrier,nodatacow,commit=30";

const BTRFS_IOC_SUBVOL_CREATE: libc::c_ulong = 0x5000_940e;
const BTRFS_IOC_SNAP_DESTROY: libc::c_ulong = 0x5000_940f;
const BTRFS_IOC_SNAP_CREATE_V2: libc::c_ulong = 0x5000_9417;
const BTRFS_IOC_SUBVOL_SETFLAGS: libc::c_ulong = 0x4008_941a;
const BTRFS_IOC_QUOTA_CTL: libc::c_ulong = 0xc010_9428;
const BTRFS_IOC_QGROUP_LIMIT: libc::c_ulong = 0x8030_942b;
const BTRFS_IOC_QGROUP_CREATE: libc::c_ulong = 0x4010_942a;
const BTRFS_IOC_INO_LOOKUP: libc::c_ulong = 0xd000_9412;
const BTRFS_IOC_FS_INFO: libc::c_ulong = 0x8400_941f;
const QUOTA_ENABLE_FULL: u64 = 1;
const QUOTA_ENABLE_SIMPLE: u64 = 4;
const LIMIT_REFERENCED: u64 = 1;
const SUBVOL_RDONLY: u64 = 2;

/// How long a subvolume may stay in use by a mount that the kernel is still taking down.
const BUSY_DEADLINE: Duration = Duration::from_secs(10);

#[repr(C)]
struct VolumeArgs {
    fd: i64,
    name: [u8; 4088],
}

#[repr(C)]
struct SnapshotArgs {
    fd: i64,
    transid: u64,
    flags: u64,
    unused: [u64; 4],
    name: [u8; 4040],
}

#[repr(C)]
struct LimitArgs {
    qgroupid: u64,
    flags: u64,
    max_rfer: u64,
    max_excl: u64,
    rsv_rfer: u64,
    rsv_excl: u64,
}

#[repr(C)]
struct GroupArgs {
    create: u64,
    qgroupid: u64,
}

#[repr(C)]
struct QuotaArgs {
    command: u64,
    status: u64,
}

#[repr(C)]
struct LookupArgs {
    treeid: u64,
    objectid: u64,
    name: [u8; 4080],
}

/// Makes the image file and its filesystem. `mb` megabytes are allocated at once.
pub fn make_image(path: &Path, mb: u64) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)?;
    file.set_permissions(std::fs::Permissions::from_mode(0o600))?;
    let size = i64::try_from(mb << 20).map_err(io::Error::other)?;
    // SAFETY: plain integers; posix_fallocate returns the error instead of setting errno.
    let code = unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, size) };
    if code != 0 {
        let _ = std::fs::remove_file(path);
        let error = io::Error::from_raw_os_error(code);
        return Err(io::Error::new(
            error.kind(),
            format!(
                "{mb} MB for {}: {error}; free disk space or give a smaller --scratch-mb",
                path.display()
            ),
        ));
    }
    let made = Command::new("mkfs.btrfs")
        .args(["-q", "-f", "-m", "single", "-d", "single", "-K"])
        .arg(path)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| {
            io::Error::new(
                error.kind(),
                format!("mkfs.btrfs: {error}; install btrfs-progs"),
            )
        })?;
    if made.status.success() {
        Ok(())
    } else {
        Err(io::Error::other(format!(
            "mkfs.btrfs: {}",
            String::from_utf8_lossy(&made.stderr).trim()
        )))
    }
}

/// The image as a block device.
pub fn attach_loop(image: &Path) -> io::Result<File> {
    let backing = File::options().read(true).write(true).open(image)?;
    loops::attach(
        &backing,
        image.as_os_str().as_encoded_bytes(),
        Path::new("/dev"),
        Access::Write,
    )
}

/// Whom the kernel charges for data that several subvolumes share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quotas {
    /// Whoever wrote it: a snapshot begins with nothing.
    Simple,
    /// Each of them: a snapshot begins with all that it holds.
    Full,
}

impl Quotas {
    pub fn name(self) -> &'static str {
        match self {
            Quotas::Simple => "simple",
            Quotas::Full => "full",
        }
    }
}

/// The mounted scratch filesystem, by descriptor.
pub struct Scratch {
    root: OwnedFd,
    pub quotas: Quotas,
    /// /sys/fs/btrfs/<uuid>/qgroups, for reading use as it is, reservations included.
    qgroups: OwnedFd,
    /// Quota groups of deleted subvolumes: the kernel lets go of one only when the last extent has been freed, some time after the deletion.
    orphans: Mutex<Vec<u64>>,
    spares: Spares,
}

/// A sandbox's record in its subvolume: what a restarted spawner needs to find it again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    pub slot: u32,
    pub pid: i32,
    pub start_time: u64,
}

impl Scratch {
    /// Takes the mounted root; enables quotas where they aren't yet.
    pub fn open(root: OwnedFd) -> io::Result<Self> {
        let enable = |command| {
            let mut quota = QuotaArgs { command, status: 0 };
            ioctl(root.as_raw_fd(), BTRFS_IOC_QUOTA_CTL, &mut quota)
        };
        let quotas = match enable(QUOTA_ENABLE_SIMPLE) {
            Ok(()) => Quotas::Simple,
            Err(_) => {
                // Kernels before 6.7 have full accounting only. Enabling what is enabled is no error.
                enable(QUOTA_ENABLE_FULL)?;
                Quotas::Full
            }
        };
        let mut info = [0_u8; 1024];
        ioctl(root.as_raw_fd(), BTRFS_IOC_FS_INFO, info.as_mut_ptr())?;
        // struct btrfs_ioctl_fs_info_args: max_id, num_devices, then the 16 bytes of the filesystem's id.
        let hex: String = info[16..32]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let uuid = [
            &hex[..8],
            &hex[8..12],
            &hex[12..16],
            &hex[16..20],
            &hex[20..],
        ]
        .join("-");
        Ok(Scratch {
            root,
            quotas,
            qgroups: File::open(format!("/sys/fs/btrfs/{uuid}/qgroups"))?.into(),
            orphans: Mutex::default(),
            spares: Spares::default(),
        })
    }

    /// Takes over what an earlier spawner left besides sandboxes: spare subvolumes, ones that it was clearing, quota groups of deleted ones.
    /// Makes the spares that are missing.
    pub fn recover(&self) -> io::Result<()> {
        for name in self.spares.find(self.root())? {
            self.remove_volume(&name)?;
        }
        self.find_orphans()?;
        for _ in 0..self.spares.wanted() {
            let name = self.spares.new_name();
            self.make(&name)?;
            self.spares.add(&name)?;
        }
        Ok(())
    }

    pub fn root(&self) -> RawFd {
        self.root.as_raw_fd()
    }

    /// Makes a sandbox's subvolume with its quota, holding `u` (what it wrote) and `w` (overlayfs' own).
    pub fn create(&self, id: &str, disk: u64) -> io::Result<()> {
        if !self.spares.take(self.root(), id)? {
            self.make(id)?;
        }
        self.limit(id, disk)
    }

    fn make(&self, name: &str) -> io::Result<()> {
        self.volume_call(BTRFS_IOC_SUBVOL_CREATE, name)?;
        furnish(&self.open_volume(name)?)
    }

    /// Makes a sandbox's subvolume of a sealed snapshot. Whether what that holds counts against `disk` is a matter of [`Quotas`].
    pub fn create_from(&self, id: &str, snapshot: &str, disk: u64) -> io::Result<()> {
        let source = self.open_volume(snapshot).map_err(|error| {
            io::Error::new(error.kind(), format!("snapshot {snapshot}: {error}"))
        })?;
        self.snapshot(&source, id)?;
        self.limit(id, disk)
    }

    /// Makes `name` a writable copy of a subvolume as it is now.
    pub fn snapshot(&self, source: &OwnedFd, name: &str) -> io::Result<()> {
        let mut args = SnapshotArgs {
            fd: i64::from(source.as_raw_fd()),
            transid: 0,
            flags: 0,
            unused: [0; 4],
            name: [0; 4040],
        };
        args.name[..name.len()].copy_from_slice(name.as_bytes());
        ioctl(self.root(), BTRFS_IOC_SNAP_CREATE_V2, &mut args)
    }

    /// Takes what belongs to one sandbox alone out of a snapshot (its record, overlayfs' working files), and makes it read-only.
    pub fn seal(&self, snapshot: &str) -> io::Result<()> {
        self.forget(snapshot)?;
        let volume = self.open_volume(snapshot)?;
        // Among the working files is the mark of an overlay that wasn't unmounted, which would keep others from being mounted.
        std::fs::remove_dir_all(format!("/proc/self/fd/{}/w", volume.as_raw_fd()))?;
        sysapi::make_dir_at(volume.as_raw_fd(), c"w", 0o755)?;
        let mut flags = SUBVOL_RDONLY;
        ioctl(volume.as_raw_fd(), BTRFS_IOC_SUBVOL_SETFLAGS, &mut flags)
    }

    fn volume_call(&self, request: libc::c_ulong, id: &str) -> io::Result<()> {
        let mut args = VolumeArgs {
            fd: 0,
            name: [0; 4088],
        };
        args.name[..id.len()].copy_from_slice(id.as_bytes());
        ioctl(self.root(), request, &mut args)
    }

    pub fn open_volume(&self, id: &str) -> io::Result<OwnedFd> {
        sysapi::open_at(
            self.root(),
            &CString::new(id)?,
            libc::O_RDONLY | libc::O_DIRECTORY,
        )
    }

    pub fn limit(&self, id: &str, disk: u64) -> io::Result<()> {
        self.limit_volume(self.open_volume(id)?.as_raw_fd(), disk)
    }

    fn limit_volume(&self, volume: RawFd, disk: u64) -> io::Result<()> {
        let mut args = LimitArgs {
            qgroupid: 0,
            flags: LIMIT_REFERENCED,
            max_rfer: disk,
            max_excl: 0,
            rsv_rfer: 0,
            rsv_excl: 0,
        };
        ioctl(volume, BTRFS_IOC_QGROUP_LIMIT, &mut args)
    }

    /// Removes the subvolume of a sandbox that has ended and held so many bytes (None: not known): it is cleared for another one, or deleted.
    /// One that isn't there is fine.
    pub fn remove(&self, id: &str, used: Option<u64>) -> io::Result<()> {
        let small = used.is_some_and(|bytes| bytes <= spares::MOST_BYTES);
        if small && self.spares.wanted() > 0 {
            if let Ok(volume) = self.open_volume(id) {
                return match self.spares.give_back(self.root(), id, &volume, |volume| {
                    self.furnish_unused(volume)
                }) {
                    Ok(()) => Ok(()),
                    Err(left) => self.remove_volume(&left),
                };
            }
        }
        self.remove_volume(id)
    }

    /// Deletes a subvolume; one that isn't there is fine.
    pub fn remove_volume(&self, name: &str) -> io::Result<()> {
        let tree = self.open_volume(name).and_then(|volume| tree_of(&volume));
        self.destroy(name)?;
        if let Ok(tree) = tree {
            self.orphans
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(tree);
        }
        Ok(())
    }

    /// Removes the quota groups of deleted subvolumes that the kernel lets go of by now.
    pub fn remove_orphans(&self) {
        let orphans =
            std::mem::take(&mut *self.orphans.lock().unwrap_or_else(PoisonError::into_inner));
        let kept = orphans.into_iter().filter(|tree| {
            let mut args = GroupArgs {
                create: 0,
                qgroupid: *tree,
            };
            let removed = ioctl(self.root(), BTRFS_IOC_QGROUP_CREATE, &mut args);
            matches!(removed, Err(error) if error.raw_os_error() == Some(libc::EBUSY))
        });
        let kept: Vec<u64> = kept.collect();
        self.orphans
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend(kept);
    }

    /// Takes over the quota groups that an earlier spawner's deletions left.
    fn find_orphans(&self) -> io::Result<()> {
        let names = sysapi::names_in(self.root())?;
        let live: HashSet<u64> = names
            .iter()
            .filter_map(|id| tree_of(&self.open_volume(id).ok()?).ok())
            .collect();
        let groups = sysapi::names_in(self.qgroups.as_raw_fd())?
            .into_iter()
            .filter_map(|name| {
                let tree: u64 = name.strip_prefix("0_")?.parse().ok()?;
                // Trees below 256 are the filesystem's own.
                (tree >= 256 && !live.contains(&tree)).then_some(tree)
            });
        self.orphans
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend(groups);
        Ok(())
    }

    fn destroy(&self, id: &str) -> io::Result<()> {
        let end = Instant::now() + BUSY_DEADLINE;
        loop {
            match self.volume_call(BTRFS_IOC_SNAP_DESTROY, id) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(1))
                }
                other => return other,
            }
        }
    }

    /// Bytes that a sandbox holds on the scratch filesystem, reserved ones included.
    pub fn usage(&self, id: &str) -> io::Result<u64> {
        self.usage_of(&self.open_volume(id)?)
    }

    fn usage_of(&self, volume: &OwnedFd) -> io::Result<u64> {
        let tree = tree_of(volume)?;
        let read = |file: &str| -> u64 {
            CString::new(format!("0_{tree}/{file}"))
                .map_err(io::Error::other)
                .and_then(|path| sysapi::read_at(self.qgroups.as_raw_fd(), &path))
                .ok()
                .and_then(|value| value.trim().parse().ok())
                .unwrap_or(0)
        };
        Ok(read("referenced") + read("rsv_data"))
    }

    /// Makes a cleared subvolume one for the next sandbox. What was already on the disk stays in the quota until the kernel's next commit: the
    /// next sandbox isn't charged for it, and can't tell from it what this one wrote.
    fn furnish_unused(&self, volume: &OwnedFd) -> io::Result<()> {
        if self.usage_of(volume)? > spares::UNUSED_BYTES {
            return Err(io::Error::other("it still counts what was removed"));
        }
        furnish(volume)
    }

    /// Total and used bytes of the filesystem.
    pub fn space(&self) -> (u64, u64) {
        // SAFETY: statvfs is plain data, and the descriptor is open.
        unsafe {
            let mut stat: libc::statvfs = std::mem::zeroed();
            if libc::fstatvfs(self.root(), &mut stat) != 0 {
                return (0, 0);
            }
            (
                stat.f_blocks * stat.f_frsize,
                (stat.f_blocks - stat.f_bfree) * stat.f_frsize,
            )
        }
    }

    pub fn write_record(&self, id: &str, record: Record) -> io::Result<()> {
        let dir = self.open_volume(id)?;
        let file = sysapi::open_at(
            dir.as_raw_fd(),
            c"sandbox",
            libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC | libc::O_NOFOLLOW,
        )?;
        File::from(file)
            .write_all(format!("{} {} {}\n", record.slot, record.pid, record.start_time).as_bytes())
    }

    pub fn read_record(&self, id: &str) -> Option<Record> {
        let dir = self.open_volume(id).ok()?;
        let file = sysapi::open_at(
            dir.as_raw_fd(),
            c"sandbox",
            libc::O_RDONLY | libc::O_NOFOLLOW,
        )
        .ok()?;
        let mut content = String::new();
        File::from(file)
            .take(256)
            .read_to_string(&mut content)
            .ok()?;
        let mut fields = content.split_ascii_whitespace();
        Some(Record {
            slot: fields.next()?.parse().ok()?,
            pid: fields.next()?.parse().ok()?,
            start_time: fields.next()?.parse().ok()?,
        })
    }

    /// Keeps what a sandbox wrote but frees its slot: without its record it is nobody's.
    pub fn forget(&self, id: &str) -> io::Result<()> {
        match self
            .open_volume(id)
            .and_then(|dir| sysapi::unlink_at(dir.as_raw_fd(), c"sandbox"))
        {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Sandboxes that have a subvolume.
    pub fn list(&self) -> io::Result<Vec<String>> {
        Ok(sysapi::names_in(self.root())?
            .into_iter()
            .filter(|name| crate::cgroup::is_group_name(name))
            .collect())
    }

    /// What a sandbox wrote, behind the path `after` and at most `limit` entries.
    pub fn diff(&self, id: &str, after: &[u8], limit: usize) -> io::Result<Page> {
        let volume = self.open_volume(id)?;
        let top = sysapi::open_at(
            volume.as_raw_fd(),
            c"u",
            libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW,
        )?;
        changes::page(&top, after, limit)
    }
}

/// Makes what every sandbox's subvolume begins with: `u` for what it writes, `w` for overlayfs.
fn furnish(volume: &OwnedFd) -> io::Result<()> {
    for name in [c"u", c"w"] {
        sysapi::make_dir_at(volume.as_raw_fd(), name, 0o755)?;
    }
    Ok(())
}

/// Number of the tree that a subvolume is, and of its quota group.
fn tree_of(volume: &OwnedFd) -> io::Result<u64> {
    let mut lookup = LookupArgs {
        treeid: 0,
        objectid: 256,
        name: [0; 4080],
    };
    ioctl(volume.as_raw_fd(), BTRFS_IOC_INO_LOOKUP, &mut lookup)?;
    Ok(lookup.treeid)
}
