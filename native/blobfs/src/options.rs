//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

const DEFAULT_CACHE_BYTES: u64 = 16 << 30;
/// Less than this holds not even the chunks that are read at once.
const MIN_CACHE_BYTES: u64 = 1 << 20;
const DEFAULT_WAIT_S: u64 = 60;

pub const HELP: &str = "\
dsec-blobfs: shows data blobs of layers as whole files, and fetches their chunks when they are first read

  dsec-blobfs [OPTION...]

  --run-dir DIR       where spawner.sock and fetch.sock are, and blobfs.sock will be (/run/dsec)
  --state-dir DIR     chunks are kept in DIR/blobfs (/var/lib/dsec)
  --cache-bytes N     how many bytes of chunks are kept at most (17179869184)
  --wait-s N          how long a read waits for its chunks before it fails (60)
";

#[derive(Debug, PartialEq, Eq)]
pub struct Options {
    pub run_dir: PathBuf,
    pub state_dir: PathBuf,
    pub cache_bytes: u64,
    pub wait: Duration,
}

/// Reads the arguments after the program's name; None: help is wanted.
///
/// # Errors
/// One line that says which argument is wrong.
pub fn parse(args: impl Iterator<Item = OsString>) -> Result<Option<Options>, String> {
    let mut args = args;
    let mut options = Options {
        run_dir: PathBuf::from("/run/dsec"),
        state_dir: PathBuf::from("/var/lib/dsec"),
        cache_bytes: DEFAULT_CACHE_BYTES,
        wait: Duration::from_secs(DEFAULT_WAIT_S),
    };
    while let Some(name) = args.next() {
        let name = name.to_string_lossy().into_owned();
        if name == "--help" || name == "-h" {
            return Ok(None);
        }
        let value = args.next().ok_or(format!("{name} needs a value"))?;
        match name.as_str() {
            "--run-dir" => options.run_dir = absolute(&name, value)?,
            "--state-dir" => options.state_dir = absolute(&name, value)?,
            "--cache-bytes" => {
                options.cache_bytes = number(&name, &value, MIN_CACHE_BYTES, u64::MAX >> 2)?
            }
            "--wait-s" => options.wait = Duration::from_secs(number(&name, &value, 1, 86_400)?),
            _ => {
                return Err(format!(
                    "{name} is no option of dsec-blobfs; --help lists them"
                ))
            }
        }
    }
    Ok(Some(options))
}

fn absolute(name: &str, value: OsString) -> Result<PathBuf, String> {
    let path = PathBuf::from(value);
    if path.is_absolute() {
        Ok(path)
    } else {
        Err(format!("{name} {path:?}: an absolute path is needed"))
    }
}

fn number(name: &str, value: &OsString, low: u64, high: u64) -> Result<u64, String> {
    value
        .to_str()
        .and_then(|text| text.parse().ok())
        .filter(|value| (low..=high).contains(value))
        .ok_or_else(|| format!("{name} {value:?}: a number from {low} to {high} is needed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(args: &[&str]) -> Result<Option<Options>, String> {
        parse(args.iter().map(OsString::from))
    }

    #[test]
    fn options_are_understood_or_named() {
        let options = parsed(&["--run-dir", "/r", "--cache-bytes", "2000000"]);
        assert!(matches!(options, Ok(Some(options)) if options.cache_bytes == 2_000_000));
        assert_eq!(parsed(&["--help"]), Ok(None));
        for bad in [
            &["--run-dir", "r"][..],
            &["--wait-s", "0"],
            &["--wait-s", "x"],
            &["--cache-bytes", "5"],
            &["--wait-s"],
            &["--dance", "1"],
        ] {
            assert!(parsed(bad).is_err_and(|reason| reason.contains(bad[0])));
        }
    }
}
