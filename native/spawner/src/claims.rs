//! What an instance has for itself alone: its directories, its cgroup, and its sandboxes' uids. Two instances that share one of them take each
//! other's for leftovers and sweep them, or share users.
//!
//! Each has a record in a directory of root's, named by its run directory, that says what is its own. The supervisor and the processes of the
//! service's user hold a flock on it, which the kernel lets go of however they die; the spawner and sandboxes don't hold it. A record that nobody
//! holds still counts while the instance's namespace of layers is pinned: then sandboxes live on for its next start.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use crate::options::{self, Options};

/// Goes with a reboot, as what the records tell of does.
const REGISTRY: &str = "/run/dsec-instances";
/// How long to wait for the service of a supervisor that was killed: it finishes what it has under way, for at most 20 s.
const PATIENCE: Duration = Duration::from_secs(25);
const POLL: Duration = Duration::from_millis(50);

/// What it is taken for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Start,
    /// Touches directories and the cgroup, nobody's uids.
    Sweep,
}

/// Held as long as this, or a copy of its descriptor in another process, is open.
#[derive(Debug)]
pub struct Claim {
    /// The record.
    file: File,
    path: PathBuf,
    run: PathBuf,
    /// The state directory itself is locked too: who shares it from another container may have another registry.
    _state: Option<File>,
}

impl AsRawFd for Claim {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

/// Takes all that these options name.
///
/// # Errors
/// Something of it is another instance's: which, whose, and what to do.
pub fn take(options: &Options, purpose: Purpose) -> Result<Claim, String> {
    take_in(Path::new(REGISTRY), options, purpose)
}

fn take_in(registry: &Path, options: &Options, purpose: Purpose) -> Result<Claim, String> {
    let record = Record::of(options);
    let path = registry.join(record.name());
    let deadline = Instant::now() + PATIENCE;
    loop {
        let locked = guard(registry)?;
        let file = open_record(&path)?;
        if lock(&file, libc::LOCK_EX) {
            return match claim(registry, &file, &record, purpose) {
                Ok(state) => Ok(Claim {
                    file,
                    path,
                    run: record.run,
                    _state: state,
                }),
                Err(reason) => {
                    // One that was made just now tells of nothing.
                    if file.metadata().is_ok_and(|found| found.len() == 0) {
                        let _ = fs::remove_file(&path);
                    }
                    Err(reason)
                }
            };
        }
        drop(locked);
        if Instant::now() > deadline {
            return Err(format!(
                "another instance is at work in {}",
                record.run.display()
            ));
        }
        std::thread::sleep(POLL);
    }
}

/// With the registry and the own record locked: looks at all others, and writes the own one.
fn claim(
    registry: &Path,
    file: &File,
    record: &Record,
    purpose: Purpose,
) -> Result<Option<File>, String> {
    let failed = |error: io::Error| format!("{}: {error}", registry.display());
    let others = others(registry, record).map_err(failed)?;
    for (other, hold) in &others {
        let shared = record.shared_with(other, purpose);
        if !shared.is_empty() {
            let free = record.free_base(others.iter().map(|(other, _)| other));
            return Err(refusal(&shared, other, *hold, purpose, free));
        }
    }
    if let Some(earlier) = read_record(file).filter(Record::is_pinned) {
        record.refuse_change_of(&earlier, purpose)?;
    }
    let state = lock_state(&record.state, purpose)?;
    write_record(file, record).map_err(failed)?;
    Ok(state)
}

impl Claim {
    /// Forgets the record, unless sandboxes live on.
    pub fn end(self) -> Result<(), String> {
        if crate::layers::is_pinned(&crate::node::pin_below(&self.run)) {
            return Ok(());
        }
        let registry = self.path.parent().unwrap_or(Path::new(REGISTRY));
        let _locked = guard(registry)?;
        fs::remove_file(&self.path).map_err(|error| format!("{}: {error}", self.path.display()))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hold {
    /// By a process.
    Live,
    /// By sandboxes that wait for a start.
    Kept,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Record {
    run: PathBuf,
    state: PathBuf,
    cgroup: String,
    uids: Range<u32>,
}

impl Record {
    fn of(options: &Options) -> Self {
        Record {
            run: resolved(&options.run_dir),
            state: resolved(&options.state_dir),
            cgroup: options.cgroup.clone(),
            uids: options.uids(),
        }
    }

    /// Of the file: the run directory's path may be too long for a name.
    fn name(&self) -> String {
        let digest = Sha256::digest(self.run.as_os_str().as_bytes());
        digest[..16]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }

    /// Five fields with NUL between them, which no path can hold.
    fn encode(&self) -> Vec<u8> {
        let (start, end) = (self.uids.start.to_string(), self.uids.end.to_string());
        let fields = [
            self.run.as_os_str().as_bytes(),
            self.state.as_os_str().as_bytes(),
            self.cgroup.as_bytes(),
            start.as_bytes(),
            end.as_bytes(),
        ];
        fields.join(&0)
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let fields: Vec<&[u8]> = bytes.split(|byte| *byte == 0).collect();
        let [run, state, cgroup, start, end] = fields[..] else {
            return None;
        };
        let path = |bytes: &[u8]| PathBuf::from(std::ffi::OsStr::from_bytes(bytes));
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).ok();
        Some(Record {
            run: path(run),
            state: path(state),
            cgroup: text(cgroup)?,
            uids: text(start)?.parse().ok()?..text(end)?.parse().ok()?,
        })
    }

    fn is_pinned(&self) -> bool {
        crate::layers::is_pinned(&crate::node::pin_below(&self.run))
    }

    /// What both would have, as options.
    fn shared_with(&self, other: &Record, purpose: Purpose) -> Vec<String> {
        let mut shared = Vec::new();
        if is_same_directory(&self.state, &other.state) {
            shared.push(format!("--state-dir {}", self.state.display()));
        }
        if self.cgroup == other.cgroup {
            shared.push(format!("--cgroup {}", self.cgroup));
        }
        if purpose == Purpose::Start && overlap(&self.uids, &other.uids) {
            shared.push(format!(
                "--uid-base {} (uids up to {})",
                self.uids.start,
                self.uids.end - 1
            ));
        }
        shared
    }

    /// Sandboxes that an earlier run in the same directory left are found by its cgroup, and keep their uids.
    fn refuse_change_of(&self, earlier: &Record, purpose: Purpose) -> Result<(), String> {
        let same_uids = self.uids == earlier.uids || purpose == Purpose::Sweep;
        if self.cgroup == earlier.cgroup
            && same_uids
            && is_same_directory(&self.state, &earlier.state)
        {
            return Ok(());
        }
        Err(format!(
            "what an earlier run left in {} has --state-dir {}, --cgroup {}, --uid-base {} and --max-sandboxes {}: name the same ones, or end its \
             sandboxes first",
            self.run.display(),
            earlier.state.display(),
            earlier.cgroup,
            earlier.uids.start,
            options::sandboxes_in(&earlier.uids)
        ))
    }

    /// A --uid-base for as many that overlaps with none of these.
    fn free_base<'a>(&self, others: impl Iterator<Item = &'a Record> + Clone) -> Option<u32> {
        let length = self.uids.end - self.uids.start;
        options::bases(length).find(|base| {
            let range = *base..base + length;
            !others.clone().any(|other| overlap(&range, &other.uids))
        })
    }
}

fn overlap(one: &Range<u32>, other: &Range<u32>) -> bool {
    one.start < other.end && other.start < one.end
}

fn refusal(
    shared: &[String],
    other: &Record,
    hold: Hold,
    purpose: Purpose,
    free: Option<u32>,
) -> String {
    let run = other.run.display();
    let verb = if shared.len() == 1 { "is" } else { "are" };
    let holder = match hold {
        Hold::Live => format!("{verb} in use by another instance, whose --run-dir is {run}"),
        Hold::Kept => format!(
            "{verb} in use by sandboxes that wait for the next start with --run-dir {run} (`dsec down --run-dir {run}` ends them)"
        ),
    };
    let advice = match purpose {
        Purpose::Start => {
            let base = free.map_or(String::new(), |base| format!(" ({base} is free)"));
            format!("give this one its own --state-dir, --cgroup, --uid-base{base} and ports")
        }
        Purpose::Sweep => {
            "sweeping would destroy that one; name the --state-dir and --cgroup of what is to be swept"
                .to_owned()
        }
    };
    format!("{} {holder}: {advice}", shared.join(", "))
}

/// The records of other instances that count. Those that don't are removed.
fn others(registry: &Path, own: &Record) -> io::Result<Vec<(Record, Hold)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(registry)? {
        let path = entry?.path();
        if path.file_name().is_some_and(|name| *name == *own.name()) {
            continue;
        }
        let file = File::open(&path)?;
        let record = read_record(&file);
        let is_live = !lock(&file, libc::LOCK_SH);
        match record {
            Some(record) if is_live => found.push((record, Hold::Live)),
            Some(record) if record.is_pinned() => found.push((record, Hold::Kept)),
            // It is being written, which takes the registry's lock; so it is none of ours.
            None if is_live => {}
            _ => fs::remove_file(&path)?,
        }
    }
    Ok(found)
}

/// Held while records are looked at, made or removed.
fn guard(registry: &Path) -> Result<File, String> {
    let failed = |error: io::Error| format!("{}: {error}", registry.display());
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(registry)
        .map_err(failed)?;
    let directory = File::open(registry).map_err(failed)?;
    // SAFETY: plain integers; the descriptor is open.
    if unsafe { libc::flock(directory.as_raw_fd(), libc::LOCK_EX) } < 0 {
        return Err(failed(io::Error::last_os_error()));
    }
    Ok(directory)
}

fn open_record(path: &Path) -> Result<File, String> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
        .map_err(|error| format!("{}: {error}", path.display()))
}

/// Whether the lock could be had.
fn lock(file: &File, kind: libc::c_int) -> bool {
    // SAFETY: plain integers; the descriptor is open.
    unsafe { libc::flock(file.as_raw_fd(), kind | libc::LOCK_NB) == 0 }
}

fn lock_state(state: &Path, purpose: Purpose) -> Result<Option<File>, String> {
    let failed = |error: io::Error| format!("{}: {error}", state.display());
    if purpose == Purpose::Start {
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(state)
            .map_err(failed)?;
    }
    let directory = match File::open(state) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(failed)?,
    };
    if lock(&directory, libc::LOCK_EX) {
        return Ok(Some(directory));
    }
    Err(format!(
        "--state-dir {} is in use by another instance, which isn't known to this machine (in another container?): give this one its own",
        state.display()
    ))
}

fn read_record(file: &File) -> Option<Record> {
    let mut bytes = Vec::new();
    let mut reader = file;
    io::Seek::rewind(&mut reader).ok()?;
    reader.read_to_end(&mut bytes).ok()?;
    Record::decode(&bytes)
}

fn write_record(file: &File, record: &Record) -> io::Result<()> {
    let mut writer = file;
    file.set_len(0)?;
    io::Seek::rewind(&mut writer)?;
    writer.write_all(&record.encode())
}

/// The path without links, as far as it exists.
fn resolved(path: &Path) -> PathBuf {
    let known = path
        .ancestors()
        .find_map(|at| Some((at, at.canonicalize().ok()?)));
    match known {
        Some((at, real)) => match path.strip_prefix(at) {
            Ok(rest) if !rest.as_os_str().is_empty() => real.join(rest),
            _ => real,
        },
        None => path.to_owned(),
    }
}

/// Also by two mounts.
fn is_same_directory(one: &Path, other: &Path) -> bool {
    let inode = |path: &Path| {
        fs::metadata(path)
            .ok()
            .map(|found| (found.dev(), found.ino()))
    };
    one == other || inode(one).is_some_and(|found| inode(other) == Some(found))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Directory;

    struct Machine(Directory);

    impl Machine {
        fn options(&self, name: &str, cgroup: &str, base: u32) -> Options {
            let mut options = Options::with_defaults();
            options.run_dir = self.0.join(format!("{name}-run"));
            options.state_dir = self.0.join(format!("{name}-state"));
            options.cgroup = cgroup.to_owned();
            options.uid_base = base;
            options
        }

        fn take(&self, options: &Options, purpose: Purpose) -> Result<Claim, String> {
            take_in(&self.0.join("instances"), options, purpose)
        }
    }

    #[test]
    fn what_a_live_instance_has_no_other_gets() {
        let machine = Machine(Directory::make("claims"));
        let first = machine.options("a", "dsec-a", 0x1000_0000);
        let claim = machine.take(&first, Purpose::Start).unwrap();
        let mut same_state = machine.options("b", "dsec-b", 0x2000_0000);
        std::os::unix::fs::symlink(&first.state_dir, machine.0.join("link")).unwrap();
        same_state.state_dir = machine.0.join("link");
        for (other, named) in [
            (same_state, "--state-dir "),
            (
                machine.options("b", "dsec-a", 0x2000_0000),
                "--cgroup dsec-a is in use",
            ),
            (
                machine.options("b", "dsec-b", 0x1fff_0000),
                "--uid-base 536805376 (uids up to 805236735) is in use",
            ),
        ] {
            let reason = machine.take(&other, Purpose::Start).unwrap_err();
            assert!(reason.contains(named), "{reason}");
            assert!(reason.contains("a-run: give this one its own"), "{reason}");
        }
        let mut beside = machine.options("b", "dsec-b", 0x2000_0000);
        machine.take(&beside, Purpose::Start).unwrap();
        beside.cgroup = "dsec-a".to_owned();
        drop(claim);
        machine.take(&beside, Purpose::Start).unwrap();
    }

    #[test]
    fn a_sweep_spares_others_but_needs_no_uids() {
        let machine = Machine(Directory::make("claims-sweep"));
        let first = machine.options("a", "dsec-a", 0x1000_0000);
        let claim = machine.take(&first, Purpose::Start).unwrap();
        let other = machine.options("b", "dsec-b", 0x1000_0000);
        machine.take(&other, Purpose::Sweep).unwrap().end().unwrap();
        let same = machine.options("b", "dsec-a", 0x2000_0000);
        let reason = machine.take(&same, Purpose::Sweep).unwrap_err();
        assert!(
            reason.contains("sweeping would destroy that one"),
            "{reason}"
        );
        claim.end().unwrap();
        machine.take(&same, Purpose::Sweep).unwrap().end().unwrap();
        let left = fs::read_dir(machine.0.join("instances")).unwrap().count();
        assert_eq!(left, 0);
    }

    #[test]
    fn a_free_base_is_named() {
        let machine = Machine(Directory::make("claims-free"));
        let _first = machine
            .take(&machine.options("a", "dsec-a", 0x1000_0000), Purpose::Start)
            .unwrap();
        let _second = machine
            .take(&machine.options("b", "dsec-b", 0x2000_0000), Purpose::Start)
            .unwrap();
        let third = machine.options("c", "dsec-c", 0x1000_0000);
        let reason = machine.take(&third, Purpose::Start).unwrap_err();
        assert!(reason.contains("(805306368 is free)"), "{reason}");
    }

    #[test]
    fn a_record_reads_as_it_was_written() {
        let record = Record::of(&Options::with_defaults());
        assert_eq!(Record::decode(&record.encode()), Some(record));
        assert_eq!(Record::decode(b""), None);
    }
}
