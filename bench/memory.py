"""Memory that is the machine's own before anything is measured.

A hypervisor may take a guest's free memory back, and gives it again page by page as it is touched: up to 16 µs for 4 KiB where these
benchmarks are run, more than most of what they measure costs, and not the same from one minute to the next. So each measurement, ours or
the peer's, begins after as much memory as it needs was touched and freed. On hardware that keeps its memory this changes nothing and takes
a third of a second a gigabyte.
"""

from __future__ import annotations

import asyncio
import mmap
import sys

from bench.claim import Setting, WrongAnswer
from dsec.demo import footprint

KEPT_FREE_MB = 1_024
"""Never touched: other processes go on."""


async def warm(setting: Setting, megabytes: int) -> None:
    """Touches and frees that much memory, less if less is available; nothing in a smoke run. Raises WrongAnswer."""
    if setting.quick:
        return
    # In a process of its own: the call that touches the pages holds the interpreter.
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "bench.memory", str(megabytes))
    try:
        if await process.wait() != 0:
            raise WrongAnswer(f"{megabytes} MB of memory could not be touched")
    finally:
        if process.returncode is None:
            process.kill()


def _touch(megabytes: int) -> None:
    room = footprint.memory_available() // (1 << 20) - KEPT_FREE_MB
    if (size := min(megabytes, room) << 20) > 0:
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()


if __name__ == "__main__":
    _touch(int(sys.argv[1]))
