//! System calls as functions that can't be misused: descriptors are owned, errors are `io::Error`.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// The errno form of a libc result.
pub fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// The errno form of the result of a call that moves bytes.
pub fn check_size(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// An own descriptor from the result of a call that makes one.
pub fn own(result: libc::c_int) -> io::Result<OwnedFd> {
    let fd = check(result)?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

pub fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

/// The kernel's words for an error number, without Rust's "(os error N)".
pub fn describe(errno: i32) -> String {
    // SAFETY: strerror returns a string that lives until its next call; this process has one thread.
    unsafe { CStr::from_ptr(libc::strerror(errno)) }
        .to_string_lossy()
        .into_owned()
}

/// A pipe: (read end, write end). The ends are separate descriptions, so one can be made non-blocking without the other.
pub fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends = [0; 2];
    // SAFETY: pipe2 fills the two descriptors in.
    check(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) })?;
    // SAFETY: both are new and ours.
    Ok(unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) })
}

/// A pair of connected message sockets.
pub fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends = [0; 2];
    // SAFETY: socketpair fills the two descriptors in.
    check(unsafe {
        libc::socketpair(
            libc::AF_UNIX,
            libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC,
            0,
            ends.as_mut_ptr(),
        )
    })?;
    // SAFETY: both are new and ours.
    Ok(unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) })
}

pub fn set_nonblocking(fd: RawFd) -> io::Result<()> {
    // SAFETY: plain flag changes of a descriptor; a bad one gives EBADF.
    let flags = check(unsafe { libc::fcntl(fd, libc::F_GETFL) })?;
    // SAFETY: as above.
    check(unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) }).map(drop)
}

/// Enlarges a pipe as far as the kernel's limits for this user allow; a smaller one works too.
pub fn enlarge_pipe(fd: RawFd, size: usize) {
    // SAFETY: a size change of a pipe; anything else gives an error that doesn't matter.
    unsafe { libc::fcntl(fd, libc::F_SETPIPE_SZ, size as libc::c_int) };
}

/// Lets a socket hold more, as far as the host's limit allows.
pub fn enlarge_send_buffer(fd: RawFd, size: usize) {
    let size = size as libc::c_int;
    // SAFETY: SO_SNDBUF reads one int; a socket that keeps its size works too.
    unsafe {
        let length = size_of::<libc::c_int>() as libc::socklen_t;
        libc::setsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_SNDBUF,
            (&raw const size).cast(),
            length,
        );
    }
}

/// Bytes that can be read from a pipe, socket or terminal now; 0 where the kernel can't say.
pub fn readable_bytes(fd: RawFd) -> usize {
    let mut count: libc::c_int = 0;
    // SAFETY: FIONREAD writes one int.
    let result = unsafe { libc::ioctl(fd, libc::FIONREAD, &mut count) };
    if result < 0 {
        0
    } else {
        usize::try_from(count).unwrap_or(0)
    }
}

pub fn read(fd: RawFd, buffer: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the buffer is writable for its length.
    check_size(unsafe { libc::read(fd, buffer.as_mut_ptr().cast(), buffer.len()) })
}

pub fn write(fd: RawFd, data: &[u8]) -> io::Result<usize> {
    // SAFETY: the buffer is readable for its length.
    check_size(unsafe { libc::write(fd, data.as_ptr().cast(), data.len()) })
}

/// Reads into the spare capacity of `buffer`, at most `limit` bytes; the vector is never moved.
pub fn read_into_spare(fd: RawFd, buffer: &mut Vec<u8>, limit: usize) -> io::Result<usize> {
    let spare = buffer.spare_capacity_mut();
    let room = spare.len().min(limit);
    // SAFETY: the spare capacity is writable for `room` bytes.
    let count = check_size(unsafe { libc::read(fd, spare.as_mut_ptr().cast(), room) })?;
    // SAFETY: the kernel has initialized `count` bytes behind the old length.
    unsafe { buffer.set_len(buffer.len() + count) };
    Ok(count)
}

pub fn fill_random(buffer: &mut [u8]) -> io::Result<()> {
    // SAFETY: the buffer is writable for its length; up to 256 bytes are never cut short.
    let count =
        check_size(unsafe { libc::getrandom(buffer.as_mut_ptr().cast(), buffer.len(), 0) })?;
    if count == buffer.len() {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(libc::EIO))
    }
}

/// What an event belongs to: the owner's number and which of its descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Token {
    Listener,
    Children,
    Connection,
    Command(u64, End),
    Session(u64, End),
}

/// Which descriptor of a command or session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    Stdout,
    Stderr,
    Stdin,
    /// The socket on which a child hands over the terminal that it opened.
    Terminal,
    /// A session's status pipe.
    Status,
}

const ENDS: [End; 5] = [
    End::Stdout,
    End::Stderr,
    End::Stdin,
    End::Terminal,
    End::Status,
];

impl Token {
    fn encode(self) -> u64 {
        match self {
            Token::Listener => 0,
            Token::Children => 1,
            Token::Connection => 2,
            Token::Command(id, end) => 3 | (end as u64) << 4 | id << 8,
            Token::Session(id, end) => 4 | (end as u64) << 4 | id << 8,
        }
    }

    fn decode(word: u64) -> Token {
        let end = ENDS[(word >> 4 & 7) as usize % ENDS.len()];
        match word & 15 {
            0 => Token::Listener,
            1 => Token::Children,
            2 => Token::Connection,
            3 => Token::Command(word >> 8, end),
            _ => Token::Session(word >> 8, end),
        }
    }
}

/// An epoll set. Descriptors are removed explicitly before they are closed: a forked child may still hold a copy, and epoll would go on
/// reporting it.
pub struct Poller {
    epoll: OwnedFd,
}

pub const READABLE: u32 = libc::EPOLLIN as u32;
pub const WRITABLE: u32 = libc::EPOLLOUT as u32;

impl Poller {
    pub fn new() -> io::Result<Poller> {
        // SAFETY: makes a descriptor.
        let epoll = own(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        Ok(Poller { epoll })
    }

    fn control(
        &self,
        operation: libc::c_int,
        fd: RawFd,
        interest: u32,
        word: u64,
    ) -> io::Result<()> {
        let mut event = libc::epoll_event {
            events: interest,
            u64: word,
        };
        // SAFETY: the event outlives the call.
        check(unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), operation, fd, &mut event) })
            .map(drop)
    }

    pub fn add(&self, fd: RawFd, token: Token, interest: u32) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, interest, token.encode())
    }

    pub fn modify(&self, fd: RawFd, token: Token, interest: u32) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, interest, token.encode())
    }

    /// Removing what isn't there is no error.
    pub fn remove(&self, fd: RawFd) {
        let _absent_is_fine = self.control(libc::EPOLL_CTL_DEL, fd, 0, 0);
    }

    /// Waits for events, at most `timeout_ms` (-1: for ever), and appends them to `ready`.
    pub fn wait(&self, timeout_ms: i32, ready: &mut Vec<(Token, u32)>) -> io::Result<()> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
        // SAFETY: the array takes as many events as we say.
        let count = check(unsafe {
            libc::epoll_wait(
                self.epoll.as_raw_fd(),
                events.as_mut_ptr(),
                events.len() as libc::c_int,
                timeout_ms,
            )
        })?;
        ready.extend(
            events[..count as usize]
                .iter()
                .map(|event| (Token::decode(event.u64), event.events)),
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_survive_their_encoding() {
        for token in [
            Token::Listener,
            Token::Children,
            Token::Connection,
            Token::Command(1 << 40, End::Terminal),
            Token::Session(7, End::Status),
        ] {
            assert_eq!(Token::decode(token.encode()), token);
        }
    }
}
