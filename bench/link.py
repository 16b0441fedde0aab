"""A network of the benchmark's own: a far side in a network namespace, behind a link of 1 Gbit/s, with a millisecond on the way.

Not every kernel has netem, so the rate is the link's (tbf on both ends) and the millisecond is a relay's on the far side, which holds back
what clients send for that long. Servers listen on the far side's loopback only; whoever wants them passes the relay and the link.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.claim import WrongAnswer
from dsec.demo import lifetime

NAMESPACE = "dsec-far-"
"""What the far side's namespaces are called, before the process id of their run."""
RATE = "1gbit"
DELAY_S = 0.001
ANSWER_DEADLINE_S = 60.0
STOP_DEADLINE_S = 20.0


@dataclass(frozen=True)
class Link:
    """The near end of the link, and how to get to the far side."""

    namespace: str
    device: str
    far: str
    """Address of the far side, as the near side reaches it."""
    stack: AsyncExitStack
    """Ends what runs on the far side."""
    servers: list[int]
    """Process ids of what runs there."""

    def processor_s(self) -> float:
        """Seconds of processor time that the far side has used: it shares this machine's processors, which a real one wouldn't."""
        ticks = 0
        for pid in self.servers:
            # Fields 14 and 15 of proc_pid_stat(5), counted from behind the command's name.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def received(self) -> int:
        """Bytes that have come over the link to the near side, headers included."""
        return int(Path(f"/sys/class/net/{self.device}/statistics/rx_bytes").read_text())

    async def serve(self, *command: str | Path, port: int, relay: int, log: Path) -> None:
        """Runs a server on the far side until the link is taken down, and relays ``relay`` of the far address to its loopback ``port``.

        Raises WrongAnswer if it doesn't listen in time.
        """
        relay_command = (sys.executable, "-m", "bench.relay", self.far, str(relay), str(port), str(DELAY_S))
        for words, output in ((command, log), (relay_command, log.with_suffix(".relay"))):
            started = await self.stack.enter_async_context(process(self._inside(*words), output))
            self.servers.append(started.pid)
        deadline = asyncio.get_running_loop().time() + ANSWER_DEADLINE_S
        while not await _takes_connections(self.far, relay):
            if asyncio.get_running_loop().time() > deadline:
                said = await asyncio.to_thread(log.read_bytes)
                raise WrongAnswer(f"{command[0]} doesn't listen on port {port}: {said[-2_000:].decode('utf-8', 'replace')}")
            await asyncio.sleep(0.2)

    def _inside(self, *command: str | Path) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *map(str, command)]


@asynccontextmanager
async def up() -> AsyncIterator[Link]:
    """Makes the namespace and the link; takes both away when the block is left, and what runs there."""
    _remove_left()
    token = os.getpid()
    subnet = f"10.213.{secrets.randbelow(255)}"
    link = Link(f"{NAMESPACE}{token}", f"dsn{token}", f"{subnet}.2", AsyncExitStack(), [])
    far_device = f"dsf{token}"
    await call("ip", "netns", "add", link.namespace)
    try:
        await call("ip", "link", "add", link.device, "type", "veth", "peer", "name", far_device, "netns", link.namespace)
        try:
            await call("ip", "addr", "add", f"{subnet}.1/30", "dev", link.device)
            await call("ip", "link", "set", link.device, "up")
            await call(*link._inside("ip", "addr", "add", f"{subnet}.2/30", "dev", far_device))
            await call(*link._inside("ip", "link", "set", far_device, "up"))
            await call(*link._inside("ip", "link", "set", "lo", "up"))
            shape = ("root", "tbf", "rate", RATE, "burst", "256kb", "latency", "50ms")
            await call("tc", "qdisc", "add", "dev", link.device, *shape)
            await call(*link._inside("tc", "qdisc", "add", "dev", far_device, *shape))
            async with link.stack:
                yield link
        finally:
            with suppress(WrongAnswer):
                await asyncio.shield(call("ip", "link", "del", link.device))
    finally:
        await asyncio.shield(call("ip", "netns", "del", link.namespace))


def _remove_left() -> None:
    """Removes the namespaces, with the links into them, of runs that were killed."""
    for path in Path("/run/netns").glob(f"{NAMESPACE}*"):
        if not Path("/proc", path.name.removeprefix(NAMESPACE)).exists():
            subprocess.run(["ip", "netns", "del", path.name], check=False)


async def call(*command: str) -> None:
    """Runs a command to its end. Raises WrongAnswer with what it complained of."""
    started = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, complaint = await started.communicate()
    if started.returncode != 0:
        raise WrongAnswer(f"{' '.join(command)}: {complaint.decode('utf-8', 'replace').strip()}")


async def _takes_connections(address: str, port: int) -> bool:
    """Whether a server stands behind the relay, which closes at once what its server doesn't take."""
    try:
        reader, writer = await asyncio.open_connection(address, port)
    except OSError:
        return False
    try:
        await asyncio.wait_for(reader.read(1), 0.2)
    except TimeoutError:
        return True
    except OSError:
        return False
    finally:
        writer.close()
    return False


@asynccontextmanager
async def process(command: Sequence[str | Path], log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs a command with its output in a file until the block is left."""
    with log.open("wb") as output:
        started = await asyncio.create_subprocess_exec(
            *lifetime.with_parent("TERM", *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield started
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(started.wait(), STOP_DEADLINE_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            await started.wait()
