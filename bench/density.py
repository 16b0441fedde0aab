"""Thousands live on one node, each answering, and all of them gone again."""

from __future__ import annotations

import asyncio
import time

from bench import memory, ours
from bench.claim import Claim, Outcome, Setting, median, rounded
from dsec.demo import footprint
from libdsec import Sandbox

SANDBOXES = 3_200
EDGE_OF_RATE = 200
"""The first and the last this many creates are compared."""
COMMANDS_AT_ONCE = 64
SETTLE_S = 3.0
"""Pause before MemAvailable is read: per-CPU caches and RCU callbacks of the creates drain."""
MEMORY_MB = 4_096
"""Touched before each round."""
MB = 1 << 20


async def measure(setting: Setting) -> Outcome:
    count, edge = (48, 12) if setting.quick else (SANDBOXES, EDGE_OF_RATE)
    rounds = [await _round(setting, count, edge) for _ in range(setting.rounds)]
    names = ("live", "mb_per_sandbox", "late_rate_ratio", "teardown_s")
    return Outcome(
        figures={**{name: median([one[name] for one in rounds]) for name in names}, "leftovers": max(one["leftovers"] for one in rounds)},
        detail={"ours": {name: rounded([one[name] for one in rounds]) for name in rounds[0]}, "peer": {}},
    )


async def _round(setting: Setting, count: int, edge: int) -> dict[str, float]:
    """One service filled and emptied."""
    await memory.warm(setting, MEMORY_MB)
    async with ours.running(setting, "density", scratch_mb=8_192) as service:
        await asyncio.sleep(SETTLE_S)
        available = footprint.memory_available()
        started = time.perf_counter()
        ready_at: list[float] = []
        sandboxes = await service.start_many(count, ready_at)
        created_s = ready_at[-1] - started
        answered = await _answering(sandboxes)
        live = min(answered, footprint.sandbox_agents(service.instance.marks))
        await asyncio.sleep(SETTLE_S)
        used = available - footprint.memory_available()
        started = time.perf_counter()
        await service.stop(sandboxes)
        stopped_s = time.perf_counter() - started
        left = await service.gone()
        teardown_s = time.perf_counter() - started
        marks = service.instance.marks
    after = footprint.take(marks)
    first_rate = edge / (ready_at[edge - 1] - (ready_at[-1] - created_s))
    last_rate = edge / (ready_at[-1] - ready_at[-1 - edge])
    return {
        "live": live,
        "mb_per_sandbox": used / MB / live,
        "late_rate_ratio": last_rate / first_rate,
        "teardown_s": teardown_s,
        "leftovers": left.total + after.total,
        "creates_per_s": count / created_s,
        "first_rate_per_s": first_rate,
        "last_rate_per_s": last_rate,
        "stop_calls_s": stopped_s,
    }


async def _answering(sandboxes: list[Sandbox]) -> int:
    """How many answer a command, asked when all are up."""
    turn = asyncio.Semaphore(COMMANDS_AT_ONCE)

    async def answers(sandbox: Sandbox) -> bool:
        async with turn:
            return (await sandbox.exec(ours.TRUE)).exit_code == 0

    return sum(await asyncio.gather(*map(answers, sandboxes)))


CLAIM = Claim(
    name="density",
    what=f"{SANDBOXES:,} live, each answering; memory of an idle one; the last creates' rate against the first; all gone",
    floors={
        "live": (">=", SANDBOXES),
        "mb_per_sandbox": ("<=", 1.2),
        "late_rate_ratio": (">=", 0.5),
        "teardown_s": ("<=", 10),
        "leftovers": ("==", 0),
    },
    measure=measure,
)
