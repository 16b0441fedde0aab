//! Connections to ports inside: a command without a process, whose stdin and stdout are a socket.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, OwnedFd};

use wire::frame::kind;
use wire::message;

use crate::buffer::{OutputBuffer, Policy};
use crate::command::{Command, Origin, Subscriber, INITIAL_CREDIT};
use crate::input::{Input, Kind};
use crate::kernel::{check, describe, errno, own, End, Poller, Token, WRITABLE};
use crate::process::Status;
use crate::server::Chronus;

/// A connection that is being made.
pub struct Connecting {
    socket: OwnedFd,
    port: u16,
    /// Addresses to try if this one fails.
    others: VecDeque<IpAddr>,
}

impl Chronus {
    /// CONNECT.
    pub(crate) fn connect(&mut self, stream: u32, port: u64, host: &[u8]) {
        let (Ok(port @ 1..), Some(addresses)) = (u16::try_from(port), addresses(host)) else {
            let message = format!(
                "{}:{port} is no IP address and port",
                String::from_utf8_lossy(host)
            );
            return self.push_error(stream, libc::EINVAL, "invalid_argument", &message);
        };
        let id = self.new_id();
        let nothing_kept = || OutputBuffer::new(Policy::Window { history: 0 });
        let mut command = Command::new(id, String::new(), &[], [nothing_kept(), nothing_kept()]);
        command.origin = Origin::Tunnel;
        command.capture = false;
        command.input = Input::expected();
        self.adopt(command, Subscriber::following(stream, [Some(0), None]));
        self.try_addresses(id, port, addresses);
    }

    fn try_addresses(&mut self, id: u64, port: u16, mut addresses: VecDeque<IpAddr>) {
        let mut last = libc::ECONNREFUSED;
        while let Some(address) = addresses.pop_front() {
            let Some(command) = self.commands.get_mut(&id) else {
                return;
            };
            let begun = begin(address, port).and_then(|socket| {
                self.poller
                    .add(socket.as_raw_fd(), Token::Command(id, End::Stdin), WRITABLE)
                    .map(|()| socket)
            });
            match begun {
                Ok(socket) => {
                    command.connecting = Some(Connecting {
                        socket,
                        port,
                        others: addresses,
                    });
                    return;
                }
                Err(error) => last = errno(&error),
            }
        }
        self.refuse(id, port, last);
    }

    fn refuse(&mut self, id: u64, port: u16, errno: i32) {
        let Some(command) = self.commands.remove(&id) else {
            return;
        };
        for subscriber in &command.subscribers {
            self.streams.remove(&subscriber.stream);
            self.push_error(
                subscriber.stream,
                errno,
                "not_found",
                &format!("port {port}: {}", describe(errno)),
            );
        }
    }

    /// The socket that connects is writable: it is connected, or can't be.
    pub(crate) fn finish_connecting(&mut self, id: u64) {
        let Some(command) = self.commands.get_mut(&id) else {
            return;
        };
        let Some(Connecting {
            socket,
            port,
            others,
        }) = command.connecting.take()
        else {
            return;
        };
        self.poller.remove(socket.as_raw_fd());
        match outcome(&socket).and_then(|()| socket.try_clone()) {
            Ok(copy) => {
                command.input.provide(copy, Kind::Socket);
                command.pipes[0] = Some(socket);
                command
                    .subscribers
                    .iter_mut()
                    .for_each(Subscriber::may_write);
                let streams: Vec<u32> = command
                    .subscribers
                    .iter()
                    .map(|subscriber| subscriber.stream)
                    .collect();
                for stream in streams {
                    self.push(
                        stream,
                        kind::STARTED,
                        0,
                        &message::started("", false, [0; 2]),
                    );
                    self.push(stream, kind::STDIN_CREDIT, INITIAL_CREDIT, b"");
                }
                self.settle(id);
            }
            Err(error) if others.is_empty() => self.refuse(id, port, errno(&error)),
            Err(_) => self.try_addresses(id, port, others),
        }
    }
}

/// A tunnel is over when the other side has said all and got all.
pub fn check_end(command: &mut Command) {
    let established = command.connecting.is_none() && !command.input.is_expected();
    if established
        && command.pipes[0].is_none()
        && !command.input.waits_for_room()
        && command.status.is_none()
    {
        command.status = Some(Status {
            code: 0,
            signal: None,
        });
    }
}

/// Stops a connection that is being made.
pub fn give_up(command: &mut Command, poller: &Poller) {
    if let Some(connecting) = command.connecting.take() {
        poller.remove(connecting.socket.as_raw_fd());
    }
}

/// The addresses of a host; only literal ones, since looking a name up would block.
fn addresses(host: &[u8]) -> Option<VecDeque<IpAddr>> {
    if host.is_empty() || host == b"localhost" {
        return Some(VecDeque::from([
            Ipv4Addr::LOCALHOST.into(),
            Ipv6Addr::LOCALHOST.into(),
        ]));
    }
    let address = std::str::from_utf8(host).ok()?.parse().ok()?;
    Some(VecDeque::from([address]))
}

/// A non-blocking socket that is connecting.
fn begin(address: IpAddr, port: u16) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    // SAFETY: makes a descriptor.
    let socket = own(unsafe {
        libc::socket(
            family,
            libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC,
            0,
        )
    })?;
    let result = match address {
        IpAddr::V4(address) => {
            let to = libc::sockaddr_in {
                sin_family: libc::AF_INET as u16,
                sin_port: port.to_be(),
                sin_addr: libc::in_addr {
                    s_addr: u32::from_ne_bytes(address.octets()),
                },
                sin_zero: [0; 8],
            };
            // SAFETY: the address is readable for the length that is given.
            unsafe {
                libc::connect(
                    socket.as_raw_fd(),
                    (&raw const to).cast(),
                    size_of_val(&to) as u32,
                )
            }
        }
        IpAddr::V6(address) => {
            let to = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as u16,
                sin6_port: port.to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr {
                    s6_addr: address.octets(),
                },
                sin6_scope_id: 0,
            };
            // SAFETY: as above.
            unsafe {
                libc::connect(
                    socket.as_raw_fd(),
                    (&raw const to).cast(),
                    size_of_val(&to) as u32,
                )
            }
        }
    };
    match check(result) {
        Err(error) if errno(&error) != libc::EINPROGRESS => Err(error),
        _ => Ok(socket),
    }
}

/// What became of a connection attempt.
fn outcome(socket: &OwnedFd) -> io::Result<()> {
    let mut error: libc::c_int = 0;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: SO_ERROR writes one int.
    check(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ERROR,
            (&raw mut error).cast(),
            &mut length,
        )
    })?;
    if error == 0 {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_an_address_or_this_machine() {
        assert_eq!(addresses(b"").map(|list| list.len()), Some(2));
        assert_eq!(
            addresses(b"::1"),
            Some(VecDeque::from([IpAddr::V6(Ipv6Addr::LOCALHOST)]))
        );
        assert_eq!(addresses(b"example.org"), None);
        assert_eq!(addresses(b"\xff"), None);
    }
}
