//! Builtins: file operations and the like, in a forked child with the sandbox user's credentials. Stdin and stdout are pipes to chronus.
//!
//! They may block, allocate and die as they like: it is their own process.

mod archive;
mod files;
mod processes;
mod tar_in;
mod tar_out;
mod tree;
mod watch;

use std::fs::File;
use std::io::{self, Write};
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;

use wire::message::BuiltinArgs;
use wire::value::Writer;

use crate::child::STATUS_FD;
use crate::kernel::{describe, errno};

/// Why a builtin failed: an error number and what it was about.
#[derive(Debug)]
pub struct Failure {
    errno: i32,
    message: String,
}

impl Failure {
    /// An error of an act on `path`: "open /x: No such file or directory".
    pub fn at(act: &str, path: &[u8], error: &io::Error) -> Failure {
        let errno = errno(error);
        Failure {
            errno,
            message: format!(
                "{act} {}: {}",
                String::from_utf8_lossy(path),
                describe(errno)
            ),
        }
    }

    pub fn new(errno: i32, message: impl Into<String>) -> Failure {
        Failure {
            errno,
            message: message.into(),
        }
    }
}

/// An error of standard input or output: the other side is gone, most likely.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        let errno = errno(&error);
        Failure {
            errno,
            message: describe(errno),
        }
    }
}

type Result<T> = std::result::Result<T, Failure>;
type Builtin = fn(&BuiltinArgs) -> Result<()>;

const BUILTINS: &[(&str, Builtin)] = &[
    ("read", files::read),
    ("write", files::write),
    ("list", tree::list),
    ("stat", tree::stat),
    ("mkdir", tree::mkdir),
    ("move", tree::rename),
    ("remove", tree::remove),
    ("chmod", tree::chmod),
    ("chown", tree::chown),
    ("watch", watch::watch),
    ("tar_out", tar_out::tar_out),
    ("tar_in", tar_in::tar_in),
    ("processes", processes::processes),
];

pub fn exists(name: &str) -> bool {
    find(name).is_some()
}

/// True for a builtin that says when it is ready, by [`ready`].
pub fn announces(name: &str) -> bool {
    name == "watch"
}

/// Tells chronus that this builtin is ready.
fn ready() {
    // SAFETY: closes the status pipe, which nothing else in this child knows.
    unsafe { libc::close(STATUS_FD) };
}

fn find(name: &str) -> Option<Builtin> {
    BUILTINS
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, act)| *act)
}

/// Runs a builtin to its end, in a child. Returns the exit code: 0, or 1 with the reason on stderr.
pub fn run(name: &str, arguments: &BuiltinArgs) -> i32 {
    let result = find(name).map_or_else(
        || Err(Failure::new(libc::EINVAL, "no such builtin")),
        |act| act(arguments),
    );
    let Err(failure) = result else { return 0 };
    let number = u64::try_from(failure.errno).unwrap_or(0);
    let report = Writer::new()
        .map(2)
        .text("errno")
        .unsigned(number)
        .text("message")
        .text(&failure.message)
        .finish();
    // Nobody is left to tell where this fails.
    let _unread = stderr().write_all(&report);
    1
}

/// Writes an answer that is one msgpack value.
fn answer(value: Writer) -> Result<()> {
    Ok(stdout().write_all(&value.finish())?)
}

/// A standard descriptor without the buffer that Rust's own has; it isn't closed.
fn standard(fd: i32) -> ManuallyDrop<File> {
    // SAFETY: the child's standard descriptors are open as long as it lives, and nobody closes them through this.
    ManuallyDrop::new(unsafe { File::from_raw_fd(fd) })
}

fn stdin() -> ManuallyDrop<File> {
    standard(0)
}

fn stdout() -> ManuallyDrop<File> {
    standard(1)
}

fn stderr() -> ManuallyDrop<File> {
    standard(2)
}
