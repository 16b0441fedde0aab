"""Create, command, delete, over and over with hundreds live: no slower at the end, nothing left, no kernel memory kept."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from pathlib import Path

from bench import memory, ours
from bench.claim import Claim, Outcome, Setting
from dsec.demo import footprint
from libdsec import Sandbox

CYCLES = 20_000
LIVE = 500
WINDOW = 1_000
"""The rates of the first and of the last this many cycles are compared."""
WORKERS = 16
SETTLE_S = 8.0
"""Pause before kernel memory is read: dead cgroups and namespaces are freed by workqueues and after RCU grace periods."""
DROP_SLAB = "2"
"""For /proc/sys/vm/drop_caches: dentries and inodes, which the kernel keeps as a cache, don't count as kept by us."""
MEMORY_MB = 1_024
"""Touched before the cycles."""
MB = 1 << 20


async def measure(setting: Setting) -> Outcome:
    cycles, live, window = (120, 20, 40) if setting.quick else (CYCLES, LIVE, WINDOW)
    async with ours.running(setting, "churn") as service:
        await service.stop(await service.start_many(live))  # the kernel's own caches for that many have been made once
        await service.gone()
        kernel_before = await _settled_kernel_memory()
        state = service.instance.marks.directory / "state"
        journal_before = _journal_bytes(state)
        service_pid = service.instance.service_pid
        files_before, resident_before = footprint.open_files(service_pid), footprint.resident(service_pid)
        await memory.warm(setting, MEMORY_MB)
        done_at = await _churn(service, cycles, live)
        left = await service.gone()
        kernel_after = await _settled_kernel_memory()
        detail = {
            "cycles": cycles,
            "live": live,
            "cycles_per_s": round(cycles / (done_at[-1] - done_at[0]), 1),
            "first_per_s": round(window / (done_at[window] - done_at[0]), 1),
            "last_per_s": round(window / (done_at[-1] - done_at[-1 - window]), 1),
            "each_window_per_s": [round(window / (done_at[end] - done_at[end - window]), 1) for end in range(window, cycles + 1, window)],
            "kernel_mb": [round(kernel_before / MB, 1), round(kernel_after / MB, 1)],
            "journal_mb": [round(journal_before / MB, 2), round(_journal_bytes(state) / MB, 2)],
            "service_open_files": [files_before, footprint.open_files(service_pid)],
            "service_resident_mb": [round(resident_before / MB, 1), round(footprint.resident(service_pid) / MB, 1)],
        }
        marks = service.instance.marks
    after = footprint.take(marks)
    return Outcome(
        figures={
            "late_rate_ratio": (done_at[window] - done_at[0]) / (done_at[-1] - done_at[-1 - window]),
            "leftovers": left.total + after.total,
            "kernel_mb_growth": (kernel_after - kernel_before) / MB,
        },
        detail={"ours": detail, "peer": {}},
    )


async def _churn(service: ours.Ours, cycles: int, live: int) -> list[float]:
    """Runs the cycles and empties the service; the moment at which each cycle ended, the first entry being the start."""
    alive: deque[Sandbox] = deque(await service.start_many(live))
    done_at = [time.perf_counter()]
    remaining = iter(range(cycles))

    async def worker() -> None:
        for _ in remaining:
            sandbox = await service.client.run_container(service.args())
            await ours.first_command(sandbox)
            alive.append(sandbox)
            await alive.popleft().stop()
            done_at.append(time.perf_counter())

    await asyncio.gather(*(worker() for _ in range(WORKERS)))
    await service.stop(list(alive))
    return done_at


async def _settled_kernel_memory() -> int:
    """Bytes of kernel memory once what is only waiting to be freed is freed."""
    await asyncio.to_thread(_drop_slab)
    await asyncio.sleep(SETTLE_S)
    await asyncio.to_thread(_drop_slab)
    return footprint.kernel_memory()


def _drop_slab() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text(DROP_SLAB)


def _journal_bytes(state: Path) -> int:
    return sum(file.stat().st_size for file in state.glob("journal.sqlite*"))


CLAIM = Claim(
    name="churn",
    what=f"{CYCLES:,} create/exec/delete at {LIVE} live: the last {WINDOW:,} against the first, nothing left",
    floors={"late_rate_ratio": (">=", 0.9), "leftovers": ("==", 0), "kernel_mb_growth": ("<=", 50)},
    measure=measure,
)
