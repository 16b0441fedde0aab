//! A process that does nothing but hold the connection of the blobs' filesystem: with it, the spawner and blobfs may both go (a restart of the
//! service) and reads wait for the next ones. It is started with the first layer that is loaded on demand, and ends by itself when no spawner comes
//! back: then what waits is told so.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use wire::passing;

use crate::options::Options;
use crate::sysapi;

/// How long reads wait for a blobfs while a spawner is there, which starts one again at once: longer, and it can't be started.
pub const GRACE: Duration = Duration::from_secs(30);
/// It has nothing to finish.
const END_MS: libc::c_int = 2000;
const MAX_FRAME: u32 = 16;

/// What is asked of it.
const TAKE: &[u8] = b"take";
const KEEP: &[u8] = b"keep";
const END: &[u8] = b"end";

/// Its descriptors when it starts.
const CONNECTION: RawFd = 3;
const LISTENER: RawFd = 4;
const SPAWNER: RawFd = 5;

pub fn socket(options: &Options) -> PathBuf {
    options.run_dir.join("keep.sock")
}

/// The spawner's end.
pub struct Keeper {
    program: PathBuf,
    /// Seconds that one waits for the next spawner.
    absence_s: u64,
    null: File,
    /// The socket of those that are started from here. None: an earlier spawner started it, and has taken its socket along.
    listener: Option<UnixListener>,
    /// To the one that runs, if there is one.
    link: Mutex<Option<UnixStream>>,
}

impl Keeper {
    /// Finds the one that an earlier spawner started, and the connection that it holds. Must be called in the host's mount namespace.
    pub fn open(path: &Path, absence_s: u64, null: File) -> io::Result<(Self, Option<OwnedFd>)> {
        let (listener, link, held) = match ask(path, TAKE) {
            Ok((stream, _, held)) => (None, Some(stream), held),
            Err(_) => {
                match std::fs::remove_file(path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
                let listener = UnixListener::bind(path)?;
                std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
                (Some(listener), None, None)
            }
        };
        let keeper = Keeper {
            program: "/proc/self/exe".into(),
            absence_s,
            null,
            listener,
            link: Mutex::new(link),
        };
        Ok((keeper, held))
    }

    fn link(&self) -> MutexGuard<'_, Option<UnixStream>> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether one runs.
    pub fn is_there(&self) -> bool {
        let link = self.link();
        link.as_ref()
            .is_some_and(|stream| !sysapi::has_failed(stream.as_raw_fd()))
    }

    /// Lets it hold this connection, and no other. Starts one where none runs, also in the place of one that died.
    pub fn keep(&self, connection: BorrowedFd) -> io::Result<()> {
        let mut link = self.link();
        if let Some(stream) = &*link {
            if passing::send_frame(stream, KEEP, Some(connection.as_raw_fd())).is_ok() {
                return Ok(());
            }
            *link = None;
        }
        let listener = self.listener.as_ref().ok_or_else(|| {
            io::Error::other("the one of an earlier spawner has died; the next start has another")
        })?;
        let (ours, theirs) = UnixStream::pair()?;
        self.start([
            connection.as_raw_fd(),
            listener.as_raw_fd(),
            theirs.as_raw_fd(),
        ])?;
        *link = Some(ours);
        Ok(())
    }

    fn start(&self, descriptors: [RawFd; 3]) -> io::Result<()> {
        let null = || self.null.try_clone().map(Stdio::from);
        let mut command = Command::new(&self.program);
        command
            .arg0("dsec-spawner")
            .arg("keep")
            .arg(format!("--absence-s={}", self.absence_s))
            .stdin(null()?)
            .stdout(null()?)
            .stderr(null()?);
        // SAFETY: between fork and exec the closure makes system calls only.
        unsafe {
            command.pre_exec(move || {
                libc::setsid();
                // First out of the way of each other, then into place; dup2 leaves no close-on-exec.
                let mut high = [0; 3];
                for (index, descriptor) in descriptors.into_iter().enumerate() {
                    high[index] = libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 10);
                }
                for (descriptor, place) in high.into_iter().zip([CONNECTION, LISTENER, SPAWNER]) {
                    sysapi::check(libc::c_long::from(libc::dup2(descriptor, place)))?;
                }
                Ok(())
            });
        }
        let mut child = command.spawn()?;
        // Whoever outlives the other: this thread waits for nothing else.
        std::thread::Builder::new()
            .name("keeper".into())
            .spawn(move || drop(child.wait()))
            .map(drop)
    }
}

/// One question to the one that listens at `path`: its answer, and the descriptor that came with it.
fn ask(path: &Path, what: &[u8]) -> io::Result<(UnixStream, Vec<u8>, Option<OwnedFd>)> {
    let stream = UnixStream::connect(path)?;
    passing::send_frame(&stream, what, None)?;
    let answer = passing::receive_frame(&stream, MAX_FRAME)?;
    let (body, descriptor) = answer.ok_or(io::ErrorKind::UnexpectedEof)?;
    Ok((stream, body, descriptor))
}

/// Ends the one of this instance, if there is one.
pub fn end(path: &Path) -> io::Result<()> {
    let Ok((_, body, _)) = ask(path, END) else {
        return Ok(());
    };
    let pid = body.try_into().map(i32::from_be_bytes);
    let pid = pid.map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    match sysapi::pidfd_open(pid) {
        Ok(process) if !sysapi::wait_readable(process.as_raw_fd(), END_MS)? => {
            Err(io::Error::other("the keeper of blobs doesn't end"))
        }
        _ => Ok(()),
    }
}

/// The process. `absence_s`: seconds that it waits for the next spawner.
pub fn run(absence_s: u64) -> Result<i32, String> {
    // SAFETY: the spawner put these three into place; nobody else owns them.
    let (mut connection, listener, spawner) = unsafe {
        (
            OwnedFd::from_raw_fd(CONNECTION),
            UnixListener::from_raw_fd(LISTENER),
            UnixStream::from_raw_fd(SPAWNER),
        )
    };
    let mut peer = spawner;
    loop {
        if serve(&peer, &mut connection) {
            return Ok(0);
        }
        let patience = (absence_s * 1000) as libc::c_int;
        let came = sysapi::wait_readable(listener.as_raw_fd(), patience);
        if !came.map_err(|error| error.to_string())? {
            return Ok(0);
        }
        peer = listener.accept().map_err(|error| error.to_string())?.0;
    }
}

/// Until the peer is gone. True: it wants the end.
fn serve(peer: &UnixStream, connection: &mut OwnedFd) -> bool {
    while let Ok(Some((body, descriptor))) = passing::receive_frame(peer, MAX_FRAME) {
        let sent = match (&body[..], descriptor) {
            (TAKE, _) => passing::send_frame(peer, b"", Some(connection.as_raw_fd())),
            (KEEP, Some(descriptor)) => {
                *connection = descriptor;
                Ok(())
            }
            (END, _) => {
                let pid = std::process::id().to_be_bytes();
                let _ = passing::send_frame(peer, &pid, None);
                return true;
            }
            _ => return false,
        };
        if sent.is_err() {
            return false;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn one_that_died_is_followed_by_another() {
        let null = || File::options().read(true).write(true).open("/dev/null");
        let path = std::env::temp_dir().join(format!("dsec-keeper-{}", std::process::id()));
        let (mut keeper, held) = Keeper::open(&path, 1, null().unwrap()).unwrap();
        assert!(held.is_none() && !keeper.is_there());
        // It ends at once.
        keeper.program = "/bin/true".into();
        for _ in 0..2 {
            keeper.keep(null().unwrap().as_fd()).unwrap();
            let ours = keeper.link().as_ref().unwrap().as_raw_fd();
            assert!(sysapi::wait_readable(ours, 10_000).unwrap());
            assert!(!keeper.is_there());
        }
        std::fs::remove_file(path).unwrap();
    }
}
