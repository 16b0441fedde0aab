"""Images that are not on the node yet: a store and a registry behind a link of 1 Gbit/s, caches dropped, docker pull + run as the peer.

What stands on the far side is made once and kept (`.cache/bench`): the same root filesystems, pushed to a docker-registry by docker and
published to an S3 store by a node of ours.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import disk, link, memory, ours, peer
from bench.claim import Claim, Outcome, Setting, WrongAnswer, median
from bench.environments import TOOLCHAINS, Toolchain
from bench.rootfs import PACKAGES
from bench.servers import S3, Registry
from dsec.demo import instance
from dsec.images.chunks import CHUNK_BYTES
from libdsec import DSecClient, DSecContainerRunArgs, Sandbox

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "bench"
SANDBOXES = 128
RUNS_AT_ONCE = 16
"""Sandboxes whose workload runs at a time, and docker runs: more make neither faster on two cores."""
REGISTRY_PORT, S3_PORT = 5000, 8333
SCRATCH_MB = 4_096
MEMORY_MB = 8_192
"""Touched before each run: what is written on the way stays in memory, on docker's side most of all."""
RECORD_DEADLINE_S = 120.0


@dataclass(frozen=True)
class FarSide:
    """The servers behind the link, and what they hold."""

    link: link.Link
    toolchains: Sequence[Toolchain]
    registry: Registry
    s3: S3

    @property
    def store(self) -> str:
        """As ``dsec up --store`` takes it."""
        return self.s3.url(f"{self.link.far}:{S3_PORT + 1}")

    @property
    def registry_address(self) -> str:
        return f"{self.link.far}:{REGISTRY_PORT + 1}"


@asynccontextmanager
async def far_side(setting: Setting, toolchains: Sequence[Toolchain]) -> AsyncIterator[FarSide]:
    """Both servers behind a link, holding these toolchains; what is missing of them is made first (minutes, the first time)."""
    directory = CACHE / ("quick" if setting.quick else "cold")
    # An image keeps the chunks that it was packed with.
    registry, s3 = Registry(directory / "registry"), S3(directory / f"s3-{CHUNK_BYTES >> 10}k")
    await _fill(setting, toolchains, registry, s3)
    async with link.up() as way:
        await way.serve(*registry.command(REGISTRY_PORT), port=REGISTRY_PORT, relay=REGISTRY_PORT + 1, log=directory / "registry.log")
        await way.serve(*s3.command(S3_PORT), port=S3_PORT, relay=S3_PORT + 1, log=directory / "s3.log")
        await s3.ready(f"{way.far}:{S3_PORT + 1}")
        yield FarSide(way, toolchains, registry, s3)


async def _fill(setting: Setting, toolchains: Sequence[Toolchain], registry: Registry, s3: S3) -> None:
    """Puts the toolchains into both servers, over the loopback."""
    missing = [one for one in toolchains if not registry.holds(one.name)]
    if missing:
        async with registry.running(REGISTRY_PORT), peer.daemon(setting.parent) as docker:
            for toolchain in missing:
                tag = f"127.0.0.1:{REGISTRY_PORT}/{toolchain.name}"
                await docker.call("import", str(await toolchain.tar()), tag)
                await docker.call("push", tag)
                await docker.call("rmi", tag)
    missing = [one for one in toolchains if not s3.holds(one.name)]
    if missing:
        async with s3.running(S3_PORT), _node(setting, "fill", s3.url(f"127.0.0.1:{S3_PORT}")) as client:
            for toolchain in missing:
                await client.images.import_(await toolchain.tar(), name=toolchain.name)
                s3.note(toolchain.name)


@asynccontextmanager
async def _node(setting: Setting, name: str, store: str, *options: str) -> AsyncIterator[DSecClient]:
    """A node of ours with nothing on it but the address of the store."""
    async with (
        instance.running(f"bench-{name}", scratch_mb=SCRATCH_MB, parent=setting.parent, options=("--store", store, *options)) as own,
        DSecClient(url=own.nearest, api_key=own.api_key) as client,
    ):
        yield client


@dataclass
class Run:
    """What one side took for all sandboxes."""

    seconds: float
    received: int
    written: int
    far_processor_s: float
    """What the servers behind the link took of the processors that both sides share here."""


async def _ours(far: FarSide, client: DSecClient, count: int, parent: Path) -> Run:
    """``count`` sandboxes over all images, the workload run in each and each ended."""
    turn = asyncio.Semaphore(RUNS_AT_ONCE)

    async def work(sandbox: Sandbox, workload: str) -> None:
        async with turn:
            ours.check(await sandbox.exec(workload))
        await sandbox.stop()

    batch = _spread(far.toolchains, count)
    args = [DSecContainerRunArgs(container_image=one.name, network="none") for one in batch]
    received, used = far.link.received(), far.link.processor_s()
    async with disk.writes(parent) as written:
        started = time.perf_counter()
        at_work = [asyncio.create_task(work(ours.made(item), batch[item.index].workload)) async for item in client.run_many(args)]
        await asyncio.gather(*at_work)
        seconds = time.perf_counter() - started
    return Run(seconds, far.link.received() - received, written.bytes, far.link.processor_s() - used)


async def _docker(far: FarSide, docker: peer.Docker, count: int, parent: Path) -> Run:
    """The same by docker: each image pulled, all at once, and its containers run as soon as it is there."""
    turn = asyncio.Semaphore(peer.PARALLEL)
    batch = _spread(far.toolchains, count)

    async def run(toolchain: Toolchain) -> None:
        async with turn:
            await docker.call(
                "run", "--rm", "--network", "none", f"{far.registry_address}/{toolchain.name}", "sh", "-c", toolchain.workload
            )

    async def image(toolchain: Toolchain) -> None:
        await docker.call("pull", "-q", f"{far.registry_address}/{toolchain.name}")
        await asyncio.gather(*(run(one) for one in batch if one is toolchain))

    received, used = far.link.received(), far.link.processor_s()
    async with disk.writes(parent) as written:
        started = time.perf_counter()
        await asyncio.gather(*map(image, far.toolchains))
        seconds = time.perf_counter() - started
    return Run(seconds, far.link.received() - received, written.bytes, far.link.processor_s() - used)


def _spread(toolchains: Sequence[Toolchain], count: int) -> list[Toolchain]:
    return [toolchains[index % len(toolchains)] for index in range(count)]


async def drop_caches() -> None:
    """Nothing that was read before is in memory any more."""
    await asyncio.to_thread(os.sync)
    await asyncio.to_thread(Path("/proc/sys/vm/drop_caches").write_text, "3")


async def _cold(setting: Setting) -> None:
    """What every cold run begins with."""
    await drop_caches()
    await memory.warm(setting, MEMORY_MB)


@dataclass
class Round:
    """One round of cold-burst."""

    cold: Run
    warm: Run
    """The same again, on the node that has everything now."""
    theirs: Run


async def measure_burst(setting: Setting) -> Outcome:
    count, toolchains = (8, _small()) if setting.quick else (SANDBOXES, TOOLCHAINS)
    rounds: list[Round] = []
    async with far_side(setting, toolchains) as far:
        # Images that were never run anywhere: the first node records for the others what they read.
        async with _node(setting, "burst", far.store, "--no-prefetch") as client:
            unknown = await _cold_and_warm(setting, far, client, count)
            for toolchain in toolchains:
                await _recorded(client, toolchain.name)
        for _ in range(setting.rounds):
            async with _node(setting, "burst", far.store) as client:
                cold, warm = await _cold_and_warm(setting, far, client, count)
            async with peer.daemon(setting.parent, registry=far.registry_address) as docker:
                await _cold(setting)
                rounds.append(Round(cold, warm, await _docker(far, docker, count, setting.parent)))
    return Outcome(
        figures={
            "speedup_docker": median([one.theirs.seconds / one.cold.seconds for one in rounds]),
            "bytes_ratio": median([one.cold.received / one.theirs.received for one in rounds]),
            "disk_write_ratio": median([one.cold.written / one.theirs.written for one in rounds]),
            "warm_ratio": median([one.cold.seconds / one.warm.seconds for one in rounds]),
        },
        detail={
            "ours": {
                "sandboxes": count,
                "images": len(toolchains),
                "cold": [_figures(one.cold) for one in rounds],
                "warm": [_figures(one.warm) for one in rounds],
                "never_run_before": {"cold": _figures(unknown[0]), "warm": _figures(unknown[1])},
            },
            "peer": {"runs": [_figures(one.theirs) for one in rounds], "parallel": peer.PARALLEL},
        },
    )


async def _cold_and_warm(setting: Setting, far: FarSide, client: DSecClient, count: int) -> tuple[Run, Run]:
    await _cold(setting)
    cold = await _ours(far, client, count, setting.parent)
    await memory.warm(setting, MEMORY_MB)
    return cold, await _ours(far, client, count, setting.parent)


async def measure_first(setting: Setting) -> Outcome:
    toolchain = (_small() if setting.quick else TOOLCHAINS)[0]
    our_runs, peer_runs = [], []
    async with far_side(setting, [toolchain]) as far:
        for _ in range(setting.rounds):
            async with _node(setting, "first", far.store) as client:
                await _cold(setting)
                our_runs.append(await _ours(far, client, 1, setting.parent))
            async with peer.daemon(setting.parent, registry=far.registry_address) as docker:
                await _cold(setting)
                peer_runs.append(await _docker(far, docker, 1, setting.parent))
    return Outcome(
        figures={"speedup_docker": median([b.seconds / a.seconds for a, b in zip(our_runs, peer_runs, strict=True)])},
        detail={
            "ours": {"image": toolchain.name, "runs": [_figures(run) for run in our_runs]},
            "peer": {"runs": [_figures(run) for run in peer_runs]},
        },
    )


async def measure_trace(setting: Setting) -> Outcome:
    toolchain = (_small() if setting.quick else TOOLCHAINS)[0]
    with_trace: list[Run] = []
    without: list[Run] = []
    async with far_side(setting, [toolchain]) as far:
        # A first run records; the trace is in the store when its node has ended.
        async with _node(setting, "record", far.store) as client:
            await _ours(far, client, 1, setting.parent)
            await _recorded(client, toolchain.name)
        for _ in range(setting.rounds):
            for runs, options in ((without, ("--no-prefetch",)), (with_trace, ())):
                async with _node(setting, "trace", far.store, *options) as client:
                    await _cold(setting)
                    runs.append(await _ours(far, client, 1, setting.parent))
    return Outcome(
        figures={"speedup": median([a.seconds / b.seconds for a, b in zip(without, with_trace, strict=True)])},
        detail={"ours": {"with": [_figures(run) for run in with_trace], "without": [_figures(run) for run in without]}, "peer": {}},
    )


async def _recorded(client: DSecClient, name: str) -> None:
    """Waits until what the first run read of the image is known to the store. Raises WrongAnswer."""
    deadline = time.monotonic() + RECORD_DEADLINE_S
    while not (await client.images.stats(name)).traced:
        if time.monotonic() > deadline:
            raise WrongAnswer(f"no trace of {name} was recorded within {RECORD_DEADLINE_S:.0f} s")
        await asyncio.sleep(0.5)


def _small() -> Sequence[Toolchain]:
    """What a smoke run uses instead of the toolchains: the root filesystem of the other benchmarks."""
    return [Toolchain("small", PACKAGES, "python3 -c 'import os'")]


def _figures(run: Run) -> dict[str, float]:
    return {
        "seconds": round(run.seconds, 3),
        "received_mb": round(run.received / 1e6, 1),
        "written_mb": round(run.written / 1e6, 1),
        "far_processor_s": round(run.far_processor_s, 2),
    }


BURST = Claim(
    name="cold-burst",
    what=f"{SANDBOXES} sandboxes over {len(TOOLCHAINS)} images that another node has run and this one hasn't, against docker pull + run",
    floors={"speedup_docker": (">=", 3), "bytes_ratio": ("<=", 0.25), "disk_write_ratio": ("<=", 0.2), "warm_ratio": ("<=", 1.5)},
    measure=measure_burst,
)
FIRST = Claim(
    name="cold-first",
    what="the first command in one sandbox of an image of 1 GB that is not on the node, against docker pull + run",
    floors={"speedup_docker": (">=", 8)},
    measure=measure_first,
)
TRACE = Claim(
    name="trace",
    what="the same with what an earlier run read fetched ahead, against without",
    floors={"speedup": (">=", 1.5)},
    measure=measure_trace,
)
