"""Two nodes with one store: what one has imported starts on the other at once, and is fetched as it is read."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from libdsec import DSecClient, DSecContainerRunArgs, Sandbox
from libdsec.schema import SandboxEvent
from tests.conftest import Instance, node_at

DEADLINE_S = 60.0
IMAGE = "lazy"


class Nodes:
    """A store with one image in it, and the node that is to start it."""

    def __init__(self, first: Instance, second: Instance, store: Path) -> None:
        self.first, self.second, self.store = first, second, store

    def kept(self) -> int:
        """Bytes of data that blobfs has on the second node's disk."""
        return sum(path.stat().st_blocks * 512 for path in (self.second.home / "state" / "blobfs").iterdir())


@pytest.fixture(scope="module")
def nodes(base_tar: Path) -> Iterator[Nodes]:
    with tempfile.TemporaryDirectory(prefix="dsec-test-", ignore_cleanup_errors=True) as name:
        os.chmod(name, 0o755)
        home, store = Path(name), Path(name) / "store"
        store.mkdir()
        os.chmod(store, 0o777)
        shared = ("--store", str(store))
        with node_at(home / "one-0001", *shared) as first, node_at(home / "two-0002", *shared) as second:

            async def fill() -> None:
                async with DSecClient(first.url, first.api_key) as client:
                    await client.images.import_(base_tar, name=IMAGE)

            asyncio.run(fill())
            yield Nodes(first, second, store)


@pytest.fixture
async def client(nodes: Nodes) -> AsyncIterator[DSecClient]:
    async with DSecClient(nodes.second.url, nodes.second.api_key) as opened:
        yield opened


def _args(image: str = IMAGE) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(container_image=image, network="none")


async def test_an_image_of_another_node_starts_without_being_fetched_whole(nodes: Nodes, client: DSecClient) -> None:
    async with await client.run_container(_args(), timeout=DEADLINE_S) as sandbox:
        result = await sandbox.exec(["python3", "-c", "import json; print(json.dumps([1]))"])
        assert result.stdout == "[1]\n", result
    image = await client.images.get(IMAGE)
    assert 0 < nodes.kept() < image.size / 2


async def test_each_sandbox_is_told_what_it_has_read_itself(nodes: Nodes, client: DSecClient) -> None:
    size = 3 << 20
    cold = "head -c 3145728 /usr/bin/perl | sha256sum"
    await asyncio.to_thread(Path("/proc/sys/vm/drop_caches").write_text, "3")
    async with (
        await client.run_container(_args(), timeout=DEADLINE_S) as reader,
        await client.run_container(_args(), timeout=DEADLINE_S) as other,
    ):
        before = (await reader.metrics()).reads
        assert before is not None
        assert (await reader.exec(cold, timeout=DEADLINE_S)).exit_code == 0
        reads = (await reader.metrics()).reads
        assert reads is not None and reads.needed - before.needed >= size, (before, reads)
        assert reads.fetched + reads.from_cache > before.fetched + before.from_cache
        # From memory: nobody asks for it again.
        assert (await other.exec(cold, timeout=DEADLINE_S)).exit_code == 0
        less = (await other.metrics()).reads
        assert less is not None and less.needed < size
    async with DSecClient(nodes.first.url, nodes.first.api_key) as first, await first.run_container(_args(), timeout=DEADLINE_S) as whole:
        assert (await whole.metrics()).reads is None


async def test_what_is_read_is_what_the_other_node_has(nodes: Nodes, client: DSecClient) -> None:
    command = "find /usr/bin /usr/lib/python3* /etc -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum"
    other = DSecClient(nodes.first.url, nodes.first.api_key)
    async with other, await other.run_container(_args(), timeout=DEADLINE_S) as sandbox:
        expected = await sandbox.exec(command, timeout=DEADLINE_S)
    async with await client.run_container(_args(), timeout=DEADLINE_S) as sandbox:
        found = await sandbox.exec(command, timeout=DEADLINE_S)
    assert expected.exit_code == 0 and found.stdout_bytes == expected.stdout_bytes


@pytest.mark.parametrize("part", ["dsec-blobfs", "dsec.images.fetcher", "dsec.serve", "dsec-spawner"])
async def test_kill_9_of_any_part_costs_a_wait_at_most(nodes: Nodes, client: DSecClient, part: str) -> None:
    async with await client.run_container(_args(), timeout=DEADLINE_S) as sandbox:
        reading = asyncio.create_task(sandbox.exec("cat /usr/lib/x86_64-linux-gnu/* /usr/sbin/* 2>/dev/null | wc -c", timeout=DEADLINE_S))
        await asyncio.sleep(0.05)
        for pid in nodes.second.pids(part):
            if "supervise" not in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
        result = await reading
        assert result.exit_code == 0 and int(result.stdout) > 0, result
        assert (await sandbox.exec(["true"])).exit_code == 0


async def test_a_blob_that_is_whole_becomes_a_blob_of_the_node(nodes: Nodes, client: DSecClient) -> None:
    image = await client.images.get(IMAGE)
    blobs = [nodes.second.home / "state/images/blobs" / str(layer.blob).removeprefix("sha256:") for layer in image.layers]
    assert not any(blob.exists() for blob in blobs)
    # What the kernel has of it already would not be read: of a piece that was on its way when blobfs was killed, it may have more than the
    # disk.
    await asyncio.to_thread(Path("/proc/sys/vm/drop_caches").write_text, "3")
    async with await client.run_container(_args(), timeout=DEADLINE_S) as sandbox:
        await sandbox.exec("find / -xdev -type f -print0 | xargs -0 cat > /dev/null", timeout=DEADLINE_S)
        end = time.monotonic() + DEADLINE_S
        while not all(blob.exists() for blob in blobs):
            assert time.monotonic() < end, "the blob was not taken over"
            await asyncio.sleep(0.1)
        assert (await sandbox.exec(["python3", "-c", "print(1)"])).stdout == "1\n"


async def test_a_corrupted_chunk_is_never_shown(nodes: Nodes, base_tar: Path) -> None:
    """On a third node, which has nothing of the image yet."""
    frames = sorted((nodes.store / "blobs").glob("*.z"), key=lambda path: path.stat().st_size)[-1]
    content = frames.read_bytes()
    damaged = bytearray(content)
    for place in range(0, len(damaged), 50_000):
        damaged[place] ^= 0xFF
    frames.chmod(0o644)
    frames.write_bytes(damaged)
    try:
        with node_at(nodes.store.parent / "three-03", "--store", str(nodes.store)) as third:
            client = DSecClient(third.url, third.api_key)
            async with client, await client.run_container(_args(), timeout=DEADLINE_S) as sandbox:
                result = await sandbox.exec(["python3", "-c", "print(1)"], timeout=DEADLINE_S)
                assert result.exit_code != 0
                events = [event async for event in _until_storage(sandbox)]
                assert "storage" in {event.type for event in events}
    finally:
        frames.write_bytes(content)


async def _until_storage(sandbox: Sandbox) -> AsyncIterator[SandboxEvent]:
    async with asyncio.timeout(DEADLINE_S):
        async for event in sandbox.events():
            yield event
            if event.type == "storage":
                return
