//! The command line that all subcommands share: what tells one instance of the spawner from another.

use std::ffi::{OsStr, OsString};
use std::ops::Range;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use crate::create::IDS_PER_SANDBOX;
use crate::layers::Mounts;

/// First host uid of sandboxes: above what /etc/subuid hands out by habit, with room for thousands of ranges below 2^31.
const DEFAULT_UID_BASE: u32 = 0x1000_0000;
/// A number that distributions give to nobody for good.
const DEFAULT_SERVICE_UID: u32 = 64_913;
const DEFAULT_SCRATCH_MB: u64 = 16 * 1024;
/// mkfs.btrfs refuses less than about 110 MiB; below this a handful of sandboxes fill it.
const MIN_SCRATCH_MB: u64 = 256;
/// Chunks of blobs that are kept, unless told otherwise; blobfs refuses less than the minimum.
const DEFAULT_CACHE_BYTES: u64 = 16 << 30;
const MIN_CACHE_BYTES: u64 = 1 << 20;
/// How long reads wait for a service that was ended: sandboxes live on, and whoever upgrades or mends it has so long.
const DEFAULT_ABSENCE_S: u64 = 600;
const MAX_ABSENCE_S: u64 = 86_400;
/// Bytes of the run directory's path: the sockets below it must fit into the 108 of sun_path.
const MAX_RUN_DIR_BYTES: usize = 80;
const MAX_CGROUP_BYTES: usize = 40;
/// Uids below are the host's own: system users, people, and what containers of others may map first.
const MIN_UID_BASE: u32 = 65_536;
/// Above it old interfaces show uids as negative numbers, and -1 means "no uid".
const END_OF_UIDS: u32 = 1 << 31;
/// As many ranges as fit into 2^28 uids: more than a node is built for, and seven instances have room below 2^31.
const DEFAULT_MAX_SANDBOXES: u32 = 4_080;
const MOST_SANDBOXES: u32 = 30_000;

pub const HELP: &str = "\
dsec-spawner: every privileged act of the service, behind one socket

  dsec-spawner serve [OPTION...]
      The daemon: answers the service on RUN/spawner.sock. SIGTERM ends it and leaves sandboxes alone.
  dsec-spawner supervise --code DIR [OPTION...] -- PROGRAM [ARGUMENT...]
      Starts the daemon and, as the service uid and without any privilege, PROGRAM (the service), blobfs and the fetcher if there
      is one; each is started again when it dies.
      SIGINT stops the service, ends every sandbox and removes all that was made; a second one hastens. SIGTERM stops the
      processes and leaves sandboxes for the next start.
  dsec-spawner sweep [OPTION...]
      Removes every kernel object of an instance: processes, cgroups, mounts, writable layers.
  dsec-spawner doctor [OPTION...]
      Prints as JSON which kernel features this machine has, and what it costs where one is missing.

  --run-dir DIR        sockets and mount points (/run/dsec)
  --state-dir DIR      what outlives a restart (/var/lib/dsec)
  --cgroup NAME        name of the root cgroup: 1 to 40 of a-z, 0-9 and '-' (dsec)
  --uid-base N         first host uid of sandboxes, of which each has 65,792 (268435456)
  --max-sandboxes N    how many may live at once; with --uid-base, which uids are this instance's alone (4080)
  --service-uid N      who may call the daemon, and whom the service runs as (64913)
  --scratch-mb N       MiB allocated for writable layers when there are none yet (16384)
  --mounts MEANS       auto; or classic: layers by loop devices and by path, as kernels before 6.15 need (auto)
  --chronus FILE       the agent's program (chronus beside this program)
  --mklayer FILE       the program that makes layers (dsec-mklayer beside this program)
  --absence-s N        how long reads of layers that are loaded on demand wait for a daemon that was ended (600)
  --code DIR           supervise: the directory that the service's code is read from
  --blobfs FILE        supervise: the program that serves blobs (dsec-blobfs beside this program)
  --cache-bytes N      supervise: how many bytes of blobs blobfs keeps (17179869184)
  --log FILE           supervise: where all of them write once the directories are known to be this instance's (where they are started)
  --fetcher WORD       supervise: one word of the command that fetches for blobfs; repeated for each word
";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    Serve,
    Supervise,
    /// Started by the daemon itself.
    Keep,
    Sweep,
    Doctor,
    Help,
}

/// Checked options: all paths are absolute and free of `..`, all numbers are within bounds that work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    pub run_dir: PathBuf,
    pub state_dir: PathBuf,
    /// Name of the root cgroup in each hierarchy.
    pub cgroup: String,
    /// First host uid of slot 0.
    pub uid_base: u32,
    /// Slots: how many sandboxes may live at once.
    pub max_sandboxes: u32,
    /// Uid and gid of the service.
    pub service_uid: u32,
    /// MiB of the scratch file.
    pub scratch_mb: u64,
    /// How layers are mounted.
    pub mounts: Mounts,
    pub chronus: PathBuf,
    pub mklayer: PathBuf,
    /// Seconds that reads wait for a service that was ended.
    pub absence_s: u64,
    /// Where the service's code is; empty but for `supervise`.
    pub code: PathBuf,
    /// The program that serves blobs.
    pub blobfs: PathBuf,
    /// What it may keep.
    pub cache_bytes: u64,
    /// Where supervise and what it starts write; None: where it is told to when it is started.
    pub log: Option<PathBuf>,
    /// The fetcher's command; empty: there is none.
    pub fetcher: Vec<OsString>,
    /// What stands after `--`: the service's command.
    pub argv: Vec<OsString>,
}

impl Options {
    pub fn with_defaults() -> Self {
        Options {
            run_dir: PathBuf::from("/run/dsec"),
            state_dir: PathBuf::from("/var/lib/dsec"),
            cgroup: "dsec".to_owned(),
            uid_base: DEFAULT_UID_BASE,
            max_sandboxes: DEFAULT_MAX_SANDBOXES,
            service_uid: DEFAULT_SERVICE_UID,
            scratch_mb: DEFAULT_SCRATCH_MB,
            mounts: Mounts::Auto,
            chronus: beside_this_program("chronus"),
            mklayer: beside_this_program("dsec-mklayer"),
            absence_s: DEFAULT_ABSENCE_S,
            code: PathBuf::new(),
            blobfs: beside_this_program("dsec-blobfs"),
            cache_bytes: DEFAULT_CACHE_BYTES,
            log: None,
            fetcher: Vec::new(),
            argv: Vec::new(),
        }
    }

    /// The arguments that make another process of this program see the same instance (without what only `supervise` needs).
    pub fn to_args(&self) -> Vec<OsString> {
        let pairs: [(&str, OsString); 11] = [
            ("--run-dir", self.run_dir.clone().into()),
            ("--state-dir", self.state_dir.clone().into()),
            ("--cgroup", self.cgroup.clone().into()),
            ("--uid-base", self.uid_base.to_string().into()),
            ("--max-sandboxes", self.max_sandboxes.to_string().into()),
            ("--service-uid", self.service_uid.to_string().into()),
            ("--scratch-mb", self.scratch_mb.to_string().into()),
            ("--mounts", self.mounts.name().into()),
            ("--chronus", self.chronus.clone().into()),
            ("--mklayer", self.mklayer.clone().into()),
            ("--absence-s", self.absence_s.to_string().into()),
        ];
        pairs
            .into_iter()
            .flat_map(|(name, value)| [OsString::from(name), value])
            .collect()
    }

    /// Host uids of all slots.
    pub fn uids(&self) -> Range<u32> {
        self.uid_base..self.uid_base + self.max_sandboxes * IDS_PER_SANDBOX
    }

    fn set(&mut self, name: &str, value: OsString) -> Result<(), String> {
        match name {
            "--run-dir" => self.run_dir = run_dir(absolute(name, value)?)?,
            "--state-dir" => self.state_dir = absolute(name, value)?,
            "--cgroup" => self.cgroup = cgroup_name(&value)?,
            "--uid-base" => {
                let last = END_OF_UIDS - IDS_PER_SANDBOX;
                self.uid_base = number(name, &value, MIN_UID_BASE.into(), last.into())?
            }
            "--max-sandboxes" => {
                self.max_sandboxes = number(name, &value, 1, MOST_SANDBOXES.into())?
            }
            "--service-uid" => self.service_uid = number(name, &value, 1, (u32::MAX - 1).into())?,
            "--scratch-mb" => {
                self.scratch_mb = number(name, &value, MIN_SCRATCH_MB, u64::MAX >> 20)?
            }
            "--mounts" => self.mounts = mounts(&value)?,
            "--chronus" => self.chronus = absolute(name, value)?,
            "--mklayer" => self.mklayer = absolute(name, value)?,
            "--absence-s" => self.absence_s = number(name, &value, 1, MAX_ABSENCE_S)?,
            "--code" => self.code = absolute(name, value)?,
            "--blobfs" => self.blobfs = absolute(name, value)?,
            "--cache-bytes" => {
                self.cache_bytes = number(name, &value, MIN_CACHE_BYTES, u64::MAX >> 2)?
            }
            "--log" => self.log = Some(absolute(name, value)?),
            "--fetcher" => self.fetcher.push(value),
            _ => {
                return Err(format!(
                    "{name} is no option of dsec-spawner; --help lists them"
                ))
            }
        }
        Ok(())
    }
}

/// Reads the arguments after the program's name.
///
/// # Errors
/// One line that says which argument is wrong and what it should be.
pub fn parse(args: impl Iterator<Item = OsString>) -> Result<(Command, Options), String> {
    let mut args = args;
    let mut options = Options::with_defaults();
    let command = match args.next() {
        Some(word) => command(&word)?,
        None => {
            return Err(
                "which command? serve, supervise, sweep or doctor (--help tells more)".to_owned(),
            )
        }
    };
    while let Some(arg) = args.next() {
        if arg == "--" {
            options.argv = args.collect();
            break;
        }
        if arg == "--help" || arg == "-h" {
            return Ok((Command::Help, options));
        }
        let (name, attached) = split_name(&arg)?;
        let value = match attached {
            Some(value) => value,
            None => args.next().ok_or_else(|| format!("{name} needs a value"))?,
        };
        options.set(name, value)?;
    }
    check_command(command, &options)?;
    Ok((command, options))
}

fn command(word: &OsStr) -> Result<Command, String> {
    match word.to_str() {
        Some("serve") => Ok(Command::Serve),
        Some("supervise") => Ok(Command::Supervise),
        Some("keep") => Ok(Command::Keep),
        Some("sweep") => Ok(Command::Sweep),
        Some("doctor") => Ok(Command::Doctor),
        Some("help" | "--help" | "-h") => Ok(Command::Help),
        _ => Err(format!(
            "{word:?} is no command; there are serve, supervise, sweep and doctor"
        )),
    }
}

/// `--name` or `--name=value`.
fn split_name(arg: &OsStr) -> Result<(&str, Option<OsString>), String> {
    let bytes = arg.as_bytes();
    let end = bytes
        .iter()
        .position(|byte| *byte == b'=')
        .unwrap_or(bytes.len());
    let name = std::str::from_utf8(&bytes[..end]).map_err(|_| format!("{arg:?} is no option"))?;
    if !name.starts_with("--") {
        return Err(format!("{arg:?} is unexpected: options start with --"));
    }
    let value = bytes
        .get(end + 1..)
        .map(|rest| OsString::from_vec(rest.to_vec()));
    Ok((name, value))
}

/// What a command needs beyond the defaults, or has no use for.
fn check_command(command: Command, options: &Options) -> Result<(), String> {
    if command == Command::Supervise {
        if options.code.as_os_str().is_empty() {
            return Err(
                "supervise needs --code DIR, the directory of the service's code".to_owned(),
            );
        }
        if options.argv.is_empty() {
            return Err("supervise needs the service's command after --".to_owned());
        }
    } else if !options.argv.is_empty() || !options.fetcher.is_empty() {
        return Err("only supervise takes a command after --, or a fetcher".to_owned());
    }
    let room = (END_OF_UIDS - options.uid_base) / IDS_PER_SANDBOX;
    if options.max_sandboxes > room {
        return Err(format!(
            "--max-sandboxes {}: behind --uid-base {} there is room for {room}, each with {IDS_PER_SANDBOX} uids below 2^31",
            options.max_sandboxes, options.uid_base
        ));
    }
    if options.run_dir == options.state_dir {
        return Err("--run-dir and --state-dir must not be the same directory".to_owned());
    }
    Ok(())
}

/// Where ranges of so many uids may start without meeting each other.
pub fn bases(length: u32) -> impl Iterator<Item = u32> {
    let step = length.next_power_of_two();
    (DEFAULT_UID_BASE..=END_OF_UIDS - length).step_by(step as usize)
}

/// How many sandboxes these uids are for.
pub fn sandboxes_in(uids: &Range<u32>) -> u32 {
    (uids.end - uids.start) / IDS_PER_SANDBOX
}

/// An absolute path that names what it seems to name: without `..` and NUL; `.` and doubled slashes are dropped.
fn absolute(name: &str, value: OsString) -> Result<PathBuf, String> {
    let path = Path::new(&value);
    let plain = path
        .components()
        .all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    if !path.is_absolute() || !plain || value.as_bytes().contains(&0) {
        return Err(format!(
            "{name} {value:?}: an absolute path without '..' is needed"
        ));
    }
    Ok(path.components().collect())
}

fn run_dir(path: PathBuf) -> Result<PathBuf, String> {
    let length = path.as_os_str().len();
    if length > MAX_RUN_DIR_BYTES {
        return Err(format!(
            "--run-dir has {length} bytes; it may have {MAX_RUN_DIR_BYTES}, so that the names of sockets below it fit"
        ));
    }
    Ok(path)
}

fn cgroup_name(value: &OsStr) -> Result<String, String> {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    match value.to_str() {
        Some(name) if (1..=MAX_CGROUP_BYTES).contains(&name.len()) && name.bytes().all(allowed) => {
            Ok(name.to_owned())
        }
        _ => Err(format!(
            "--cgroup {value:?}: a name of 1 to {MAX_CGROUP_BYTES} of a-z, 0-9 and '-' is needed"
        )),
    }
}

fn mounts(value: &OsStr) -> Result<Mounts, String> {
    [Mounts::Auto, Mounts::Classic]
        .into_iter()
        .find(|mounts| value == mounts.name())
        .ok_or_else(|| format!("--mounts {value:?}: auto or classic is needed"))
}

fn number<T: TryFrom<u64>>(name: &str, value: &OsStr, low: u64, high: u64) -> Result<T, String> {
    value
        .to_str()
        .filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()))
        .and_then(|text| text.parse::<u64>().ok())
        .filter(|value| (low..=high).contains(value))
        .and_then(|value| T::try_from(value).ok())
        .ok_or_else(|| format!("{name} {value:?}: a number from {low} to {high} is needed"))
}

/// The path of a program installed next to this one.
fn beside_this_program(name: &str) -> PathBuf {
    std::env::current_exe()
        .ok()
        .and_then(|program| program.parent().map(|directory| directory.join(name)))
        .unwrap_or_else(|| Path::new("/usr/lib/dsec").join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(args: &[&str]) -> Result<(Command, Options), String> {
        parse(args.iter().map(OsString::from))
    }

    fn accepted(args: &[&str]) -> (Command, Options) {
        match parsed(args) {
            Ok(result) => result,
            Err(reason) => panic!("{args:?} was refused: {reason}"),
        }
    }

    #[test]
    fn values_stand_after_the_name_or_behind_an_equals_sign() {
        let (command, options) = accepted(&["serve", "--run-dir", "/run/one", "--uid-base=200000"]);
        assert_eq!(command, Command::Serve);
        assert_eq!(options.run_dir, Path::new("/run/one"));
        assert_eq!(options.uid_base, 200_000);
        assert_eq!(options.service_uid, 64_913);
    }

    #[test]
    fn what_follows_two_dashes_is_the_services_command_untouched() {
        let (command, options) = accepted(&[
            "supervise",
            "--code",
            "/srv/code",
            "--",
            "python",
            "--run-dir",
            "--",
            "x",
        ]);
        assert_eq!(command, Command::Supervise);
        assert_eq!(options.argv, ["python", "--run-dir", "--", "x"]);
        assert_eq!(options.run_dir, Path::new("/run/dsec"));
    }

    #[test]
    fn the_fetchers_command_comes_word_by_word() {
        let words = [
            "--fetcher",
            "python",
            "--fetcher=-m",
            "--fetcher",
            "--store",
        ];
        let args = [&["supervise", "--code", "/c"], &words[..], &["--", "x"]].concat();
        let (_, options) = accepted(&args);
        assert_eq!(options.fetcher, ["python", "-m", "--store"]);
        assert!(parsed(&["serve", "--fetcher", "python"]).is_err());
    }

    #[test]
    fn the_arguments_for_another_process_mean_the_same_instance() {
        let (_, options) = accepted(&[
            "sweep",
            "--run-dir=/r",
            "--cgroup",
            "a-1",
            "--scratch-mb",
            "512",
            "--chronus",
            "/b/c",
        ]);
        let args = [OsString::from("serve")]
            .into_iter()
            .chain(options.to_args());
        assert_eq!(parse(args), Ok((Command::Serve, options)));
    }

    #[test]
    fn paths_that_could_name_something_else_are_refused() {
        for path in ["run", "/a/../b", "", "."] {
            assert!(parsed(&["serve", "--state-dir", path]).is_err(), "{path:?}");
        }
        let (_, options) = accepted(&["serve", "--state-dir", "/a//b/./c/"]);
        assert_eq!(options.state_dir.as_os_str(), "/a/b/c");
    }

    #[test]
    fn a_run_dir_too_long_for_socket_names_is_refused() {
        let longest = format!("/{}", "r".repeat(MAX_RUN_DIR_BYTES - 1));
        accepted(&["serve", "--run-dir", &longest]);
        assert!(parsed(&["serve", "--run-dir", &format!("{longest}r")]).is_err());
    }

    #[test]
    fn cgroup_names_cant_leave_their_directory() {
        for name in ["", "..", "a/b", "A", "a.b", &"a".repeat(41)] {
            assert!(parsed(&["serve", "--cgroup", name]).is_err(), "{name:?}");
        }
        accepted(&["serve", "--cgroup", &"a".repeat(40)]);
    }

    #[test]
    fn numbers_out_of_bounds_are_refused() {
        let bad = [
            ("--service-uid", "0"),
            ("--service-uid", "4294967295"),
            ("--uid-base", "1000"),
            ("--uid-base", "+99999999"),
            ("--uid-base", "2147483647"),
            ("--uid-base", "2000000000"),
            ("--max-sandboxes", "0"),
            ("--max-sandboxes", "29000"),
            ("--scratch-mb", "1"),
            ("--scratch-mb", "99999999999999999999999"),
            ("--scratch-mb", "1G"),
        ];
        for (name, value) in bad {
            assert!(parsed(&["serve", name, value]).is_err(), "{name} {value}");
        }
    }

    #[test]
    fn seven_instances_have_room_for_their_uids() {
        let (_, options) = accepted(&["serve"]);
        let uids = options.uids();
        let bases: Vec<u32> = bases(uids.end - uids.start).collect();
        assert_eq!(bases.len(), 7);
        for pair in bases.windows(2) {
            assert!(pair[0] + (uids.end - uids.start) <= pair[1]);
        }
        assert_eq!(sandboxes_in(&uids), DEFAULT_MAX_SANDBOXES);
        accepted(&["serve", "--uid-base", &bases[6].to_string()]);
    }

    #[test]
    fn supervise_needs_code_and_a_command_that_no_other_takes() {
        assert!(parsed(&["supervise", "--", "python"]).is_err());
        assert!(parsed(&["supervise", "--code", "/srv"]).is_err());
        assert!(parsed(&["serve", "--", "python"]).is_err());
        assert!(parsed(&["serve", "python"]).is_err());
        assert!(parsed(&["serve", "--run-dir"]).is_err());
        assert!(parsed(&["dance"]).is_err());
        assert!(parsed(&[]).is_err());
    }

    #[test]
    fn help_is_found_wherever_it_stands() {
        assert_eq!(accepted(&["--help"]).0, Command::Help);
        assert_eq!(accepted(&["serve", "--help"]).0, Command::Help);
    }
}
