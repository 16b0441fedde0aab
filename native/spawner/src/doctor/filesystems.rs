//! What layers and writable layers need of the kernel, tried with a filesystem of one page.

use std::ffi::{CStr, CString};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::finding::{is_for_root, Feature, Finding, State};
use super::processes::IdleChild;
use crate::loops::{self, Access};
use crate::sysapi::{self, FsContext, MOUNT_ATTR_IDMAP, MOUNT_ATTR_RDONLY};

const EROFS: Feature = Feature {
    name: "EROFS",
    cost: "no layer can be mounted: no sandbox starts",
    todo: "a kernel with EROFS_FS (modprobe erofs)",
};
const EROFS_FILES: Feature = Feature {
    name: "EROFS from a file",
    cost: "layers are mounted from loop devices, two for each layer",
    todo: "a kernel from 6.12 with EROFS_FS_BACKED_BY_FILE, and a state directory on a disk filesystem",
};
const MAPPED_EROFS: Feature = Feature {
    name: "idmapped EROFS",
    cost: "no sandbox could have uids of its own: none starts",
    todo: "a kernel from 5.19",
};
const MAPPED_TMPFS: Feature = Feature {
    name: "idmapped tmpfs",
    cost: "devices in sandboxes seem to belong to nobody",
    todo: "a kernel from 6.3",
};
const OVERLAY: Feature = Feature {
    name: "overlayfs",
    cost: "layers can't be stacked: no sandbox starts",
    todo: "a kernel with OVERLAY_FS (modprobe overlay)",
};
const OVERLAY_DESCRIPTORS: Feature = Feature {
    name: "overlay layers by descriptor",
    cost: "layers are attached to be stacked: creating a sandbox takes longer, the more so the more layers it has",
    todo: "a kernel from 6.15",
};
const BTRFS: Feature = Feature {
    name: "btrfs",
    cost: "sandboxes have nowhere to write: none starts",
    todo: "a kernel with BTRFS_FS (modprobe btrfs)",
};
const SIMPLE_QUOTAS: Feature = Feature {
    name: "btrfs simple quotas",
    cost: "disk limits use full quota groups: removing sandboxes gets slower the more there are",
    todo: "a kernel from 6.7",
};
const LOOP: Feature = Feature {
    name: "loop devices",
    cost: "the scratch file can't be mounted: no sandbox starts",
    todo: "a kernel with BLK_DEV_LOOP (modprobe loop)",
};
const FUSE: Feature = Feature {
    name: "FUSE",
    cost: "layers can't be loaded on demand: a blob has to be here whole before a sandbox starts from it",
    todo: "a kernel with FUSE_FS (modprobe fuse)",
};

pub fn findings(state_dir: &Path, kernel: (u32, u32)) -> Vec<Finding> {
    let from_file = mount_erofs(state_dir, false);
    let from_loop = match from_file {
        Ok(_) => None,
        Err(_) => Some(mount_erofs(state_dir, true)),
    };
    let mapped = match (&from_file, &from_loop) {
        (Ok(mount), _) | (_, Some(Ok(mount))) => mapped(mount),
        (Err(error), _) if is_for_root(error) => Err(error.kind().into()),
        _ => Err(io::Error::other("not tried: EROFS can't be mounted")),
    };
    vec![
        EROFS.tried(
            FsContext::open(c"erofs").map(|_| String::new()),
            State::Missing,
        ),
        EROFS_FILES.tried(
            from_file.map(|_| "mounted one".to_owned()),
            match from_loop {
                Some(Err(_)) => State::Missing,
                _ => State::Degraded,
            },
        ),
        MAPPED_EROFS.tried(mapped, State::Missing),
        MAPPED_TMPFS.tried(
            tmpfs().and_then(|mount| self::mapped(&mount)),
            State::Degraded,
        ),
        OVERLAY.tried(
            FsContext::open(c"overlay").map(|_| String::new()),
            State::Missing,
        ),
        OVERLAY_DESCRIPTORS.tried(
            stack_by_descriptor().map(|()| "stacked two".to_owned()),
            State::Degraded,
        ),
        BTRFS.tried(
            FsContext::open(c"btrfs").map(|_| String::new()),
            State::Missing,
        ),
        simple_quotas(kernel),
        LOOP.tried(opened(c"/dev/loop-control"), State::Missing),
        FUSE.tried(opened(c"/dev/fuse"), State::Degraded),
    ]
}

/// A detached mount of an image in an unnamed file, where images will be: not every filesystem can carry one. `on_loop`: by a loop device.
pub fn mount_erofs(state_dir: &Path, on_loop: bool) -> io::Result<OwnedFd> {
    let mut file = unnamed_file(existing(state_dir))?;
    file.write_all(&erofs_image())?;
    if on_loop {
        file = loops::attach(&file, b"dsec-doctor", Path::new("/dev"), Access::Read)?;
    }
    let context = FsContext::open(c"erofs")?;
    let source = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    context.set(c"source", &source)?;
    context.set_flag(c"ro")?;
    context.mount(MOUNT_ATTR_RDONLY)
}

fn existing(path: &Path) -> &Path {
    path.ancestors()
        .find(|path| path.is_dir())
        .unwrap_or(Path::new("/"))
}

fn unnamed_file(directory: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_TMPFILE)
        .mode(0o600)
        .open(directory)
}

const BLOCK_BITS: u8 = 12;
const SUPERBLOCK_AT: usize = 1024;
/// In units of 32 bytes from the image's start: right behind the superblock.
const ROOT_NODE: u16 = 36;

/// An EROFS with nothing but an empty root directory: Documentation/filesystems/erofs.rst and fs/erofs/erofs_fs.h.
fn erofs_image() -> Vec<u8> {
    const MAGIC: u32 = 0xe0f5_e1e2;
    let mut image = vec![0; 1 << BLOCK_BITS];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(SUPERBLOCK_AT, &MAGIC.to_le_bytes());
    put(SUPERBLOCK_AT + 12, &[BLOCK_BITS]);
    put(SUPERBLOCK_AT + 14, &ROOT_NODE.to_le_bytes());
    put(SUPERBLOCK_AT + 16, &1_u64.to_le_bytes()); // inodes
    put(SUPERBLOCK_AT + 36, &1_u32.to_le_bytes()); // blocks
    let root = usize::from(ROOT_NODE) * 32;
    put(root + 4, &(libc::S_IFDIR as u16 | 0o755).to_le_bytes());
    put(root + 6, &2_u16.to_le_bytes()); // links
    put(root + 20, &1_u32.to_le_bytes()); // inode number
    image
}

fn tmpfs() -> io::Result<OwnedFd> {
    FsContext::open(c"tmpfs")?.mount(0)
}

/// Maps the ids of a detached mount by a user namespace made for it.
fn mapped(mount: &OwnedFd) -> io::Result<String> {
    let child = IdleChild::start(libc::CLONE_NEWUSER)?;
    let namespace = child.map_ids()?;
    sysapi::set_mount_attributes(
        mount.as_raw_fd(),
        MOUNT_ATTR_IDMAP,
        Some(namespace.as_raw_fd()),
    )?;
    Ok("mapped one".to_owned())
}

/// Stacks layers by descriptor that are attached nowhere.
pub fn stack_by_descriptor() -> io::Result<()> {
    let layers = [tmpfs()?, tmpfs()?];
    let context = FsContext::open(c"overlay")?;
    for layer in &layers {
        context.set_fd(c"lowerdir+", layer.as_raw_fd())?;
    }
    context.mount(MOUNT_ATTR_RDONLY).map(drop)
}

/// By the kernel's version: to try it takes a filesystem of 110 MB.
fn simple_quotas(kernel: (u32, u32)) -> Finding {
    const SINCE: (u32, u32) = (6, 7);
    let (major, minor) = kernel;
    let detail = format!("by the kernel's version, {major}.{minor}");
    if kernel >= SINCE {
        SIMPLE_QUOTAS.found(detail)
    } else {
        SIMPLE_QUOTAS.lacking(State::Degraded, detail)
    }
}

fn opened(device: &CStr) -> io::Result<String> {
    sysapi::open_at(libc::AT_FDCWD, device, libc::O_RDWR).map(|_| String::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_image_holds_a_directory_where_its_superblock_says() {
        let image = erofs_image();
        assert_eq!(image.len(), 4096);
        let node = u16::from_le_bytes([image[SUPERBLOCK_AT + 14], image[SUPERBLOCK_AT + 15]]);
        let mode = u16::from_le_bytes([
            image[usize::from(node) * 32 + 4],
            image[usize::from(node) * 32 + 5],
        ]);
        assert_eq!(u32::from(mode) & libc::S_IFMT, libc::S_IFDIR);
    }

    #[test]
    fn quotas_are_judged_by_version() {
        assert_eq!(simple_quotas((6, 7)).state, State::Ok);
        assert_eq!(simple_quotas((6, 1)).state, State::Degraded);
    }

    #[test]
    fn the_directory_tried_is_the_nearest_that_exists() {
        assert_eq!(
            existing(Path::new("/proc/self/nothing/here")),
            Path::new("/proc/self")
        );
    }
}
