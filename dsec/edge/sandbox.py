"""One live sandbox as the edge holds it in memory. Kept small: there may be thousands."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsec.edge.commands import COMMANDS_MAX
from dsec.edge.events import EventLog
from dsec.edge.record import Record
from dsec.edge.states import Step, Writer, check_transition
from libdsec.errors import Conflict, DSecError, SandboxFailed, SandboxGone
from libdsec.schema import CommandEntry, SandboxEvent, State

if TYPE_CHECKING:
    from dsec.edge.cgroups import KillCounter
    from dsec.edge.channel import Channel
    from dsec.edge.once import Acts


@dataclass(slots=True)
class Command:
    """A command as its sandbox remembers it."""

    entry: CommandEntry
    kills_before: int
    """Memory kills that were seen before it began: none of those was its own."""


class Sandbox:
    """A sandbox of which kernel objects exist or are about to: its record, its channel, and who uses it."""

    __slots__ = (
        "acts",
        "askers",
        "busy",
        "channel",
        "commands",
        "dead",
        "env",
        "events",
        "forget",
        "kill_counter",
        "last_used",
        "oom_seen",
        "oom_unclaimed",
        "orphan_until",
        "record",
        "settling",
        "starters",
        "starting",
        "stopping",
        "told",
        "total_at",
        "untold_in_journal",
    )

    def __init__(self, record: Record, now: float) -> None:
        """``now``: monotonic seconds."""
        self.record = record
        self.channel: Channel | None = None
        self.env = encode_env(tuple(record.env.items()))
        self.busy = 0
        """Requests and streams that count as use."""
        self.last_used = now
        self.total_at: float | None = None
        """When the absolute lifetime ends, monotonic seconds."""
        self.told = False
        """Somebody was told of it, or has named it."""
        self.askers = 0
        """Requests that may yet tell somebody of it."""
        self.orphan_until: float | None = None
        """When the grace of an orphan ends, monotonic seconds; see :mod:`dsec.edge.orphans`."""
        self.untold_in_journal = True
        """An edge that starts now would take the journal's row for an untold one."""
        self.events = EventLog()
        self.commands: dict[str, Command] | None = None
        self.acts: Acts | None = None
        """What was done by calls with an idempotency key; made with the first one."""
        self.starting: asyncio.Task[DSecError | None] | None = None
        """The creation; its value is why it failed."""
        self.starters = 0
        """Requests that wait for the creation."""
        self.settling: asyncio.Task[None] | None = None
        """Finding out what a broken channel means, or cleaning up after a failure."""
        self.stopping: asyncio.Task[None] | None = None
        self.forget = False
        """Its end leaves no record: nobody was told of it, and its idempotency key is free again."""
        self.dead: asyncio.Future[int] | None = None
        """The agent's wait status, for whoever settles a broken channel."""
        self.kill_counter: KillCounter | None = None
        """Open from its first command until its channel is closed."""
        self.oom_seen = 0
        """How many memory kills were seen: they are numbered from 1."""
        self.oom_unclaimed: tuple[int, ...] = ()
        """The numbers of those that no command has claimed, ascending; the newest ones."""

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def state(self) -> State:
        return self.record.state

    def become(self, new: State, writer: Writer, at: float, reason: str | None = None) -> None:
        """Writes a state (in memory: the caller writes the journal). Raises IllegalTransition."""
        record = self.record
        check_transition(record.id, record.state, new, writer, self.events.steps)
        step = Step(at, record.state, new, writer)
        record.state = new
        if reason is not None and record.reason is None:
            record.reason = reason
        self.events.add_step(step, reason)

    def begin_use(self, now: float) -> None:
        """Something that counts as use begins, at ``now`` (monotonic seconds)."""
        self.busy += 1
        self.last_used = now

    def end_use(self, now: float) -> None:
        """It has ended."""
        self.busy -= 1
        self.last_used = now

    def close_channel(self) -> None:
        """Lets go of the agent and of the counter of its memory kills; what waits for the agent fails with ChannelLost."""
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.close()
        counter, self.kill_counter = self.kill_counter, None
        if counter is not None:
            counter.close()

    def touch(self, now: float) -> None:
        """The sandbox was used until now."""
        self.last_used = now

    def idle_since(self) -> float | None:
        """Since when nothing uses it (monotonic seconds); None while something does."""
        if self.busy or (self.channel is not None and self.channel.running):
            return None
        return self.last_used

    def note(self, at: float, kind: str, message: str, exec_id: str | None = None) -> None:
        """Adds an event."""
        self.events.add(SandboxEvent(at=at, type=kind, message=message, exec_id=exec_id))

    def command_started(self, entry: CommandEntry) -> Command:
        """Remembers a command; the oldest one goes when there are too many. One that is known and hasn't ended keeps its entry: it was
        found again, or its call was repeated."""
        if self.commands is None:
            self.commands = {}
        known = self.commands.get(entry.exec_id)
        if known is not None and known.entry.duration_s is None:
            return known
        command = self.commands[entry.exec_id] = Command(entry, self.oom_seen)
        if len(self.commands) > COMMANDS_MAX:
            del self.commands[next(iter(self.commands))]
        return command

    def see_oom_kills(self) -> int:
        """How many of its processes the kernel has killed for memory since this was last asked."""
        count = 0 if self.kill_counter is None else self.kill_counter.read()
        rise = count - self.oom_seen
        if rise <= 0:
            return 0
        self.oom_seen = count
        self.oom_unclaimed = (*self.oom_unclaimed, *range(count - min(rise, COMMANDS_MAX) + 1, count + 1))[-COMMANDS_MAX:]
        return rise

    def claim_oom_kill(self, command: Command) -> bool:
        """Whether one of the kills that were seen may be that of ``command``, which ended by SIGKILL. Each is claimed once."""
        for number in self.oom_unclaimed:
            if number > command.kills_before:
                self.oom_unclaimed = tuple(other for other in self.oom_unclaimed if other != number)
                return True
        return False


@functools.lru_cache(maxsize=1024)
def encode_env(variables: tuple[tuple[str, str], ...]) -> dict[bytes, bytes]:
    """The variables as chronus takes them. Sandboxes with the same ones share the dict: don't change it."""
    return {os_encode(name): os_encode(value) for name, value in variables}


def os_encode(text: str) -> bytes:
    """Text of a request as the bytes it stands for: UTF-8, and surrogate escapes for what isn't."""
    return text.encode("utf-8", "surrogateescape")


def refusal(record: Record) -> DSecError:
    """The error for a call that a sandbox in this state doesn't take."""
    if record.state in ("creating", "running", "pausing", "paused", "resuming"):
        return Conflict(f"sandbox {record.id} is {record.state}", retry_after=0.5)
    if record.state in ("failed", "lost"):
        reason = record.reason or record.state
        return SandboxFailed(
            f"sandbox {record.id} has {'failed' if record.state == 'failed' else 'been lost'}: {reason}", reason=reason, at=record.ended_at
        )
    reason = record.reason or "stopped"
    return SandboxGone(f"sandbox {record.id} is {record.state}: {reason}", reason=reason, at=record.ended_at)
