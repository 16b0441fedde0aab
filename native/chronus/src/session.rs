//! Shell sessions: one shell that lives between calls, and the calls that queue for it.
//!
//! The shell reads its script from a pipe. Each call is one `eval` whose children get neither that pipe nor the status pipe, followed by a
//! line that writes a fresh nonce and `$?` to the status pipe: nothing that a command prints is ever taken for an exit code.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use wire::frame::kind;
use wire::message::{Env, Exit, Shell};

use crate::buffer::{Filled, OutputBuffer, Policy};
use crate::child::{Launch, Program, Stdio, STATUS_FD};
use crate::command::{Command, Origin, Subscriber};
use crate::input::{Input, Kind};
use crate::kernel::{self, errno, End, Poller, Token, READABLE, WRITABLE};
use crate::process::{Attempt, Process, StartError, Status};
use crate::report::Stage;
use crate::server::{Chronus, Leader};
use crate::spawn::Pipes;
use crate::timers::Timer;
use crate::users::{Account, Lookup, Unresolved};
use crate::waiting::ends;

/// Output of background children that is kept between two calls, each stream; the rest is counted.
const IDLE_OUTPUT_MAX: u64 = 64 << 10;
/// A status line is far shorter; what doesn't end by then is no status line.
const STATUS_LINE_MAX: usize = 4 << 10;
/// Names of sessions that ended are remembered (to say so to the next call) up to this many.
const NAMES_MAX: usize = 4096;
const DEFAULT_CWD: &[u8] = b"/";

/// The sessions by number, and the numbers by name.
#[derive(Default)]
pub struct Sessions {
    table: HashMap<u64, Session>,
    by_name: HashMap<String, u64>,
}

struct Session {
    name: String,
    shell: Option<OpenShell>,
    /// The call that runs.
    current: Option<u64>,
    queue: VecDeque<Queued>,
    /// An earlier shell of this name has ended by itself.
    restarted: bool,
    /// Closed: only its shell's death is waited for.
    closing: bool,
}

/// A call that waits for its turn.
struct Queued {
    command: u64,
    request: Shell,
}

/// A shell that runs.
struct OpenShell {
    process: Process,
    attempt: Attempt,
    control: Input,
    control_watched: bool,
    outputs: [Option<OwnedFd>; 2],
    /// Where output goes while no call runs.
    idle: [OutputBuffer; 2],
    status: OwnedFd,
    status_line: Vec<u8>,
    nonce: String,
}

impl Sessions {
    /// The shell of a session, to be signalled.
    fn process(&self, id: u64) -> Option<Process> {
        self.table
            .get(&id)?
            .shell
            .as_ref()
            .map(|shell| shell.process)
    }

    /// The call of a session that runs.
    fn current(&self, id: u64) -> Option<u64> {
        self.table.get(&id)?.current
    }

    /// Takes a call out of its session's queue; false where it isn't waiting there.
    pub fn withdraw(&mut self, id: u64, call: u64) -> bool {
        let Some(session) = self.table.get_mut(&id) else {
            return false;
        };
        let waiting = session.queue.len();
        session.queue.retain(|queued| queued.command != call);
        session.queue.len() < waiting
    }
}

fn idle_output() -> OutputBuffer {
    OutputBuffer::new(Policy::Capture {
        limit: IDLE_OUTPUT_MAX,
    })
}

impl Chronus {
    /// SHELL.
    pub(crate) fn shell(&mut self, stream: u32, mut request: Shell) {
        if !self.accepts_name(stream, &request.exec_id)
            || !self.accepts_name(stream, &request.session)
        {
            return;
        }
        if let Some(id) = self.find(&request.exec_id) {
            return self.join(stream, id, true, false);
        }
        if request.command.contains(&0) {
            return self.push_error(
                stream,
                libc::EINVAL,
                "invalid_argument",
                "a shell command can't contain a NUL byte",
            );
        }
        let session_id = self.session_named(&request.session);
        let Some(session) = self.sessions.table.get_mut(&session_id) else {
            return;
        };
        let opens = session.shell.is_none() && session.queue.is_empty();
        if !opens && (request.cwd.is_some() || request.env.is_some() || request.user.is_some()) {
            let message = format!(
                "session {} is open: cwd, env and user count only when it opens",
                request.session
            );
            return self.push_error(stream, libc::EINVAL, "invalid_argument", &message);
        }
        let id = self.new_id();
        let limit = Policy::Capture {
            limit: request.max_output,
        };
        let argv = [
            std::mem::take(&mut request.exec_id).into_bytes(),
            request.command.clone(),
        ];
        let exec_id = String::from_utf8_lossy(&argv[0]).into_owned();
        let mut command = Command::new(
            id,
            exec_id,
            &argv[1..],
            [OutputBuffer::new(limit), OutputBuffer::new(limit)],
        );
        command.kept = !command.exec_id.is_empty();
        command.origin = Origin::Call(session_id);
        if request.timeout_ms > 0 {
            // From here on: a caller waits no longer for its turn than for its command.
            command.timeout = self.timers.set(
                Duration::from_millis(request.timeout_ms),
                Timer::CommandTimeout(id),
            );
        }
        self.adopt(command, Subscriber::whole(stream));
        if let Some(session) = self.sessions.table.get_mut(&session_id) {
            session.queue.push_back(Queued {
                command: id,
                request,
            });
        }
        self.advance_session(session_id);
    }

    fn session_named(&mut self, name: &str) -> u64 {
        if let Some(id) = self.sessions.by_name.get(name) {
            return *id;
        }
        if self.sessions.table.len() >= NAMES_MAX {
            let unused = |session: &Session| {
                session.shell.is_none() && session.current.is_none() && session.queue.is_empty()
            };
            if let Some(id) = self
                .sessions
                .table
                .iter()
                .find(|(_, session)| unused(session))
                .map(|(id, _)| *id)
            {
                self.forget_session(id);
            }
        }
        let id = self.new_id();
        let session = Session {
            name: name.to_owned(),
            shell: None,
            current: None,
            queue: VecDeque::new(),
            restarted: false,
            closing: false,
        };
        self.sessions.table.insert(id, session);
        self.sessions.by_name.insert(name.to_owned(), id);
        id
    }

    fn forget_session(&mut self, id: u64) {
        if let Some(session) = self.sessions.table.remove(&id) {
            if self.sessions.by_name.get(&session.name) == Some(&id) {
                self.sessions.by_name.remove(&session.name);
            }
        }
    }

    /// Lets the next call begin if none runs.
    pub(crate) fn advance_session(&mut self, id: u64) {
        loop {
            let Some(session) = self.sessions.table.get_mut(&id) else {
                return;
            };
            if session.current.is_some() || session.closing {
                return;
            }
            let Some(next) = session.queue.front() else {
                return;
            };
            let mut account = None;
            if session.shell.is_none() {
                match self.starter.look_up(user_of(&next.request)) {
                    Lookup::Known(known) => account = Some(known),
                    Lookup::Awaited => return self.session_waits(id),
                }
            }
            let Some(next) = session.queue.pop_front() else {
                return;
            };
            session.current = Some(next.command);
            if let Err(error) = self.begin_call(id, &next, account) {
                let attempt = shell_attempt(&next.request);
                self.fail_call(id, next.command, &attempt, error);
                continue;
            }
            return;
        }
    }

    /// `account`: whom the shell runs as, where there is none yet.
    fn begin_call(
        &mut self,
        id: u64,
        call: &Queued,
        account: Option<Result<Account, Unresolved>>,
    ) -> Result<(), StartError> {
        if let Some(account) = account {
            self.open_shell(id, &call.request, account?)?;
        }
        let (Some(session), Some(command)) = (
            self.sessions.table.get_mut(&id),
            self.commands.get_mut(&call.command),
        ) else {
            return Ok(());
        };
        let Some(shell) = &mut session.shell else {
            return Ok(());
        };
        command.started = Instant::now();
        command.session_restarted = std::mem::take(&mut session.restarted);
        for which in 0..2 {
            command.outputs[which] = std::mem::replace(&mut shell.idle[which], idle_output());
            command.dropped_before[which] =
                command.outputs[which].carry_over(call.request.max_output);
        }
        shell.nonce = nonce().map_err(|error| StartError {
            stage: Stage::Fork,
            errno: errno(&error),
        })?;
        shell.status_line.clear();
        shell
            .control
            .offer(0, &script(&call.request.command, &shell.nonce));
        shell.watch_control(id, &self.poller);
        Ok(())
    }

    /// Starts the shell of a session that has none.
    fn open_shell(&mut self, id: u64, request: &Shell, account: Account) -> Result<(), StartError> {
        let stdio_error = |error: io::Error| StartError {
            stage: Stage::Stdio,
            errno: errno(&error),
        };
        let (their_control, our_control) = kernel::pipe().map_err(stdio_error)?;
        let (our_stdout, their_stdout) = kernel::pipe().map_err(stdio_error)?;
        let (our_stderr, their_stderr) = kernel::pipe().map_err(stdio_error)?;
        let (our_status, their_status) = kernel::pipe().map_err(stdio_error)?;
        let ours = [
            (&our_stdout, End::Stdout),
            (&our_stderr, End::Stderr),
            (&our_status, End::Status),
        ];
        for fd in ours
            .iter()
            .map(|(fd, _)| fd.as_raw_fd())
            .chain([our_control.as_raw_fd()])
        {
            kernel::set_nonblocking(fd).map_err(stdio_error)?;
        }
        for (fd, end) in ours {
            self.poller
                .add(fd.as_raw_fd(), Token::Session(id, end), READABLE)
                .map_err(stdio_error)?;
        }
        let mut env = request.base_env.clone();
        env.extend(
            request
                .env
                .iter()
                .flatten()
                .map(|(name, value)| (name.clone(), value.clone())),
        );
        let attempt = shell_attempt(request);
        let process = self.starter.start(Launch {
            program: Program::FirstOf(vec![
                vec![
                    b"bash".to_vec(),
                    b"--noprofile".to_vec(),
                    b"--norc".to_vec(),
                ],
                vec![b"sh".to_vec()],
            ]),
            account,
            cwd: &attempt.cwd,
            env: &env as &Env,
            no_new_privs: request.no_new_privs,
            stdio: Stdio::Pipes(Pipes {
                stdin: Some(their_control.as_raw_fd()),
                stdout: their_stdout.as_raw_fd(),
                stderr: their_stderr.as_raw_fd(),
                status: Some(their_status.as_raw_fd()),
            }),
        });
        let process = match process {
            Ok(process) => process,
            Err(error) => {
                ours.iter()
                    .for_each(|(fd, _)| self.poller.remove(fd.as_raw_fd()));
                return Err(error);
            }
        };
        self.leaders.insert(process.pid, Leader::Session(id));
        let shell = OpenShell {
            process,
            attempt,
            control: Input::new(our_control, Kind::Pipe),
            control_watched: false,
            outputs: [Some(our_stdout), Some(our_stderr)],
            idle: [idle_output(), idle_output()],
            status: our_status,
            status_line: Vec::new(),
            nonce: String::new(),
        };
        if let Some(session) = self.sessions.table.get_mut(&id) {
            session.shell = Some(shell);
        }
        Ok(())
    }

    pub(crate) fn handle_session_event(&mut self, id: u64, end: End, hung_up: bool) {
        match end {
            End::Stdout => self.read_session_output(id, 0, hung_up),
            End::Stderr => self.read_session_output(id, 1, hung_up),
            End::Status => self.read_session_status(id),
            End::Stdin | End::Terminal => {
                let Some(shell) = self.open_session_shell(id) else {
                    return;
                };
                shell.control.flush();
                if let Some(session) = self.sessions.table.get_mut(&id) {
                    if let Some(shell) = &mut session.shell {
                        shell.watch_control(id, &self.poller);
                    }
                }
            }
        }
    }

    fn open_session_shell(&mut self, id: u64) -> Option<&mut OpenShell> {
        self.sessions.table.get_mut(&id)?.shell.as_mut()
    }

    fn read_session_output(&mut self, id: u64, which: usize, hung_up: bool) {
        let Some(session) = self.sessions.table.get_mut(&id) else {
            return;
        };
        let current = session.current;
        let Some(shell) = &mut session.shell else {
            return;
        };
        let Some(fd) = shell.outputs[which].as_ref().map(AsRawFd::as_raw_fd) else {
            return;
        };
        let buffer = match current.and_then(|command| self.commands.get_mut(&command)) {
            Some(command) => &mut command.outputs[which],
            None => &mut shell.idle[which],
        };
        if buffer.fill(fd) == Filled::Ended || (hung_up && kernel::readable_bytes(fd) == 0) {
            shell.close_output(which, &self.poller);
        }
    }

    fn read_session_status(&mut self, id: u64) {
        let Some(shell) = self.open_session_shell(id) else {
            return;
        };
        let mut bytes = [0; 512];
        let fd = shell.status.as_raw_fd();
        match kernel::read(fd, &mut bytes) {
            Ok(count) if count > 0 => {
                shell.status_line.extend_from_slice(&bytes[..count]);
                if let Some(code) = shell.take_status() {
                    self.finish_call(id, code);
                }
            }
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) => {}
            // The shell closed it (exec of a program, exit): its death tells the rest.
            _ => self.poller.remove(fd),
        }
    }

    /// The current call has told its exit code: what its finished children wrote is in the pipes already.
    fn finish_call(&mut self, id: u64, code: i64) {
        let Some(call) = self.take_current_call(id) else {
            return;
        };
        if let Some(command) = self.commands.get_mut(&call) {
            command.status = Some(Status { code, signal: None });
        }
        self.settle(call);
        self.advance_session(id);
    }

    /// Drains the shell's outputs into the current call, which is over.
    fn take_current_call(&mut self, id: u64) -> Option<u64> {
        let session = self.sessions.table.get_mut(&id)?;
        let call = session.current.take()?;
        let command = self.commands.get_mut(&call)?;
        for (which, output) in session
            .shell
            .iter_mut()
            .flat_map(|shell| &shell.outputs)
            .enumerate()
        {
            if let Some(fd) = output {
                command.outputs[which].drain(fd.as_raw_fd(), 0);
            }
        }
        Some(call)
    }

    fn fail_call(&mut self, id: u64, call: u64, attempt: &Attempt, error: StartError) {
        if let Some(session) = self.sessions.table.get_mut(&id) {
            session.current = None;
        }
        if let Some(command) = self.commands.get_mut(&call) {
            command.fail_start(attempt, error);
        }
        self.settle(call);
    }

    /// A session's shell is dead: by `exit`, by a timeout, by a signal, or because it never started.
    pub(crate) fn shell_died(&mut self, id: u64, status: Status) {
        let call = self.take_current_call(id);
        let Some(session) = self.sessions.table.get_mut(&id) else {
            return;
        };
        let Some(mut shell) = session.shell.take() else {
            return;
        };
        session.restarted = true;
        let closing = session.closing;
        shell.close(&self.poller);
        let (failed, _) = self.starter.bury(&shell.process, true);
        if let Some(command) = call.and_then(|call| self.commands.get_mut(&call)) {
            match failed {
                Some(error) => command.fail_start(&shell.attempt, error),
                None => command.status = Some(status),
            }
        }
        if let Some(call) = call {
            self.settle(call);
        }
        if closing {
            self.forget_session(id);
        } else {
            self.advance_session(id);
        }
    }

    /// Sends a signal to a call: to the session's shell where the call runs, so that KILL ends the session, and all of its processes with `tree`. To a call
    /// that waits for its turn nothing happens but its end; the others are left alone.
    pub(crate) fn signal_call(&mut self, session: u64, call: u64, signal: i32, tree: bool) {
        if self.sessions.current(session) == Some(call) {
            if let Some(process) = self.sessions.process(session) {
                self.starter.send(&process, signal, tree);
            }
        } else if ends(signal) && self.sessions.withdraw(session, call) {
            if let Some(command) = self.commands.get_mut(&call) {
                command.status = u8::try_from(signal).ok().map(Status::killed_by);
            }
            self.settle(call);
        }
    }

    /// Kills a session's shell with its children.
    fn kill_session_shell(&mut self, id: u64) {
        if let Some(process) = self.sessions.process(id) {
            self.starter.kill(&process);
        }
    }

    /// CLOSE_SESSION: kills it with its children. Closing what isn't open is no error.
    pub(crate) fn close_session(&mut self, stream: u32, name: &str) {
        if let Some(id) = self.sessions.by_name.remove(name) {
            self.end_session(id);
        }
        self.push(stream, kind::EXIT, 0, &Exit::default().write("", b"", b""));
    }

    fn end_session(&mut self, id: u64) {
        self.kill_session_shell(id);
        let current = self.take_current_call(id);
        let Some(session) = self.sessions.table.get_mut(&id) else {
            return;
        };
        session.closing = true;
        let queued: Vec<u64> = session.queue.drain(..).map(|call| call.command).collect();
        if let Some(shell) = &mut session.shell {
            shell.close(&self.poller);
        } else {
            self.sessions.table.remove(&id);
        }
        let killed = Status::killed_by(libc::SIGKILL as u8);
        for call in current.into_iter().chain(queued) {
            if let Some(command) = self.commands.get_mut(&call) {
                command.status = Some(killed);
            }
            self.settle(call);
        }
    }
}

impl OpenShell {
    fn watch_control(&mut self, id: u64, poller: &Poller) {
        self.drop_retired_control(poller);
        let wanted = self.control.waits_for_room();
        let Some(fd) = self.control.fd() else { return };
        if wanted && !self.control_watched {
            self.control_watched = poller
                .add(fd, Token::Session(id, End::Stdin), WRITABLE)
                .is_ok();
        } else if !wanted && self.control_watched {
            self.control_watched = false;
            poller.remove(fd);
        }
    }

    fn drop_retired_control(&mut self, poller: &Poller) {
        if let Some(fd) = self.control.take_retired() {
            if std::mem::take(&mut self.control_watched) {
                poller.remove(fd.as_raw_fd());
            }
        }
    }

    fn close_output(&mut self, which: usize, poller: &Poller) {
        if let Some(fd) = self.outputs[which].take() {
            poller.remove(fd.as_raw_fd());
        }
    }

    /// Lets go of its descriptors.
    fn close(&mut self, poller: &Poller) {
        self.close_output(0, poller);
        self.close_output(1, poller);
        poller.remove(self.status.as_raw_fd());
        self.control.close();
        self.drop_retired_control(poller);
    }

    /// The exit code of a complete line with the current nonce; other lines are dropped.
    fn take_status(&mut self) -> Option<i64> {
        while let Some(end) = self.status_line.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.status_line.drain(..=end).collect();
            if let Some(code) = parse_status(&line[..end], &self.nonce) {
                return Some(code);
            }
        }
        if self.status_line.len() > STATUS_LINE_MAX {
            self.status_line.clear();
        }
        None
    }
}

fn parse_status(line: &[u8], nonce: &str) -> Option<i64> {
    let (said, code) = std::str::from_utf8(line).ok()?.split_once(' ')?;
    if said != nonce || nonce.is_empty() {
        return None;
    }
    code.parse().ok()
}

/// What the shell of a request is started as.
fn shell_attempt(request: &Shell) -> Attempt {
    let cwd = request
        .cwd
        .as_deref()
        .or(request.base_cwd.as_deref())
        .unwrap_or(DEFAULT_CWD);
    Attempt::new(b"sh", user_of(request), cwd)
}

/// Whom the shell of a request runs as.
fn user_of(request: &Shell) -> &str {
    request.user.as_deref().unwrap_or(&request.base_user)
}

fn nonce() -> io::Result<String> {
    let mut bytes = [0; 16];
    kernel::fill_random(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The lines that the shell reads for one call. `command eval` keeps a POSIX shell alive when the command has a syntax error; the braces
/// keep control and status pipe away from its children. The status line is silent, so that `set -x` doesn't show it. The empty line before it resets bash's parser, which
/// after an unclosed quote in `eval` would not see a reserved word.
fn script(command: &[u8], nonce: &str) -> Vec<u8> {
    let mut script = Vec::with_capacity(command.len() + 160);
    script.extend_from_slice(b"{ command eval '");
    for byte in command {
        match byte {
            b'\'' => script.extend_from_slice(b"'\\''"),
            other => script.push(*other),
        }
    }
    let status: RawFd = STATUS_FD;
    script.extend_from_slice(
        format!("'; }} </dev/null {status}>&-\n\n{{ command printf '%s %d\\n' {nonce} \"$?\" >&{status}; }} 2>/dev/null\n").as_bytes(),
    );
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_line_with_the_nonce_is_a_status() {
        assert_eq!(parse_status(b"abc 3", "abc"), Some(3));
        assert_eq!(parse_status(b"abd 3", "abc"), None);
        assert_eq!(parse_status(b" 3", ""), None);
        assert_eq!(parse_status(b"abc x", "abc"), None);
        assert_eq!(parse_status(b"abc", "abc"), None);
    }

    #[test]
    fn a_command_stays_one_word() {
        let script = script(b"echo 'a b'\necho $x", "n");
        assert!(script
            .starts_with(b"{ command eval 'echo '\\''a b'\\''\necho $x'; } </dev/null 9>&-\n"));
    }
}
