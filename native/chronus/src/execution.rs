//! What is executed, prepared to the last byte: the child only makes system calls.

use std::ffi::{c_char, CString};
use std::ptr;

use bare::call;
use wire::message::Env;

use crate::users::Account;

/// Where programs are looked for if the environment doesn't say.
const DEFAULT_PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// C strings and the null-terminated array of pointers to them that execve takes.
struct Strings {
    /// What the pointers point at.
    _strings: Vec<CString>,
    pointers: Vec<*const c_char>,
}

impl Strings {
    /// None where one has a NUL in it.
    fn new<'a>(strings: impl Iterator<Item = &'a [u8]>) -> Option<Strings> {
        let strings = strings
            .map(CString::new)
            .collect::<Result<Vec<_>, _>>()
            .ok()?;
        let pointers = strings
            .iter()
            .map(|string| string.as_ptr())
            .chain([ptr::null()])
            .collect();
        Some(Strings {
            _strings: strings,
            pointers,
        })
    }
}

/// A command line, and where its program may be.
struct Candidate {
    argv: Strings,
    paths: Vec<CString>,
    /// The paths come from PATH: one that can't be run is passed over, as execvp(3) does.
    searched: bool,
}

/// The first of its command lines whose program exists is what is run.
pub struct Execution {
    candidates: Vec<Candidate>,
    environment: Strings,
}

impl Execution {
    /// None for what no kernel can run: an empty command line, or a NUL within a string.
    pub fn new(command_lines: &[Vec<Vec<u8>>], env: &Env, account: &Account) -> Option<Execution> {
        let environment = environment(env, account);
        let path = environment
            .iter()
            .find_map(|entry| entry.strip_prefix(b"PATH="))
            .unwrap_or(DEFAULT_PATH);
        let candidates = command_lines
            .iter()
            .map(|argv| candidate(argv, path))
            .collect::<Option<Vec<_>>>()?;
        let environment = Strings::new(environment.iter().map(Vec::as_slice))?;
        Some(Execution {
            candidates,
            environment,
        })
    }

    /// In the child: replaces it by the program; returns errno if none could be run. Makes bare system calls only.
    pub fn execute(&self) -> i32 {
        let mut last = libc::ENOENT;
        for candidate in &self.candidates {
            last = self.execute_one(candidate);
            if last != libc::ENOENT {
                break;
            }
        }
        last
    }

    fn execute_one(&self, candidate: &Candidate) -> i32 {
        let mut outcome = libc::ENOENT;
        for path in &candidate.paths {
            // SAFETY: all are C strings, both lists end with a null pointer, and everything lives as long as this child.
            let error = unsafe {
                call!(
                    libc::SYS_execve,
                    path.as_ptr(),
                    candidate.argv.pointers.as_ptr(),
                    self.environment.pointers.as_ptr()
                )
            }
            .result()
            .err()
            .unwrap_or(libc::EIO);
            match error {
                libc::ENOENT | libc::ENOTDIR | libc::ENAMETOOLONG | libc::ELOOP
                    if candidate.searched => {}
                libc::EACCES if candidate.searched => outcome = error,
                _ => return error,
            }
        }
        outcome
    }
}

fn candidate(argv: &[Vec<u8>], path: &[u8]) -> Option<Candidate> {
    let name = argv.first()?;
    let searched = !name.contains(&b'/');
    let paths = if searched && !name.is_empty() {
        path.split(|byte| *byte == b':')
            .map(|directory| {
                let directory: &[u8] = if directory.is_empty() {
                    b"."
                } else {
                    directory
                };
                CString::new([directory, b"/", name].concat()).ok()
            })
            .collect::<Option<Vec<_>>>()?
    } else if searched {
        Vec::new()
    } else {
        vec![CString::new(name.clone()).ok()?]
    };
    Some(Candidate {
        argv: Strings::new(argv.iter().map(Vec::as_slice))?,
        paths,
        searched,
    })
}

/// The environment as execve takes it, with what a program may expect added where it is missing.
fn environment(env: &Env, account: &Account) -> Vec<Vec<u8>> {
    let number = account.uid.to_string().into_bytes();
    let name = account.name.as_ref().unwrap_or(&number);
    let defaults: [(&[u8], &[u8]); 4] = [
        (b"HOME", &account.home),
        (b"USER", name),
        (b"LOGNAME", name),
        (b"PATH", DEFAULT_PATH),
    ];
    let missing = defaults
        .into_iter()
        .filter(|(key, _)| !env.contains_key(*key));
    let given = env
        .iter()
        .map(|(key, value)| (key.as_slice(), value.as_slice()));
    given
        .chain(missing)
        .map(|(key, value)| [key, b"=", value].concat())
        .collect()
}
