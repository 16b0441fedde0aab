//! What a command wrote: addressed by byte offset, allocated as it arrives, freed when it leaves the window.

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::rc::Rc;

use crate::kernel;

/// Unread bytes of a streamed output at which its writer blocks.
pub const UNREAD_LIMIT: u64 = 1 << 20;
/// The most that one read takes, one block holds and one frame carries.
pub const BLOCK_MAX: usize = 256 << 10;
/// The least that a block holds, so that trickling output doesn't become a list of tiny ones.
const BLOCK_MIN: usize = 1 << 10;
/// A pipe is enlarged once its stream has shown this much.
const BUSY_BYTES: u64 = 256 << 10;
const BUSY_PIPE: usize = 1 << 20;

/// What is kept of an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// The first bytes, up to a limit; the rest is counted and dropped.
    Capture { limit: u64 },
    /// The last bytes: everything unread, and a window of what was read.
    Window { history: u64 },
}

/// What one read did.
#[derive(Debug, PartialEq, Eq)]
pub enum Filled {
    Data,
    /// Nothing there now.
    Empty,
    /// No writer is left, or the descriptor is broken.
    Ended,
}

/// A run of kept bytes. It is shared with the connection while it waits to be sent, and only appended to when it isn't.
struct Block {
    offset: u64,
    data: Rc<Vec<u8>>,
}

/// A piece of a block, ready to be sent.
pub struct Slice {
    pub block: Rc<Vec<u8>>,
    pub start: usize,
    pub end: usize,
}

pub struct OutputBuffer {
    policy: Policy,
    blocks: VecDeque<Block>,
    /// Bytes read from the writer, kept or not.
    total: u64,
    /// Offset behind the last byte that a reader has taken (streams only).
    read: u64,
    /// Bytes beyond the unread limit that are taken because their writer is dead.
    grace: u64,
    recycled: Option<Vec<u8>>,
    enlarged: bool,
}

impl OutputBuffer {
    pub fn new(policy: Policy) -> OutputBuffer {
        OutputBuffer {
            policy,
            blocks: VecDeque::new(),
            total: 0,
            read: 0,
            grace: 0,
            recycled: None,
            enlarged: false,
        }
    }

    pub fn total(&self) -> u64 {
        self.total
    }

    /// Offset of the first byte that is kept.
    pub fn start(&self) -> u64 {
        self.blocks.front().map_or(self.end(), |block| block.offset)
    }

    /// Offset behind the last byte that is kept.
    pub fn end(&self) -> u64 {
        match self.policy {
            Policy::Capture { limit } => self.total.min(limit),
            Policy::Window { .. } => self.total,
        }
    }

    pub fn kept(&self) -> u64 {
        self.end() - self.start()
    }

    pub fn truncated(&self) -> bool {
        matches!(self.policy, Policy::Capture { limit } if self.total > limit)
    }

    /// Changes what a captured output may keep; what is kept beyond that is dropped.
    pub fn set_limit(&mut self, limit: u64) {
        self.policy = Policy::Capture { limit };
        while self
            .blocks
            .back()
            .is_some_and(|block| block.offset >= limit)
        {
            self.blocks.pop_back();
        }
        if let Some(last) = self.blocks.back_mut() {
            let keep = usize::try_from(limit - last.offset).unwrap_or(usize::MAX);
            if keep < last.data.len() {
                last.data = Rc::new(last.data[..keep].to_vec());
            }
        }
    }

    /// Makes this, which collected output that belonged to nobody, the beginning of a captured output. Returns how many bytes had been
    /// dropped by then.
    pub fn carry_over(&mut self, limit: u64) -> u64 {
        let dropped = self.total - self.end();
        self.total = self.end();
        self.set_limit(limit);
        dropped
    }

    /// Takes what `fd` holds now: at least what the kernel says is there, at most that or `least` bytes, whichever is more.
    pub fn drain(&mut self, fd: RawFd, least: u64) -> Filled {
        // One more than that, so that the end behind it is noticed.
        let budget = (kernel::readable_bytes(fd) as u64).max(least) + 1;
        self.grace += budget;
        let stop = self.total + budget;
        loop {
            match self.fill(fd) {
                Filled::Data if self.total < stop => {}
                Filled::Data => return Filled::Data,
                end => return end,
            }
        }
    }

    /// A reader has taken everything below `offset`.
    pub fn mark_read(&mut self, offset: u64) {
        self.read = self.read.max(offset.min(self.total));
        self.evict();
    }

    /// False while a streamed output has too much unread.
    pub fn takes_more(&self) -> bool {
        self.room() > 0
    }

    fn room(&self) -> u64 {
        match self.policy {
            Policy::Capture { .. } => u64::MAX,
            Policy::Window { .. } => {
                (UNREAD_LIMIT + self.grace).saturating_sub(self.total - self.read)
            }
        }
    }

    /// One read from `fd`, which must not block.
    pub fn fill(&mut self, fd: RawFd) -> Filled {
        if let Policy::Capture { limit } = self.policy {
            if self.total >= limit {
                return self.discard(fd);
            }
        }
        let room = usize::try_from(self.room())
            .unwrap_or(usize::MAX)
            .min(BLOCK_MAX);
        if room == 0 {
            return Filled::Empty;
        }
        match self.fill_block(fd, room) {
            Ok(0) => Filled::Ended,
            Ok(count) => {
                self.count(count);
                if !self.enlarged && self.total > BUSY_BYTES {
                    self.enlarged = true;
                    kernel::enlarge_pipe(fd, BUSY_PIPE);
                }
                Filled::Data
            }
            Err(error) => unreadable(&error),
        }
    }

    fn fill_block(&mut self, fd: RawFd, room: usize) -> io::Result<usize> {
        if let Some(last) = self.blocks.back_mut() {
            if let Some(data) = Rc::get_mut(&mut last.data) {
                if data.capacity() > data.len() {
                    return kernel::read_into_spare(fd, data, room);
                }
            }
        }
        let waiting = kernel::readable_bytes(fd);
        if waiting == 0 {
            // Most likely the end: found out without allocating. A terminal can't always say what it holds.
            let mut probe = [0; BLOCK_MIN];
            let count = kernel::read(fd, &mut probe[..room.min(BLOCK_MIN)])?;
            if count > 0 {
                let mut data = Vec::with_capacity(BLOCK_MIN);
                data.extend_from_slice(&probe[..count]);
                self.blocks.push_back(Block {
                    offset: self.total,
                    data: Rc::new(data),
                });
            }
            return Ok(count);
        }
        let capacity = waiting.min(BLOCK_MAX).next_power_of_two().max(BLOCK_MIN);
        let mut data = match self.recycled.take() {
            Some(block) if block.capacity() >= capacity => block,
            _ => Vec::with_capacity(capacity),
        };
        let count = kernel::read_into_spare(fd, &mut data, room)?;
        if count > 0 {
            self.blocks.push_back(Block {
                offset: self.total,
                data: Rc::new(data),
            });
        }
        Ok(count)
    }

    /// Accounts for `count` bytes that now stand at the end of the last block.
    fn count(&mut self, count: usize) {
        self.total += count as u64;
        match self.policy {
            Policy::Capture { limit } if self.total > limit => self.set_limit(limit),
            Policy::Capture { .. } => {}
            Policy::Window { .. } => self.evict(),
        }
    }

    /// One read whose bytes are only counted.
    fn discard(&mut self, fd: RawFd) -> Filled {
        let mut scratch = [0; 64 << 10];
        match kernel::read(fd, &mut scratch) {
            Ok(0) => Filled::Ended,
            Ok(count) => {
                self.total += count as u64;
                Filled::Data
            }
            Err(error) => unreadable(&error),
        }
    }

    /// Drops read blocks that lie wholly before the window.
    fn evict(&mut self) {
        let Policy::Window { history } = self.policy else {
            return;
        };
        let keep_from = self.total.saturating_sub(history).min(self.read);
        while self
            .blocks
            .front()
            .is_some_and(|block| block.offset + block.data.len() as u64 <= keep_from)
        {
            let Some(block) = self.blocks.pop_front() else {
                return;
            };
            if let Ok(mut data) = Rc::try_unwrap(block.data) {
                if data.capacity() == BLOCK_MAX {
                    data.clear();
                    self.recycled = Some(data);
                }
            }
        }
    }

    /// The kept bytes from `offset` on that lie in one block, at most `limit` of them. None when `offset` isn't kept, or nothing is there.
    pub fn slice(&self, offset: u64, limit: u64) -> Option<Slice> {
        let after = self.blocks.partition_point(|block| block.offset <= offset);
        let block = self.blocks.get(after.checked_sub(1)?)?;
        let start = usize::try_from(offset - block.offset).ok()?;
        let available = block
            .data
            .len()
            .checked_sub(start)
            .filter(|count| *count > 0)?;
        let count = available
            .min(BLOCK_MAX)
            .min(usize::try_from(limit).unwrap_or(usize::MAX));
        Some(Slice {
            block: Rc::clone(&block.data),
            start,
            end: start + count,
        })
    }

    /// All kept bytes, copied together.
    pub fn concat(&self) -> Vec<u8> {
        let mut all = Vec::with_capacity(usize::try_from(self.kept()).unwrap_or(0));
        self.blocks
            .iter()
            .for_each(|block| all.extend_from_slice(&block.data));
        all
    }

    /// Nothing more will be written: gives back what was reserved for it.
    pub fn finish(&mut self) {
        self.recycled = None;
        if let Some(data) = self
            .blocks
            .back_mut()
            .and_then(|block| Rc::get_mut(&mut block.data))
        {
            data.shrink_to_fit();
        }
    }
}

/// How a read that failed is understood: EAGAIN is nothing yet; a terminal whose other side is closed gives EIO.
fn unreadable(error: &io::Error) -> Filled {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Filled::Empty,
        _ => Filled::Ended,
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, OwnedFd};

    use super::*;

    fn pipe() -> (OwnedFd, OwnedFd) {
        let (reader, writer) = kernel::pipe().unwrap();
        kernel::set_nonblocking(reader.as_raw_fd()).unwrap();
        kernel::enlarge_pipe(writer.as_raw_fd(), 1 << 20);
        (reader, writer)
    }

    fn drain(buffer: &mut OutputBuffer, reader: &OwnedFd) {
        while buffer.fill(reader.as_raw_fd()) == Filled::Data {}
    }

    #[test]
    fn a_captured_output_keeps_its_first_bytes_and_counts_the_rest() {
        let (reader, writer) = pipe();
        let mut buffer = OutputBuffer::new(Policy::Capture { limit: 5 });
        for piece in [&b"abc"[..], b"defgh", b"ij"] {
            kernel::write(writer.as_raw_fd(), piece).unwrap();
            drain(&mut buffer, &reader);
        }
        assert_eq!(
            (
                buffer.concat().as_slice(),
                buffer.total(),
                buffer.truncated()
            ),
            (&b"abcde"[..], 10, true)
        );
        drop(writer);
        assert_eq!(buffer.fill(reader.as_raw_fd()), Filled::Ended);
    }

    #[test]
    fn an_unread_stream_takes_one_mebibyte_and_goes_on_when_it_is_read() {
        let (reader, writer) = pipe();
        let mut buffer = OutputBuffer::new(Policy::Window { history: 8 << 20 });
        for _ in 0..3 {
            kernel::write(writer.as_raw_fd(), &vec![1; 512 << 10]).unwrap();
            drain(&mut buffer, &reader);
        }
        assert_eq!((buffer.total(), buffer.takes_more()), (UNREAD_LIMIT, false));
        buffer.mark_read(100);
        drain(&mut buffer, &reader);
        assert_eq!(buffer.total(), UNREAD_LIMIT + 100);
        buffer.drain(reader.as_raw_fd(), 0);
        assert_eq!(buffer.total(), 3 << 19);
    }

    #[test]
    fn the_window_loses_only_what_was_read() {
        let (reader, writer) = pipe();
        let mut buffer = OutputBuffer::new(Policy::Window { history: 1000 });
        for piece in 0..40_u8 {
            kernel::write(writer.as_raw_fd(), &[piece; 1024]).unwrap();
            drain(&mut buffer, &reader);
        }
        assert_eq!(buffer.start(), 0);
        buffer.mark_read(buffer.total());
        assert!(buffer.start() > 30 * 1024);
        assert!(buffer.slice(0, 10).is_none());
        let slice = buffer.slice(buffer.start(), 10).unwrap();
        assert_eq!(slice.end - slice.start, 10);
        assert!(buffer.slice(buffer.total(), 10).is_none());
    }

    #[test]
    fn a_block_that_waits_to_be_sent_is_not_changed() {
        let (reader, writer) = pipe();
        let mut buffer = OutputBuffer::new(Policy::Window { history: 1000 });
        kernel::write(writer.as_raw_fd(), b"first").unwrap();
        drain(&mut buffer, &reader);
        let waiting = buffer.slice(0, 100).unwrap();
        kernel::write(writer.as_raw_fd(), b"second").unwrap();
        drain(&mut buffer, &reader);
        assert_eq!(&waiting.block[waiting.start..waiting.end], b"first");
        let next = buffer.slice(5, 100).unwrap();
        assert_eq!(&next.block[next.start..next.end], b"second");
    }

    #[test]
    fn lowering_the_limit_drops_what_is_beyond() {
        let (reader, writer) = pipe();
        let mut buffer = OutputBuffer::new(Policy::Capture { limit: 100 });
        kernel::write(writer.as_raw_fd(), b"0123456789").unwrap();
        drain(&mut buffer, &reader);
        buffer.set_limit(4);
        assert_eq!(
            (buffer.concat().as_slice(), buffer.truncated()),
            (&b"0123"[..], true)
        );
        buffer.set_limit(0);
        assert_eq!(buffer.kept(), 0);
    }
}
