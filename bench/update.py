"""A new version of a toolkit under many workspaces: one layer here; with docker, an image to build for each workspace."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path

from bench import ours, peer
from bench.claim import Claim, Outcome, Setting, WrongAnswer, median, rounded
from libdsec import DSecContainerRunArgs

WORKSPACES = 50
TOOLKIT_FILES = 200
TOOLKIT_FILE_BYTES = 100_000
WORKSPACE_FILES = 20
WORKSPACE_FILE_BYTES = 10_000
TOOLKIT_AT = "/opt/tool"
WORKSPACE_AT = "/work"
STARTS_AT_ONCE = 16


async def measure(setting: Setting) -> Outcome:
    count = 4 if setting.quick else WORKSPACES
    with tempfile.TemporaryDirectory(prefix="dsec-update-", dir=setting.parent) as directory:
        content = Path(directory)
        await asyncio.to_thread(_make_content, content, count)
        our_times, layers_built, build_times = [], [], []
        async with ours.running(setting, "update") as service, peer.running(setting.root_tar, setting.parent) as docker:
            for index in range(count):
                await service.client.images.import_(
                    content / f"workspace-{index}", name=f"workspace-{index}", kind="workspace", at=WORKSPACE_AT
                )
            await _builds(docker, peer.IMAGE, content, "workspace-{}", "workspace:{}", WORKSPACE_AT, count)
            for version in range(1, setting.rounds + 1):
                await asyncio.to_thread(_make_toolkit, content / "toolkit", version)
                before = await _layers(service)
                started = time.perf_counter()
                await service.client.images.import_(content / "toolkit", name="toolkit", kind="toolkit", at=TOOLKIT_AT)
                our_times.append(time.perf_counter() - started)
                layers_built.append(len(await _layers(service) - before))
                await _check(service, count, version)
                build_times.append(await _builds(docker, "workspace:{}", content, "toolkit", "environment:{}", TOOLKIT_AT, count))
    return Outcome(
        figures={
            "layers_built": max(layers_built),
            "speedup_docker": median([theirs / our for our, theirs in zip(our_times, build_times, strict=True)]),
        },
        detail={
            "ours": {"workspaces": count, "seconds": rounded(our_times, 3), "layers_built": layers_built},
            "peer": {"builds": count, "seconds": rounded(build_times, 3), "parallel": peer.PARALLEL},
        },
    )


async def _layers(service: ours.Ours) -> set[str]:
    return {layer.digest for image in await service.client.images.list() for layer in image.layers}


async def _check(service: ours.Ours, count: int, version: int) -> None:
    """Every environment has the new toolkit over its own workspace. Raises WrongAnswer."""
    turn = asyncio.Semaphore(STARTS_AT_ONCE)

    async def check(index: int) -> None:
        args = DSecContainerRunArgs(container_image=ours.IMAGE, workspace=f"workspace-{index}", toolkits=("toolkit",), network="none")
        async with turn, await service.client.run_container(args) as sandbox:
            result = await sandbox.exec(f"cat {TOOLKIT_AT}/version {WORKSPACE_AT}/name")
            if result.stdout != f"{version}\n{index}\n":
                raise WrongAnswer(f"environment {index} shows {result.stdout!r} after the update to {version}")

    await asyncio.gather(*map(check, range(count)))


async def _builds(docker: peer.Docker, base: str, content: Path, source: str, tag: str, at: str, count: int) -> float:
    """Builds an image for each workspace, several at once: ``base`` with ``content / source`` at ``at``. Seconds for all."""
    turn = asyncio.Semaphore(peer.PARALLEL)

    async def build(index: int) -> None:
        dockerfile = f"FROM {base.format(index)}\nCOPY . {at}\n"
        async with turn:
            await docker.build(content / source.format(index), dockerfile, tag.format(index))

    started = time.perf_counter()
    await asyncio.gather(*map(build, range(count)))
    return time.perf_counter() - started


def _make_content(directory: Path, count: int) -> None:
    for index in range(count):
        workspace = directory / f"workspace-{index}"
        workspace.mkdir()
        _fill(workspace, WORKSPACE_FILES, WORKSPACE_FILE_BYTES)
        (workspace / "name").write_text(f"{index}\n")
    toolkit = directory / "toolkit"
    toolkit.mkdir()
    _fill(toolkit, TOOLKIT_FILES, TOOLKIT_FILE_BYTES)


def _make_toolkit(toolkit: Path, version: int) -> None:
    """Another version: a tenth of its files differ."""
    _fill(toolkit, TOOLKIT_FILES // 10, TOOLKIT_FILE_BYTES)
    (toolkit / "version").write_text(f"{version}\n")


def _fill(directory: Path, files: int, size: int) -> None:
    for number in range(files):
        (directory / f"file-{number}").write_bytes(os.urandom(size))


CLAIM = Claim(
    name="update",
    what=f"a new toolkit version under {WORKSPACES} workspaces: layers built and seconds, against {WORKSPACES} docker builds",
    floors={"layers_built": ("==", 1), "speedup_docker": (">=", 50)},
    measure=measure,
)
