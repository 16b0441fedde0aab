//! A sandbox's writable layer at one moment: taken while nothing in it runs, made to a layer by `dsec-mklayer`, or the start of further sandboxes.
//!
//! A snapshot is a subvolume `sn-…` beside those of the sandboxes; what is made of it lies in `<state>/packs/<snapshot>`, root's until it is whole,
//! the service's from then on. Both are found by name, so that the service's sweep removes what nobody asks for any more.

use std::collections::HashMap;
use std::ffi::CString;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use wire::capabilities::{bound, Header, Words};

use crate::node::Node;
use crate::sysapi::{self, check};

/// Syncing before the freeze is repeated while it still has something to do: what is dirty then is written while the sandbox stands still.
const SYNCS: u32 = 3;
const QUICK_SYNC: Duration = Duration::from_millis(10);
/// The most that a report or a complaint of dsec-mklayer may be.
const REPORT_MAX: u64 = 1 << 20;

const CAP_DAC_READ_SEARCH: u32 = 2;
const CAP_SYS_ADMIN: u32 = 21;
/// What reading a whole tree takes: files that nobody else may read, and `trusted.*` attributes.
const READER_SET: [u32; 2] = [CAP_DAC_READ_SEARCH, CAP_SYS_ADMIN];

/// Whether `name` may name a snapshot.
pub fn is_snapshot_name(name: &str) -> bool {
    name.starts_with("sn-")
        && (8..=64).contains(&name.len())
        && name
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

/// How long the parts of taking a snapshot took.
#[derive(Debug, Clone, Copy)]
pub struct Taken {
    pub sync: Duration,
    /// From the first process that stood still to the last one that went on.
    pub frozen: Duration,
}

/// What a layer is to be made of.
#[derive(Debug)]
pub struct Order {
    pub snapshot: String,
    /// Globs of what stays out.
    pub exclude: Vec<String>,
    pub max_entries: u64,
    pub max_bytes: u64,
    pub max_meta: u64,
}

/// Why no layer was made: a code for the wire, and words.
#[derive(Debug)]
pub struct Refused {
    pub code: &'static str,
    pub message: String,
}

impl From<io::Error> for Refused {
    fn from(error: io::Error) -> Self {
        let code = match error.kind() {
            io::ErrorKind::NotFound => "not_found",
            io::ErrorKind::AlreadyExists => "conflict",
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "no_space",
            _ => "failed",
        };
        Refused {
            code,
            message: error.to_string(),
        }
    }
}

/// Takes a snapshot of a running sandbox, which stands still meanwhile.
///
/// # Errors
/// `NotFound`: no such sandbox; `AlreadyExists`: the name is taken; `TimedOut`: it doesn't stand still. It runs again in any case.
pub fn take(node: &Node, sandbox: &str, snapshot: &str) -> io::Result<Taken> {
    let volume = node.scratch.open_volume(sandbox)?;
    let begun = Instant::now();
    for _ in 0..SYNCS {
        let started = Instant::now();
        // SAFETY: the descriptor is open.
        check(libc::c_long::from(unsafe {
            libc::syncfs(volume.as_raw_fd())
        }))?;
        if started.elapsed() < QUICK_SYNC {
            break;
        }
    }
    let sync = begun.elapsed();
    let begun = Instant::now();
    let still = node.cgroups.freeze(sandbox)?;
    let taken = node.scratch.snapshot(&volume, snapshot);
    drop(still);
    let frozen = begun.elapsed();
    taken?;
    node.scratch
        .seal(snapshot)
        .inspect_err(|_| drop(node.scratch.remove_volume(snapshot)))?;
    Ok(Taken { sync, frozen })
}

/// Layers that are being made, so that the snapshot of one that nobody waits for any more can go.
#[derive(Default)]
pub struct Packs {
    running: Mutex<HashMap<String, Arc<OwnedFd>>>,
    ended: Condvar,
}

impl Packs {
    fn running(&self) -> MutexGuard<'_, HashMap<String, Arc<OwnedFd>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a layer of a snapshot: files `meta` and `blob` in `<state>/packs/<snapshot>`. Returns what dsec-mklayer reports, a line of JSON.
    pub fn make(&self, node: &Node, order: &Order) -> Result<String, Refused> {
        let volume = node.scratch.open_volume(&order.snapshot)?;
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW;
        let top = sysapi::open_at(volume.as_raw_fd(), c"u", flags)?;
        let place = Place::make(node, &order.snapshot)?;
        let made = self.run(node, order, &top, &place);
        if made.is_ok() {
            place.hand_over(node.service_uid)?;
        } else {
            place.remove(node)?;
        }
        made
    }

    fn run(
        &self,
        node: &Node,
        order: &Order,
        top: &OwnedFd,
        place: &Place,
    ) -> Result<String, Refused> {
        let (reading, writing) = sysapi::pipe()?;
        let mut child = start(node, order, top, place, &writing)?;
        drop(writing);
        let opened = sysapi::pidfd_open(child.id() as i32).inspect_err(|_| {
            let _ = child.kill();
            let _ = child.wait();
        });
        let pidfd = Arc::new(opened?);
        self.running().insert(order.snapshot.clone(), pidfd.clone());
        let outcome = collect(child, reading, &pidfd);
        self.running().remove(&order.snapshot);
        self.ended.notify_all();
        outcome
    }

    /// Removes a snapshot and what was made of it; ends whoever still reads it. What isn't there is fine.
    pub fn remove(&self, node: &Node, snapshot: &str) -> io::Result<()> {
        let mut running = self.running();
        while let Some(pidfd) = running.get(snapshot) {
            let _ = sysapi::pidfd_kill(pidfd.as_raw_fd());
            running = self
                .ended
                .wait(running)
                .unwrap_or_else(PoisonError::into_inner);
        }
        drop(running);
        remove_place(node, snapshot)?;
        node.scratch.remove_volume(snapshot)
    }
}

/// Snapshots of which anything is there.
pub fn list(node: &Node) -> io::Result<Vec<String>> {
    let mut names = sysapi::names_in(node.scratch.root())?;
    names.extend(sysapi::names_in(node.packs.as_raw_fd())?);
    names.retain(|name| is_snapshot_name(name));
    names.sort();
    names.dedup();
    Ok(names)
}

fn remove_place(node: &Node, snapshot: &str) -> io::Result<()> {
    // Once it was handed over the service may have put anything into it; this function follows no link.
    let path = format!("/proc/self/fd/{}/{snapshot}", node.packs.as_raw_fd());
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Where a layer is written to.
struct Place {
    snapshot: String,
    directory: OwnedFd,
    meta: OwnedFd,
    blob: OwnedFd,
}

impl Place {
    fn make(node: &Node, snapshot: &str) -> io::Result<Self> {
        let name = CString::new(snapshot)?;
        sysapi::make_dir_at(node.packs.as_raw_fd(), &name, 0o700)?;
        let directory = sysapi::open_at(
            node.packs.as_raw_fd(),
            &name,
            libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW,
        )?;
        let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW;
        Ok(Place {
            snapshot: snapshot.to_owned(),
            meta: sysapi::open_at(directory.as_raw_fd(), c"meta", flags)?,
            blob: sysapi::open_at(directory.as_raw_fd(), c"blob", flags)?,
            directory,
        })
    }

    fn hand_over(self, uid: u32) -> io::Result<()> {
        for file in [&self.meta, &self.blob, &self.directory] {
            sysapi::chown_at(file.as_raw_fd(), c"", uid, uid)?;
        }
        Ok(())
    }

    fn remove(self, node: &Node) -> io::Result<()> {
        remove_place(node, &self.snapshot)
    }
}

/// Starts dsec-mklayer on the tree at `top`. It may read that, write its two files and its report, and nothing else: it has the service's uid, two
/// capabilities, the tree as its root directory, and gives up most system calls by itself.
fn start(
    node: &Node,
    order: &Order,
    top: &OwnedFd,
    place: &Place,
    report: &OwnedFd,
) -> io::Result<Child> {
    let (tree, meta, blob) = (
        top.as_raw_fd(),
        place.meta.as_raw_fd(),
        place.blob.as_raw_fd(),
    );
    let mut words: Vec<String> = vec!["dsec-mklayer".into()];
    let numbers = [
        ("--directory-fd", tree as u64),
        ("--meta-fd", meta as u64),
        ("--blob-fd", blob as u64),
        ("--max-entries", order.max_entries),
        ("--max-bytes", order.max_bytes),
        ("--max-meta", order.max_meta),
    ];
    for (name, number) in numbers {
        words.extend([name.to_owned(), number.to_string()]);
    }
    for glob in &order.exclude {
        words.extend(["--exclude".to_owned(), glob.clone()]);
    }
    let words = words
        .into_iter()
        .map(CString::new)
        .collect::<Result<Vec<_>, _>>()?;
    let mut arguments: Vec<*const libc::c_char> = words.iter().map(|word| word.as_ptr()).collect();
    arguments.push(std::ptr::null());
    let reader = ReaderStart {
        program: node.mklayer.as_raw_fd(),
        arguments: Arguments(arguments),
        kept: [tree, meta, blob],
        tree,
        uid: node.service_uid,
        spawner: std::process::id() as libc::pid_t,
    };
    let mut command = Command::new("dsec-mklayer");
    command
        .stdin(node.null.try_clone()?)
        .stdout(report.try_clone()?)
        .stderr(report.try_clone()?);
    // SAFETY: between fork and exec only system calls are made, with memory that was prepared before.
    unsafe { command.pre_exec(move || Err(reader.become_it())) };
    let child = command.spawn();
    // The words live until the child has executed the program, which is when spawn returns.
    drop(words);
    child
}

/// Pointers to words that outlive the child's use of them.
struct Arguments(Vec<*const libc::c_char>);

// SAFETY: they are read by the forked child alone, from its own copy of the memory.
unsafe impl Send for Arguments {}
// SAFETY: as above.
unsafe impl Sync for Arguments {}

/// All that the child needs to become dsec-mklayer.
struct ReaderStart {
    program: RawFd,
    arguments: Arguments,
    kept: [RawFd; 3],
    tree: RawFd,
    uid: u32,
    spawner: libc::pid_t,
}

impl ReaderStart {
    /// Executes the program; returns only what kept it from that.
    fn become_it(&self) -> io::Error {
        match self.confine() {
            Err(error) => error,
            Ok(()) => {
                let environment = [std::ptr::null::<libc::c_char>()];
                // SAFETY: both arrays end with a null, and their strings live.
                unsafe {
                    libc::syscall(
                        libc::SYS_execveat,
                        self.program,
                        c"".as_ptr(),
                        self.arguments.0.as_ptr(),
                        environment.as_ptr(),
                        libc::AT_EMPTY_PATH,
                    )
                };
                io::Error::last_os_error()
            }
        }
    }

    /// capabilities(7): ambient ones are what a program without file capabilities keeps at exec. Raw calls, for libc's concern all threads.
    fn confine(&self) -> io::Result<()> {
        let succeed = |result: libc::c_int| check(libc::c_long::from(result)).map(drop);
        let bits = READER_SET.iter().fold(0, |bits, number| bits | 1 << number);
        let header = Header::OWN;
        let sets = [
            Words {
                effective: bits,
                permitted: bits,
                inheritable: bits,
            },
            Words::default(),
        ];
        // SAFETY: plain integers and a constant string; for capset a valid header with the two sets that version 3 has.
        unsafe {
            for fd in self.kept {
                succeed(libc::fcntl(fd, libc::F_SETFD, 0))?;
            }
            succeed(libc::fchdir(self.tree))?;
            succeed(libc::chroot(c".".as_ptr()))?;
            bound(u64::from(bits))?;
            succeed(libc::prctl(libc::PR_SET_KEEPCAPS, 1, 0, 0, 0))?;
            check(libc::syscall(libc::SYS_setgroups, 0, 0))?;
            check(libc::syscall(
                libc::SYS_setresgid,
                self.uid,
                self.uid,
                self.uid,
            ))?;
            check(libc::syscall(
                libc::SYS_setresuid,
                self.uid,
                self.uid,
                self.uid,
            ))?;
            check(libc::syscall(libc::SYS_capset, &header, &sets))?;
            for number in READER_SET {
                let number = libc::c_ulong::from(number);
                let raise = libc::PR_CAP_AMBIENT_RAISE;
                succeed(libc::prctl(libc::PR_CAP_AMBIENT, raise, number, 0, 0))?;
            }
            succeed(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
            // After the last change of ids, which takes it back.
            succeed(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?;
            if libc::getppid() != self.spawner {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
        }
        Ok(())
    }
}

/// Waits for the program's end. What it wrote is its report, or its complaint.
fn collect(mut child: Child, reading: OwnedFd, pidfd: &OwnedFd) -> Result<String, Refused> {
    let mut said = Vec::new();
    let read = std::fs::File::from(reading)
        .take(REPORT_MAX + 1)
        .read_to_end(&mut said);
    if said.len() as u64 > REPORT_MAX || read.is_err() {
        let _ = sysapi::pidfd_kill(pidfd.as_raw_fd());
    }
    let status = child.wait()?;
    let text = String::from_utf8_lossy(&said).trim().to_owned();
    match (status.code(), status.signal()) {
        (Some(0), _) => Ok(text),
        (Some(1), _) => Err(Refused {
            code: "image_error",
            message: text,
        }),
        (Some(2), _) => Err(Refused {
            code: "invalid_argument",
            message: text,
        }),
        (Some(3), _) if text.contains("No space left") => Err(Refused {
            code: "no_space",
            message: text,
        }),
        (_, Some(signal)) => Err(Refused {
            code: "failed",
            message: format!("dsec-mklayer was ended by signal {signal}"),
        }),
        _ => Err(Refused {
            code: "failed",
            message: format!("dsec-mklayer: {text}"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_single_components() {
        assert!(is_snapshot_name("sn-e1-0123456789"));
        for bad in [
            "",
            "sn-",
            "sn-../../x",
            "sb-e1-0123456789",
            "sn-E1-aaaaaa",
            "sn-e1-aaaa/b",
        ] {
            assert!(!is_snapshot_name(bad), "{bad:?}");
        }
    }
}
