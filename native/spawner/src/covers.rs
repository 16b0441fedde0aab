//! Files that stand over the host's in /proc and /sys, so that programs see the sandbox's limits (`nproc`, `free`, a JVM sizing its heap).
//!
//! They are rendered once for each pair of limits and don't change afterwards: MemTotal is right, the share in use is not shown.

use std::io;

/// Paths that a cover may stand over, relative to the sandbox's root; a [`Key`] renders all of them or none.
pub const PATHS: [&std::ffi::CStr; 3] = [
    c"proc/meminfo",
    c"proc/cpuinfo",
    c"sys/devices/system/cpu/online",
];

/// What covers depend on.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Key {
    pub memory: u64,
    /// Whole processors that the sandbox sees.
    pub processors: usize,
}

impl Key {
    pub fn name(&self) -> String {
        format!("{}-{}", self.memory, self.processors)
    }

    /// The covers' names and contents, in the order of [`PATHS`].
    pub fn files(&self) -> io::Result<Vec<(&'static str, String)>> {
        Ok(vec![
            (
                "meminfo",
                meminfo(&std::fs::read_to_string("/proc/meminfo")?, self.memory),
            ),
            (
                "cpuinfo",
                cpuinfo(&std::fs::read_to_string("/proc/cpuinfo")?, self.processors),
            ),
            ("online", online(self.processors)),
        ])
    }
}

/// The host's table with its totals cut to the limit, and nothing of the host's use shown.
fn meminfo(host: &str, memory: u64) -> String {
    let limit = memory / 1024;
    host.lines()
        .filter_map(|line| {
            let (name, rest) = line.split_once(':')?;
            let value: u64 = rest.split_ascii_whitespace().next()?.parse().ok()?;
            let shown = match name {
                "MemTotal" | "MemFree" | "MemAvailable" => {
                    limit.min(if name == "MemTotal" { value } else { limit })
                }
                "VmallocTotal" | "Hugepagesize" => value,
                _ => 0,
            };
            let unit = if rest.trim_end().ends_with("kB") {
                " kB"
            } else {
                ""
            };
            Some(format!("{:<16}{shown:>8}{unit}\n", format!("{name}:")))
        })
        .collect()
}

/// The first `processors` blocks of the host's table.
fn cpuinfo(host: &str, processors: usize) -> String {
    host.split("\n\n")
        .filter(|block| block.starts_with("processor"))
        .take(processors.max(1))
        .map(|block| format!("{block}\n\n"))
        .collect()
}

fn online(processors: usize) -> String {
    match processors {
        0 | 1 => "0\n".to_owned(),
        more => format!("0-{}\n", more - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_are_the_limits() {
        let host = "MemTotal:       24000000 kB\nMemFree:        1000 kB\nCached:  55 kB\nHugePages_Total:       3\n";
        let shown = meminfo(host, 300 << 20);
        assert!(shown.contains("MemTotal:         307200 kB\n"), "{shown}");
        assert!(shown.contains("Cached:                0 kB\n"), "{shown}");
        assert!(shown.contains("HugePages_Total:       0\n"), "{shown}");
    }

    #[test]
    fn processors_are_counted_off() {
        let host = "processor\t: 0\nmodel\t: x\n\nprocessor\t: 1\nmodel\t: x\n\n";
        assert_eq!(cpuinfo(host, 1), "processor\t: 0\nmodel\t: x\n\n");
        assert_eq!(online(1), "0\n");
        assert_eq!(online(4), "0-3\n");
    }
}
