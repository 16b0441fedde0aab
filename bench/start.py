"""Many sandboxes at once: from the request to the answer of each one's first command."""

from __future__ import annotations

import asyncio
import time

from bench import memory, ours, peer
from bench.claim import Claim, Outcome, Setting, median, rounded

SANDBOXES = 500
CONTAINERS = 48
"""Docker's share of a round: enough for a steady rate at a hundredth of ours."""
MEMORY_MB = 1_024
"""Touched before each measurement."""


async def measure(setting: Setting) -> Outcome:
    count, containers = (32, 8) if setting.quick else (SANDBOXES, CONTAINERS)
    our_rates, peer_rates, peer_runs = [], [], []
    async with ours.running(setting, "start") as service, peer.running(setting.root_tar, setting.parent) as docker:
        for _ in range(setting.rounds):
            await memory.warm(setting, MEMORY_MB)
            our_rates.append(await _our_rate(service, count))
            await memory.warm(setting, MEMORY_MB)
            runs_per_s, pairs_per_s = await _peer_rates(docker, containers)
            peer_runs.append(runs_per_s)
            peer_rates.append(pairs_per_s)
    return Outcome(
        figures={
            "rate_per_s": median(our_rates),
            "ratio_docker": median([a / b for a, b in zip(our_rates, peer_rates, strict=True)]),
        },
        detail={
            "ours": {"sandboxes": count, "rates_per_s": rounded(our_rates)},
            "peer": {
                "containers": containers,
                "run_and_exec_per_s": rounded(peer_rates),
                "run_per_s": rounded(peer_runs),
                "parallel": peer.PARALLEL,
            },
        },
        strange=peer.strange("parallel run -d per second", median(peer_runs), peer.PARALLEL_RUNS_PER_S),
    )


async def _our_rate(service: ours.Ours, count: int) -> float:
    """Sandboxes a second: one request for all, each one's first command sent as soon as it is told."""
    started = time.perf_counter()
    sandboxes, first_commands = [], []
    async for item in service.client.run_many(service.args(), count=count):
        sandbox = ours.made(item)
        sandboxes.append(sandbox)
        first_commands.append(asyncio.create_task(ours.first_command(sandbox)))
    await asyncio.gather(*first_commands)
    rate = count / (time.perf_counter() - started)
    await service.stop(sandboxes)
    await service.gone()
    return rate


async def _peer_rates(docker: peer.Docker, count: int) -> tuple[float, float]:
    """``docker run -d`` a second, and ``run -d`` followed by ``exec true`` a second, several clients at once."""
    turn = asyncio.Semaphore(peer.PARALLEL)

    async def run(name: str) -> None:
        async with turn:
            await docker.start(name)

    async def run_and_exec(name: str) -> None:
        async with turn:
            await docker.start(name)
            await docker.exec_true(name)

    rates = []
    for kind in (run, run_and_exec):
        names = [f"{kind.__name__}-{index}" for index in range(count)]
        started = time.perf_counter()
        await asyncio.gather(*map(kind, names))
        rates.append(count / (time.perf_counter() - started))
        await docker.remove(names)
    return rates[0], rates[1]


CLAIM = Claim(
    name="start",
    what=f"{SANDBOXES} sandboxes at once, request to each one's first command answered, against docker run -d + exec",
    floors={"rate_per_s": (">=", 220), "ratio_docker": (">=", 25)},
    measure=measure,
)
