//! Length-prefixed frames on Unix stream sockets, and the descriptors that may come with them (SCM_RIGHTS, unix(7)).

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Room for the header and one descriptor; u64 for the alignment of cmsghdr.
const CONTROL_WORDS: usize = 4;

/// Sends `body` as a frame: a big-endian u32 length, then the bytes. The descriptor travels with the frame's first byte.
///
/// # Errors
/// The socket's. Part of the frame may have been sent: the connection is of no use any more.
pub fn send_frame(socket: &impl AsRawFd, body: &[u8], descriptor: Option<RawFd>) -> io::Result<()> {
    let length = u32::try_from(body.len()).map_err(io::Error::other)?;
    let mut frame = Vec::with_capacity(body.len() + 4);
    frame.extend(length.to_be_bytes());
    frame.extend(body);
    let mut sent = send(socket.as_raw_fd(), &frame, descriptor)?;
    while sent < frame.len() {
        sent += send(socket.as_raw_fd(), &frame[sent..], None)?;
    }
    Ok(())
}

/// The next frame's body, and the descriptor that came with it. None: the other end is closed.
///
/// # Errors
/// The socket's; `InvalidData` for a frame of more than `most` bytes; `UnexpectedEof` for one that is cut off.
pub fn receive_frame(
    socket: &impl AsRawFd,
    most: u32,
) -> io::Result<Option<(Vec<u8>, Option<OwnedFd>)>> {
    let mut descriptor = None;
    let mut prefix = [0; 4];
    if !fill(socket.as_raw_fd(), &mut prefix, &mut descriptor)? {
        return Ok(None);
    }
    let length = u32::from_be_bytes(prefix);
    if length > most {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("a frame of {length} bytes; {most} are the most"),
        ));
    }
    let mut body = vec![0; length as usize];
    if length > 0 && !fill(socket.as_raw_fd(), &mut body, &mut descriptor)? {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Some((body, descriptor)))
}

/// Fills `buffer`; false if the other end is closed before the first byte.
fn fill(socket: RawFd, buffer: &mut [u8], descriptor: &mut Option<OwnedFd>) -> io::Result<bool> {
    let mut filled = 0;
    while filled < buffer.len() {
        let (read, came) = receive(socket, &mut buffer[filled..])?;
        *descriptor = descriptor.take().or(came);
        match (read, filled) {
            (0, 0) => return Ok(false),
            (0, _) => return Err(io::ErrorKind::UnexpectedEof.into()),
            _ => filled += read,
        }
    }
    Ok(true)
}

fn retried(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        match usize::try_from(call()) {
            Ok(count) => return Ok(count),
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

fn send(socket: RawFd, bytes: &[u8], descriptor: Option<RawFd>) -> io::Result<usize> {
    let mut iov = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let mut control = [0_u64; CONTROL_WORDS];
    // SAFETY: the message points at live buffers; the control buffer is aligned and has room for one header and one descriptor.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &mut iov;
        message.msg_iovlen = 1;
        if let Some(descriptor) = descriptor {
            let size = std::mem::size_of::<RawFd>() as libc::c_uint;
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(size) as usize;
            let header = libc::CMSG_FIRSTHDR(&message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(size) as usize;
            std::ptr::write_unaligned(libc::CMSG_DATA(header).cast::<RawFd>(), descriptor);
        }
        retried(|| libc::sendmsg(socket, &message, libc::MSG_NOSIGNAL))
    }
}

fn receive(socket: RawFd, buffer: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut iov = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    let mut control = [0_u64; CONTROL_WORDS];
    // SAFETY: the message points at live buffers, with room for one descriptor, which is new and nobody else's.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &mut iov;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        let room = libc::CMSG_SPACE(std::mem::size_of::<RawFd>() as libc::c_uint) as usize;
        message.msg_controllen = room;
        let read = retried(|| {
            message.msg_controllen = room;
            libc::recvmsg(socket, &mut message, libc::MSG_CMSG_CLOEXEC)
        })?;
        let header = libc::CMSG_FIRSTHDR(&message);
        if header.is_null() || (*header).cmsg_type != libc::SCM_RIGHTS {
            return Ok((read, None));
        }
        let raw = std::ptr::read_unaligned(libc::CMSG_DATA(header).cast::<RawFd>());
        Ok((read, Some(OwnedFd::from_raw_fd(raw))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_descriptor_arrives_with_its_frame_and_only_with_it() {
        let (here, there) = UnixStream::pair().unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        send_frame(&here, b"first", None).unwrap();
        send_frame(&here, b"second", Some(null.as_raw_fd())).unwrap();
        send_frame(&here, b"", None).unwrap();
        drop(here);
        let next = || receive_frame(&there, 100).unwrap();
        assert!(matches!(next(), Some((body, None)) if body == b"first"));
        assert!(matches!(next(), Some((body, Some(_))) if body == b"second"));
        assert!(matches!(next(), Some((body, None)) if body.is_empty()));
        assert!(next().is_none());
    }

    #[test]
    fn frames_too_long_or_cut_off_are_refused() {
        let (here, there) = UnixStream::pair().unwrap();
        send_frame(&here, &[7; 101], None).unwrap();
        assert!(receive_frame(&there, 100).is_err());
        let (mut here, there) = UnixStream::pair().unwrap();
        io::Write::write_all(&mut here, b"\0\0\0\x09four").unwrap();
        drop(here);
        assert!(receive_frame(&there, 100).is_err());
    }
}
