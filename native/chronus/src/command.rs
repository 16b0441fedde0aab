//! A command: what runs, what it wrote, and who follows it.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Instant;

use wire::frame::kind;
use wire::message::{self, Exit, Listed};

use crate::buffer::{Filled, OutputBuffer, UNREAD_LIMIT};
use crate::child;
use crate::connection::Connection;
use crate::input::{Input, Taken};
use crate::kernel::{End, Poller, Token, READABLE, WRITABLE};
use crate::process::{Attempt, Process, StartError, Status};
use crate::pty;
use crate::timers::TimerKey;
use crate::tunnel::Connecting;

/// Bytes that each side may send of a stream before the other has returned credit.
pub const INITIAL_CREDIT: u64 = UNREAD_LIMIT;
/// Stdin credit is returned in pieces of this size: fewer frames, and the sender still has three quarters to go on with.
const CREDIT_PIECE: u64 = 256 << 10;
/// Captured output that stands in EXIT itself.
const INLINE_MAX: u64 = 128 << 10;
/// Reads in a row from a pipe whose writers are gone.
const READS_AFTER_HANGUP: usize = 64;
/// Taken from a terminal whose leader is dead, since a terminal can't say what it holds.
const TERMINAL_REST: u64 = 64 << 10;
/// What LISTING shows of a command line.
const LISTED_ARGV_BYTES: usize = 1 << 10;

const OUTPUT_KINDS: [u8; 2] = [kind::STDOUT, kind::STDERR];
const OUTPUT_ENDS: [End; 2] = [End::Stdout, End::Stderr];

/// What stands behind a command.
#[derive(Debug, Clone, Copy)]
pub enum Origin {
    Process(Process),
    /// A call in a session, by the session's number.
    Call(u64),
    /// A connection to a port.
    Tunnel,
    /// Nothing yet: who it is to run as is being looked up.
    Waiting,
    /// It could not be started.
    Nothing,
}

/// Somebody who wants to know: a stream of the connection.
pub struct Subscriber {
    pub stream: u32,
    /// Takes the whole captured output with the exit, without credit.
    pub whole: bool,
    /// Next offset to send of each output; None: not wanted.
    cursor: [Option<u64>; 2],
    credit: [u64; 2],
    /// Everything below was taken by the reader, as its credit says.
    taken: [u64; 2],
    stdin_credit: Option<u64>,
    stdin_owed: u64,
}

impl Subscriber {
    /// One that gets everything when the command has ended.
    pub fn whole(stream: u32) -> Subscriber {
        Subscriber {
            whole: true,
            cursor: [Some(0); 2],
            credit: [u64::MAX; 2],
            ..Subscriber::following(stream, [None; 2])
        }
    }

    /// One that gets each output from an offset on, as its credit allows.
    pub fn following(stream: u32, from: [Option<u64>; 2]) -> Subscriber {
        Subscriber {
            stream,
            whole: false,
            cursor: from,
            credit: [INITIAL_CREDIT; 2],
            taken: from.map(Option::unwrap_or_default),
            stdin_credit: None,
            stdin_owed: 0,
        }
    }

    /// Lets it send input, beginning with the initial credit.
    pub fn may_write(&mut self) {
        self.stdin_credit = Some(INITIAL_CREDIT);
    }

    pub fn writes(&self) -> bool {
        self.stdin_credit.is_some()
    }
}

pub struct Command {
    pub id: u64,
    pub exec_id: String,
    /// The command line, cut to what LISTING shows.
    pub argv: Vec<Vec<u8>>,
    pub origin: Origin,
    /// Listed, found by its exec_id, and kept when it has ended.
    pub kept: bool,
    pub capture: bool,
    pub kill_leftovers: bool,
    pub outputs: [OutputBuffer; 2],
    pub pipes: [Option<OwnedFd>; 2],
    pub input: Input,
    /// Where the terminal comes from that the child is opening.
    pub handover: Option<OwnedFd>,
    /// Closed by a builtin when it is ready; STARTED waits for that.
    pub readiness: Option<OwnedFd>,
    /// Where the size goes that was asked for before the terminal was there.
    pub terminal_size: Option<(u16, u16)>,
    /// A tunnel's socket until it is connected.
    pub connecting: Option<Connecting>,
    pub subscribers: Vec<Subscriber>,
    pub started: Instant,
    pub started_ms: u64,
    pub timeout: Option<TimerKey>,
    pub drain: Option<TimerKey>,
    pub timed_out: bool,
    pub session_restarted: bool,
    /// Bytes of each output that were dropped before this command began (background children of a session).
    pub dropped_before: [u64; 2],
    /// The leader is dead.
    pub status: Option<Status>,
    /// What was to be started.
    pub attempt: Option<Attempt>,
    start_error: Option<(String, u32)>,
    pub exit: Option<Exit>,
    /// Some subscriber got everything.
    pub delivered: bool,
    /// It is in the queue of those that may have something to send.
    pub queued: bool,
    registered: Registered,
}

/// Which descriptors the poller watches.
#[derive(Default)]
struct Registered {
    outputs: [bool; 2],
    input: bool,
}

impl Command {
    pub fn new(id: u64, exec_id: String, argv: &[Vec<u8>], outputs: [OutputBuffer; 2]) -> Command {
        Command {
            id,
            exec_id,
            argv: listed_argv(argv),
            origin: Origin::Nothing,
            kept: false,
            capture: true,
            kill_leftovers: true,
            outputs,
            pipes: [None, None],
            input: Input::none(),
            handover: None,
            readiness: None,
            terminal_size: None,
            connecting: None,
            subscribers: Vec::new(),
            started: Instant::now(),
            started_ms: unix_ms(),
            timeout: None,
            drain: None,
            timed_out: false,
            session_restarted: false,
            dropped_before: [0; 2],
            status: None,
            attempt: None,
            start_error: None,
            exit: None,
            delivered: false,
            queued: false,
            registered: Registered::default(),
        }
    }

    pub fn running(&self) -> bool {
        self.exit.is_none()
    }

    pub fn pid(&self) -> i32 {
        match self.origin {
            Origin::Process(process) => process.pid,
            _ => 0,
        }
    }

    pub fn totals(&self) -> [u64; 2] {
        [0, 1].map(|which: usize| self.outputs[which].total() + self.dropped_before[which])
    }

    /// Its entry in LISTING.
    pub fn listed(&self) -> Listed<'_> {
        Listed {
            exec_id: &self.exec_id,
            argv: &self.argv,
            pid: self.pid(),
            running: self.running(),
            started_ms: self.started_ms,
            totals: self.totals(),
            exit_code: self.exit.as_ref().map(|exit| exit.exit_code),
            capture: self.capture,
        }
    }

    /// Its program never ran.
    pub fn fail_start(&mut self, attempt: &Attempt, error: StartError) {
        self.status = Some(Status {
            code: i64::from(child::exit_code(error.stage, error.errno)),
            signal: None,
        });
        self.start_error = Some((
            attempt.explain(error),
            u32::try_from(error.errno).unwrap_or(0),
        ));
    }

    /// RESIZE: rows << 16 | cols. Without a terminal it means nothing.
    pub fn resize(&mut self, size: u64) {
        let (rows, cols) = ((size >> 16) as u16, size as u16);
        let is_coming = self.handover.is_some() || matches!(self.origin, Origin::Waiting);
        match (&self.pipes[0], is_coming) {
            (_, true) => self.terminal_size = Some((rows, cols)),
            (Some(terminal), false) => {
                let _pipes_have_no_size = pty::resize(terminal.as_raw_fd(), rows, cols);
            }
            (None, false) => {}
        }
    }

    pub fn subscriber(&mut self, stream: u32) -> Option<&mut Subscriber> {
        self.subscribers
            .iter_mut()
            .find(|subscriber| subscriber.stream == stream)
    }

    /// Lets the poller watch what is wanted now: outputs that take more, an input that waits for room.
    pub fn watch(&mut self, poller: &Poller) {
        for (which, end) in OUTPUT_ENDS.into_iter().enumerate() {
            let Some(pipe) = &self.pipes[which] else {
                continue;
            };
            let wanted = self.outputs[which].takes_more();
            if wanted != self.registered.outputs[which] {
                self.registered.outputs[which] = wanted;
                if !wanted {
                    // Not just without interest: a hang-up is reported all the same, for ever.
                    poller.remove(pipe.as_raw_fd());
                } else if poller
                    .add(pipe.as_raw_fd(), Token::Command(self.id, end), READABLE)
                    .is_err()
                {
                    self.close_output(which, poller);
                }
            }
        }
        self.drop_retired_input(poller);
        let wanted = self.input.waits_for_room();
        let Some(fd) = self.input.fd().filter(|_| wanted != self.registered.input) else {
            return;
        };
        self.registered.input = wanted;
        if !wanted {
            poller.remove(fd);
        } else if poller
            .add(fd, Token::Command(self.id, End::Stdin), WRITABLE)
            .is_err()
        {
            self.input.close();
        }
    }

    fn drop_retired_input(&mut self, poller: &Poller) {
        if let Some(fd) = self.input.take_retired() {
            if std::mem::take(&mut self.registered.input) {
                poller.remove(fd.as_raw_fd());
            }
        }
    }

    pub fn close_output(&mut self, which: usize, poller: &Poller) {
        if let Some(pipe) = self.pipes[which].take() {
            poller.remove(pipe.as_raw_fd());
            self.registered.outputs[which] = false;
        }
    }

    pub fn close_input(&mut self, poller: &Poller) {
        self.input.close();
        self.drop_retired_input(poller);
    }

    /// An output can be read: takes one piece, or what is left when its writers are gone.
    pub fn read_output(&mut self, which: usize, hung_up: bool, poller: &Poller) {
        let Some(fd) = self.pipes[which].as_ref().map(AsRawFd::as_raw_fd) else {
            return;
        };
        for _ in 0..if hung_up { READS_AFTER_HANGUP } else { 1 } {
            match self.outputs[which].fill(fd) {
                Filled::Data => {}
                Filled::Empty => break,
                Filled::Ended => return self.close_output(which, poller),
            }
        }
    }

    /// The leader is dead: takes what it left in its pipes. What a survivor writes later still comes, for a while.
    pub fn drain_outputs(&mut self, poller: &Poller) {
        for which in 0..2 {
            let Some(fd) = self.pipes[which].as_ref().map(AsRawFd::as_raw_fd) else {
                continue;
            };
            if self.outputs[which].drain(fd, TERMINAL_REST) == Filled::Ended {
                self.close_output(which, poller);
            }
        }
    }

    /// True when everything that belongs to the end has happened.
    pub fn is_over(&self) -> bool {
        self.status.is_some() && self.pipes.iter().all(Option::is_none) && self.exit.is_none()
    }

    /// Fixes how it ended.
    pub fn conclude(&mut self) {
        let status = self.status.unwrap_or(Status {
            code: 126,
            signal: None,
        });
        let status = if self.timed_out {
            Status::killed_by(libc::SIGKILL as u8)
        } else {
            status
        };
        let (start_error, start_errno) = match self.start_error.take() {
            Some((message, errno)) => (Some(message), errno),
            None => (None, 0),
        };
        self.exit = Some(Exit {
            exit_code: status.code,
            signal: status.signal,
            timed_out: self.timed_out,
            totals: self.totals(),
            truncated: self.outputs.iter().any(OutputBuffer::truncated)
                || self.dropped_before != [0; 2],
            duration_us: u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX),
            start_error,
            start_errno,
            session_restarted: self.session_restarted,
        });
        self.outputs.iter_mut().for_each(OutputBuffer::finish);
    }

    /// Bytes of output that are kept.
    pub fn kept_bytes(&self) -> u64 {
        self.outputs.iter().map(OutputBuffer::kept).sum()
    }

    /// The reader of `stream` has taken `count` bytes and may be sent as many more.
    pub fn add_credit(&mut self, stream: u32, which: usize, count: u64) {
        let Some(subscriber) = self
            .subscribers
            .iter_mut()
            .find(|subscriber| subscriber.stream == stream && !subscriber.whole)
        else {
            return;
        };
        subscriber.credit[which] = subscriber.credit[which].saturating_add(count);
        subscriber.taken[which] = subscriber.taken[which].saturating_add(count);
        if subscriber.cursor[which].is_some() {
            self.outputs[which].mark_read(subscriber.taken[which]);
        }
    }

    /// Input from `stream`; false when it sent more than it may.
    pub fn write_input(&mut self, stream: u32, data: &[u8], connection: &mut Connection) -> bool {
        let Some(credit) = self
            .subscriber(stream)
            .and_then(|subscriber| subscriber.stdin_credit.as_mut())
        else {
            return true;
        };
        let Some(left) = credit.checked_sub(data.len() as u64) else {
            return false;
        };
        *credit = left;
        let taken = self.input.offer(stream, data);
        self.return_credit(&taken, Some(connection));
        true
    }

    /// Tells senders that their input is through; without a connection there are none.
    pub fn return_credit(&mut self, taken: &[Taken], connection: Option<&mut Connection>) {
        let Some(connection) = connection else { return };
        for (stream, count) in taken {
            let Some(subscriber) = self
                .subscribers
                .iter_mut()
                .find(|subscriber| subscriber.stream == *stream)
            else {
                continue;
            };
            let Some(credit) = &mut subscriber.stdin_credit else {
                continue;
            };
            subscriber.stdin_owed += count;
            if subscriber.stdin_owed >= CREDIT_PIECE {
                *credit += subscriber.stdin_owed;
                connection.push(
                    *stream,
                    kind::STDIN_CREDIT,
                    std::mem::take(&mut subscriber.stdin_owed),
                    b"",
                );
            }
        }
    }

    /// Sends what may be sent to each subscriber; those who have everything are released. True when the connection was full first.
    pub fn pump(&mut self, connection: &mut Connection, streams: &mut HashMap<u32, u64>) -> bool {
        let mut index = 0;
        while index < self.subscribers.len() {
            match self.pump_subscriber(index, connection) {
                Pumped::Full => return true,
                Pumped::Waiting => index += 1,
                Pumped::Done => {
                    let subscriber = self.subscribers.swap_remove(index);
                    streams.remove(&subscriber.stream);
                }
            }
        }
        false
    }

    fn pump_subscriber(&mut self, index: usize, connection: &mut Connection) -> Pumped {
        let subscriber = &mut self.subscribers[index];
        let stream = subscriber.stream;
        if self.capture && self.exit.is_none() {
            return Pumped::Waiting;
        }
        if !connection.has_room() {
            return Pumped::Full;
        }
        let kept: u64 = self.outputs.iter().map(OutputBuffer::kept).sum();
        if let (true, true, Some(exit)) = (
            subscriber.whole && subscriber.cursor == [Some(0); 2],
            kept <= INLINE_MAX,
            &self.exit,
        ) {
            let payload = exit.write(
                &self.exec_id,
                &self.outputs[0].concat(),
                &self.outputs[1].concat(),
            );
            connection.push(stream, kind::EXIT, 0, &payload);
            self.delivered = true;
            return Pumped::Done;
        }
        for (which, output) in self.outputs.iter().enumerate() {
            while let Some(cursor) = subscriber.cursor[which]
                .filter(|cursor| *cursor < output.end() && subscriber.credit[which] > 0)
            {
                if !connection.has_room() {
                    return Pumped::Full;
                }
                let Some(slice) = output.slice(cursor, subscriber.credit[which]) else {
                    connection.push(stream, kind::ERROR, 0, &offset_gone(output));
                    return Pumped::Done;
                };
                let count = (slice.end - slice.start) as u64;
                subscriber.cursor[which] = Some(cursor + count);
                if !subscriber.whole {
                    subscriber.credit[which] -= count;
                }
                connection.push_slice(stream, OUTPUT_KINDS[which], cursor, slice);
            }
        }
        let caught_up = self
            .outputs
            .iter()
            .zip(subscriber.cursor)
            .all(|(output, cursor)| cursor.is_none_or(|cursor| cursor >= output.end()));
        match &self.exit {
            Some(exit) if caught_up => {
                self.delivered |= subscriber.cursor.iter().all(Option::is_some);
                connection.push(stream, kind::EXIT, 0, &exit.write(&self.exec_id, b"", b""));
                Pumped::Done
            }
            _ => Pumped::Waiting,
        }
    }
}

enum Pumped {
    /// It waits for output, credit or the end.
    Waiting,
    /// Its last frame is queued.
    Done,
    /// The connection takes no more now.
    Full,
}

/// The payload of the ERROR for an offset that has left the window.
pub fn offset_gone(output: &OutputBuffer) -> Vec<u8> {
    message::error(
        "offset_gone",
        &format!("the first byte still kept is at offset {}", output.start()),
    )
}

/// As much of a command line as LISTING shows.
fn listed_argv(argv: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut left = LISTED_ARGV_BYTES;
    let mut listed = Vec::new();
    for argument in argv {
        if left == 0 {
            break;
        }
        let shown = &argument[..argument.len().min(left)];
        left = left.saturating_sub(shown.len().max(16));
        listed.push(shown.to_vec());
    }
    listed
}

fn unix_ms() -> u64 {
    let since = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
