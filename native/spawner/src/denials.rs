//! Refused system calls that are reported: the filter hands them here, they get EPERM, and the edge is told.
//!
//! Only the refusal is decided here, never a permission: the caller's memory may change while it is looked at.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use crate::seccomp;
use crate::sysapi::check;

/// Reports of one sandbox after which its listener is closed: a loop of refused calls shall cost its owner only. From then on they get ENOSYS from the
/// kernel alone.
const MAX_REPORTS: u32 = 200;

const SECCOMP_IOCTL_NOTIF_RECV: libc::c_ulong = 0xc050_2100;
const SECCOMP_IOCTL_NOTIF_SEND: libc::c_ulong = 0xc018_2101;

/// struct seccomp_notif (linux/seccomp.h).
#[repr(C)]
#[derive(Default)]
struct Notification {
    id: u64,
    pid: u32,
    flags: u32,
    number: i32,
    architecture: u32,
    instruction_pointer: u64,
    arguments: [u64; 6],
}

/// struct seccomp_notif_resp.
#[repr(C)]
struct Response {
    id: u64,
    value: i64,
    error: i32,
    flags: u32,
}

struct Listener {
    sandbox: String,
    fd: OwnedFd,
    reports: u32,
}

/// One refused call. `pid` is the caller's on the host.
pub struct Denial {
    pub sandbox: String,
    pub call: String,
    pub pid: u32,
    /// The last that will be reported of this sandbox.
    pub last: bool,
}

/// The listeners of all sandboxes, behind one epoll descriptor.
pub struct Denials {
    epoll: OwnedFd,
    listeners: Mutex<HashMap<u64, Listener>>,
}

impl Denials {
    pub fn new(epoll: OwnedFd) -> Self {
        Denials {
            epoll,
            listeners: Mutex::default(),
        }
    }

    pub fn watch(&self, sandbox: &str, fd: OwnedFd) -> io::Result<()> {
        let number = fd.as_raw_fd();
        self.listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(
                number as u64,
                Listener {
                    sandbox: sandbox.to_owned(),
                    fd,
                    reports: 0,
                },
            );
        let mut event = libc::epoll_event {
            events: libc::EPOLLIN as u32,
            u64: number as u64,
        };
        // SAFETY: event is one valid epoll_event.
        check(libc::c_long::from(unsafe {
            libc::epoll_ctl(
                self.epoll.as_raw_fd(),
                libc::EPOLL_CTL_ADD,
                number,
                &mut event,
            )
        }))
        .map(drop)
    }

    /// Answers reported calls for ever, telling `report` of each.
    pub fn answer(&self, report: impl Fn(&Denial)) {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
        loop {
            // SAFETY: events has room for 64 entries.
            let ready =
                unsafe { libc::epoll_wait(self.epoll.as_raw_fd(), events.as_mut_ptr(), 64, -1) };
            for event in events.iter().take(usize::try_from(ready).unwrap_or(0)) {
                let (key, gone) = (
                    event.u64,
                    event.events & (libc::EPOLLHUP | libc::EPOLLERR) as u32 != 0,
                );
                let mut listeners = self
                    .listeners
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner);
                let Some(listener) = listeners.get_mut(&key) else {
                    continue;
                };
                let denial = if gone { None } else { refuse_next(listener) };
                let last = gone || denial.as_ref().is_some_and(|denial| denial.last);
                if last {
                    // Dropping the descriptor takes it out of the epoll set as well.
                    listeners.remove(&key);
                }
                drop(listeners);
                if let Some(denial) = denial {
                    report(&denial);
                }
            }
        }
    }
}

/// Takes one call and refuses it. None: its caller died meanwhile.
fn refuse_next(listener: &mut Listener) -> Option<Denial> {
    let mut notification = Notification::default();
    // SAFETY: both requests get the structure that they take, zeroed where the kernel asks for it.
    unsafe {
        if libc::ioctl(
            listener.fd.as_raw_fd(),
            SECCOMP_IOCTL_NOTIF_RECV as _,
            &mut notification,
        ) != 0
        {
            return None;
        }
        let mut response = Response {
            id: notification.id,
            value: 0,
            error: -libc::EPERM,
            flags: 0,
        };
        libc::ioctl(
            listener.fd.as_raw_fd(),
            SECCOMP_IOCTL_NOTIF_SEND as _,
            &mut response,
        );
    }
    listener.reports += 1;
    Some(Denial {
        sandbox: listener.sandbox.clone(),
        call: seccomp::name_of(notification.number, &notification.arguments),
        pid: notification.pid,
        last: listener.reports >= MAX_REPORTS,
    })
}
