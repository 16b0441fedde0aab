"""The service on this machine: an old kernel with one tree of control groups. Runs in the guest, where everything takes twenty times longer."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from dsec.demo.instance import Instance, running
from libdsec import DSecClient, DSecContainerRunArgs, Sandbox

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROGRAMS = ("sh", "cat", "dd", "head", "tail", "sleep", "sync", "rm", "stat", "nproc", "mkdir", "true")
CREATE_S = 60.0


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def instance() -> AsyncIterator[Instance]:
    async with running("guest", scratch_mb=1024, parent=Path("/var/tmp")) as made:
        yield made


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def client(instance: Instance, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DSecClient]:
    """Of an instance with a small base image."""
    async with DSecClient(instance.url, instance.api_key) as opened:
        await opened.images.import_(small_root(tmp_path_factory.mktemp("base")), name="base")
        yield opened


def small_root(root: Path) -> Path:
    """A root directory of a few programs of this machine and what they are linked to."""
    programs = [Path(found).resolve() for found in map(shutil.which, PROGRAMS) if found]
    assert len(programs) == len(PROGRAMS)
    linked = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True, check=True).stdout
    libraries = {Path(word) for line in linked.splitlines() for word in line.split() if word.startswith("/lib")}
    (root / "usr/bin").mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for source in libraries:
        target = root / "usr" / source.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    for name, source in zip(PROGRAMS, programs, strict=True):
        shutil.copy(source, root / "usr/bin" / name)
    (root / "etc").mkdir()
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    return root


@pytest_asyncio.fixture(loop_scope="session")
async def sandbox(client: DSecClient) -> AsyncIterator[Sandbox]:
    args = DSecContainerRunArgs(container_image="base", memory_limit_mb=128, disk_limit_mb=64, pids_limit=64, cpu_cores_limit=0.5)
    made = await client.run_container(args, timeout=CREATE_S)
    yield made
    await made.stop()


async def test_a_command_gives_its_output_and_exit_code(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
