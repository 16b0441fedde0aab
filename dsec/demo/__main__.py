"""``./run demo``."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path

import uvloop
from rich.console import Console
from rich.live import Live

from dsec.demo import environment, footprint, instance, rollout, show
from dsec.demo.rollout import Rollout, Stage
from dsec.images.debian import DebianRootError
from libdsec import DSecClient, DSecError

ROLLOUTS = 64
SETTLE_S = 1.0
"""Pause before MemAvailable is read: what the kernel is only waiting to free is freed."""
SCRATCH_MB = 4_096
"""Writable layers: a rollout writes less than 1 MB."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 if every rollout passed and nothing is left, else 1; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="./run demo", description="64 rollouts at once in 64 sandboxes on this machine.")
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS, help="how many (default: %(default)s)")
    parser.add_argument("--cache", type=Path, help="directory that keeps the base filesystem for the next time (default: it isn't kept)")
    options = parser.parse_args(arguments)
    if os.geteuid() != 0:
        parser.error("sandboxes need root")
    if options.rollouts < 1:
        parser.error("--rollouts must be at least 1")
    try:
        return uvloop.run(_interruptible(_demo(options.rollouts, options.cache, show.console())))
    except asyncio.CancelledError:
        print("interrupted; everything that was started is gone", file=sys.stderr)
        return 130
    except (instance.InstanceError, DebianRootError, DSecError) as error:
        print("\n".join((f"error: {error}", *getattr(error, "__notes__", ()))), file=sys.stderr)
        return 1


async def _interruptible(work: Awaitable[int]) -> int:
    """Awaits, cancelled by SIGINT and SIGTERM so that everything is taken down in order."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    return await work


async def _demo(count: int, cache: Path | None, console: Console) -> int:
    started = time.monotonic()
    rollouts = [Rollout(index) for index in range(count)]
    with tempfile.TemporaryDirectory(prefix="dsec-demo-") as temporary:
        async with instance.running("demo", scratch_mb=SCRATCH_MB) as own:
            console.print(f"service started: {own.url}")
            async with DSecClient(own.nearest, api_key=own.api_key) as client:
                await _build(client, cache or Path(temporary), console)
                measured, during = await _roll_out(client, own, rollouts, console)
    after = footprint.take(own.marks)
    console.print(show.results(rollouts, measured))
    console.print(show.proof(own.before, during, after))
    for line in show.troubles(rollouts):
        console.print(f"[red]{line}[/]")
    console.print(f"took {time.monotonic() - started:.0f} s")
    return 1 if after.total or show.troubles(rollouts) else 0


async def _build(client: DSecClient, cache: Path, console: Console) -> None:
    """Makes the three layers and imports them."""
    steps = (
        (f"base image: Debian with {', '.join(environment.PACKAGES)}", _import_base(client, cache)),
        ("workspace: a repository with a failing test", environment.import_workspace(client)),
        ("toolkit: a scripted agent", environment.import_toolkit(client)),
    )
    for what, work in steps:
        started = time.monotonic()
        with console.status(f"{what} …"):
            await work
        console.print(f"{what}: {time.monotonic() - started:.1f} s")


async def _import_base(client: DSecClient, cache: Path) -> None:
    await environment.import_base(client, await environment.debian_tar(cache, environment.PACKAGES))


async def _roll_out(
    client: DSecClient, own: instance.Instance, rollouts: list[Rollout], console: Console
) -> tuple[show.Measured, footprint.Footprint]:
    """All rollouts at once. First every sandbox is made and answers one command, then memory is read, then the work begins."""
    await asyncio.sleep(SETTLE_S)
    available = footprint.memory_available()
    with Live(show.progress(rollouts), console=console, refresh_per_second=10) as live:

        def changed() -> None:
            live.update(show.progress(rollouts))

        create_s = await _create(client, rollouts, changed)
        await asyncio.gather(*map(rollout.first_command, rollouts))
        await asyncio.sleep(SETTLE_S)
        memory = available - footprint.memory_available()
        during = own.footprint()
        started = time.perf_counter()
        await asyncio.gather(*(rollout.run(one, changed) for one in rollouts))
        measured = show.Measured(create_s, memory, time.perf_counter() - started)
    console.print(f"\nthe agents' change, as the first rollout has it:\n{rollouts[0].diff}", markup=False, soft_wrap=True)
    await asyncio.gather(*(one.sandbox.stop() for one in rollouts if one.sandbox))
    return measured, during


async def _create(client: DSecClient, rollouts: list[Rollout], changed: rollout.Changed) -> float:
    """Gives every rollout its sandbox, by one request. Seconds until the last was ready. Raises the first error."""
    started = time.perf_counter()
    async for item in client.run_many(rollout.args(), count=len(rollouts)):
        if item.error is not None:
            raise item.error
        one = rollouts[item.index]
        one.sandbox, one.stage, one.created_after_s = item.sandbox, Stage.READY, time.perf_counter() - started
        changed()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
