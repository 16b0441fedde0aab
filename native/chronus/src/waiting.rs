//! Commands and sessions that can't be started yet, because whom they run as can't be looked up at once: the sandbox's passwd file may be on a layer whose
//! data is still to be fetched. They are listed, followed, timed and ended like those that run; what starts them is the death of the child that reads.

use crate::command::{Command, Origin};
use crate::input::Input;
use crate::lifecycle::Order;
use crate::process::Status;
use crate::server::Chronus;
use crate::users::Lookup;

/// What is to be started.
pub(crate) enum Waiting {
    /// The command of that number, of which `stream` is to be told.
    Command {
        id: u64,
        stream: u32,
        order: Box<Order>,
    },
    /// The shell of the session of that number.
    Session(u64),
}

impl Chronus {
    /// A session whose next call needs a shell. It waits once, however many calls it has.
    pub(crate) fn session_waits(&mut self, id: u64) {
        let waits = |waiting: &Waiting| matches!(waiting, Waiting::Session(other) if *other == id);
        if !self.waiting.iter().any(waits) {
            self.waiting.push(Waiting::Session(id));
        }
    }

    pub(crate) fn wait_for_user(&mut self, command: &mut Command, order: Order, stream: u32) {
        command.origin = Origin::Waiting;
        if order.reads_stream() {
            command.input = Input::expected();
        }
        self.waiting.push(Waiting::Command {
            id: command.id,
            stream,
            order: Box::new(order),
        });
    }

    /// Users can be looked up: starts what has waited for that, in its order.
    pub(crate) fn start_waiting(&mut self) {
        for waiting in std::mem::take(&mut self.waiting) {
            match waiting {
                Waiting::Command { id, stream, order } => self.start_one(id, stream, *order),
                Waiting::Session(id) => self.advance_session(id),
            }
        }
        self.starter.settle_users();
    }

    fn start_one(&mut self, id: u64, stream: u32, order: Order) {
        // One that was ended meanwhile, or that nobody wants any more, isn't started.
        let Some(mut command) = self.commands.remove(&id) else {
            return;
        };
        if command.status.is_none() {
            let writes = order.reads_stream();
            match self.starter.look_up(&order.user) {
                Lookup::Known(account) => self.launch(&mut command, order, account),
                Lookup::Awaited => self.wait_for_user(&mut command, order, stream),
            }
            let launched = !matches!(command.origin, Origin::Waiting);
            self.commands.insert(id, command);
            match self.streams.get(&stream) {
                Some(follower) if launched && *follower == id => {
                    self.tell_launched(id, stream, writes)
                }
                _ => self.settle(id),
            }
        } else {
            self.commands.insert(id, command);
        }
    }

    /// Ends a command that waits, as the signal would have ended its process before it executed anything.
    pub(crate) fn end_waiting(&mut self, id: u64, signal: i32) {
        let Some(command) = self.commands.get_mut(&id) else {
            return;
        };
        if command.status.is_none() && ends(signal) {
            command.status = u8::try_from(signal).ok().map(Status::killed_by);
            // With its input and environment, of which whoever starts and kills could otherwise pile up any number.
            self.waiting.retain(
                |waiting| !matches!(waiting, Waiting::Command { id: other, .. } if *other == id),
            );
            self.settle(id);
        }
    }
}

/// Whether a process ends by the signal if it doesn't mind it (signal(7)).
pub fn ends(signal: i32) -> bool {
    /// Real-time signals are numbered up to this.
    const LAST: i32 = 64;
    (1..=LAST).contains(&signal)
        && !matches!(
            signal,
            libc::SIGCHLD
                | libc::SIGCONT
                | libc::SIGURG
                | libc::SIGWINCH
                | libc::SIGSTOP
                | libc::SIGTSTP
                | libc::SIGTTIN
                | libc::SIGTTOU
        )
}
