"""What a directory's disk was made to write, as the kernel counts it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

SECTOR = 512
SAMPLE_S = 0.5
MB = 1e6


class Writes:
    """Bytes written to the disk since the block was entered; final once it is left, when everything dirty has been flushed."""

    bytes = 0
    peak_mb_s = 0.0
    """The highest rate over half a second."""


@asynccontextmanager
async def writes(directory: Path) -> AsyncIterator[Writes]:
    """Watches the disk that ``directory`` is on. What was dirty before is flushed first, what became dirty is flushed at the end."""
    device = _device(directory)
    await asyncio.to_thread(os.sync)
    result, start, started = Writes(), _written(device), time.perf_counter()
    watching = asyncio.create_task(_watch(device, result))
    try:
        yield result
        await asyncio.to_thread(os.sync)
    finally:
        watching.cancel()
    result.bytes = _written(device) - start
    # A run may be over before its first sample: its peak is its average at least.
    result.peak_mb_s = max(result.peak_mb_s, result.bytes / MB / (time.perf_counter() - started))


async def _watch(device: str, result: Writes) -> None:
    last, last_at = _written(device), time.perf_counter()
    while True:
        await asyncio.sleep(SAMPLE_S)
        now, at = _written(device), time.perf_counter()
        result.peak_mb_s = max(result.peak_mb_s, (now - last) / MB / (at - last_at))
        last, last_at = now, at


def _device(directory: Path) -> str:
    number = directory.stat().st_dev
    return f"{os.major(number)}:{os.minor(number)}"


def _written(device: str) -> int:
    # The seventh field of the kernel's block/stat.rst: sectors written, of 512 bytes whatever the disk's are.
    return int(Path(f"/sys/dev/block/{device}/stat").read_text().split()[6]) * SECTOR
