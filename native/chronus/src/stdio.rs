//! The descriptors between chronus and a command: made before the fork, each side's own afterwards.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use wire::message::{STDIN_INLINE, STDIN_NONE};

use crate::child::Stdio;
use crate::command::Command;
use crate::connection::Connection;
use crate::input::{Input, Kind};
use crate::kernel::{self, End, Poller, Token, READABLE};
use crate::pty;
use crate::spawn::Pipes;

/// Where standard input comes from.
pub struct Stdin<'a> {
    /// One of the `STDIN_` constants.
    pub kind: u8,
    pub data: &'a [u8],
}

/// The child's ends.
enum Theirs {
    Pipes {
        stdin: Option<OwnedFd>,
        stdout: OwnedFd,
        stderr: OwnedFd,
        readiness: Option<OwnedFd>,
    },
    Terminal {
        handover: OwnedFd,
        rows: u16,
        cols: u16,
    },
}

/// Our ends.
enum Ours {
    Pipes {
        stdin: Option<OwnedFd>,
        stdout: OwnedFd,
        stderr: OwnedFd,
        readiness: Option<OwnedFd>,
    },
    Terminal {
        handover: OwnedFd,
    },
}

pub struct Descriptors {
    theirs: Theirs,
    ours: Ours,
}

impl Descriptors {
    /// Pipes; with `readiness` one more, which a builtin closes when it is ready.
    pub fn pipes(stdin: &Stdin<'_>, readiness: bool) -> io::Result<Descriptors> {
        let (their_stdin, our_stdin) = match stdin.kind {
            STDIN_NONE => (None, None),
            _ => kernel::pipe().map(|(reader, writer)| (Some(reader), Some(writer)))?,
        };
        let (our_readiness, their_readiness) = match readiness {
            false => (None, None),
            true => kernel::pipe().map(|(reader, writer)| (Some(reader), Some(writer)))?,
        };
        let (our_stdout, their_stdout) = kernel::pipe()?;
        let (our_stderr, their_stderr) = kernel::pipe()?;
        for fd in [Some(&our_stdout), Some(&our_stderr), our_stdin.as_ref()]
            .into_iter()
            .flatten()
        {
            kernel::set_nonblocking(fd.as_raw_fd())?;
        }
        Ok(Descriptors {
            theirs: Theirs::Pipes {
                stdin: their_stdin,
                stdout: their_stdout,
                stderr: their_stderr,
                readiness: their_readiness,
            },
            ours: Ours::Pipes {
                stdin: our_stdin,
                stdout: our_stdout,
                stderr: our_stderr,
                readiness: our_readiness,
            },
        })
    }

    pub fn terminal((rows, cols): (u16, u16)) -> io::Result<Descriptors> {
        let (ours, theirs) = kernel::socket_pair()?;
        Ok(Descriptors {
            theirs: Theirs::Terminal {
                handover: theirs,
                rows,
                cols,
            },
            ours: Ours::Terminal { handover: ours },
        })
    }

    /// How the child finds its ends.
    pub fn stdio(&self) -> Stdio {
        match &self.theirs {
            Theirs::Pipes {
                stdin,
                stdout,
                stderr,
                readiness,
            } => Stdio::Pipes(Pipes {
                stdin: stdin.as_ref().map(AsRawFd::as_raw_fd),
                stdout: stdout.as_raw_fd(),
                stderr: stderr.as_raw_fd(),
                status: readiness.as_ref().map(AsRawFd::as_raw_fd),
            }),
            Theirs::Terminal {
                handover,
                rows,
                cols,
            } => Stdio::Terminal {
                handover: handover.as_raw_fd(),
                rows: *rows,
                cols: *cols,
            },
        }
    }

    /// The child runs: closes its ends here, and gives ours to the command.
    pub fn give_to(self, command: &mut Command, stdin: &Stdin<'_>, poller: &Poller) {
        match self.ours {
            Ours::Pipes {
                stdin,
                stdout,
                stderr,
                readiness,
            } => {
                command.pipes = [Some(stdout), Some(stderr)];
                match stdin {
                    // What came while the command waited for its start goes first.
                    Some(fd) if command.input.is_expected() => {
                        command.input.provide(fd, Kind::Pipe)
                    }
                    Some(fd) => command.input = Input::new(fd, Kind::Pipe),
                    None => command.input = Input::none(),
                }
                if let Some(readiness) = readiness {
                    let token = Token::Command(command.id, End::Status);
                    if poller.add(readiness.as_raw_fd(), token, READABLE).is_ok() {
                        command.readiness = Some(readiness);
                    }
                }
            }
            Ours::Terminal { handover } => {
                if !command.input.is_expected() {
                    command.input = Input::expected();
                }
                if stdin.kind == STDIN_NONE {
                    command.input.end();
                }
                if poller
                    .add(
                        handover.as_raw_fd(),
                        Token::Command(command.id, End::Terminal),
                        READABLE,
                    )
                    .is_ok()
                {
                    command.handover = Some(handover);
                }
            }
        }
        if stdin.kind == STDIN_INLINE {
            command.input.offer(0, stdin.data);
            command.input.end();
        }
    }
}

/// Takes the terminal that the child has opened, if it has come by now; a child that closed its end without one will say why it failed.
pub fn take_terminal(command: &mut Command, poller: &Poller, connection: Option<&mut Connection>) {
    let Some(handover) = &command.handover else {
        return;
    };
    let received = match pty::receive(handover.as_raw_fd()) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
        Err(_) | Ok(None) => None,
        Ok(Some(master)) => Some(master),
    };
    close_handover(command, poller);
    let Some(master) = received else { return };
    if let Some((rows, cols)) = command.terminal_size {
        let _size_of_a_dying_terminal = pty::resize(master.as_raw_fd(), rows, cols);
    }
    match master.try_clone() {
        Ok(copy) if command.input.is_expected() => command.input.provide(copy, Kind::Terminal),
        _ => command.input.close(),
    }
    command.pipes[0] = Some(master);
    let taken = command.input.flush();
    command.return_credit(&taken, connection);
}

pub fn close_handover(command: &mut Command, poller: &Poller) {
    if let Some(handover) = command.handover.take() {
        poller.remove(handover.as_raw_fd());
    }
}

pub fn close_readiness(command: &mut Command, poller: &Poller) {
    if let Some(readiness) = command.readiness.take() {
        poller.remove(readiness.as_raw_fd());
    }
}
