"""The object store stands still, dies, and comes back, under sandboxes whose image is fetched from it as it is read."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from libdsec import DSecClient, DSecContainerRunArgs
from tests.conftest import Instance, node_at, require_root
from tests.node.base_and_work import fill
from tests.unit.seaweed import Seaweed, seaweed

DEADLINE_S = 60.0
FILES = {f"cold-{number}": random.Random(number).randbytes(1 << 20) for number in range(3)}
ARGS = DSecContainerRunArgs(container_image="base", workspace="work", network="none", memory_limit_mb=128, disk_limit_mb=64)


@dataclass
class Lazy:
    """A node that has nothing of the images, and the S3 that has them."""

    node: Instance
    server: Seaweed


@pytest.fixture
def lazy(base_tar: Path) -> Iterator[Lazy]:
    require_root()
    with tempfile.TemporaryDirectory(prefix="dsec-test-", ignore_cleanup_errors=True) as name:
        os.chmod(name, 0o755)
        home, s3, work = Path(name), Path(name) / "s3", Path(name) / "work"
        s3.mkdir()

        with seaweed(s3) as server:
            store = ("--store", server.url("node"))
            with node_at(home / "one-0001", *store) as first:
                fill(first, base_tar, work, FILES)
            with node_at(home / "two-0002", *store) as second:
                yield Lazy(second, server)


def started_again(server: Seaweed) -> subprocess.Popen[bytes]:
    """In the same place. A master that remembers a cluster waits for its other members, 10 s unless told."""
    assert isinstance(server.process.args, list)
    command = [*server.process.args, "-master.electionTimeout=500ms", "-master.heartbeatInterval=100ms"]
    with (server.home / "log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=server.home, start_new_session=True)


def line(name: str) -> bytes:
    return f"{hashlib.sha256(FILES[name]).hexdigest()}  /work/{name}\n".encode()


async def test_reads_outlast_a_store_that_stands_still_and_dies(lazy: Lazy) -> None:
    server = lazy.server.process
    async with DSecClient(lazy.node.url, lazy.node.api_key) as client, await client.run_container(ARGS, timeout=DEADLINE_S) as sandbox:
        assert (await sandbox.exec(["sha256sum", "/work/cold-0"], timeout=DEADLINE_S)).stdout_bytes == line("cold-0")
        server.send_signal(signal.SIGSTOP)
        reader = await sandbox.start(["sha256sum", "/work/cold-1"], stdin=False)
        # What is here goes on, and the reader waits.
        assert (await sandbox.exec(["sha256sum", "/work/cold-0"])).stdout_bytes == line("cold-0")
        assert (await reader.info()).running
        server.kill()
        server.wait()
        other = await sandbox.start(["sha256sum", "/work/cold-2"], stdin=False)
        assert (await sandbox.exec(["sha256sum", "/work/cold-0"])).stdout_bytes == line("cold-0")
        assert (await reader.info()).running and (await other.info()).running
        again = started_again(lazy.server)
        try:
            async with asyncio.timeout(DEADLINE_S):
                assert (await reader.stdout.read(), await other.stdout.read()) == (line("cold-1"), line("cold-2"))
            assert "storage" not in {event.type for event in [event async for event in sandbox.events()]}
        finally:
            again.kill()
            again.wait()
