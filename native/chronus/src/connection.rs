//! The one connection to the edge: frames in, frames out, nothing that blocks.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;

use wire::frame::{self, Malformed};

use crate::buffer::Slice;
use crate::kernel::{self, Poller, Token, READABLE, WRITABLE};

/// Bytes waiting to be sent above which no more output is taken from the buffers: enough to keep the socket busy.
const OUTBOX_TARGET: usize = 512 << 10;
/// What the socket may hold, as far as the host's net.core.wmem_max allows: fewer and longer turns of sender and receiver.
const SEND_BUFFER: usize = 1 << 20;
/// Input space of a quiet connection.
const INPUT_MIN: usize = 8 << 10;
/// Input space of a busy one: a read takes up to this much.
const INPUT_MAX: usize = 512 << 10;
/// Own pieces are filled up to this size before the next one is begun.
const PIECE_MAX: usize = 64 << 10;
/// Pieces handed to one sendmsg; far below the kernel's 1,024.
const PIECES_PER_CALL: usize = 64;

/// Bytes to send: our own (headers and small payloads), or part of an output block.
enum Piece {
    Own(Vec<u8>),
    Shared(Slice),
}

impl Piece {
    fn bytes(&self) -> &[u8] {
        match self {
            Piece::Own(bytes) => bytes,
            Piece::Shared(slice) => &slice.block[slice.start..slice.end],
        }
    }
}

/// The connection can't be used any more.
#[derive(Debug)]
pub struct Broken;

pub struct Connection {
    socket: OwnedFd,
    input: Vec<u8>,
    outbox: VecDeque<Piece>,
    /// Bytes of the first piece that are sent already.
    sent: usize,
    queued: usize,
    waits_writable: bool,
}

impl Connection {
    /// Takes over an accepted, non-blocking socket.
    pub fn new(socket: OwnedFd, poller: &Poller) -> io::Result<Connection> {
        poller.add(socket.as_raw_fd(), Token::Connection, READABLE)?;
        kernel::enlarge_send_buffer(socket.as_raw_fd(), SEND_BUFFER);
        Ok(Connection {
            socket,
            input: Vec::new(),
            outbox: VecDeque::new(),
            sent: 0,
            queued: 0,
            waits_writable: false,
        })
    }

    pub fn close(self, poller: &Poller) {
        poller.remove(self.socket.as_raw_fd());
    }

    /// Reads what is there, at most one buffer full. True when something came.
    pub fn receive(&mut self) -> Result<bool, Broken> {
        let missing = frame::needed(&self.input)
            .map_err(|_| Broken)?
            .map_or(0, |needed| needed.saturating_sub(self.input.len()));
        if self.input.capacity() - self.input.len() < missing.max(INPUT_MIN / 2) {
            let grown = if self.input.capacity() == 0 {
                INPUT_MIN
            } else {
                INPUT_MAX
            };
            self.input.reserve_exact(missing.max(grown));
        }
        match kernel::read_into_spare(self.socket.as_raw_fd(), &mut self.input, usize::MAX) {
            Ok(0) => Err(Broken),
            Ok(_) => Ok(true),
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) =>
            {
                Ok(false)
            }
            Err(_) => Err(Broken),
        }
    }

    /// Takes the received bytes out, to parse frames from; what is left over comes back by [`Connection::keep`].
    pub fn take_input(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.input)
    }

    pub fn keep(&mut self, mut input: Vec<u8>, consumed: usize) {
        input.drain(..consumed);
        self.input = input;
    }

    /// True when a quiet moment could free input space.
    pub fn is_bloated(&self) -> bool {
        self.input.capacity() > INPUT_MIN
    }

    pub fn trim(&mut self) {
        if self.input.is_empty() {
            self.input = Vec::new();
        }
    }

    /// Queues a frame with a payload of our own; larger ones than a frame may carry are the caller's mistake.
    pub fn push(&mut self, stream: u32, kind: u8, arg: u64, payload: &[u8]) {
        let header = frame::header(stream, kind, arg, payload.len());
        self.queued += header.len() + payload.len();
        match self.outbox.back_mut() {
            Some(Piece::Own(bytes)) if bytes.len() + header.len() + payload.len() <= PIECE_MAX => {
                bytes.extend_from_slice(&header);
                bytes.extend_from_slice(payload);
            }
            _ => self
                .outbox
                .push_back(Piece::Own([&header, payload].concat())),
        }
    }

    /// Queues a frame whose payload stays in its output block.
    pub fn push_slice(&mut self, stream: u32, kind: u8, offset: u64, slice: Slice) {
        let count = slice.end - slice.start;
        if count <= INPUT_MIN {
            // Copying a little is cheaper than one more piece, and leaves the block free for appending.
            let block = Rc::clone(&slice.block);
            return self.push(stream, kind, offset, &block[slice.start..slice.end]);
        }
        let header = frame::header(stream, kind, offset, count);
        self.queued += header.len() + count;
        match self.outbox.back_mut() {
            Some(Piece::Own(bytes)) if bytes.len() + header.len() <= PIECE_MAX => {
                bytes.extend_from_slice(&header)
            }
            _ => self.outbox.push_back(Piece::Own(header.to_vec())),
        }
        self.outbox.push_back(Piece::Shared(slice));
    }

    pub fn has_room(&self) -> bool {
        self.queued < OUTBOX_TARGET
    }

    /// Sends what the socket takes, and asks to be told when it takes more.
    pub fn flush(&mut self, poller: &Poller) -> Result<(), Broken> {
        while self.queued > 0 {
            match self.send_pieces() {
                Ok(count) => self.drop_sent(count),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => return Err(Broken),
            }
        }
        let waits = self.queued > 0;
        if waits != self.waits_writable {
            self.waits_writable = waits;
            let interest = if waits { READABLE | WRITABLE } else { READABLE };
            poller
                .modify(self.socket.as_raw_fd(), Token::Connection, interest)
                .map_err(|_| Broken)?;
        }
        Ok(())
    }

    fn send_pieces(&self) -> io::Result<usize> {
        let mut vectors = [libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        }; PIECES_PER_CALL];
        let mut skip = self.sent;
        let mut count = 0;
        for (vector, piece) in vectors.iter_mut().zip(&self.outbox) {
            let bytes = &piece.bytes()[skip..];
            *vector = libc::iovec {
                iov_base: bytes.as_ptr().cast_mut().cast(),
                iov_len: bytes.len(),
            };
            skip = 0;
            count += 1;
        }
        // SAFETY: msghdr is plain data; all zero means no address and no control data.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = vectors.as_mut_ptr();
        message.msg_iovlen = count;
        // SAFETY: the vectors point into pieces that `self` holds during the call, and sendmsg only reads them.
        kernel::check_size(unsafe {
            libc::sendmsg(
                self.socket.as_raw_fd(),
                &message,
                libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
            )
        })
    }

    fn drop_sent(&mut self, count: usize) {
        self.queued -= count;
        self.sent += count;
        while let Some(piece) = self.outbox.front() {
            let length = piece.bytes().len();
            if self.sent < length {
                break;
            }
            self.sent -= length;
            self.outbox.pop_front();
        }
    }
}

/// How far [`each_frame`] came.
pub fn each_frame(
    input: &[u8],
    mut act: impl FnMut(frame::Frame<'_>) -> Result<(), Broken>,
) -> Result<usize, Broken> {
    let mut consumed = 0;
    while let Some((frame, used)) =
        frame::split(&input[consumed..]).map_err(|_: Malformed| Broken)?
    {
        act(frame)?;
        consumed += used;
    }
    Ok(consumed)
}
