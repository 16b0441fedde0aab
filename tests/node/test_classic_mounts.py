"""`dsec up --mounts classic`: layers by loop devices and by path, the way of kernels before 6.12 and 6.15, on this kernel."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from libdsec import DSecClient, DSecContainerRunArgs
from libdsec.errors import Unavailable
from tests.conftest import Instance, node_at, require_root
from tests.unit.images_archives import member, tar

DEADLINE_S = 60.0
TOOLKITS = 20
"""A layer each. One option of fsconfig(2) has no room for the paths of so many."""


@pytest.fixture(scope="module")
def nodes(base_tar: Path) -> Iterator[tuple[Instance, Instance]]:
    """Two of them with one store; the first has an image with a workspace and a toolkit."""
    require_root()
    with tempfile.TemporaryDirectory(prefix="dsec-test-", ignore_cleanup_errors=True) as name:
        os.chmod(name, 0o755)
        home, store = Path(name), Path(name) / "store"
        store.mkdir()
        os.chmod(store, 0o777)
        work = home / "work"
        work.mkdir()
        (work / "file").write_text("from the workspace")
        for number in range(TOOLKITS):
            content = b"#!/bin/sh\necho tool %d\n" % number
            (home / f"tool-{number}.tar").write_bytes(tar([(member("bin/tool", uid=7, mode=0o4755), content)]))
        classic = ("--mounts", "classic", "--store", str(store))
        with node_at(home / "old-0001", *classic) as first, node_at(home / "old-0002", *classic) as second:

            async def fill() -> None:
                async with DSecClient(first.url, first.api_key) as client:
                    await client.images.import_(base_tar, name="base")
                    await client.images.import_(work, name="work", kind="workspace", at="/work")
                    for number in range(TOOLKITS):
                        await client.images.import_(home / f"tool-{number}.tar", name=f"tool-{number}", kind="toolkit", at=f"/opt/{number}")

            asyncio.run(fill())
            yield first, second


def loops_of(instance: Instance) -> list[str]:
    """Loop devices over files of this instance but its scratch file."""
    listed = subprocess.run(["losetup", "--list", "--noheadings", "--output", "BACK-FILE"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if str(instance.home) in line and "scratch.img" not in line]


ARGS = DSecContainerRunArgs(
    container_image="base", workspace="work", toolkits=tuple(f"tool-{number}" for number in range(TOOLKITS)), network="none"
)
READ_MUCH = "cat /usr/lib/x86_64-linux-gnu/* /usr/sbin/* 2>/dev/null | wc -c"


async def test_layers_from_loop_devices_stack_as_others_do(nodes: tuple[Instance, Instance]) -> None:
    first, _ = nodes
    async with DSecClient(first.url, first.api_key) as client:
        made = [item async for item in client.run_many([ARGS] * 6)]
        sandboxes = [item.sandbox for item in made if item.sandbox is not None]
        assert len(sandboxes) == 6, made
        assert loops_of(first), "no layer is on a loop device"
        try:
            one = sandboxes[0]
            said = (await one.exec("for tool in /opt/*/bin/tool; do $tool; done | sort -V")).stdout
            assert said == "".join(f"tool {number}\n" for number in range(TOOLKITS))
            owners = "stat -c '%u %a' /opt/0/bin/tool; stat -c %u /etc/passwd; echo x > /dev/null && rm /work/file"
            assert (await one.exec(owners)).stdout == "7 4755\n0\n"
            mounts = (await one.exec(["cat", "/proc/self/mountinfo"])).stdout
            assert str(first.home) not in mounts, mounts
            assert (await sandboxes[1].exec(["cat", "/work/file"])).stdout == "from the workspace"
        finally:
            for sandbox in sandboxes:
                await sandbox.stop()


async def test_a_layer_is_read_on_demand_through_a_loop_device(nodes: tuple[Instance, Instance]) -> None:
    first, second = nodes
    command = "find /usr/bin /etc /work /opt -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum"
    found = []
    for node in (first, second):
        async with DSecClient(node.url, node.api_key) as client, await client.run_container(ARGS, timeout=DEADLINE_S) as sandbox:
            result = await sandbox.exec(command, timeout=DEADLINE_S)
            assert result.exit_code == 0, result
            found.append(result.stdout)
    assert found[0] == found[1]


@pytest.mark.parametrize("part", ["dsec-blobfs", "dsec-spawner"])
async def test_kill_9_of_any_part_costs_a_wait_at_most(nodes: tuple[Instance, Instance], part: str) -> None:
    _, second = nodes
    async with DSecClient(second.url, second.api_key) as client:
        async with await client.run_container(ARGS, timeout=DEADLINE_S) as sandbox:
            reading = asyncio.create_task(sandbox.exec(READ_MUCH, timeout=DEADLINE_S))
            await asyncio.sleep(0.05)
            for pid in second.pids(part):
                if "supervise" not in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
            result = await reading
            assert result.exit_code == 0 and int(result.stdout) > 0, result
        end = time.monotonic() + DEADLINE_S
        while True:
            try:
                async with await client.run_container(ARGS, timeout=DEADLINE_S) as sandbox:
                    assert (await sandbox.exec(["/opt/3/bin/tool"])).stdout == "tool 3\n"
                return
            except Unavailable:
                assert time.monotonic() < end
                await asyncio.sleep(0.1)
