//! The processes of the sandbox, as its own /proc shows them.

use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;

use wire::message::BuiltinArgs;
use wire::value::Writer;

use super::{stdout, Failure, Result};

/// What is shown of a command line.
const ARGV_MAX: usize = 4 << 10;

struct Stat {
    state: String,
    parent: i64,
    ticks: u64,
    pages: u64,
}

/// `processes`: a sequence of maps, one a process, this one left out.
pub fn processes(_: &BuiltinArgs) -> Result<()> {
    let directory = fs::read_dir("/proc").map_err(|error| Failure::at("open", b"/proc", &error))?;
    let mut pids: Vec<u32> = directory
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    pids.sort_unstable();
    let maps: Vec<u8> = pids
        .into_iter()
        .filter(|pid| *pid != std::process::id())
        .filter_map(process)
        .flatten()
        .collect();
    Ok(stdout().write_all(&maps)?)
}

/// The map of one process; None if it is gone by now.
fn process(pid: u32) -> Option<Vec<u8>> {
    let directory = format!("/proc/{pid}");
    let uid = fs::metadata(&directory).ok()?.uid();
    let stat = parse(&fs::read(format!("{directory}/stat")).ok()?)?;
    let mut command = fs::read(format!("{directory}/cmdline")).unwrap_or_default();
    command.truncate(ARGV_MAX);
    let argv: Vec<&[u8]> = command
        .strip_suffix(b"\0")
        .unwrap_or(&command)
        .split(|byte| *byte == 0)
        .filter(|_| !command.is_empty())
        .collect();
    // SAFETY: sysconf has no preconditions.
    let (page, tick) = unsafe {
        (
            libc::sysconf(libc::_SC_PAGESIZE),
            libc::sysconf(libc::_SC_CLK_TCK),
        )
    };
    let out = Writer::new()
        .map(7)
        .text("pid")
        .unsigned(u64::from(pid))
        .text("ppid")
        .signed(stat.parent)
        .text("uid")
        .unsigned(u64::from(uid));
    let out = out
        .text("state")
        .text(&stat.state)
        .text("rss")
        .unsigned(stat.pages * u64::try_from(page).unwrap_or(4096));
    let out = out
        .text("cpu_s")
        .float(stat.ticks as f64 / tick as f64)
        .text("argv")
        .array(argv.len());
    Some(
        argv.iter()
            .fold(out, |out, argument| out.bytes(argument))
            .finish(),
    )
}

/// proc(5): "pid (comm) state ppid … utime(14) stime(15) … rss(24)", where comm may hold anything.
fn parse(stat: &[u8]) -> Option<Stat> {
    let after_name = &stat[stat.iter().rposition(|byte| *byte == b')')? + 1..];
    let fields: Vec<&str> = std::str::from_utf8(after_name)
        .ok()?
        .split_ascii_whitespace()
        .collect();
    // Field n of proc(5) stands at n - 3.
    let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
    Some(Stat {
        state: (*fields.first()?).to_owned(),
        parent: fields.get(1)?.parse().ok()?,
        ticks: number(14)? + number(15)?,
        pages: number(24)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_behind_a_hostile_name() {
        let stat = parse(
            b"5 (x) R 1 (y) S 2 5 5 0 -1 4194304 100 0 0 0 30 12 0 0 20 0 1 0 99 1000000 55 1 2",
        )
        .unwrap();
        assert_eq!(
            (stat.state.as_str(), stat.parent, stat.ticks, stat.pages),
            ("S", 2, 42, 55)
        );
    }
}
