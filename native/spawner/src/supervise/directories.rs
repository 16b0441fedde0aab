//! The run and state directories: root's, but the service may add files of its own.
//!
//! Both are sticky and writable for the service's group: the service makes its databases, images and `ready` in them and can't rename or
//! replace anything that root put there, on which root relies (the scratch file, the socket, the pinned namespace).

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Everybody may look: clients find `client.json` and `ready` here.
const RUN_MODE: u32 = 0o1775;
/// Keys, images and sandboxes' files are nobody else's business.
const STATE_MODE: u32 = 0o1770;

/// Names in a run directory that a run of ours leaves behind, or that `dsec up` writes before it starts us.
const RUN_NAMES: [&str; 14] = [
    "app",
    "bin",
    "blobfs.sock",
    "c",
    "client.json",
    "fetch.sock",
    "keep.sock",
    "layers.ns",
    "meta",
    "ready",
    "ready.part",
    "spawner.sock",
    "stage",
    "up.json",
];
/// Likewise in a state directory.
const STATE_NAMES: [&str; 8] = [
    "blobfs",
    "dsec.log",
    "images",
    "journal.sqlite",
    "lost+found",
    "packs",
    "scratch",
    "store.sqlite",
];

/// Makes `<run>` and `<run>/app`, and removes what an earlier service left there.
pub fn prepare_run(run: &Path, service: (u32, u32)) -> Result<(), String> {
    prepare(run, RUN_MODE, service.1, &RUN_NAMES)?;
    remove_files_of(run, service.0)?;
    own_directory(&run.join("app"), 0o755, (0, 0))
}

/// Lets the service make files in `<run>`; the daemon, which also runs without a service, makes it root's alone when it starts.
pub fn share_run(run: &Path, gid: u32) -> Result<(), String> {
    let failed = |error: io::Error| format!("{}: {error}", run.display());
    claim(&open_directory(run)?, RUN_MODE, (0, gid)).map_err(failed)
}

/// Makes `<state>`, `<state>/scratch` (root's), `<state>/images` and `<state>/blobfs` (the service's).
pub fn prepare_state(state: &Path, service: (u32, u32)) -> Result<(), String> {
    prepare(state, STATE_MODE, service.1, &STATE_NAMES)?;
    own_directory(&state.join("scratch"), 0o700, (0, 0))?;
    own_directory(&state.join("images"), 0o700, service)?;
    own_directory(&state.join("blobfs"), 0o700, service)
}

/// Lets this process and what it starts write to the end of a file, which the service may have put there but no link.
pub fn write_to(log: &Path) -> Result<(), String> {
    let failed = |error: io::Error| format!("{}: {error}", log.display());
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o640)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(log)
        .map_err(failed)?;
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(format!("{} is no file: remove it", log.display()));
    }
    for output in [libc::STDOUT_FILENO, libc::STDERR_FILENO] {
        // SAFETY: plain integers; the descriptor is open.
        if unsafe { libc::dup2(file.as_raw_fd(), output) } < 0 {
            return Err(failed(io::Error::last_os_error()));
        }
    }
    Ok(())
}

/// Makes a directory with these rights, or takes one over that is empty or was ours before.
fn prepare(path: &Path, mode: u32, gid: u32, known: &[&str]) -> Result<(), String> {
    make_parents(path)?;
    let directory = open_directory(path)?;
    let found = directory
        .metadata()
        .map_err(|error| format!("{}: {error}", path.display()))?;
    if found.gid() != gid || found.mode() & 0o7777 != mode {
        refuse_foreign(path, known)?;
    }
    claim(&directory, mode, (0, gid)).map_err(|error| format!("{}: {error}", path.display()))
}

fn make_parents(path: &Path) -> Result<(), String> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(path)
        .map_err(|error| format!("{}: {error}", path.display()))
}

fn open_directory(path: &Path) -> Result<File, String> {
    OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW)
        .open(path)
        .map_err(|error| format!("{}: {error}", path.display()))
}

/// Somebody's home or /tmp must not become ours by a slip in an option.
fn refuse_foreign(path: &Path, known: &[&str]) -> Result<(), String> {
    let entries = fs::read_dir(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let names = entries.filter_map(|entry| entry.ok().map(|entry| entry.file_name()));
    match first_foreign(names, known) {
        None => Ok(()),
        Some(name) => Err(format!(
            "{} holds {name:?}, which is not of this service: name an empty directory, or one that doesn't exist",
            path.display()
        )),
    }
}

/// The first name that isn't on the list, nor on it with a suffix (`journal.sqlite-wal`), nor a partly written file of one
/// (`.up.json.123`).
fn first_foreign(names: impl Iterator<Item = OsString>, known: &[&str]) -> Option<OsString> {
    let is_known = |name: &OsStr| {
        let bytes = name.as_bytes();
        let bytes = bytes.strip_prefix(b".").unwrap_or(bytes);
        known
            .iter()
            .any(|known| bytes.starts_with(known.as_bytes()))
    };
    let mut names = names;
    names.find(|name| !is_known(name))
}

/// A directory with this owner and mode. One that is somebody else's was put there to be mistaken for ours.
fn own_directory(path: &Path, mode: u32, owner: (u32, u32)) -> Result<(), String> {
    let failed = |error: io::Error| format!("{}: {error}", path.display());
    let made = match fs::DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => true,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
        Err(error) => return Err(failed(error)),
    };
    let directory = open_directory(path)?;
    let found = directory.metadata().map_err(failed)?;
    if !made && found.uid() != owner.0 {
        return Err(format!(
            "{} belongs to uid {}, not {}: remove it",
            path.display(),
            found.uid(),
            owner.0
        ));
    }
    claim(&directory, mode, owner).map_err(failed)
}

fn claim(directory: &File, mode: u32, (uid, gid): (u32, u32)) -> io::Result<()> {
    std::os::unix::fs::fchown(directory, Some(uid), Some(gid))?;
    directory.set_permissions(fs::Permissions::from_mode(mode))
}

/// Removes the files that the service's user has in `run`: a `ready` that is no longer true, or something put in the way of root.
fn remove_files_of(run: &Path, uid: u32) -> Result<(), String> {
    let entries = fs::read_dir(run).map_err(|error| format!("{}: {error}", run.display()))?;
    for entry in entries.flatten() {
        let path = entry.path();
        let Ok(found) = fs::symlink_metadata(&path) else {
            continue;
        };
        if found.uid() != uid {
            continue;
        }
        if found.is_dir() {
            return Err(format!("{} is in the way: remove it", path.display()));
        }
        remove_file(&path)?;
    }
    Ok(())
}

/// Removes a file if it is there.
pub fn remove_file(path: &Path) -> Result<(), String> {
    absent_is_fine(path, fs::remove_file(path))
}

/// Removes an empty directory if it is there.
pub fn remove_directory(path: &Path) -> Result<(), String> {
    absent_is_fine(path, fs::remove_dir(path))
}

fn absent_is_fine(path: &Path, result: io::Result<()>) -> Result<(), String> {
    match result {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(format!("{}: {error}", path.display()))
        }
        _ => Ok(()),
    }
}

/// The service's primary group: that of its user, if it has one on this machine, else the group of the same number.
pub fn primary_group(passwd: &str, uid: u32) -> u32 {
    passwd
        .lines()
        .find_map(|line| {
            let mut fields = line.split(':').skip(2);
            let owner: u32 = fields.next()?.parse().ok()?;
            let group: u32 = fields.next()?.parse().ok()?;
            (owner == uid && group != 0).then_some(group)
        })
        .unwrap_or(uid)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn foreign(names: &[&str]) -> Option<OsString> {
        first_foreign(names.iter().map(OsString::from), &STATE_NAMES)
    }

    #[test]
    fn what_a_run_leaves_behind_is_known() {
        assert_eq!(
            foreign(&[
                "journal.sqlite",
                "journal.sqlite-wal",
                "images",
                ".dsec.log.7"
            ]),
            None
        );
        assert_eq!(foreign(&["images", ".ssh"]), Some(".ssh".into()));
    }

    #[test]
    fn a_directory_with_other_things_in_it_is_not_taken_over() {
        let home = std::env::temp_dir().join(format!("dsec-directories-{}", std::process::id()));
        let made = fs::create_dir_all(home.join("Documents"));
        let refused = prepare(&home, STATE_MODE, 4321, &STATE_NAMES);
        let mode = fs::metadata(&home).map(|found| found.mode() & 0o7777);
        let removed = fs::remove_dir_all(&home);
        assert!(made.is_ok() && removed.is_ok());
        assert!(refused.is_err_and(|reason| reason.contains("Documents")));
        assert!(mode.is_ok_and(|mode| mode != STATE_MODE));
    }

    #[test]
    fn the_group_is_the_users_own_but_never_roots() {
        let passwd =
            "root:x:0:0:root:/root:/bin/sh\ndsec:x:990:985::/:/x\nodd:x:991:0::/:/x\nshort:x\n";
        assert_eq!(primary_group(passwd, 990), 985);
        assert_eq!(primary_group(passwd, 991), 991);
        assert_eq!(primary_group(passwd, 64_913), 64_913);
    }
}
