//! Why a layer could not be made.

use std::fmt;
use std::io;

/// What went wrong, by whose fault it is: the exit code tells the caller which one.
#[derive(Debug)]
pub enum LayerError {
    /// The archive is broken, hostile or beyond a limit. Exit code 1.
    Input {
        entry: Option<Vec<u8>>,
        what: String,
    },
    /// The command line is wrong. Exit code 2.
    Usage(String),
    /// Reading the source or writing the layer failed (a full disk, say). Exit code 3.
    Io { what: String, source: io::Error },
}

pub type Result<T> = std::result::Result<T, LayerError>;

impl LayerError {
    /// An input error that is not about one entry.
    pub fn input(what: impl Into<String>) -> Self {
        LayerError::Input {
            entry: None,
            what: what.into(),
        }
    }

    /// An input error about the entry `name`.
    pub fn entry(name: &[u8], what: impl Into<String>) -> Self {
        LayerError::Input {
            entry: Some(name.to_vec()),
            what: what.into(),
        }
    }

    /// Adds the name of the entry that was being read, where the error doesn't have one.
    pub fn about(self, name: &[u8]) -> Self {
        match self {
            LayerError::Input { entry: None, what } => LayerError::entry(name, what),
            other => other,
        }
    }

    /// The exit code that stands for this kind of error.
    pub fn exit_code(&self) -> i32 {
        match self {
            LayerError::Input { .. } => 1,
            LayerError::Usage(_) => 2,
            LayerError::Io { .. } => 3,
        }
    }
}

impl fmt::Display for LayerError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LayerError::Input {
                entry: Some(name),
                what,
            } => write!(out, "entry \"{}\": {what}", printable(name)),
            LayerError::Input { entry: None, what } => out.write_str(what),
            LayerError::Usage(what) => out.write_str(what),
            LayerError::Io { what, source } => write!(out, "{what}: {source}"),
        }
    }
}

/// The name with everything but printable ASCII escaped, cut at 200 bytes: it goes to a log and to the importing user.
fn printable(name: &[u8]) -> String {
    name[..name.len().min(200)]
        .iter()
        .flat_map(|byte| byte.escape_ascii())
        .map(char::from)
        .collect()
}
