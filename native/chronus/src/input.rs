//! What is still to be written into a command's standard input.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use crate::kernel;
use crate::pty;

/// A pipe is enlarged once this much went through it.
const BUSY_BYTES: u64 = 256 << 10;
const BUSY_PIPE: usize = 1 << 20;
/// The line discipline's default VEOF: hands what there is of a line to the reader, and so means the end where there is nothing.
const TERMINAL_EOF: u8 = 4;
/// Behind these bytes a line is empty with the line discipline's defaults: newline, the return that becomes one, VEOF, VINTR, VQUIT, VSUSP and VKILL.
const LINE_ENDS: &[u8] = b"\n\r\x04\x03\x1c\x1a\x15";
/// The stream of bytes that nobody sent.
const NO_STREAM: u32 = 0;

/// Bytes from one stream that the descriptor didn't take yet.
struct Pending {
    stream: u32,
    data: Vec<u8>,
    written: usize,
}

/// Bytes of a stream that are gone from here: written, or thrown away because nobody will read them.
pub type Taken = (u32, u64);

/// What kind of descriptor standard input is: they differ in how their end is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Pipe,
    Terminal,
    Socket,
}

#[derive(Default)]
pub struct Input {
    fd: Option<OwnedFd>,
    kind: Option<Kind>,
    queue: VecDeque<Pending>,
    end_wanted: bool,
    /// A terminal has been given the beginning of a line, which its reader doesn't see yet.
    within_line: bool,
    passed: u64,
    enlarged: bool,
    /// Closed here, but the poller may still know it.
    retired: Option<OwnedFd>,
    /// The descriptor isn't there yet (a terminal that is being opened, a socket that connects): everything waits.
    expected: bool,
}

impl Input {
    /// No standard input, or one that the parent has no hand in.
    pub fn none() -> Input {
        Input::default()
    }

    /// A non-blocking descriptor to write to.
    pub fn new(fd: OwnedFd, kind: Kind) -> Input {
        Input {
            fd: Some(fd),
            kind: Some(kind),
            ..Input::default()
        }
    }

    /// A descriptor that will come by [`Input::provide`].
    pub fn expected() -> Input {
        Input {
            expected: true,
            ..Input::default()
        }
    }

    pub fn provide(&mut self, fd: OwnedFd, kind: Kind) {
        (self.fd, self.kind, self.expected) = (Some(fd), Some(kind), false);
    }

    pub fn is_expected(&self) -> bool {
        self.expected
    }

    pub fn fd(&self) -> Option<RawFd> {
        self.fd.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// True while there is something to write and somewhere to write it.
    pub fn waits_for_room(&self) -> bool {
        self.fd.is_some() && !self.queue.is_empty()
    }

    /// Writes what fits at once and keeps the rest: each byte is copied at most once here.
    pub fn offer(&mut self, stream: u32, data: &[u8]) -> Vec<Taken> {
        let mut written = 0;
        if self.queue.is_empty() && !self.end_wanted {
            if let Some(fd) = self.fd() {
                match kernel::write(fd, data) {
                    Ok(count) => written = count,
                    Err(error) if would_block(&error) => {}
                    Err(_) => self.close(),
                }
                self.follow_line(&data[..written]);
            }
        }
        if self.end_wanted || (self.fd.is_none() && !self.expected) {
            return vec![(stream, data.len() as u64)];
        }
        self.passed += written as u64;
        self.enlarge_when_busy();
        if written < data.len() {
            self.queue.push_back(Pending {
                stream,
                data: data[written..].to_vec(),
                written: 0,
            });
        }
        vec![(stream, written as u64)]
    }

    /// Writes of the queue what fits now.
    pub fn flush(&mut self) -> Vec<Taken> {
        let mut taken = Vec::new();
        while let (Some(fd), Some(first)) = (self.fd(), self.queue.front_mut()) {
            match kernel::write(fd, &first.data[first.written..]) {
                Ok(count) => {
                    let last = first.data[..first.written + count].last().copied();
                    first.written += count;
                    let (stream, done) = (first.stream, first.written == first.data.len());
                    self.passed += count as u64;
                    taken.push((stream, count as u64));
                    if done {
                        self.queue.pop_front();
                    }
                    self.follow_line(last.as_slice());
                }
                Err(error) if would_block(&error) => break,
                Err(_) => {
                    taken.extend(self.queue.iter().map(|pending| {
                        (
                            pending.stream,
                            (pending.data.len() - pending.written) as u64,
                        )
                    }));
                    self.close();
                }
            }
        }
        self.enlarge_when_busy();
        self.end_if_due();
        taken
    }

    /// Nothing follows what is queued.
    pub fn end(&mut self) {
        self.end_wanted = true;
        self.end_if_due();
    }

    /// Drops everything; later offers are swallowed.
    pub fn close(&mut self) {
        self.queue.clear();
        self.expected = false;
        if let Some(fd) = self.fd.take() {
            self.retired = Some(fd);
        }
    }

    /// The descriptor that was closed since the last call: to be taken from the poller, then dropped.
    pub fn take_retired(&mut self) -> Option<OwnedFd> {
        self.retired.take()
    }

    fn end_if_due(&mut self) {
        if !self.end_wanted || !self.queue.is_empty() {
            return;
        }
        match (self.kind, self.fd()) {
            (Some(Kind::Terminal), Some(fd)) => {
                // A terminal has no end of file of its own: the character ends one read of its reader, and more input may follow.
                let gathers = self.within_line && pty::gathers_lines(fd);
                self.end_wanted = false;
                self.offer(NO_STREAM, &[TERMINAL_EOF; 2][usize::from(!gathers)..]);
            }
            (Some(Kind::Socket), Some(fd)) => {
                // SAFETY: half-closes a socket; the other half is read through another descriptor.
                unsafe { libc::shutdown(fd, libc::SHUT_WR) };
                self.close();
            }
            (_, Some(_)) => self.close(),
            (_, None) => {}
        }
    }

    /// Keeps in mind whether what was written leaves a terminal within a line. In raw mode there are no lines: its reader has everything.
    fn follow_line(&mut self, written: &[u8]) {
        if let (Some(Kind::Terminal), Some(fd), Some(last)) = (self.kind, self.fd(), written.last())
        {
            self.within_line = !LINE_ENDS.contains(last) && pty::gathers_lines(fd);
        }
    }

    fn enlarge_when_busy(&mut self) {
        if !self.enlarged && self.passed > BUSY_BYTES && self.kind == Some(Kind::Pipe) {
            self.enlarged = true;
            if let Some(fd) = self.fd() {
                kernel::enlarge_pipe(fd, BUSY_PIPE);
            }
        }
    }
}

fn would_block(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pipe() -> (OwnedFd, OwnedFd) {
        let (reader, writer) = kernel::pipe().unwrap();
        kernel::set_nonblocking(writer.as_raw_fd()).unwrap();
        kernel::set_nonblocking(reader.as_raw_fd()).unwrap();
        (reader, writer)
    }

    #[test]
    fn what_does_not_fit_is_written_later_and_then_the_end_comes() {
        let (reader, writer) = pipe();
        let mut input = Input::new(writer, Kind::Pipe);
        let data: Vec<u8> = (0..200_000_u32).map(|n| n as u8).collect();
        let mut taken: u64 = input.offer(7, &data).iter().map(|(_, count)| count).sum();
        input.end();
        assert!(taken < data.len() as u64 && input.waits_for_room());
        let mut received = Vec::with_capacity(data.len() + 1);
        loop {
            input.take_retired();
            match kernel::read_into_spare(reader.as_raw_fd(), &mut received, 1 << 20) {
                Ok(0) => break,
                Ok(_) => taken += input.flush().iter().map(|(_, count)| count).sum::<u64>(),
                Err(error) => panic!("{error}"),
            }
        }
        assert_eq!((received, taken), (data.clone(), data.len() as u64));
    }

    #[test]
    fn input_that_nobody_reads_is_swallowed() {
        let (reader, writer) = pipe();
        let mut input = Input::new(writer, Kind::Pipe);
        drop(reader);
        // SIGPIPE is ignored by Rust's runtime in tests; chronus blocks it.
        assert_eq!(input.offer(1, b"lost"), vec![(1, 4)]);
        assert_eq!(Input::none().offer(1, b"lost"), vec![(1, 4)]);
    }

    #[test]
    fn input_waits_for_a_descriptor_that_is_expected() {
        let (reader, writer) = pipe();
        let mut input = Input::expected();
        assert_eq!(input.offer(3, b"early"), vec![(3, 0)]);
        input.provide(writer, Kind::Pipe);
        assert_eq!(input.flush(), vec![(3, 5)]);
        let mut buffer = [0; 8];
        assert_eq!(kernel::read(reader.as_raw_fd(), &mut buffer).unwrap(), 5);
    }
}
