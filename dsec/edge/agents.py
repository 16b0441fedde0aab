"""The agents (chronus) inside the sandboxes as the edge sees them: connecting, noticing that one broke, following what runs in it to its
end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import secrets
import signal as signals
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from dsec.edge.channel import STDIN_INLINE, Channel, ChannelError, ChannelLost, Exit, Start, Stream
from dsec.edge.commands import shorten
from dsec.edge.endings import Endings
from dsec.edge.failures import of_builtin
from dsec.edge.ids import new_exec_id
from dsec.edge.inventory import Inventory
from dsec.edge.sandbox import Command, Sandbox, os_encode, refusal
from dsec.edge.spawner import Denial
from dsec.edge.states import takes
from libdsec.errors import DSecError, Unavailable
from libdsec.schema import CommandEntry

_log = structlog.get_logger("dsec.edge")

CONNECT_TIMEOUT_S = 10.0
"""For the first connection to an agent; it listens before the spawner answers."""
RECONNECT_TIMEOUT_S = 3.0
"""For a connection to an agent that was there a moment ago."""
MACHINE_ID_BYTES = 33
"""Of /etc/machine-id: 32 digits and a newline (machine-id(5)). One that is empty or says "uninitialized" is none."""
FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 1.0
"""Between connections that break as soon as they are made: the pause doubles."""
STATUS_WAIT_S = 1.0
"""How long a broken channel waits for the spawner to tell how the agent ended."""
KILLED_EXIT_CODE = 128 + signals.SIGKILL


class _MachineId(msgspec.Struct):
    """What is looked at of its file map."""

    type: str
    size: int


_machine_id = msgspec.msgpack.Decoder(_MachineId)

ConnectChannel = Callable[[str, Callable[[ChannelLost], None], float], Awaitable[Channel]]


async def connect_channel(path: str, on_lost: Callable[[ChannelLost], None], timeout_s: float) -> Channel:
    """The real :data:`ConnectChannel`."""
    return await Channel.connect(path, on_lost=on_lost, timeout_s=timeout_s)


class Agents:
    """The channels to all agents of an edge."""

    def __init__(self, inventory: Inventory, endings: Endings, connect: ConnectChannel) -> None:
        self._inventory = inventory
        self._endings = endings
        self._connect = connect

    # --- connecting

    async def connect(self, sandbox: Sandbox, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Connects to a sandbox's agent. Raises ChannelLost."""
        sandbox.channel = await self._connect(sandbox.record.socket, functools.partial(self._on_lost, sandbox), timeout_s)

    async def channel(self, sandbox: Sandbox) -> Channel:
        """The channel of a sandbox that takes calls. Raises SandboxFailed, SandboxGone, Conflict."""
        while True:
            if not takes(sandbox.state, "use"):
                raise refusal(sandbox.record)
            if sandbox.channel is not None:
                return sandbox.channel
            if sandbox.settling is None:
                raise Unavailable(f"sandbox {sandbox.id} is being connected", retry_after=0.2)
            await asyncio.wait([sandbox.settling])

    async def verdict(self, sandbox: Sandbox) -> DSecError:
        """What a channel that broke under a request means for the caller."""
        if self._inventory.closing:
            return Unavailable("the edge is being restarted; the command goes on: repeat the call with the same exec_id", retry_after=0.5)
        if sandbox.settling is not None:
            await asyncio.wait([sandbox.settling])
        if sandbox.state == "running":
            message = f"the connection to sandbox {sandbox.id} broke and is back; repeat the call with the same exec_id"
            return Unavailable(message, retry_after=0.1)
        return refusal(sandbox.record)

    async def make_workdir(self, sandbox: Sandbox) -> None:
        """Makes the working directory if it is missing, for the user that commands run as. Raises what the file operation raises."""
        record = sandbox.record
        if record.workdir == "/":
            return
        path = os_encode(record.workdir)
        try:
            try:
                await _builtin(sandbox, "mkdir", {"path": path, "parents": False, "mode": 0o755})
            except DSecError as error:
                if error.errno == errno.EEXIST:
                    return
                await _builtin(sandbox, "mkdir", {"path": path, "parents": True, "mode": 0o755})
            if record.init_user != "root":
                await _builtin(sandbox, "chown", {"path": path, "owner": record.init_user})
        except DSecError as error:
            error.field = error.field or "workdir"
            raise

    async def renew_machine_id(self, sandbox: Sandbox) -> None:
        """Gives a fork a machine id of its own, where its files have one at all: two machines with one id would be taken for each other.
        Raises what the file operation raises."""
        assert sandbox.channel is not None
        path = b"/etc/machine-id"
        found = await sandbox.channel.run(Start(exec_id=new_exec_id(), builtin="stat", args={"path": path}, user="root"))
        if found.exit_code != 0 or _machine_id.decode(found.stdout) != _MachineId(type="file", size=MACHINE_ID_BYTES):
            return
        content = secrets.token_hex(MACHINE_ID_BYTES // 2).encode() + b"\n"
        start = Start(exec_id=new_exec_id(), builtin="write", args={"path": path}, user="root", stdin=STDIN_INLINE, stdin_data=content)
        exit = await sandbox.channel.run(start)
        if exit.exit_code != 0:
            raise of_builtin(exit, "machine id")

    # --- breaking

    def on_exited(self, sandbox_id: str, status: int) -> None:
        """The spawner says that an agent is dead; ``status`` is its wait status."""
        sandbox = self._inventory.get(sandbox_id)
        if sandbox is None or self._inventory.closing:
            return
        if sandbox.dead is not None and not sandbox.dead.done():
            sandbox.dead.set_result(status)
        elif sandbox.state == "running" and sandbox.settling is None:
            self._endings.fail(sandbox, _how_it_ended(status))
        elif sandbox.state == "creating":
            # Told before the spawner's answer to the creation, which may still succeed: then its channel breaks.
            sandbox.dead = asyncio.get_running_loop().create_future()
            sandbox.dead.set_result(status)

    def on_blobs_aborted(self) -> None:
        """The spawner says that lazily mounted layers can't be read any more: what runs on them fails."""
        for sandbox in list(self._inventory):
            if sandbox.state == "running" and any(layer.lazy for layer in sandbox.record.layers):
                self._endings.fail(sandbox, "no blobfs served this node for too long: the data of its image can't be read any more")
        self._inventory.layers.lose_lazy()

    def on_denied(self, denial: Denial) -> None:
        """The spawner says that a sandbox's filter refused a system call."""
        sandbox = self._inventory.get(denial.sandbox)
        if sandbox is not None:
            more = "; further ones are not reported" if denial.last else ""
            sandbox.note(self._inventory.clock.wall(), "denied", f"{denial.call} was refused (process {denial.pid} of the host){more}")

    def _on_lost(self, sandbox: Sandbox, lost: ChannelLost) -> None:
        sandbox.channel = None
        self.reconnect(sandbox, str(lost))

    def reconnect(self, sandbox: Sandbox, why: str) -> None:
        """A sandbox that runs has no channel: has one made again, or the sandbox failed, beside the caller."""
        if sandbox.state == "running" and not self._inventory.closing and sandbox.settling is None:
            if sandbox.dead is None:
                sandbox.dead = asyncio.get_running_loop().create_future()
            sandbox.settling = self._inventory.tasks.start(self._settle(sandbox, why), f"settle {sandbox.id}")

    async def _settle(self, sandbox: Sandbox, lost: str) -> None:
        """A channel broke: is the agent still there? Then it is connected again; else the sandbox has failed."""
        pause = FIRST_PAUSE_S
        try:
            while await self._reconnected(sandbox):
                if sandbox.channel is not None or sandbox.state != "running":
                    sandbox.note(self._inventory.clock.wall(), "channel", f"the channel broke ({lost}) and was made again")
                    return
                # It broke while what runs was being followed.
                await asyncio.sleep(pause)
                pause = min(2 * pause, LAST_PAUSE_S)
            assert sandbox.dead is not None
            try:
                async with asyncio.timeout(STATUS_WAIT_S):
                    reason = _how_it_ended(await sandbox.dead)
            except TimeoutError:
                reason = f"the channel to its agent broke and can't be made again: {lost}"
        finally:
            sandbox.settling = None
            sandbox.dead = None
        if sandbox.state == "running":
            self._endings.fail(sandbox, reason)

    async def _reconnected(self, sandbox: Sandbox) -> bool:
        try:
            await self.connect(sandbox, RECONNECT_TIMEOUT_S)
        except (ChannelLost, ChannelError, OSError, TimeoutError):
            return False
        if sandbox.state == "running":
            await self.follow_running(sandbox)
        else:
            sandbox.close_channel()
        return True

    # --- commands

    def begin(self, sandbox: Sandbox, exec_id: str, text: str) -> Command:
        """A command is about to be started by the sandbox's channel: remembers it. ``text``: its command line."""
        self._count_kills(sandbox)
        now = self._inventory.clock.wall()
        kills = sandbox.see_oom_kills()
        if kills:
            sandbox.note(now, "oom", _kills_message(kills, claimed=False))
        return sandbox.command_started(CommandEntry(exec_id=exec_id, command=shorten(text), started_at=now))

    def end(self, sandbox: Sandbox, command: Command, exit: Exit) -> bool:
        """Writes a command's end into the sandbox's history; returns whether the kernel killed it for memory. Repeatable."""
        entry = command.entry
        if entry.duration_s is not None:
            return entry.oom_killed
        kills = sandbox.see_oom_kills()
        killed = not exit.timed_out and (exit.signal == signals.SIGKILL or exit.exit_code == KILLED_EXIT_CODE)
        claimed = killed and sandbox.claim_oom_kill(command)
        if kills:
            sandbox.note(self._inventory.clock.wall(), "oom", _kills_message(kills, claimed=claimed), entry.exec_id)
        entry.exit_code, entry.duration_s = exit.exit_code, exit.duration_us / 1e6
        entry.timed_out, entry.oom_killed = exit.timed_out, claimed
        return claimed

    def _count_kills(self, sandbox: Sandbox) -> None:
        # A sandbox without a channel may have ended: nobody would close what is opened now.
        if sandbox.kill_counter is None and sandbox.channel is not None:
            sandbox.kill_counter = self._inventory.cgroups.kill_counter(sandbox.id)

    # --- following

    def follow(self, sandbox: Sandbox, command: Command, stream: Stream) -> None:
        """Watches a started command to its end, for the idle rule and the sandbox's history."""
        self._inventory.tasks.start(self._follow(sandbox, command, stream), f"follow {stream.exec_id}")

    async def _follow(self, sandbox: Sandbox, command: Command, stream: Stream) -> None:
        try:
            self.end(sandbox, command, await stream.wait())
        except (ChannelLost, ChannelError):
            return  # whoever watches the channel settles what that means
        finally:
            sandbox.touch(self._inventory.clock.monotonic())

    async def follow_running(self, sandbox: Sandbox) -> None:
        """After a new connection: watches the commands that run since before."""
        channel = sandbox.channel
        if channel is None or not channel.running:
            return
        try:
            for entry in await channel.list():
                if not entry.running:
                    continue
                self._count_kills(sandbox)
                text = shorten(b" ".join(entry.argv).decode("utf-8", "replace"))
                found = CommandEntry(exec_id=entry.exec_id, command=text, started_at=entry.started_ms / 1000)
                command = sandbox.command_started(found)
                # One that has ended and gone meanwhile is no reason not to follow the others.
                with contextlib.suppress(ChannelError):
                    self.follow(sandbox, command, await channel.attach(entry.exec_id))
        except (ChannelLost, ChannelError) as error:
            _log.info("running commands can't be followed", sandbox=sandbox.id, error=str(error))


async def _builtin(sandbox: Sandbox, name: str, args: dict[str, object]) -> None:
    if sandbox.channel is None:
        raise ChannelLost("it ended while its working directory was being made")
    exit = await sandbox.channel.run(Start(exec_id=new_exec_id(), builtin=name, args=args, user="root"))
    if exit.exit_code != 0:
        raise of_builtin(exit, name)


def _kills_message(count: int, *, claimed: bool) -> str:
    """What an event tells of ``count`` memory kills, at least one; ``claimed``: one of them was the command's leader."""
    others = count - 1 if claimed else count
    processes = f"{others} process{'' if others == 1 else 'es'}"
    if not claimed:
        return f"the kernel killed {processes} for memory"
    return f"the kernel killed it and {processes} more for memory" if others else "the kernel killed it for memory"


def _how_it_ended(status: int) -> str:
    code = os.waitstatus_to_exitcode(status) if status >= 0 else status
    return f"its agent was killed by signal {-code}" if code < 0 else f"its agent ended with exit code {code}"
