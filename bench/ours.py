"""Our side: a service of the benchmark's own and a client to it, in this process, as a trainer would have it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bench.claim import Setting, WrongAnswer
from dsec.demo import footprint, instance
from dsec.demo.footprint import Footprint
from libdsec import CommandResult, DSecClient, DSecContainerRunArgs, RunItem, Sandbox

IMAGE = "bench"
SCRATCH_MB = 4_096
STOPS_AT_ONCE = 128
"""Stop requests in flight when many sandboxes are thrown away."""
GONE_DEADLINE_S = 60.0
GONE_POLL_S = 0.05
TRUE = ("true",)


@dataclass(frozen=True)
class Ours:
    """A running service with the image imported, and a client."""

    instance: instance.Instance
    client: DSecClient
    idle: Footprint
    """What it holds without any sandbox."""

    def args(self, *, memory_limit_mb: int = 2_048) -> DSecContainerRunArgs:
        """Arguments of a sandbox of the benchmark's image, without network like the peer's containers; the rest as by default."""
        return DSecContainerRunArgs(container_image=IMAGE, network="none", memory_limit_mb=memory_limit_mb)

    async def start_many(self, count: int, ready_at: list[float] | None = None) -> list[Sandbox]:
        """``count`` sandboxes by one request; the moment at which each was told goes into ``ready_at``. Raises WrongAnswer if one fails."""
        sandboxes = []
        async for item in self.client.run_many(self.args(), count=count):
            sandboxes.append(made(item))
            if ready_at is not None:
                ready_at.append(time.perf_counter())
        return sandboxes

    async def stop(self, sandboxes: Sequence[Sandbox]) -> None:
        """Stops them all."""
        turn = asyncio.Semaphore(STOPS_AT_ONCE)

        async def stop_one(sandbox: Sandbox) -> None:
            async with turn:
                await sandbox.stop()

        await asyncio.gather(*map(stop_one, sandboxes))

    async def gone(self) -> Footprint:
        """Waits until the kernel holds no more than without any sandbox; what is still there at the deadline."""
        deadline = time.monotonic() + GONE_DEADLINE_S
        while True:
            left = self.instance.footprint().beyond(self.idle)
            if left.total == 0 or time.monotonic() > deadline:
                return left
            await asyncio.sleep(GONE_POLL_S)


@asynccontextmanager
async def running(setting: Setting, name: str, *, scratch_mb: int = SCRATCH_MB) -> AsyncIterator[Ours]:
    """Starts a service, imports the root filesystem and uses it once, so that nothing measured pays for a first use."""
    async with (
        instance.running(f"bench-{name}", scratch_mb=scratch_mb, parent=setting.parent) as own,
        DSecClient(url=own.nearest, api_key=own.api_key) as client,
    ):
        await client.images.import_(setting.root_tar, name=IMAGE)
        ours = Ours(own, client, Footprint())
        sandboxes = await ours.start_many(2)
        for sandbox in sandboxes:
            check(await sandbox.exec(TRUE))
        await ours.stop(sandboxes)
        yield Ours(own, client, await _idle(own))


async def first_command(sandbox: Sandbox) -> None:
    """``true`` in a sandbox; its answer checked."""
    check(await sandbox.exec(TRUE))


def check(result: CommandResult) -> CommandResult:
    """The result, or WrongAnswer if the command failed."""
    if result.exit_code != 0:
        raise WrongAnswer(f"a command ended with {result.exit_code}: {result.start_error or result.stderr[-400:]}")
    return result


def made(item: RunItem) -> Sandbox:
    """The sandbox of a batch's item, or WrongAnswer if it wasn't made."""
    if item.sandbox is None:
        raise WrongAnswer(f"sandbox {item.index} wasn't made: {item.error}")
    return item.sandbox


async def _idle(own: instance.Instance) -> Footprint:
    """The footprint without sandboxes, once no process runs under a sandbox's uid."""
    for _ in range(int(GONE_DEADLINE_S / GONE_POLL_S)):
        if footprint.sandbox_agents(own.marks) == 0:
            break
        await asyncio.sleep(GONE_POLL_S)
    return own.footprint()
