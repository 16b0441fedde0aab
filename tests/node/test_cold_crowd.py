"""Many sandboxes read the same file at once, of an image that their node has nothing of: it is fetched once, and all get it right."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.images.chunks import CHUNK_BYTES
from libdsec import DSecClient, DSecContainerRunArgs
from libdsec.sandbox import stop_all
from tests.conftest import Instance, node_at, require_root
from tests.node.base_and_work import fill
from tests.node.blobfs_node import Connection

COUNT = 500
COLD = random.Random(1).randbytes(100_000)
ARGS = DSecContainerRunArgs(container_image="base", workspace="work", network="none", memory_limit_mb=32, disk_limit_mb=16)


@pytest.fixture
def cold_node(base_tar: Path) -> Iterator[Instance]:
    """A node that has nothing of the images ``base`` and ``work``, which another one has put into their store."""
    require_root()
    with tempfile.TemporaryDirectory(prefix="dsec-test-", ignore_cleanup_errors=True) as name:
        os.chmod(name, 0o755)
        home, store, work = Path(name), Path(name) / "store", Path(name) / "work"
        store.mkdir()
        os.chmod(store, 0o777)
        files = {"a": random.Random(2).randbytes(2 << 20), "cold": COLD, "z": random.Random(3).randbytes(2 << 20)}

        with node_at(home / "one-0001", "--store", str(store)) as first:
            fill(first, base_tar, work, files)
        with node_at(home / "two-0002", "--store", str(store)) as second:
            yield second


def fetchers(node: Instance) -> list[int]:
    return [pid for pid in node.pids("dsec.images.fetcher") if b"supervise" not in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def test_five_hundred_readers_of_one_cold_file_fetch_it_once(cold_node: Instance) -> None:
    async with DSecClient(cold_node.url, cold_node.api_key) as client:
        made = [item async for item in client.run_many(ARGS, count=COUNT)]
        boxes = [item.sandbox for item in made if item.sandbox is not None]
        assert len(boxes) == COUNT, [item.error for item in made if item.error][:3]
        # The program is warm then: whoever waits for the fetcher waits for the file.
        assert (await boxes[0].exec(["sha256sum", "/etc/passwd"])).exit_code == 0
        (layer,) = (await client.images.get("work")).layers
        blob = str(layer.blob).removeprefix("sha256:")
        blobfs = Connection(cold_node.run_dir / "blobfs.sock")
        stopped = fetchers(cold_node)
        assert stopped and blobfs.do("stats", blobs=[blob])["blobs"][blob]["fetched"] == 0
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            readers = await asyncio.gather(*(box.start(["sha256sum", "/work/cold"], stdin=False) for box in boxes))
            assert blobfs.do("stats", blobs=[blob])["blobs"][blob]["fetched"] == 0
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        said = await asyncio.gather(*(reader.stdout.read() for reader in readers))
        assert set(said) == {f"{hashlib.sha256(COLD).hexdigest()}  /work/cold\n".encode()}
        figures = blobfs.do("stats", blobs=[blob])["blobs"][blob]
        blobfs.close()
        assert len(COLD) <= figures["needed"] and figures["fetched"] <= 2 * CHUNK_BYTES, figures
        await stop_all(boxes)
