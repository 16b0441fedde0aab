//! The msgpack maps that frames carry. Unknown keys are ignored, missing ones have their default.

use std::collections::BTreeMap;

use crate::value::{Mismatch, Value, Writer};

/// Environment variables, both sides as bytes.
pub type Env = BTreeMap<Vec<u8>, Vec<u8>>;

/// Bytes kept of each output of a captured command where the request doesn't say.
const MAX_OUTPUT_DEFAULT: u64 = 10 << 20;

/// Where a command's standard input comes from (`Start::stdin`).
pub const STDIN_NONE: u8 = 0;
pub const STDIN_INLINE: u8 = 1;
pub const STDIN_STREAM: u8 = 2;
/// How output travels (`Start::mode`): anything but this one captures it.
pub const MODE_STREAM: u8 = 1;
/// What becomes of the processes that a leader leaves behind (`Start::leftovers`): anything but this one kills them.
pub const LEFTOVERS_KEEP: u8 = 1;

/// The configuration on fd 5.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// What the seccomp filter wants to see in the fifth and sixth argument of clone3.
    pub cookie: (u64, u64),
    /// Bytes kept of each stream after they were sent.
    pub history: u64,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            cookie: (0, 0),
            history: 8 << 20,
        }
    }
}

impl Config {
    pub fn read(bytes: &[u8]) -> Result<Self, Mismatch> {
        let map = Value::read(bytes)?;
        let default = Config::default();
        let cookie = match map.get("cookie") {
            Value::Nil => default.cookie,
            value => match value.array()? {
                [first, second] => (first.unsigned()?, second.unsigned()?),
                _ => return Err(Mismatch),
            },
        };
        Ok(Config {
            cookie,
            history: map
                .get("history")
                .optional(Value::unsigned)?
                .unwrap_or(default.history),
        })
    }
}

/// START: a command or a builtin.
#[derive(Debug, Clone, PartialEq)]
pub struct Start {
    pub exec_id: String,
    pub what: What,
    pub cwd: Option<Vec<u8>>,
    pub env: Env,
    pub user: String,
    pub stdin: u8,
    pub stdin_data: Vec<u8>,
    pub mode: u8,
    /// False: output is not sent on this stream, only EXIT.
    pub follow: bool,
    pub max_output: u64,
    pub timeout_ms: u64,
    pub leftovers: u8,
    /// Rows and columns.
    pub pty: Option<(u16, u16)>,
    pub no_new_privs: bool,
}

/// What START runs.
#[derive(Debug, Clone, PartialEq)]
pub enum What {
    Argv(Vec<Vec<u8>>),
    Builtin(String, BuiltinArgs),
}

impl Start {
    pub fn read(bytes: &[u8]) -> Result<Self, Mismatch> {
        let map = Value::read(bytes)?;
        map.map()?;
        let what = match map.get("builtin").optional(Value::text)? {
            Some(name) => What::Builtin(name, BuiltinArgs::from_value(map.get("args"))?),
            None => What::Argv(
                map.get("argv")
                    .array()?
                    .iter()
                    .map(Value::bytes)
                    .collect::<Result<_, _>>()?,
            ),
        };
        Ok(Start {
            exec_id: text(&map, "exec_id")?,
            what,
            cwd: map.get("cwd").optional(Value::bytes)?,
            env: map.get("env").optional(env)?.unwrap_or_default(),
            user: text(&map, "user")?,
            stdin: map
                .get("stdin")
                .optional(Value::unsigned)?
                .unwrap_or(STDIN_NONE),
            stdin_data: map
                .get("stdin_data")
                .optional(Value::bytes)?
                .unwrap_or_default(),
            mode: map.get("mode").optional(Value::unsigned)?.unwrap_or(0),
            follow: map.get("follow").optional(Value::boolean)?.unwrap_or(true),
            max_output: map
                .get("max_output")
                .optional(Value::unsigned)?
                .unwrap_or(MAX_OUTPUT_DEFAULT),
            timeout_ms: map
                .get("timeout_ms")
                .optional(Value::unsigned)?
                .unwrap_or(0),
            leftovers: map.get("leftovers").optional(Value::unsigned)?.unwrap_or(0),
            pty: map.get("pty").optional(pair)?,
            no_new_privs: map
                .get("no_new_privs")
                .optional(Value::boolean)?
                .unwrap_or(false),
        })
    }
}

/// The arguments of all builtins together: each takes its own and has its own defaults for what is absent.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct BuiltinArgs {
    pub path: Vec<u8>,
    pub to: Vec<u8>,
    pub name: Option<Vec<u8>>,
    pub offset: u64,
    pub length: Option<u64>,
    pub limit: Option<u64>,
    pub mode: Option<u32>,
    pub append: bool,
    pub exclusive: bool,
    pub recursive: bool,
    pub follow: bool,
    pub parents: bool,
    pub uid: Option<i64>,
    pub gid: Option<i64>,
    pub owner: Option<String>,
}

impl BuiltinArgs {
    fn from_value(map: &Value<'_>) -> Result<Self, Mismatch> {
        let flag = |key, default| Ok(map.get(key).optional(Value::boolean)?.unwrap_or(default));
        Ok(BuiltinArgs {
            path: map.get("path").optional(Value::bytes)?.unwrap_or_default(),
            to: map.get("to").optional(Value::bytes)?.unwrap_or_default(),
            name: map.get("name").optional(Value::bytes)?,
            offset: map.get("offset").optional(Value::unsigned)?.unwrap_or(0),
            length: map.get("length").optional(Value::unsigned)?,
            limit: map.get("limit").optional(Value::unsigned)?,
            mode: map.get("mode").optional(Value::unsigned)?,
            append: flag("append", false)?,
            exclusive: flag("exclusive", false)?,
            recursive: flag("recursive", false)?,
            follow: flag("follow", false)?,
            parents: flag("parents", true)?,
            uid: map.get("uid").optional(Value::signed)?,
            gid: map.get("gid").optional(Value::signed)?,
            owner: map.get("owner").optional(Value::text)?,
        })
    }
}

/// ATTACH: follow a command that exists.
#[derive(Debug, Clone, PartialEq)]
pub struct Attach {
    pub exec_id: String,
    pub stdout_from: Option<u64>,
    pub stderr_from: Option<u64>,
    pub stdin: bool,
}

impl Attach {
    pub fn read(bytes: &[u8]) -> Result<Self, Mismatch> {
        let map = Value::read(bytes)?;
        Ok(Attach {
            exec_id: map.get("exec_id").text()?,
            stdout_from: map.get("stdout_from").optional(Value::unsigned)?,
            stderr_from: map.get("stderr_from").optional(Value::unsigned)?,
            stdin: map.get("stdin").optional(Value::boolean)?.unwrap_or(false),
        })
    }
}

/// SHELL: a command in a session. What starts with `base_` is for opening the session and is no claim about an open one.
#[derive(Debug, Clone, PartialEq)]
pub struct Shell {
    pub exec_id: String,
    pub session: String,
    pub command: Vec<u8>,
    pub timeout_ms: u64,
    pub max_output: u64,
    pub cwd: Option<Vec<u8>>,
    pub env: Option<Env>,
    pub user: Option<String>,
    pub no_new_privs: bool,
    pub base_env: Env,
    pub base_cwd: Option<Vec<u8>>,
    pub base_user: String,
}

impl Shell {
    pub fn read(bytes: &[u8]) -> Result<Self, Mismatch> {
        let map = Value::read(bytes)?;
        Ok(Shell {
            exec_id: text(&map, "exec_id")?,
            session: map.get("session").text()?,
            command: map.get("command").bytes()?,
            timeout_ms: map
                .get("timeout_ms")
                .optional(Value::unsigned)?
                .unwrap_or(0),
            max_output: map
                .get("max_output")
                .optional(Value::unsigned)?
                .unwrap_or(MAX_OUTPUT_DEFAULT),
            cwd: map.get("cwd").optional(Value::bytes)?,
            env: map.get("env").optional(env)?,
            user: map.get("user").optional(Value::text)?,
            no_new_privs: map
                .get("no_new_privs")
                .optional(Value::boolean)?
                .unwrap_or(false),
            base_env: map.get("base_env").optional(env)?.unwrap_or_default(),
            base_cwd: map.get("base_cwd").optional(Value::bytes)?,
            base_user: text(&map, "base_user")?,
        })
    }
}

/// The session that CLOSE_SESSION names.
pub fn read_close_session(bytes: &[u8]) -> Result<String, Mismatch> {
    Value::read(bytes)?.get("session").text()
}

fn text(map: &Value<'_>, key: &str) -> Result<String, Mismatch> {
    Ok(map.get(key).optional(Value::text)?.unwrap_or_default())
}

fn env(value: &Value<'_>) -> Result<Env, Mismatch> {
    value
        .map()?
        .iter()
        .map(|(name, value)| Ok((name.bytes()?, value.bytes()?)))
        .collect()
}

fn pair(value: &Value<'_>) -> Result<(u16, u16), Mismatch> {
    match value.array()? {
        [first, second] => Ok((first.unsigned()?, second.unsigned()?)),
        _ => Err(Mismatch),
    }
}

/// HELLO: commands that run.
pub fn hello(running: usize) -> Vec<u8> {
    Writer::new()
        .map(1)
        .text("running")
        .unsigned(running as u64)
        .finish()
}

/// STARTED: who, whether it ran already, and the offsets of the first bytes that will come.
pub fn started(exec_id: &str, attached: bool, from: [u64; 2]) -> Vec<u8> {
    let map = Writer::new()
        .map(4)
        .text("exec_id")
        .text(exec_id)
        .text("attached")
        .boolean(attached);
    map.text("stdout_from")
        .unsigned(from[0])
        .text("stderr_from")
        .unsigned(from[1])
        .finish()
}

/// ERROR; `code` is one of the codes of the platform's error tree.
pub fn error(code: &str, message: &str) -> Vec<u8> {
    Writer::new()
        .map(2)
        .text("code")
        .text(code)
        .text("message")
        .text(message)
        .finish()
}

/// EXIT, without what its frame says besides: the exec_id and captured output.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Exit {
    pub exit_code: i64,
    pub signal: Option<u8>,
    pub timed_out: bool,
    /// Bytes written to stdout and stderr, also those that were dropped.
    pub totals: [u64; 2],
    pub truncated: bool,
    pub duration_us: u64,
    pub start_error: Option<String>,
    pub start_errno: u32,
    pub session_restarted: bool,
}

impl Exit {
    pub fn write(&self, exec_id: &str, stdout: &[u8], stderr: &[u8]) -> Vec<u8> {
        let map = Writer::new()
            .map(13)
            .text("exec_id")
            .text(exec_id)
            .text("exit_code")
            .signed(self.exit_code);
        let map = map
            .text("signal")
            .optional(self.signal, |out, signal| out.unsigned(u64::from(signal)));
        let map = map
            .text("timed_out")
            .boolean(self.timed_out)
            .text("truncated")
            .boolean(self.truncated);
        let map = map
            .text("stdout_total")
            .unsigned(self.totals[0])
            .text("stderr_total")
            .unsigned(self.totals[1]);
        let map = map
            .text("duration_us")
            .unsigned(self.duration_us)
            .text("session_restarted")
            .boolean(self.session_restarted);
        let map = map
            .text("start_error")
            .optional(self.start_error.as_deref(), Writer::text);
        let map = map
            .text("start_errno")
            .unsigned(u64::from(self.start_errno));
        map.text("stdout")
            .bytes(stdout)
            .text("stderr")
            .bytes(stderr)
            .finish()
    }
}

/// One entry of LISTING.
#[derive(Debug, Clone, PartialEq)]
pub struct Listed<'a> {
    pub exec_id: &'a str,
    pub argv: &'a [Vec<u8>],
    pub pid: i32,
    pub running: bool,
    pub started_ms: u64,
    pub totals: [u64; 2],
    pub exit_code: Option<i64>,
    pub capture: bool,
}

/// LISTING.
pub fn listing(entries: &[Listed<'_>]) -> Vec<u8> {
    entries
        .iter()
        .fold(Writer::new().array(entries.len()), |out, entry| {
            let out = out
                .map(9)
                .text("exec_id")
                .text(entry.exec_id)
                .text("argv")
                .array(entry.argv.len());
            let out = entry
                .argv
                .iter()
                .fold(out, |out, argument| out.bytes(argument));
            let out = out
                .text("pid")
                .signed(i64::from(entry.pid))
                .text("running")
                .boolean(entry.running);
            let out = out
                .text("started_ms")
                .unsigned(entry.started_ms)
                .text("capture")
                .boolean(entry.capture);
            let out = out
                .text("stdout_total")
                .unsigned(entry.totals[0])
                .text("stderr_total")
                .unsigned(entry.totals[1]);
            out.text("exit_code")
                .optional(entry.exit_code, Writer::signed)
        })
        .finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_keys_have_defaults_and_unknown_ones_are_ignored() {
        let bytes = Writer::new()
            .map(2)
            .text("argv")
            .array(1)
            .bytes(b"\xff")
            .text("novelty")
            .nil()
            .finish();
        let start = Start::read(&bytes).unwrap();
        assert_eq!(start.what, What::Argv(vec![vec![0xff]]));
        assert_eq!(
            (start.max_output, start.follow, start.pty),
            (10 << 20, true, None)
        );
    }

    #[test]
    fn a_start_without_a_command_or_of_the_wrong_type_is_refused() {
        assert_eq!(Start::read(&Writer::new().map(0).finish()), Err(Mismatch));
        assert_eq!(Start::read(&Writer::new().array(0).finish()), Err(Mismatch));
        let negative = Writer::new()
            .map(2)
            .text("argv")
            .array(0)
            .text("timeout_ms")
            .signed(-1)
            .finish();
        assert_eq!(Start::read(&negative), Err(Mismatch));
    }

    #[test]
    fn exit_is_one_flat_map_with_binary_output() {
        let exit = Exit {
            exit_code: 137,
            signal: Some(9),
            ..Exit::default()
        };
        let bytes = exit.write("e", b"\xff", b"");
        let value = Value::read(&bytes).unwrap();
        assert_eq!(value.get("exit_code").signed(), Ok(137));
        assert_eq!(value.get("signal").unsigned(), Ok(9_u8));
        assert_eq!(value.get("stdout").bytes(), Ok(vec![0xff]));
        assert_eq!(value.get("start_error"), &Value::Nil);
    }

    #[test]
    fn the_configuration_has_a_default_for_each_key() {
        let bytes = Writer::new()
            .map(1)
            .text("cookie")
            .array(2)
            .unsigned(1)
            .unsigned(u64::MAX)
            .finish();
        assert_eq!(
            Config::read(&bytes),
            Ok(Config {
                cookie: (1, u64::MAX),
                history: 8 << 20
            })
        );
    }
}
