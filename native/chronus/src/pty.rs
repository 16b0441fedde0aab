//! Terminals. The child opens its own, as the sandbox's user and through the sandbox's devpts, and hands the master over.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use crate::kernel::{check, check_size, own};

/// Room for one descriptor in a control message, with the alignment that the header wants.
#[repr(C, align(8))]
struct Control([u8; 64]);

/// In the child: makes a terminal its controlling one and its standard descriptors, and sends the master through `handover`.
pub fn open_in_child(handover: RawFd, rows: u16, cols: u16) -> io::Result<()> {
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // O_NONBLOCK is for chronus, which reads the master; the other side has a description of its own.
    // SAFETY: opens a path.
    let master = own(unsafe { libc::open(c"/dev/ptmx".as_ptr(), flags | libc::O_NONBLOCK) })?;
    let mut unlocked: libc::c_int = 0;
    // SAFETY: TIOCSPTLCK reads one int; on anything but a terminal master it fails.
    check(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &mut unlocked) })?;
    // By descriptor: the path of the other side would be the sandbox's to forge.
    // SAFETY: TIOCGPTPEER takes open flags and makes a descriptor.
    let slave = own(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags) })?;
    resize(master.as_raw_fd(), rows, cols)?;
    // SAFETY: this process leads a session without a terminal.
    check(unsafe { libc::ioctl(slave.as_raw_fd(), libc::TIOCSCTTY, 0) })?;
    send(handover, master.as_raw_fd())?;
    for fd in 0..=2 {
        // SAFETY: the slave is open; 0, 1 and 2 are to be replaced.
        check(unsafe { libc::dup2(slave.as_raw_fd(), fd) })?;
    }
    // SAFETY: closes the copy that this module's caller reserved; nothing uses it afterwards.
    check(unsafe { libc::close(handover) }).map(drop)
}

pub fn resize(terminal: RawFd, rows: u16, cols: u16) -> io::Result<()> {
    let size = libc::winsize {
        ws_row: rows,
        ws_col: cols,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: TIOCSWINSZ reads one winsize.
    check(unsafe { libc::ioctl(terminal, libc::TIOCSWINSZ, &size) }).map(drop)
}

/// Whether a terminal keeps what it is given until a line is complete (ICANON, termios(3)). The master answers for the other side.
pub fn gathers_lines(terminal: RawFd) -> bool {
    let mut modes = MaybeUninit::<libc::termios>::zeroed();
    // SAFETY: tcgetattr fills in one termios; where it fails, what there is stays plain zeros.
    let modes = unsafe {
        libc::tcgetattr(terminal, modes.as_mut_ptr());
        modes.assume_init()
    };
    modes.c_lflag & libc::ICANON != 0
}

/// A message of one byte that brings a descriptor along.
fn send(socket: RawFd, fd: RawFd) -> io::Result<()> {
    let mut byte = [0_u8];
    let mut vector = libc::iovec {
        iov_base: byte.as_mut_ptr().cast(),
        iov_len: 1,
    };
    let mut control = Control([0; 64]);
    // SAFETY: msghdr is plain data; every pointer set below outlives the call, and the control buffer has room for one descriptor.
    unsafe {
        let mut message: libc::msghdr = MaybeUninit::zeroed().assume_init();
        message.msg_iov = &mut vector;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(size_of::<RawFd>() as u32) as usize;
        let header = libc::CMSG_FIRSTHDR(&message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as u32) as usize;
        libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(fd);
        check_size(libc::sendmsg(socket, &message, libc::MSG_NOSIGNAL)).map(drop)
    }
}

/// The descriptor that came through `socket`; None when it was closed without one.
pub fn receive(socket: RawFd) -> io::Result<Option<OwnedFd>> {
    let mut byte = [0_u8];
    let mut vector = libc::iovec {
        iov_base: byte.as_mut_ptr().cast(),
        iov_len: 1,
    };
    let mut control = Control([0; 64]);
    // SAFETY: as in `send`; the control message is only looked at when the kernel says that it is there.
    unsafe {
        let mut message: libc::msghdr = MaybeUninit::zeroed().assume_init();
        message.msg_iov = &mut vector;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = control.0.len();
        check_size(libc::recvmsg(
            socket,
            &mut message,
            libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT,
        ))?;
        let header = libc::CMSG_FIRSTHDR(&message);
        if header.is_null()
            || (*header).cmsg_level != libc::SOL_SOCKET
            || (*header).cmsg_type != libc::SCM_RIGHTS
        {
            return Ok(None);
        }
        Ok(Some(OwnedFd::from_raw_fd(
            libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned(),
        )))
    }
}
