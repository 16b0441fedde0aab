"""A big workspace in many sandboxes at once: as a mounted layer, against a tar.gz that each unpacks for itself."""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import random
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench import disk, ours
from bench.claim import Claim, Outcome, Setting, median, rounded
from libdsec import DSecContainerRunArgs, Sandbox

SANDBOXES = 64
WORKSPACE_MB = 300
FILE_BYTES = 60_000
AT = "/work"
ARCHIVE_AT = "/archive"
ARCHIVE = "workspace.tar.gz"
WORDS = 4_096
"""Different pieces that files are put together of: they compress about as source code does, to a quarter."""
UNPACK_DEADLINE_S = 1_800.0


async def measure(setting: Setting) -> Outcome:
    count, megabytes = (4, 8) if setting.quick else (SANDBOXES, WORKSPACE_MB)
    with tempfile.TemporaryDirectory(prefix="dsec-layers-", dir=setting.parent) as name:
        directory = Path(name)
        (directory / "archive").mkdir()
        await asyncio.to_thread(_make_workspace, directory / "workspace.tar", directory / "archive" / ARCHIVE, megabytes)
        scratch_mb = 2_048 + count * megabytes * 5 // 4
        layer_times, layer_writes = [], []
        async with ours.running(setting, "layers", scratch_mb=scratch_mb) as service:
            # Both are there before anything is measured: the layer in the image store, the archive in each sandbox's image.
            await service.client.images.import_(directory / "workspace.tar", name="workspace", kind="workspace", at=AT)
            await service.client.images.import_(directory / "archive", name="archive", kind="workspace", at=ARCHIVE_AT)
            for _ in range(setting.rounds):
                async with disk.writes(setting.parent) as written:
                    seconds, sandboxes = await _ready(service, "workspace", count, f"test -f {AT}/file-0")
                    layer_times.append(seconds)
                layer_writes.append(written)
                await service.stop(sandboxes)
                await service.gone()
            # Once: it is the slow side by far, and its rounds differ little.
            async with disk.writes(setting.parent) as tar_writes:
                tar_time, sandboxes = await _ready(
                    service, "archive", count, f"mkdir {AT} && tar xzf {ARCHIVE_AT}/{ARCHIVE} -C {AT} && test -f {AT}/file-0"
                )
            await service.stop(sandboxes)
            await service.gone()
    layer_bytes = median([one.bytes for one in layer_writes])
    layer_peak = median([one.peak_mb_s for one in layer_writes])
    return Outcome(
        figures={
            "speedup": tar_time / median(layer_times),
            "disk_write_ratio": layer_bytes / tar_writes.bytes,
            "peak_write_ratio": layer_peak / tar_writes.peak_mb_s,
        },
        detail={
            "ours": {
                "sandboxes": count,
                "seconds": rounded(layer_times, 3),
                "written_mb": rounded([one.bytes / 1e6 for one in layer_writes]),
                "peak_mb_s": rounded([one.peak_mb_s for one in layer_writes]),
            },
            "peer": {
                "seconds": round(tar_time, 2),
                "written_mb": round(tar_writes.bytes / 1e6, 1),
                "peak_mb_s": round(tar_writes.peak_mb_s, 1),
                "rounds": 1,
            },
        },
    )


async def _ready(service: ours.Ours, workspace: str, count: int, command: str) -> tuple[float, Sequence[Sandbox]]:
    """Starts ``count`` sandboxes with the workspace; seconds until ``command`` has succeeded in each."""
    args = DSecContainerRunArgs(container_image=ours.IMAGE, workspace=workspace, network="none")
    started = time.perf_counter()
    sandboxes, commands = [], []
    async for item in service.client.run_many(args, count=count):
        sandbox = ours.made(item)
        sandboxes.append(sandbox)
        commands.append(asyncio.create_task(sandbox.exec(command, timeout=UNPACK_DEADLINE_S)))
    for result in await asyncio.gather(*commands):
        ours.check(result)
    return time.perf_counter() - started, sandboxes


def _make_workspace(tar: Path, archive: Path, megabytes: int) -> None:
    """The same content twice: a plain tar to import, a tar.gz to unpack."""
    dice = random.Random(7)
    words = [os.urandom(8).hex().encode() + b" " for _ in range(WORDS)]
    with tar.open("wb") as plain, tarfile.open(fileobj=plain, mode="w") as output:
        for number in range(megabytes * 1_000_000 // FILE_BYTES):
            content = b"".join(dice.choices(words, k=FILE_BYTES // len(words[0])))
            member = tarfile.TarInfo(f"file-{number}")
            member.size = len(content)
            output.addfile(member, io.BytesIO(content))
    with tar.open("rb") as source, gzip.open(archive, "wb", compresslevel=6) as packed:
        while piece := source.read(1 << 20):
            packed.write(piece)


CLAIM = Claim(
    name="layers-vs-tar",
    what=f"{SANDBOXES} sandboxes with a workspace of {WORKSPACE_MB} MB: a mounted layer against a tar.gz that each unpacks",
    floors={"speedup": (">=", 60), "disk_write_ratio": ("<=", 0.002)},
    measure=measure,
)
