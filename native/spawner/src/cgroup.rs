//! Control groups of sandboxes: the one module that knows v1, hybrid and v2.
//!
//! Every sandbox has a directory named by its id in each hierarchy used. The v2 directory (also on hybrid hosts, where it has no controllers)
//! belongs to the sandbox's chronus, which makes a child for each command: cgroup.kill then ends exactly that command's processes.
//! Devices are limited once, on the root group: no sandbox may loosen it and none needs its own list.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::sysapi;

/// Docker's seven: null, zero, full, random, urandom, tty, ptmx (and the terminals behind it).
const DEVICES: &[&str] = &[
    "c 1:3 rwm",
    "c 1:5 rwm",
    "c 1:7 rwm",
    "c 1:8 rwm",
    "c 1:9 rwm",
    "c 5:0 rwm",
    "c 5:2 rwm",
    "c 136:* rwm",
    // /dev/fuse, for the spawner itself, which is in the same group: sandboxes have no node of it and can't make one.
    "c 10:229 rwm",
];

/// Loop devices and their control, where layers need them: for the spawner too, as /dev/fuse is.
const LOOP_DEVICES: &[&str] = &["c 10:237 rwm", "b 7:* rwm"];

/// Scheduler period of a CPU quota, the kernel's default.
const PERIOD_US: u64 = 100_000;

/// What waits in sockets may take this fraction of a sandbox's memory on top of it, where it is counted apart; and at least so many bytes.
const SOCKET_SHARE: u64 = 8;
const SOCKET_MEMORY_MIN: u64 = 16 << 20;

/// How long a directory may stay busy (its last processes are on their way out) before it is reported.
const BUSY_DEADLINE: Duration = Duration::from_secs(10);

/// How long the processes of a sandbox may take to stand still, and how often that is looked at.
const FREEZE_DEADLINE: Duration = Duration::from_secs(2);
const FREEZE_POLL: Duration = Duration::from_micros(100);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    V1,
    V2,
    Hybrid,
}

impl Mode {
    pub fn name(self) -> &'static str {
        match self {
            Mode::V1 => "v1",
            Mode::V2 => "v2",
            Mode::Hybrid => "hybrid",
        }
    }
}

/// One v1 hierarchy: its controllers and the instance's root group in it.
struct Hierarchy {
    controllers: Vec<String>,
    root: OwnedFd,
}

impl Hierarchy {
    fn has(&self, controller: &str) -> bool {
        self.controllers.iter().any(|name| name == controller)
    }
}

/// The instance's root groups, by open descriptors: nothing here needs /sys/fs/cgroup to stay mounted where the spawner lives.
pub struct Cgroups {
    v1: Vec<Hierarchy>,
    v2: Option<OwnedFd>,
    pub mode: Mode,
}

/// What limits a sandbox.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes.
    pub memory: u64,
    /// Thousandths of a CPU; None: no quota.
    pub cpu_millis: Option<u64>,
    pub pids: u64,
}

/// What a sandbox used, read just before its groups go.
#[derive(Default, Clone, Copy, Debug)]
pub struct Figures {
    pub cpu_us: u64,
    pub memory_peak: u64,
    pub oom_kills: u64,
}

/// Whether `name` may name a group: a single path component of the sandboxes' own alphabet.
pub fn is_group_name(name: &str) -> bool {
    name.starts_with("sb-")
        && (8..=64).contains(&name.len())
        && name
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

fn text(value: &str) -> CString {
    CString::new(value).unwrap_or_default()
}

/// Mount points of cgroup hierarchies: (mount point, None for v2 or the v1 controllers).
fn mounted() -> io::Result<Vec<(String, Option<Vec<String>>)>> {
    let mut found = Vec::new();
    for line in std::fs::read_to_string("/proc/self/mounts")?.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let [_, point, kind, options, ..] = fields[..] else {
            continue;
        };
        match kind {
            "cgroup2" => found.push((point.to_owned(), None)),
            "cgroup" => found.push((
                point.to_owned(),
                Some(options.split(',').map(str::to_owned).collect()),
            )),
            _ => {}
        }
    }
    Ok(found)
}

impl Cgroups {
    /// Opens (and makes, where missing) the root group `name` in every hierarchy that matters. `loops`: the spawner needs loop devices.
    pub fn open(name: &str, loops: bool) -> io::Result<Self> {
        let mut v1 = Vec::new();
        let mut v2 = None;
        for (point, controllers) in mounted()? {
            let wanted = controllers.as_ref().is_none_or(|names| {
                ["memory", "cpu", "pids", "devices"]
                    .iter()
                    .any(|one| names.iter().any(|name| name == one))
            });
            if !wanted {
                continue;
            }
            let path = Path::new(&point).join(name);
            match std::fs::create_dir(&path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
            let root = OwnedFd::from(std::fs::File::open(&path)?);
            match controllers {
                Some(controllers) => v1.push(Hierarchy { controllers, root }),
                None => {
                    // Only what is the v2 tree's own here can be switched on: on hybrid hosts none of the three is.
                    for controller in ["+memory", "+pids", "+cpu"] {
                        let _ = std::fs::write(
                            Path::new(&point).join("cgroup.subtree_control"),
                            controller,
                        );
                        let _ = sysapi::write_at(
                            root.as_raw_fd(),
                            c"cgroup.subtree_control",
                            controller.as_bytes(),
                        );
                    }
                    v2 = Some(root);
                }
            }
        }
        let mode = match (v1.is_empty(), v2.is_some()) {
            (true, true) => Mode::V2,
            (false, true) => Mode::Hybrid,
            (false, false) => Mode::V1,
            (true, false) => {
                return Err(io::Error::other(
                    "no cgroup hierarchy is mounted below /sys/fs/cgroup",
                ))
            }
        };
        let groups = Cgroups { v1, v2, mode };
        groups.limit_devices(loops)?;
        Ok(groups)
    }

    fn limit_devices(&self, loops: bool) -> io::Result<()> {
        if let Some(hierarchy) = self.v1.iter().find(|one| one.has("devices")) {
            let root = hierarchy.root.as_raw_fd();
            // A group that already has children refuses a new list; then an earlier spawner of this instance wrote it.
            if sysapi::write_at(root, c"devices.deny", b"a").is_ok() {
                let more = if loops { LOOP_DEVICES } else { &[] };
                for device in DEVICES.iter().chain(more) {
                    sysapi::write_at(root, c"devices.allow", device.as_bytes())?;
                }
            }
        }
        if let Some(hierarchy) = self.v1.iter().find(|one| one.has("memory")) {
            // Sandboxes inherit it.
            sysapi::write_at(hierarchy.root.as_raw_fd(), c"memory.swappiness", b"0")?;
            // Kernels before 5.11 count children only when told; later ones always do and refuse the write.
            let _ = sysapi::write_at(hierarchy.root.as_raw_fd(), c"memory.use_hierarchy", b"1");
            // No limit, but counted: while one group has this the kernel's code isn't patched for each first and last sandbox.
            let _ = sysapi::write_at(
                hierarchy.root.as_raw_fd(),
                c"memory.kmem.tcp.limit_in_bytes",
                b"-1",
            );
        }
        Ok(())
    }

    /// Hierarchies in which each sandbox has a directory.
    fn per_sandbox(&self) -> impl Iterator<Item = &Hierarchy> {
        self.v1.iter().filter(|one| !one.has("devices"))
    }

    fn roots(&self) -> impl Iterator<Item = RawFd> + '_ {
        self.per_sandbox()
            .map(|one| one.root.as_raw_fd())
            .chain(self.v2.iter().map(AsRawFd::as_raw_fd))
    }

    fn controller(&self, controller: &str) -> Option<(RawFd, bool)> {
        match self.v1.iter().find(|one| one.has(controller)) {
            Some(hierarchy) => Some((hierarchy.root.as_raw_fd(), false)),
            None if self.mode == Mode::V2 => self.v2.as_ref().map(|root| (root.as_raw_fd(), true)),
            None => None,
        }
    }

    /// Makes a sandbox's groups, sets its limits, and gives its v2 directory to `owner`, its chronus. The v2 directory's descriptor is returned.
    pub fn create(&self, id: &str, limits: Limits, owner: u32) -> io::Result<Option<OwnedFd>> {
        let name = text(id);
        for root in self.roots() {
            sysapi::make_dir_at(root, &name, 0o755)?;
        }
        self.limit(id, limits)?;
        let Some(v2) = &self.v2 else {
            return Ok(None);
        };
        let dir = sysapi::open_at(v2.as_raw_fd(), &name, libc::O_RDONLY | libc::O_DIRECTORY)?;
        // As much as making groups below it and putting commands there takes.
        for file in [c"", c"cgroup.procs"] {
            sysapi::chown_at(dir.as_raw_fd(), file, owner, owner)?;
        }
        Ok(Some(dir))
    }

    /// Writes the limits of fresh groups, which have none.
    fn limit(&self, id: &str, limits: Limits) -> io::Result<()> {
        let write = |root: RawFd, file: &str, value: &str| {
            sysapi::write_at(root, &text(&format!("{id}/{file}")), value.as_bytes())
                .map_err(|error| io::Error::new(error.kind(), format!("{file}={value}: {error}")))
        };
        let memory = limits.memory.to_string();
        match self.controller("memory") {
            Some((root, true)) => {
                write(root, "memory.max", &memory)?;
                let _ = write(root, "memory.swap.max", "0");
            }
            Some((root, false)) => {
                write(root, "memory.limit_in_bytes", &memory)?;
                let _ = write(root, "memory.memsw.limit_in_bytes", &memory);
                // Without a limit v1 doesn't count what waits in sockets at all; with one it has an account of its own.
                let sockets = (limits.memory / SOCKET_SHARE).max(SOCKET_MEMORY_MIN);
                let _ = write(root, "memory.kmem.tcp.limit_in_bytes", &sockets.to_string());
            }
            None => {}
        }
        if let Some((root, _)) = self.controller("pids") {
            write(root, "pids.max", &limits.pids.to_string())?;
        }
        if let (Some(millis), Some((root, v2))) = (limits.cpu_millis, self.controller("cpu")) {
            let quota = millis * PERIOD_US / 1000;
            if v2 {
                write(root, "cpu.max", &format!("{quota} {PERIOD_US}"))?;
            } else {
                write(root, "cpu.cfs_quota_us", &quota.to_string())?;
            }
        }
        Ok(())
    }

    /// Moves this process into the group whose devices are limited: sandboxes are born there, and entering a group costs more than making one.
    pub fn enter_devices(&self) -> io::Result<()> {
        match self.v1.iter().find(|one| one.has("devices")) {
            Some(hierarchy) => sysapi::write_at(hierarchy.root.as_raw_fd(), c"cgroup.procs", b"0"),
            None => Ok(()),
        }
    }

    /// Moves a process into the sandbox's v1 groups. The v2 one it was born in (or moves to, where clone couldn't).
    pub fn attach(&self, id: &str, pid: i32, born_in_v2: bool) -> io::Result<()> {
        let procs = text(&format!("{id}/cgroup.procs"));
        for hierarchy in self.per_sandbox() {
            sysapi::write_at(
                hierarchy.root.as_raw_fd(),
                &procs,
                pid.to_string().as_bytes(),
            )?;
        }
        match (&self.v2, born_in_v2) {
            (Some(root), false) => {
                sysapi::write_at(root.as_raw_fd(), &procs, pid.to_string().as_bytes())
            }
            _ => Ok(()),
        }
    }

    /// Kills everything in the sandbox's group. False where the host has no cgroup.kill: its first process takes the rest along.
    pub fn kill(&self, id: &str) -> bool {
        let file = text(&format!("{id}/cgroup.kill"));
        self.v2
            .as_ref()
            .is_some_and(|root| sysapi::write_at(root.as_raw_fd(), &file, b"1").is_ok())
    }

    /// Stops everything in the sandbox's group until the value returned is dropped.
    ///
    /// # Errors
    /// `Unsupported` where the host has no v2 tree; `TimedOut` if a process doesn't stop: then all go on.
    pub fn freeze(&self, id: &str) -> io::Result<Frozen> {
        let root = self.v2.as_ref().ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::Unsupported,
                "this host has no v2 cgroup tree, by which sandboxes are frozen",
            )
        })?;
        let group = sysapi::open_at(
            root.as_raw_fd(),
            &text(id),
            libc::O_RDONLY | libc::O_DIRECTORY,
        )?;
        sysapi::write_at(group.as_raw_fd(), c"cgroup.freeze", b"1")?;
        let frozen = Frozen { group };
        let end = Instant::now() + FREEZE_DEADLINE;
        while !frozen.is_complete()? {
            if Instant::now() > end {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "a process in the sandbox waits for the kernel and can't be stopped now",
                ));
            }
            std::thread::sleep(FREEZE_POLL);
        }
        Ok(frozen)
    }

    /// Lets every sandbox go on that a spawner left frozen which died.
    pub fn thaw_all(&self) {
        let Some(root) = &self.v2 else { return };
        for name in self.list() {
            let file = text(&format!("{name}/cgroup.freeze"));
            if sysapi::read_at(root.as_raw_fd(), &file).is_ok_and(|state| state.trim() == "1") {
                if let Err(error) = sysapi::write_at(root.as_raw_fd(), &file, b"0") {
                    eprintln!("dsec-spawner: {name} stays frozen: {error}");
                }
            }
        }
    }

    pub fn figures(&self, id: &str) -> Figures {
        let read =
            |root: RawFd, file: &str| sysapi::read_at(root, &text(&format!("{id}/{file}"))).ok();
        let mut figures = Figures::default();
        if let Some(root) = &self.v2 {
            figures.cpu_us = read(root.as_raw_fd(), "cpu.stat")
                .and_then(|stat| keyed(&stat, "usage_usec"))
                .unwrap_or(0);
        }
        if let Some((root, v2)) = self.controller("memory") {
            let (peak, events) = if v2 {
                ("memory.peak", "memory.events")
            } else {
                ("memory.max_usage_in_bytes", "memory.oom_control")
            };
            figures.memory_peak = read(root, peak)
                .and_then(|value| value.trim().parse().ok())
                .unwrap_or(0);
            figures.oom_kills = read(root, events)
                .and_then(|value| keyed(&value, "oom_kill"))
                .unwrap_or(0);
        }
        figures
    }

    /// Removes every group of the sandbox; waits for processes that are on their way out.
    pub fn remove(&self, id: &str) -> io::Result<()> {
        let end = Instant::now() + BUSY_DEADLINE;
        self.roots()
            .try_for_each(|root| remove_tree_by(root, &text(id), end))
    }

    /// Sandboxes that have a group in some hierarchy.
    pub fn list(&self) -> Vec<String> {
        let mut names: Vec<String> = self
            .roots()
            .flat_map(|root| sysapi::names_in(root).unwrap_or_default())
            .filter(|name| is_group_name(name))
            .collect();
        names.sort();
        names.dedup();
        names
    }

    /// Processes in the sandbox's group and below (in the v2 tree each command has a group of its own), as the kernel lists them.
    pub fn pids(&self, id: &str) -> Vec<i32> {
        let mut pids = Vec::new();
        for root in self.roots() {
            pids_below(root, &text(id), &mut pids);
        }
        pids.sort_unstable();
        pids.dedup();
        pids
    }
}

/// A group whose processes stand still.
pub struct Frozen {
    group: OwnedFd,
}

impl Frozen {
    fn is_complete(&self) -> io::Result<bool> {
        let events = sysapi::read_at(self.group.as_raw_fd(), c"cgroup.events")?;
        Ok(keyed(&events, "frozen") == Some(1))
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        match sysapi::write_at(self.group.as_raw_fd(), c"cgroup.freeze", b"0") {
            Ok(()) => {}
            // Its sandbox was ended meanwhile, and its group is gone or on its way.
            Err(error)
                if error.kind() == io::ErrorKind::NotFound
                    || error.raw_os_error() == Some(libc::ENODEV) => {}
            // Nothing may stay frozen: the next spawner lets go of what it finds so.
            Err(error) => {
                eprintln!("dsec-spawner: thawing: {error}; starting anew");
                std::process::abort();
            }
        }
    }
}

fn pids_below(parent: RawFd, name: &CStr, pids: &mut Vec<i32>) {
    // A group may go at any time, and its processes with it.
    let Ok(group) = sysapi::open_at(parent, name, libc::O_RDONLY | libc::O_DIRECTORY) else {
        return;
    };
    let content = sysapi::read_at(group.as_raw_fd(), c"cgroup.procs").unwrap_or_default();
    pids.extend(content.lines().filter_map(|line| line.parse::<i32>().ok()));
    for child in children(&group) {
        pids_below(group.as_raw_fd(), &child, pids);
    }
}

/// The groups directly below one.
fn children(group: &OwnedFd) -> Vec<CString> {
    let Ok(entries) = std::fs::read_dir(format!("/proc/self/fd/{}", group.as_raw_fd())) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| text(&entry.file_name().to_string_lossy()))
        .collect()
}

/// Removes a group and its children, deepest first. One that isn't there is fine.
fn remove_tree(parent: RawFd, name: &CStr) -> io::Result<()> {
    match sysapi::remove_dir_at(parent, name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
        other => return other,
    }
    let dir = match sysapi::open_at(parent, name, libc::O_RDONLY | libc::O_DIRECTORY) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    for child in children(&dir) {
        remove_tree(dir.as_raw_fd(), &child)?;
    }
    match sysapi::remove_dir_at(parent, name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Likewise, once its last processes have ended, for which it waits so long.
fn remove_tree_by(parent: RawFd, name: &CStr, end: Instant) -> io::Result<()> {
    loop {
        match remove_tree(parent, name) {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(1));
            }
            other => return other,
        }
    }
}

/// The number behind `key` in lines of `key value`.
fn keyed(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        line.split_once(' ')
            .filter(|(name, _)| *name == key)?
            .1
            .trim()
            .parse()
            .ok()
    })
}

/// Removes the instance's root groups everywhere (they must be empty of sandboxes).
pub fn remove_roots(name: &str) -> io::Result<()> {
    let end = Instant::now() + BUSY_DEADLINE;
    for (point, _) in mounted()? {
        let parent = OwnedFd::from(std::fs::File::open(&point)?);
        remove_tree_by(parent.as_raw_fd(), &text(name), end).map_err(|error| {
            let mut pids = Vec::new();
            pids_below(parent.as_raw_fd(), &text(name), &mut pids);
            let inside = if pids.is_empty() {
                String::new()
            } else {
                format!(" (processes {pids:?} are in it)")
            };
            io::Error::new(error.kind(), format!("{point}/{name}: {error}{inside}"))
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_single_components() {
        assert!(is_group_name("sb-e1-0123456789abcdef"));
        for bad in [
            "",
            "sb-",
            "../sb-aaaaaaa",
            "sb-e1/..",
            "sb-E1-aaaaaa",
            "xx-e1-aaaaaaaa",
            "sb-e1-aaaa\0aaaa",
        ] {
            assert!(!is_group_name(bad), "{bad:?}");
        }
    }

    #[test]
    fn keyed_values_are_found() {
        assert_eq!(
            keyed("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", "oom_kill"),
            Some(3)
        );
        assert_eq!(keyed("usage_usec 17\n", "nope"), None);
    }

    #[test]
    fn processes_of_commands_own_groups_are_found_too() {
        let root = crate::testing::Directory::make("groups");
        let command = root.join("sb-1/e1");
        std::fs::create_dir_all(&command).unwrap();
        std::fs::write(root.join("sb-1/cgroup.procs"), "7\n").unwrap();
        std::fs::write(command.join("cgroup.procs"), "9\n8\n").unwrap();
        let parent = std::fs::File::open(&*root).unwrap();
        let mut pids = Vec::new();
        pids_below(parent.as_raw_fd(), c"sb-1", &mut pids);
        assert_eq!(pids, [7, 9, 8]);
        pids_below(parent.as_raw_fd(), c"sb-2", &mut pids);
        assert_eq!(pids.len(), 3);
    }
}
