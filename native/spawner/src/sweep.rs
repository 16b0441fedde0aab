//! Removing every kernel object of an instance, whoever made it: what Ctrl-C and a broken machine end with.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::cgroup::{self, Cgroups};
use crate::claims;
use crate::node;
use crate::options::Options;
use crate::sysapi;

/// How long the kernel may take to let go of the scratch filesystem once nobody uses it.
const RELEASE_DEADLINE: Duration = Duration::from_secs(15);
/// A daemon that was just killed loses its name before its socket.
const CLOSE_DEADLINE: Duration = Duration::from_secs(2);
const KILL_DEADLINE: Duration = Duration::from_secs(20);

/// [`sweep`] of an instance that no supervisor carries. Waits for the service of one that was killed.
pub fn run(options: &Options) -> Result<i32, String> {
    let claim = claims::take(options, claims::Purpose::Sweep)?;
    let status = sweep(options)?;
    claim.end().map(|()| status)
}

/// Ends every sandbox and removes what the instance made. The daemon must not run. Returns the exit code.
pub fn sweep(options: &Options) -> Result<i32, String> {
    remove_all(options)
        .map(|()| 0)
        .map_err(|error| format!("sweeping: {error}"))
}

fn remove_all(options: &Options) -> io::Result<()> {
    let deadline = Instant::now() + CLOSE_DEADLINE;
    while crate::server::is_running(&options.run_dir) {
        if Instant::now() > deadline {
            return Err(io::Error::other(
                "the daemon of this instance runs: stop it first",
            ));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    crate::keeper::end(&crate::keeper::socket(options))?;
    end_sandboxes(options)?;
    cgroup::remove_roots(&options.cgroup)?;
    release_mounts(options)?;
    let sockets = std::ffi::CString::new(
        options
            .run_dir
            .join("c")
            .into_os_string()
            .into_encoded_bytes(),
    )?;
    let _ = sysapi::unmount(&sockets, libc::MNT_DETACH);
    for directory in ["c", "meta", "bin", "stage"] {
        remove(&options.run_dir.join(directory))?;
    }
    for file in [
        "spawner.sock",
        "blobfs.sock",
        "fetch.sock",
        "keep.sock",
        "layers.ns",
        "ready",
    ] {
        remove(&options.run_dir.join(file))?;
    }
    remove(&options.state_dir.join("packs"))?;
    remove(&options.state_dir.join("scratch"))
}

fn remove(path: &Path) -> io::Result<()> {
    let result = if path.is_dir() {
        std::fs::remove_dir_all(path)
    } else {
        std::fs::remove_file(path)
    };
    match result {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io::Error::new(
            error.kind(),
            format!("{}: {error}", path.display()),
        )),
        _ => Ok(()),
    }
}

fn end_sandboxes(options: &Options) -> io::Result<()> {
    let groups = Cgroups::open(&options.cgroup, false)?;
    let names = groups.list();
    for name in &names {
        groups.kill(name);
    }
    let deadline = Instant::now() + KILL_DEADLINE;
    for name in &names {
        // Where there is no cgroup.kill: the first process takes its namespace along.
        loop {
            let pids = groups.pids(name);
            if pids.is_empty() {
                break;
            }
            if Instant::now() > deadline {
                return Err(io::Error::other(format!(
                    "{name}: processes {pids:?} do not end"
                )));
            }
            for pid in pids {
                if let Ok(pidfd) = sysapi::pidfd_open(pid) {
                    if groups.pids(name).contains(&pid) {
                        let _ = sysapi::pidfd_kill(std::os::fd::AsRawFd::as_raw_fd(&pidfd));
                    }
                }
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        groups.remove(name)?;
    }
    Ok(())
}

/// Lets go of the namespace that holds the layers and the scratch filesystem, and waits until the kernel has taken both down.
fn release_mounts(options: &Options) -> io::Result<()> {
    let pin = std::ffi::CString::new(node::pin(options).into_os_string().into_encoded_bytes())?;
    while sysapi::unmount(&pin, libc::MNT_DETACH).is_ok() {}
    let image = node::scratch_image(options);
    let deadline = Instant::now() + RELEASE_DEADLINE;
    while let Some(device) = loop_of(&image)? {
        if Instant::now() > deadline {
            return Err(io::Error::other(format!(
                "{device} still holds {}",
                image.display()
            )));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// The loop device over this file, if there is one.
fn loop_of(image: &Path) -> io::Result<Option<String>> {
    let image = image.to_string_lossy();
    for entry in std::fs::read_dir("/sys/block")?.flatten() {
        let backing =
            std::fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
        if backing.trim() == image {
            return Ok(Some(entry.file_name().to_string_lossy().into_owned()));
        }
    }
    Ok(None)
}
