//! Control groups: which kind, what they control, and how a whole group is ended.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::finding::{Feature, Finding, State};
use super::text;

const TREE: Feature = Feature {
    name: "cgroup v2 tree",
    cost: "commands are ended by process group and /proc: one that forks fast may escape its timeout until its sandbox ends",
    todo: "mount -t cgroup2 none /sys/fs/cgroup/unified (a v2 tree helps also without controllers)",
};
const CONTROLLERS: Feature = Feature {
    name: "cgroup controllers",
    cost: "the limits of what is lacking don't hold: one sandbox can take the machine's share of all",
    todo: "a kernel with the cgroup controllers cpu, memory and pids, not switched off on its command line",
};
const KILL: Feature = Feature {
    name: "cgroup.kill",
    cost: "processes are ended one by one: a fork bomb takes longer to end",
    todo: "a kernel from 5.14",
};
const SWAP_ACCOUNTING: Feature = Feature {
    name: "swap accounting",
    cost: "a sandbox at its memory limit goes on in swap, beyond the limit",
    todo: "a kernel with MEMCG, and swapaccount=1 on its command line (cgroup v1), or no swap",
};
const PRESSURE: Feature = Feature {
    name: "memory pressure (PSI)",
    cost: "admission only looks at free memory: it may start sandboxes on a machine that is already thrashing",
    todo: "a kernel with PSI, and psi=1 on its command line",
};

/// What sandboxes are limited by.
const WANTED: [&str; 3] = ["cpu", "memory", "pids"];

/// Mounted hierarchies, as /proc/self/mounts has them.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Trees {
    pub v2: Option<String>,
    /// Mount point and controllers of each v1 hierarchy.
    v1: Vec<(String, Vec<String>)>,
}

impl Trees {
    pub fn mounted() -> Self {
        Trees::parse(&fs::read_to_string("/proc/self/mounts").unwrap_or_default())
    }

    fn parse(mounts: &str) -> Self {
        let mut trees = Trees::default();
        for line in mounts.lines() {
            let fields: Vec<&str> = line.split(' ').collect();
            match fields[..] {
                [_, point, "cgroup2", ..] => trees.v2 = Some(point.to_owned()),
                [_, point, "cgroup", options, ..] => {
                    let controllers = options.split(',').map(str::to_owned).collect();
                    trees.v1.push((point.to_owned(), controllers));
                }
                _ => {}
            }
        }
        trees
    }

    fn kind(&self) -> &'static str {
        match (
            self.v1.iter().any(|(_, options)| {
                WANTED
                    .iter()
                    .any(|name| options.iter().any(|have| have == name))
            }),
            &self.v2,
        ) {
            (true, Some(_)) => "hybrid",
            (true, None) => "v1",
            (false, _) => "v2",
        }
    }

    /// The v1 hierarchy of a controller.
    fn v1_of(&self, controller: &str) -> Option<&str> {
        let is_its = |options: &[String]| options.iter().any(|name| name == controller);
        self.v1
            .iter()
            .find(|(_, options)| is_its(options))
            .map(|(point, _)| point.as_str())
    }

    fn lacking(&self) -> Vec<&'static str> {
        let in_v2 = self
            .v2
            .as_ref()
            .and_then(|tree| text(&format!("{tree}/cgroup.controllers")))
            .unwrap_or_default();
        WANTED
            .into_iter()
            .filter(|name| {
                self.v1_of(name).is_none() && !in_v2.split(' ').any(|have| have == *name)
            })
            .collect()
    }
}

pub fn findings(trees: &Trees) -> Vec<Finding> {
    vec![
        tree(trees),
        controllers(trees),
        KILL.tried(kill(trees), State::Degraded),
        swap_accounting(trees),
        pressure(),
    ]
}

fn kill(trees: &Trees) -> io::Result<String> {
    let tree = trees.v2.as_deref();
    let tree = tree.ok_or_else(|| io::Error::other("no cgroup v2 tree is mounted"))?;
    fs::metadata(Sample::make(tree)?.0.join("cgroup.kill")).map(|_| String::new())
}

fn tree(trees: &Trees) -> Finding {
    match &trees.v2 {
        Some(point) => TREE.found(format!("{}, at {point}", trees.kind())),
        None => TREE.lacking(State::Degraded, trees.kind()),
    }
}

fn controllers(trees: &Trees) -> Finding {
    let lacking = trees.lacking();
    if lacking.is_empty() {
        CONTROLLERS.found(format!("{} ({})", WANTED.join(", "), trees.kind()))
    } else {
        CONTROLLERS.lacking(State::Degraded, format!("without {}", lacking.join(", ")))
    }
}

fn swap_accounting(trees: &Trees) -> Finding {
    let in_use = fs::read_to_string("/proc/swaps").is_ok_and(|table| table.lines().count() > 1);
    let accounted = match trees.v1_of("memory") {
        Some(point) => Path::new(point)
            .join("memory.memsw.limit_in_bytes")
            .exists(),
        // In v2 it is always there where there is swap in the kernel.
        None => Path::new("/proc/swaps").exists(),
    };
    match (accounted, in_use) {
        (true, true) => SWAP_ACCOUNTING.found("swap is in use"),
        (true, false) => SWAP_ACCOUNTING.found("no swap in use"),
        (false, false) => SWAP_ACCOUNTING.found("not needed: no swap in use"),
        (false, true) => SWAP_ACCOUNTING.lacking(State::Degraded, "swap is in use"),
    }
}

fn pressure() -> Finding {
    match fs::read_to_string("/proc/pressure/memory") {
        Ok(_) => PRESSURE.found(""),
        Err(error) => PRESSURE.lacking(State::Degraded, error.to_string()),
    }
}

/// A v2 group that exists while it is looked at: the root group lacks most files.
struct Sample(PathBuf);

impl Sample {
    fn make(tree: &str) -> io::Result<Self> {
        let path = Path::new(tree).join(format!("dsec-doctor-{}", std::process::id()));
        fs::create_dir(&path).map(|()| Sample(path))
    }
}

impl Drop for Sample {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.0) {
            eprintln!("dsec-spawner: {}: {error}", self.0.display());
        }
    }
}

/// The v2 group of this process, as a path in the tree.
pub fn own_v2_group() -> Option<String> {
    let table = fs::read_to_string("/proc/self/cgroup").ok()?;
    table
        .lines()
        .find_map(|line| line.strip_prefix("0::").map(str::to_owned))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n\
        cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n\
        cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n\
        cgroup /sys/fs/cgroup/systemd cgroup rw,name=systemd 0 0\n";

    #[test]
    fn a_hybrid_host_has_both_and_each_controller_its_own_hierarchy() {
        let trees = Trees::parse(HYBRID);
        assert_eq!(
            (trees.kind(), trees.v2.as_deref()),
            ("hybrid", Some("/sys/fs/cgroup/unified"))
        );
        assert_eq!(trees.v1_of("memory"), Some("/sys/fs/cgroup/memory"));
        assert_eq!(trees.v1_of("cpu"), Some("/sys/fs/cgroup/cpu,cpuacct"));
        assert_eq!(trees.v1_of("pids"), None);
    }

    #[test]
    fn a_name_only_hierarchy_doesnt_make_a_v2_host_hybrid() {
        let trees = Trees::parse(
            "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\nnone /run/x cgroup rw,name=systemd 0 0\n",
        );
        assert_eq!(trees.kind(), "v2");
    }
}
