"""Bytes through the whole chain, incompressible: a command's output, a file up, a file down; the edge's memory stays flat."""

from __future__ import annotations

import asyncio
import mmap
import os
import tempfile
import time
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import suppress

from bench import memory, ours
from bench.claim import Claim, Outcome, Setting, WrongAnswer, median, rounded
from dsec.demo import footprint
from libdsec import Sandbox

SIZE = 1 << 30
SANDBOX_MEMORY_MB = 4_096
MEMORY_MB = 2_048
"""The uploaded file in memory, and as much again on its way to the disk."""
PIECE = 256 << 10
"""Bytes that the uploading client hands over at a time."""
UPLOADED = "/data"
SAMPLE_S = 0.02
"""How often the edge's resident memory is read."""
MB = 1 << 20


async def measure(setting: Setting) -> Outcome:
    size = 16 * MB if setting.quick else SIZE
    stdout_rates, up_rates, down_rates, growths = [], [], [], []
    async with ours.running(setting, "stream", scratch_mb=8_192) as service:
        sandbox = await service.client.run_container(service.args(memory_limit_mb=SANDBOX_MEMORY_MB))
        with tempfile.TemporaryFile(dir=setting.parent) as file, _random_content(file.fileno(), size) as content:
            for _ in range(setting.rounds):
                await memory.warm(setting, MEMORY_MB)
                with _MemoryWatch(service.instance.service_pid) as watch:
                    up_rates.append(size / 1e6 / await _upload(sandbox, content))
                    stdout_rates.append(size / 1e6 / await _stdout(sandbox, content))
                    down_rates.append(size / 1e6 / await _download(sandbox, content))
                growths.append(watch.growth / MB)
                await sandbox.files.remove(UPLOADED)
        await sandbox.stop()
    return Outcome(
        figures={
            "stdout_mb_s": median(stdout_rates),
            "upload_mb_s": median(up_rates),
            "download_mb_s": median(down_rates),
            "edge_growth_mb": max(growths),
        },
        detail={
            "ours": {
                "bytes": size,
                "stdout_mb_s": rounded(stdout_rates),
                "upload_mb_s": rounded(up_rates),
                "download_mb_s": rounded(down_rates),
                "edge_growth_mb": rounded(growths),
            },
            "peer": {},
        },
    )


def _random_content(descriptor: int, size: int) -> mmap.mmap:
    """Maps ``size`` random bytes, written to an open file."""
    for start in range(0, size, PIECE):
        os.pwrite(descriptor, os.urandom(min(PIECE, size - start)), start)
    return mmap.mmap(descriptor, size)


async def _upload(sandbox: Sandbox, content: mmap.mmap) -> float:
    """Seconds that it takes to write the content to a file in the sandbox."""

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(content), PIECE):
            yield content[start : start + PIECE]

    started = time.perf_counter()
    await sandbox.files.write_stream(UPLOADED, pieces())
    return time.perf_counter() - started


async def _stdout(sandbox: Sandbox, content: mmap.mmap) -> float:
    """Seconds that it takes a command to write the content to its standard output, and us to read and compare it."""
    started = time.perf_counter()
    process = await sandbox.start(["cat", UPLOADED])
    await _compare(process.stdout, content)
    ours.check(await process.wait())
    return time.perf_counter() - started


async def _download(sandbox: Sandbox, content: mmap.mmap) -> float:
    """Seconds that it takes to read the file back and compare it."""
    started = time.perf_counter()
    await _compare(sandbox.files.read_stream(UPLOADED), content)
    return time.perf_counter() - started


async def _compare(chunks: AsyncIterable[bytes], content: mmap.mmap) -> None:
    """Reads to the end. Raises WrongAnswer if it isn't the content, byte for byte."""
    offset = 0
    async for chunk in chunks:
        if content[offset : offset + len(chunk)] != chunk:
            raise WrongAnswer(f"the bytes from offset {offset} on aren't those that were written")
        offset += len(chunk)
    if offset != len(content):
        raise WrongAnswer(f"{offset} bytes came, {len(content)} were written")


class _MemoryWatch:
    """Samples a process's resident memory while the block runs."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = footprint.resident(pid)
        self._peak = self._before

    @property
    def growth(self) -> int:
        """Bytes by which the peak exceeds the beginning."""
        return self._peak - self._before

    def __enter__(self) -> _MemoryWatch:
        self._task = asyncio.create_task(self._sample())
        return self

    def __exit__(self, *_: object) -> None:
        self._task.cancel()

    async def _sample(self) -> None:
        with suppress(asyncio.CancelledError):
            while True:
                self._peak = max(self._peak, footprint.resident(self._pid))
                await asyncio.sleep(SAMPLE_S)


CLAIM = Claim(
    name="stream",
    what="1 GB of stdout, 1 GB up, 1 GB down, incompressible; growth of the edge's memory",
    floors={"stdout_mb_s": (">=", 600), "upload_mb_s": (">=", 350), "download_mb_s": (">=", 500), "edge_growth_mb": ("<=", 64)},
    measure=measure,
)
