//! Signals as something to wait for.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

const WANTED: [libc::c_int; 4] = [libc::SIGCHLD, libc::SIGHUP, libc::SIGINT, libc::SIGTERM];

/// SIGCHLD, SIGHUP, SIGINT and SIGTERM of this process, from now on delivered here only.
pub struct Signals(OwnedFd);

impl Signals {
    pub fn take() -> Result<Self, String> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigemptyset initializes the set before anything reads it; it outlives the calls.
        let fd = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for number in WANTED {
                libc::sigaddset(set.as_mut_ptr(), number);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
            libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
        };
        if fd < 0 {
            return Err(format!("signalfd: {}", io::Error::last_os_error()));
        }
        // SAFETY: the call just returned this descriptor; nobody else owns it.
        Ok(Signals(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// The next signal; None if there is none within `timeout` (None: as long as it takes).
    pub fn next(&self, timeout: Option<Duration>) -> Result<Option<libc::c_int>, String> {
        let mut entry = libc::pollfd {
            fd: self.0.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // Rounded up: 0 would turn the last millisecond into a busy loop.
        let milliseconds = timeout.map_or(-1, |timeout| {
            libc::c_int::try_from(timeout.as_micros().div_ceil(1000)).unwrap_or(libc::c_int::MAX)
        });
        // SAFETY: entry is one valid pollfd.
        if unsafe { libc::poll(&mut entry, 1, milliseconds) } < 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(format!("poll: {error}"));
            }
        }
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::uninit();
        let size = std::mem::size_of::<libc::signalfd_siginfo>();
        // SAFETY: info is writable for its size.
        let read = unsafe { libc::read(self.0.as_raw_fd(), info.as_mut_ptr().cast(), size) };
        if read == size as isize {
            // SAFETY: the kernel filled it whole.
            let number = unsafe { info.assume_init() }.ssi_signo;
            return Ok(libc::c_int::try_from(number).ok());
        }
        Ok(None)
    }
}
