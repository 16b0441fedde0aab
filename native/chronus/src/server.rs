//! The loop: events in, frames in, commands along, frames out. Nothing in here waits for a process of the sandbox, or for a disk or a store: where a command's
//! user can't be looked up at once, the command waits, not the loop (`waiting.rs`).

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use wire::frame::{kind, Frame, MAX_PAYLOAD, PROTOCOL_VERSION};
use wire::message::{self, Attach, Listed, Shell, Start};

use crate::command::{Command, Origin};
use crate::connection::{each_frame, Broken, Connection};
use crate::kernel::{self, errno, own, End, Poller, Token, READABLE};
use crate::process::{self, Starter};
use crate::session::Sessions;
use crate::stdio::take_terminal;
use crate::timers::{Timer, Timers};
use crate::tunnel;
use crate::waiting::Waiting;

/// First and longest pause between two attempts to remove cgroups that were still busy.
const SWEEP_PAUSE_MIN: Duration = Duration::from_millis(2);
const SWEEP_PAUSE_MAX: Duration = Duration::from_secs(1);
/// Between two looks whether the own OOM score may be had back: it is the commands' for one to two of these after the last start.
const SETTLE_PAUSE: Duration = Duration::from_secs(1);
/// Pause before another attempt to accept a connection, or to give memory back.
const LATER: Duration = Duration::from_secs(1);

/// Whose leader a pid is.
#[derive(Debug, Clone, Copy)]
pub enum Leader {
    Command(u64),
    Session(u64),
}

pub struct Chronus {
    pub(crate) poller: Poller,
    pub(crate) timers: Timers,
    pub(crate) starter: Starter,
    pub(crate) connection: Option<Connection>,
    pub(crate) commands: HashMap<u64, Command>,
    pub(crate) leaders: HashMap<i32, Leader>,
    pub(crate) sessions: Sessions,
    /// What is to be started when users can be looked up.
    pub(crate) waiting: Vec<Waiting>,
    /// Stream of the connection to command.
    pub(crate) streams: HashMap<u32, u64>,
    pub(crate) by_exec_id: HashMap<String, u64>,
    /// Ended commands that are kept, oldest first, with the bytes of output that they keep.
    pub(crate) ended: VecDeque<(u64, u64)>,
    pub(crate) ended_bytes: u64,
    /// Commands that may have something to send.
    sendable: VecDeque<u64>,
    pub(crate) next_id: u64,
    pub(crate) history: u64,
    listener: OwnedFd,
    children: OwnedFd,
    sweep_pause: Duration,
    sweep_set: bool,
    trim_set: bool,
    score_set: bool,
}

impl Chronus {
    /// `children` is a signalfd for SIGCHLD.
    pub fn new(
        listener: OwnedFd,
        children: OwnedFd,
        starter: Starter,
        history: u64,
    ) -> io::Result<Chronus> {
        let poller = Poller::new()?;
        kernel::set_nonblocking(listener.as_raw_fd())?;
        poller.add(listener.as_raw_fd(), Token::Listener, READABLE)?;
        poller.add(children.as_raw_fd(), Token::Children, READABLE)?;
        Ok(Chronus {
            poller,
            timers: Timers::default(),
            starter,
            connection: None,
            commands: HashMap::new(),
            leaders: HashMap::new(),
            sessions: Sessions::default(),
            waiting: Vec::new(),
            streams: HashMap::new(),
            by_exec_id: HashMap::new(),
            ended: VecDeque::new(),
            ended_bytes: 0,
            sendable: VecDeque::new(),
            next_id: 1,
            history,
            listener,
            children,
            sweep_pause: SWEEP_PAUSE_MIN,
            sweep_set: false,
            trim_set: false,
            score_set: false,
        })
    }

    /// Serves for ever; returns only if the kernel refuses to wait for events.
    pub fn serve(&mut self) -> io::Error {
        let mut ready = Vec::new();
        loop {
            ready.clear();
            match self.poller.wait(self.timers.timeout_ms(), &mut ready) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return error,
                _ => {}
            }
            // Deaths last: what the dead have written is then read already, mostly.
            ready.sort_by_key(|(token, _)| *token == Token::Children);
            for (token, events) in &ready {
                self.handle_event(*token, *events);
            }
            while let Some(timer) = self.timers.pop_due() {
                self.handle_timer(timer);
            }
            self.settle_score_later();
            self.send();
        }
    }

    /// Takes the own OOM score back when nothing has been started for a while.
    fn settle_score_later(&mut self) {
        if self.starter.tidy() && !self.score_set {
            self.score_set = self.timers.set(SETTLE_PAUSE, Timer::SettleScore).is_some();
        }
    }

    fn handle_event(&mut self, token: Token, events: u32) {
        let hung_up = events & (libc::EPOLLHUP | libc::EPOLLERR) as u32 != 0;
        match token {
            Token::Listener => self.accept(),
            Token::Children => self.reap_children(),
            Token::Connection => {
                if events & READABLE != 0 || hung_up {
                    self.receive();
                }
            }
            Token::Command(id, end) => self.handle_command_event(id, end, hung_up),
            Token::Session(id, end) => self.handle_session_event(id, end, hung_up),
        }
    }

    fn handle_command_event(&mut self, id: u64, end: End, hung_up: bool) {
        let Some(command) = self.commands.get_mut(&id) else {
            return;
        };
        match end {
            End::Stdout => command.read_output(0, hung_up, &self.poller),
            End::Stderr => command.read_output(1, hung_up, &self.poller),
            End::Terminal => take_terminal(command, &self.poller, self.connection.as_mut()),
            End::Status => self.announce(id),
            End::Stdin => {
                if command.connecting.is_some() {
                    return self.finish_connecting(id);
                }
                let taken = command.input.flush();
                command.return_credit(&taken, self.connection.as_mut());
            }
        }
        self.settle(id);
    }

    /// After anything has changed about a command: what is watched, what can be sent, and whether it is over.
    pub(crate) fn settle(&mut self, id: u64) {
        let Some(command) = self.commands.get_mut(&id) else {
            return;
        };
        if matches!(command.origin, Origin::Tunnel) {
            tunnel::check_end(command);
        }
        command.watch(&self.poller);
        if command.is_over() {
            self.conclude(id);
        }
        self.enqueue(id);
    }

    /// Remembers that a command may have something to send.
    fn enqueue(&mut self, id: u64) {
        let Some(command) = self.commands.get_mut(&id) else {
            return;
        };
        if !command.queued && !command.subscribers.is_empty() {
            command.queued = true;
            self.sendable.push_back(id);
        }
    }

    fn handle_timer(&mut self, timer: Timer) {
        match timer {
            Timer::CommandTimeout(id) => self.time_out(id),
            Timer::DrainEnded(id) => {
                let Some(command) = self.commands.get_mut(&id) else {
                    return;
                };
                command.drain = None;
                command.close_output(0, &self.poller);
                command.close_output(1, &self.poller);
                self.settle(id);
            }
            Timer::SweepGroups => {
                self.sweep_set = false;
                if self.starter.sweep_groups() {
                    self.sweep_pause = (self.sweep_pause * 2).min(SWEEP_PAUSE_MAX);
                    self.sweep_later();
                }
            }
            // Tried again behind this.
            Timer::SettleScore => {
                self.score_set = false;
                self.starter.settle_score();
            }
            Timer::Trim => {
                self.trim_set = false;
                self.listen_again();
                if let Some(connection) = &mut self.connection {
                    connection.trim();
                }
                // SAFETY: gives free heap pages back to the kernel.
                unsafe { libc::malloc_trim(0) };
            }
        }
    }

    /// Tries to remove busy cgroups soon: something has died just now.
    pub(crate) fn sweep_soon(&mut self) {
        self.sweep_pause = SWEEP_PAUSE_MIN;
        self.sweep_later();
    }

    fn sweep_later(&mut self) {
        if !self.sweep_set {
            self.sweep_set = self
                .timers
                .set(self.sweep_pause, Timer::SweepGroups)
                .is_some();
        }
    }

    pub(crate) fn trim_later(&mut self) {
        if !self.trim_set {
            self.trim_set = self.timers.set(LATER, Timer::Trim).is_some();
        }
    }

    fn time_out(&mut self, id: u64) {
        let Some(command) = self.commands.get_mut(&id) else {
            return;
        };
        command.timeout = None;
        command.timed_out = true;
        match command.origin {
            Origin::Process(process) => self.starter.kill(&process),
            Origin::Call(session) => self.signal_call(session, id, libc::SIGKILL, true),
            Origin::Waiting => self.end_waiting(id, libc::SIGKILL),
            Origin::Tunnel | Origin::Nothing => {}
        }
    }

    // ---- the connection

    fn accept(&mut self) {
        let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        // SAFETY: accepts without asking for the peer's address.
        let accepted = own(unsafe {
            libc::accept4(
                self.listener.as_raw_fd(),
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                flags,
            )
        });
        match accepted.and_then(|socket| Connection::new(socket, &self.poller)) {
            Ok(connection) => {
                self.lose_connection();
                let mut connection = connection;
                let running = self
                    .commands
                    .values()
                    .filter(|command| command.kept && command.running())
                    .count();
                connection.push(0, kind::HELLO, PROTOCOL_VERSION, &message::hello(running));
                self.connection = Some(connection);
            }
            Err(error)
                if matches!(
                    errno(&error),
                    libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS
                ) =>
            {
                // The old connection gives a descriptor back; without one, the listener would be ready for ever.
                if self.connection.is_none() {
                    self.poller.remove(self.listener.as_raw_fd());
                    self.trim_later();
                }
                self.lose_connection();
            }
            Err(_) => {}
        }
    }

    /// Watches the listener again if it was put aside; watching it already is no error.
    fn listen_again(&mut self) {
        let _watched_already =
            self.poller
                .add(self.listener.as_raw_fd(), Token::Listener, READABLE);
    }

    /// Nobody listens any more. Commands go on; what only this connection could have used ends.
    fn lose_connection(&mut self) {
        if let Some(connection) = self.connection.take() {
            connection.close(&self.poller);
        }
        self.streams.clear();
        let followed: Vec<u64> = self
            .commands
            .values()
            .filter(|command| !command.subscribers.is_empty())
            .map(|command| command.id)
            .collect();
        for id in followed {
            if let Some(command) = self.commands.get_mut(&id) {
                command.subscribers.clear();
            }
            self.abandon_if_unwanted(id);
        }
    }

    /// Ends what nobody can find again, once nobody follows it.
    fn abandon_if_unwanted(&mut self, id: u64) {
        let Some(command) = self.commands.get_mut(&id) else {
            return;
        };
        if command.kept || !command.subscribers.is_empty() {
            return;
        }
        match command.origin {
            Origin::Process(process) if command.status.is_none() => self.starter.kill(&process),
            Origin::Process(_) if command.exit.is_none() => {}
            Origin::Call(_) if command.exit.is_none() => {}
            _ => self.forget(id),
        }
    }

    fn receive(&mut self) {
        let Some(connection) = &mut self.connection else {
            return;
        };
        match connection.receive() {
            Err(Broken) => return self.lose_connection(),
            Ok(false) => return,
            Ok(true) => {}
        }
        let input = connection.take_input();
        let handled = each_frame(&input, |frame| self.handle_frame(frame));
        match (handled, &mut self.connection) {
            (Ok(consumed), Some(connection)) => {
                connection.keep(input, consumed);
                if connection.is_bloated() {
                    self.trim_later();
                }
            }
            _ => self.lose_connection(),
        }
    }

    /// Fills the connection from the commands' buffers, as far as it takes it.
    fn send(&mut self) {
        loop {
            let Some(connection) = &mut self.connection else {
                return self.send_nothing();
            };
            // Each command once a round: one with much to send doesn't hold the others up.
            for _ in 0..self.sendable.len() {
                let Some(id) = self.sendable.pop_front() else {
                    break;
                };
                let Some(command) = self.commands.get_mut(&id) else {
                    continue;
                };
                if command.pump(connection, &mut self.streams) {
                    self.sendable.push_back(id);
                    break;
                }
                command.queued = false;
                if !command.kept && command.exit.is_some() && command.subscribers.is_empty() {
                    self.commands.remove(&id);
                }
            }
            if connection.flush(&self.poller).is_err() {
                self.lose_connection();
                continue;
            }
            if self.sendable.is_empty() || !connection.has_room() {
                return;
            }
        }
    }

    /// Nobody is there to send to.
    fn send_nothing(&mut self) {
        for id in std::mem::take(&mut self.sendable) {
            if let Some(command) = self.commands.get_mut(&id) {
                command.queued = false;
            }
        }
    }

    /// Queues a frame if somebody is there.
    pub(crate) fn push(&mut self, stream: u32, kind: u8, arg: u64, payload: &[u8]) {
        if let Some(connection) = &mut self.connection {
            connection.push(stream, kind, arg, payload);
        }
    }

    pub(crate) fn push_error(&mut self, stream: u32, errno: i32, code: &str, message: &str) {
        self.push(
            stream,
            kind::ERROR,
            u64::try_from(errno).unwrap_or(0),
            &message::error(code, message),
        );
    }

    // ---- frames

    fn handle_frame(&mut self, frame: Frame<'_>) -> Result<(), Broken> {
        let opens = matches!(
            frame.kind,
            kind::START
                | kind::SHELL
                | kind::ATTACH
                | kind::CONNECT
                | kind::LIST
                | kind::CLOSE_SESSION
        );
        if opens && (frame.stream == 0 || self.streams.contains_key(&frame.stream)) {
            return Err(Broken);
        }
        match frame.kind {
            kind::START => self.start(
                frame.stream,
                Start::read(frame.payload).map_err(|_| Broken)?,
            ),
            kind::SHELL => self.shell(
                frame.stream,
                Shell::read(frame.payload).map_err(|_| Broken)?,
            ),
            kind::ATTACH => self.attach(
                frame.stream,
                &Attach::read(frame.payload).map_err(|_| Broken)?,
            ),
            kind::CONNECT => self.connect(frame.stream, frame.arg, frame.payload),
            kind::LIST => self.list(frame.stream),
            kind::CLOSE_SESSION => self.close_session(
                frame.stream,
                &message::read_close_session(frame.payload).map_err(|_| Broken)?,
            ),
            kind::PING => self.push(frame.stream, kind::PONG, frame.arg, b""),
            _ => return self.handle_stream_frame(frame),
        }
        Ok(())
    }

    /// Frames for a stream that exists. One that has just ended is still spoken to by an edge that doesn't know yet: that is ignored.
    fn handle_stream_frame(&mut self, frame: Frame<'_>) -> Result<(), Broken> {
        let known = matches!(
            frame.kind,
            kind::STDIN
                | kind::STDIN_EOF
                | kind::CREDIT
                | kind::SIGNAL
                | kind::RESIZE
                | kind::DETACH
        );
        if !known {
            return Err(Broken);
        }
        let Some(&id) = self.streams.get(&frame.stream) else {
            return Ok(());
        };
        let (Some(command), Some(connection)) = (self.commands.get_mut(&id), &mut self.connection)
        else {
            return Ok(());
        };
        match frame.kind {
            kind::STDIN => {
                if !command.write_input(frame.stream, frame.payload, connection) {
                    return Err(Broken);
                }
            }
            kind::STDIN_EOF => command.input.end(),
            kind::CREDIT => match frame.payload {
                [which @ 1..=2] => {
                    command.add_credit(frame.stream, usize::from(*which) - 1, frame.arg)
                }
                _ => return Err(Broken),
            },
            kind::SIGNAL => self.signal(id, frame.arg, frame.payload == b"tree"),
            kind::RESIZE => command.resize(frame.arg),
            _ => self.detach(frame.stream, id),
        }
        self.settle(id);
        Ok(())
    }

    fn signal(&mut self, id: u64, number: u64, tree: bool) {
        let (Some(command), Ok(number)) = (self.commands.get(&id), i32::try_from(number)) else {
            return;
        };
        match command.origin {
            Origin::Waiting => self.end_waiting(id, number),
            Origin::Process(process) if command.status.is_none() => {
                self.starter.send(&process, number, tree);
            }
            Origin::Call(session) if command.exit.is_none() => {
                self.signal_call(session, id, number, tree);
            }
            _ => {}
        }
    }

    fn detach(&mut self, stream: u32, id: u64) {
        self.streams.remove(&stream);
        if let Some(command) = self.commands.get_mut(&id) {
            command
                .subscribers
                .retain(|subscriber| subscriber.stream != stream);
            // Whoever wants a call that has not begun can ask for it again: it was never carried out.
            if let (Origin::Call(session), true) = (command.origin, command.subscribers.is_empty())
            {
                if self.sessions.withdraw(session, id) {
                    return self.forget(id);
                }
            }
        }
        self.abandon_if_unwanted(id);
    }

    fn list(&mut self, stream: u32) {
        let mut kept: Vec<&Command> = self
            .commands
            .values()
            .filter(|command| command.kept)
            .collect();
        kept.sort_by_key(|command| command.id);
        let mut entries: Vec<Listed<'_>> = kept.into_iter().map(Command::listed).collect();
        let mut payload = message::listing(&entries);
        if payload.len() > MAX_PAYLOAD {
            entries.iter_mut().for_each(|entry| entry.argv = &[]);
            payload = message::listing(&entries);
        }
        while payload.len() > MAX_PAYLOAD {
            entries.drain(..entries.len() / 2);
            payload = message::listing(&entries);
        }
        self.push(stream, kind::LISTING, 0, &payload);
    }

    // ---- children

    fn reap_children(&mut self) {
        let mut information = [0; 1024];
        while kernel::read(self.children.as_raw_fd(), &mut information)
            .is_ok_and(|count| count == information.len())
        {}
        while let Some((pid, status)) = process::reap() {
            match self.leaders.remove(&pid) {
                Some(Leader::Command(id)) => self.leader_died(id, status),
                Some(Leader::Session(id)) => self.shell_died(id, status),
                None if self.starter.finish_reading(pid) => self.start_waiting(),
                None => {}
            }
        }
        if self.starter.has_retired_groups() {
            self.sweep_soon();
        }
    }
}
