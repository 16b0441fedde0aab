"""Reading a blob that became whole under a live mount, against the same blob mounted from disk: both by a program in a sandbox."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bench import memory, ours
from bench.claim import Claim, Outcome, Setting, WrongAnswer, median, rounded
from bench.cold import S3_PORT, drop_caches
from bench.servers import S3
from dsec.demo import instance
from libdsec import DSecClient, DSecContainerRunArgs, Sandbox

SIZE = 500_000_000
READS = 20_000
AT = "/data"
SEQUENTIAL = f"""
import time
started, total, buffer = time.perf_counter(), 0, bytearray(1 << 20)
with open({AT!r} + "/blob", "rb", buffering=0) as file:
    while count := file.readinto(buffer):
        total += count
print(total / 1e6 / (time.perf_counter() - started))
"""
RANDOM = f"""
import os, random, sys, time
count, dice = int(sys.argv[1]), random.Random(1)
file = os.open({AT!r} + "/blob", os.O_RDONLY)
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
pages = os.fstat(file).st_size // 4096
offsets = [dice.randrange(pages) * 4096 for _ in range(count)]
started = time.perf_counter()
for offset in offsets:
    os.pread(file, 4096, offset)
print(count / (time.perf_counter() - started))
"""
MEMORY_MB = 1_024
"""Touched before each read: what is read stays in memory."""
COMPLETE_DEADLINE_S = 120.0
READ_DEADLINE_S = 300.0


async def measure(setting: Setting) -> Outcome:
    size, reads = (8_000_000, 500) if setting.quick else (SIZE, READS)
    with tempfile.TemporaryDirectory(prefix="dsec-warm-", dir=setting.parent) as name:
        directory, s3 = Path(name), S3(Path(name) / "s3")
        os.chmod(directory, 0o755)
        (directory / "content").mkdir()
        await asyncio.to_thread(_make_blob, directory / "content" / "blob", size)
        async with s3.running(S3_PORT), _node(setting, "whole", s3) as (_, first), _node(setting, "lazy", s3) as (second_home, second):
            await first.images.import_(setting.root_tar, name=ours.IMAGE)
            image = await first.images.import_(directory / "content", name="blob", kind="workspace", at=AT)
            args = DSecContainerRunArgs(container_image=ours.IMAGE, workspace="blob", network="none")
            async with await first.run_container(args) as whole, await second.run_container(args) as lazy:
                await _read(lazy, SEQUENTIAL)
                await _complete([second_home / "state/images/blobs" / str(layer.blob).removeprefix("sha256:") for layer in image.layers])
                figures: dict[str, list[float]] = {"seq_lazy": [], "seq_whole": [], "rand_lazy": [], "rand_whole": []}
                for turn in range(setting.rounds):
                    sides = [("lazy", lazy), ("whole", whole)]
                    for side, sandbox in sides if turn % 2 == 0 else reversed(sides):
                        await _cold(setting)
                        figures[f"seq_{side}"].append(await _read(sandbox, SEQUENTIAL))
                        await _cold(setting)
                        figures[f"rand_{side}"].append(await _read(sandbox, RANDOM, str(reads)))
    return Outcome(
        figures={
            "seq_ratio": median([a / b for a, b in zip(figures["seq_lazy"], figures["seq_whole"], strict=True)]),
            "rand_ratio": median([a / b for a, b in zip(figures["rand_lazy"], figures["rand_whole"], strict=True)]),
        },
        detail={
            "ours": {"bytes": size, "reads": reads, "mb_s": rounded(figures["seq_lazy"]), "reads_s": rounded(figures["rand_lazy"])},
            "peer": {"mb_s": rounded(figures["seq_whole"]), "reads_s": rounded(figures["rand_whole"])},
        },
    )


@asynccontextmanager
async def _node(setting: Setting, name: str, s3: S3) -> AsyncIterator[tuple[Path, DSecClient]]:
    options = ("--store", s3.url(f"127.0.0.1:{S3_PORT}"))
    async with (
        instance.running(f"bench-{name}", scratch_mb=1_024, parent=setting.parent, options=options) as own,
        DSecClient(url=own.nearest, api_key=own.api_key) as client,
    ):
        yield own.marks.directory, client


async def _cold(setting: Setting) -> None:
    await drop_caches()
    await memory.warm(setting, MEMORY_MB)


async def _read(sandbox: Sandbox, program: str, *arguments: str) -> float:
    """What the program says it reached."""
    return float(ours.check(await sandbox.exec(["python3", "-c", program, *arguments], timeout=READ_DEADLINE_S)).stdout)


async def _complete(blobs: list[Path]) -> None:
    """Waits until the node has taken the blobs over. Raises WrongAnswer."""
    deadline = time.monotonic() + COMPLETE_DEADLINE_S
    while not all([await asyncio.to_thread(blob.exists) for blob in blobs]):
        if time.monotonic() > deadline:
            raise WrongAnswer("a blob that was read whole isn't a blob of the node")
        await asyncio.sleep(0.1)


def _make_blob(path: Path, size: int) -> None:
    with path.open("wb") as file:
        for _ in range(size // 1_000_000):
            file.write(os.urandom(1_000_000))


CLAIM = Claim(
    name="warm-read",
    what="a blob that became whole under a live mount: 500 MB in order and 4 KiB at random, against plain EROFS on disk",
    floors={"seq_ratio": (">=", 0.95), "rand_ratio": (">=", 0.7)},
    measure=measure,
)
