//! From START and ATTACH to the end of a command, and how long it is remembered.

use std::time::Duration;

use wire::frame::kind;
use wire::message::{self, Attach, Env, Start, What};

use crate::buffer::{OutputBuffer, Policy};
use crate::builtin;
use crate::child::{Launch, Program};
use crate::command::{offset_gone, Command, Origin, Subscriber, INITIAL_CREDIT};
use crate::kernel::errno;
use crate::process::{Attempt, StartError, Status, Survivors};
use crate::report::Stage;
use crate::server::{Chronus, Leader};
use crate::stdio::{close_handover, close_readiness, take_terminal, Descriptors, Stdin};
use crate::timers::Timer;
use crate::tunnel;
use crate::users::{Account, Lookup, Unresolved};

/// How long a pipe is read that survivors of a leader hold.
const DRAIN_TIME: Duration = Duration::from_millis(200);
/// Ended commands that are kept, and how much output of theirs.
const ENDED_MAX: usize = 256;
const ENDED_BYTES_MAX: u64 = 64 << 20;
/// Longest exec_id and session name.
const NAME_MAX: usize = 128;
const DEFAULT_CWD: &[u8] = b"/";

/// What is to be started for a command: a program, whom it runs as, where, and with what.
pub(crate) struct Order {
    program: Program,
    pub(crate) user: String,
    cwd: Option<Vec<u8>>,
    env: Env,
    no_new_privs: bool,
    /// One of the `STDIN_` constants.
    stdin: u8,
    stdin_data: Vec<u8>,
    /// Rows and columns.
    terminal: Option<(u16, u16)>,
}

impl Order {
    /// Whether its input comes on the stream.
    pub(crate) fn reads_stream(&self) -> bool {
        self.stdin == message::STDIN_STREAM
    }
}

impl Chronus {
    pub(crate) fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id - 1
    }

    /// Adds a command that `stream` follows.
    pub(crate) fn adopt(&mut self, mut command: Command, subscriber: Subscriber) {
        self.streams.insert(subscriber.stream, command.id);
        command.subscribers.push(subscriber);
        if command.kept {
            self.by_exec_id.insert(command.exec_id.clone(), command.id);
        }
        self.commands.insert(command.id, command);
    }

    /// The command of that exec_id, if it is still known.
    pub(crate) fn find(&self, exec_id: &str) -> Option<u64> {
        self.by_exec_id.get(exec_id).copied()
    }

    /// False (and an ERROR) for names that are too long to be listed.
    pub(crate) fn accepts_name(&mut self, stream: u32, name: &str) -> bool {
        if name.len() > NAME_MAX {
            self.push_error(
                stream,
                libc::EINVAL,
                "invalid_argument",
                &format!("exec_id or session exceeds {NAME_MAX} bytes"),
            );
        }
        name.len() <= NAME_MAX
    }

    pub(crate) fn start(&mut self, stream: u32, start: Start) {
        if !self.accepts_name(stream, &start.exec_id) {
            return;
        }
        if let Some(id) = self.find(&start.exec_id) {
            let writes = start.stdin == message::STDIN_STREAM;
            return self.join(stream, id, start.follow, writes);
        }
        let (id, capture) = (self.new_id(), start.mode != message::MODE_STREAM);
        let policy = if capture {
            Policy::Capture {
                limit: start.max_output,
            }
        } else {
            Policy::Window {
                history: self.history,
            }
        };
        let (argv, program) = match start.what {
            What::Argv(argv) => (argv.clone(), Program::FirstOf(vec![argv])),
            What::Builtin(name, arguments) => {
                if !builtin::exists(&name) {
                    return self.push_error(
                        stream,
                        libc::EINVAL,
                        "invalid_argument",
                        &format!("no builtin {name}"),
                    );
                }
                (
                    vec![name.clone().into_bytes()],
                    Program::Builtin(name, Box::new(arguments)),
                )
            }
        };
        let mut command = Command::new(
            id,
            start.exec_id,
            &argv,
            [OutputBuffer::new(policy), OutputBuffer::new(policy)],
        );
        command.kept = matches!(program, Program::FirstOf(_)) && !command.exec_id.is_empty();
        command.capture = capture;
        command.kill_leftovers = start.leftovers != message::LEFTOVERS_KEEP;
        let order = Order {
            program,
            user: start.user,
            cwd: start.cwd,
            env: start.env,
            no_new_privs: start.no_new_privs,
            stdin: start.stdin,
            stdin_data: start.stdin_data,
            terminal: start.pty,
        };
        let writes = order.reads_stream();
        let launched = match self.starter.look_up(&order.user) {
            Lookup::Known(account) => {
                self.launch(&mut command, order, account);
                true
            }
            Lookup::Awaited => {
                self.wait_for_user(&mut command, order, stream);
                false
            }
        };
        if start.timeout_ms > 0 && command.status.is_none() {
            command.timeout = self.timers.set(
                Duration::from_millis(start.timeout_ms),
                Timer::CommandTimeout(id),
            );
        }
        let mut subscriber = match (capture, start.follow) {
            (true, _) => Subscriber::whole(stream),
            (false, true) => Subscriber::following(stream, [Some(0); 2]),
            (false, false) => Subscriber::following(stream, [None; 2]),
        };
        if writes {
            subscriber.may_write();
        }
        self.adopt(command, subscriber);
        if launched {
            self.tell_launched(id, stream, writes);
        }
    }

    /// A command was started, or could not be: what its stream is told at once.
    pub(crate) fn tell_launched(&mut self, id: u64, stream: u32, writes: bool) {
        let is_due =
            |command: &Command| command.readiness.is_none() && (!command.capture || writes);
        if self.commands.get(&id).is_some_and(is_due) {
            self.push_started(id, stream);
        }
        if writes {
            self.push(stream, kind::STDIN_CREDIT, INITIAL_CREDIT, b"");
        }
        self.settle(id);
    }

    fn push_started(&mut self, id: u64, stream: u32) {
        let Some(command) = self.commands.get(&id) else {
            return;
        };
        let started = message::started(&command.exec_id, false, [0, 0]);
        let pid = u64::try_from(command.pid()).unwrap_or(0);
        self.push(stream, kind::STARTED, pid, &started);
    }

    /// A builtin has closed its readiness pipe: it is ready, or dead.
    pub(crate) fn announce(&mut self, id: u64) {
        let Some(command) = self.commands.get_mut(&id) else {
            return;
        };
        if command.readiness.is_none() {
            return;
        }
        close_readiness(command, &self.poller);
        let followers: Vec<u32> = command
            .subscribers
            .iter()
            .filter(|subscriber| !subscriber.whole)
            .map(|subscriber| subscriber.stream)
            .collect();
        for stream in followers {
            self.push_started(id, stream);
        }
    }

    /// Starts a command's process, or leaves in the command why it could not be.
    pub(crate) fn launch(
        &mut self,
        command: &mut Command,
        order: Order,
        account: Result<Account, Unresolved>,
    ) {
        let Order {
            program,
            env,
            no_new_privs,
            ..
        } = order;
        let announces = matches!(&program, Program::Builtin(name, _) if builtin::announces(name));
        let cwd = order.cwd.as_deref().unwrap_or(DEFAULT_CWD);
        let stdin = Stdin {
            kind: order.stdin,
            data: &order.stdin_data,
        };
        let attempt = Attempt::new(
            command.argv.first().map_or(b"", Vec::as_slice),
            &order.user,
            cwd,
        );
        let launched = account.map_err(StartError::from).and_then(|account| {
            let prepared = match order.terminal {
                Some(size) => Descriptors::terminal(size),
                None => Descriptors::pipes(&stdin, announces),
            };
            let descriptors = prepared.map_err(|error| StartError {
                stage: Stage::Stdio,
                errno: errno(&error),
            })?;
            let process = self.starter.start(Launch {
                program,
                account,
                cwd,
                env: &env,
                no_new_privs,
                stdio: descriptors.stdio(),
            })?;
            Ok((process, descriptors))
        });
        match launched {
            Ok((process, descriptors)) => {
                command.origin = Origin::Process(process);
                command.attempt = Some(attempt);
                self.leaders
                    .insert(process.pid, Leader::Command(command.id));
                descriptors.give_to(command, &stdin, &self.poller);
            }
            Err(error) => {
                command.origin = Origin::Nothing;
                command.fail_start(&attempt, error);
            }
        }
    }

    /// START or SHELL for an exec_id that is known: as if this stream had started it.
    pub(crate) fn join(&mut self, stream: u32, id: u64, follow: bool, writes: bool) {
        let Some(command) = self.commands.get_mut(&id) else {
            return;
        };
        let from = if command.capture {
            [0; 2]
        } else {
            [command.outputs[0].start(), command.outputs[1].start()]
        };
        let mut subscriber = match (command.capture, follow) {
            (true, _) => Subscriber::whole(stream),
            (false, true) => Subscriber::following(stream, from.map(Some)),
            (false, false) => Subscriber::following(stream, [None; 2]),
        };
        if writes {
            subscriber.may_write();
        }
        self.follow(id, subscriber, from);
    }

    pub(crate) fn attach(&mut self, stream: u32, attach: &Attach) {
        let Some(command) = self
            .find(&attach.exec_id)
            .and_then(|id| self.commands.get_mut(&id))
        else {
            return self.push_error(
                stream,
                libc::ESRCH,
                "process_not_found",
                &format!("no command {} is known", attach.exec_id),
            );
        };
        let wanted = [attach.stdout_from, attach.stderr_from];
        for (output, from) in command.outputs.iter_mut().zip(wanted) {
            let Some(from) = from else { continue };
            if from > output.total() {
                let message = format!(
                    "offset {from} is beyond the {} bytes that were written",
                    output.total()
                );
                return self.push_error(stream, libc::EINVAL, "invalid_argument", &message);
            }
            if from < output.start() {
                let payload = offset_gone(output);
                return self.push(stream, kind::ERROR, 0, &payload);
            }
            output.mark_read(from);
        }
        let mut subscriber = Subscriber::following(stream, wanted);
        if attach.stdin {
            subscriber.may_write();
        }
        let from = [0, 1]
            .map(|which: usize| wanted[which].unwrap_or_else(|| command.outputs[which].total()));
        let id = command.id;
        self.follow(id, subscriber, from);
    }

    fn follow(&mut self, id: u64, subscriber: Subscriber, from: [u64; 2]) {
        let Some(command) = self.commands.get_mut(&id) else {
            return;
        };
        let (stream, writes) = (subscriber.stream, subscriber.writes());
        let started = message::started(&command.exec_id, true, from);
        let pid = command.pid() as u64;
        command.subscribers.push(subscriber);
        self.streams.insert(stream, id);
        self.push(stream, kind::STARTED, pid, &started);
        if writes {
            self.push(stream, kind::STDIN_CREDIT, INITIAL_CREDIT, b"");
        }
        self.settle(id);
    }

    pub(crate) fn leader_died(&mut self, id: u64, status: Status) {
        self.announce(id);
        let Some(command) = self.commands.get_mut(&id) else {
            return;
        };
        let Origin::Process(process) = command.origin else {
            return;
        };
        self.timers.cancel(command.timeout.take());
        let kill_rest = command.kill_leftovers || command.timed_out;
        let (failed, survivors) = self.starter.bury(&process, kill_rest);
        command.status = Some(status);
        if let (Some(error), Some(attempt)) = (failed, command.attempt.take()) {
            command.fail_start(&attempt, error);
        }
        if command.handover.is_some() {
            take_terminal(command, &self.poller, self.connection.as_mut());
            close_handover(command, &self.poller);
        }
        command.close_input(&self.poller);
        command.drain_outputs(&self.poller);
        if command.pipes.iter().any(Option::is_some) {
            command.drain = self.timers.set(DRAIN_TIME, Timer::DrainEnded(id));
        }
        if survivors == Survivors::Some {
            self.sweep_soon();
        }
        self.settle(id);
    }

    /// A command is over: its exit is fixed, and it is kept or waits only to be sent.
    pub(crate) fn conclude(&mut self, id: u64) {
        let Some(command) = self.commands.get_mut(&id) else {
            return;
        };
        command.conclude();
        command.close_input(&self.poller);
        self.timers.cancel(command.timeout.take());
        self.timers.cancel(command.drain.take());
        if command.kept {
            let bytes = command.kept_bytes();
            self.ended.push_back((id, bytes));
            self.ended_bytes += bytes;
            self.forget_surplus();
        } else if command.subscribers.is_empty() {
            self.commands.remove(&id);
        }
    }

    /// Lets go of ended commands above the limits: first those whose output somebody has whole, then the oldest.
    fn forget_surplus(&mut self) {
        while self.ended.len() > ENDED_MAX || self.ended_bytes > ENDED_BYTES_MAX {
            let is_delivered = |(id, _): &(u64, u64)| {
                self.commands
                    .get(id)
                    .is_none_or(|command| command.delivered)
            };
            let victim = self.ended.iter().position(is_delivered).unwrap_or(0);
            let Some((id, bytes)) = self.ended.remove(victim) else {
                return;
            };
            self.ended_bytes -= bytes;
            self.forget(id);
            self.trim_later();
        }
    }

    pub(crate) fn forget(&mut self, id: u64) {
        let Some(mut command) = self.commands.remove(&id) else {
            return;
        };
        command.close_output(0, &self.poller);
        command.close_output(1, &self.poller);
        command.close_input(&self.poller);
        close_handover(&mut command, &self.poller);
        close_readiness(&mut command, &self.poller);
        tunnel::give_up(&mut command, &self.poller);
        self.timers.cancel(command.timeout);
        self.timers.cancel(command.drain);
        if self.by_exec_id.get(&command.exec_id) == Some(&id) {
            self.by_exec_id.remove(&command.exec_id);
        }
        for subscriber in &command.subscribers {
            self.streams.remove(&subscriber.stream);
            let payload = message::error(
                "process_not_found",
                "the command's output was dropped to make room for newer ones",
            );
            if let Some(connection) = &mut self.connection {
                connection.push(subscriber.stream, kind::ERROR, 0, &payload);
            }
        }
    }
}
