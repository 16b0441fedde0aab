"""Two nodes and one store for real: an image that one node imported starts sandboxes on another, which never saw its archive."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsec.cli.instance import default_service_uid
from libdsec import DSecClient, Lock, Sandbox
from libdsec.errors import ImageNotFound
from tests.conftest import Instance, require_root, start_instance, stop_instance


@contextmanager
def up(store: Path) -> Iterator[Instance]:
    """A node of its own that shares ``store``; at the end nothing of it may be left."""
    require_root()
    with tempfile.TemporaryDirectory(prefix="dsec-test-", ignore_cleanup_errors=True) as home:
        os.chmod(home, 0o755)
        running = start_instance(Path(home), scratch_mb=2048, extra=("--store", str(store)))
        try:
            yield running
        finally:
            left = stop_instance(running)
        assert not left, left


@pytest.fixture
def store() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dsec-store-") as directory:
        os.chown(directory, default_service_uid(), -1)
        yield Path(directory)


async def test_an_image_of_one_node_runs_on_another_from_a_lock_file(store: Path, base_tar: Path, tmp_path: Path) -> None:
    steps: set[str] = set()
    with up(store) as one:
        async with DSecClient(one.url, one.api_key) as client:
            made = await client.images.import_(base_tar, name="team/debian:12", progress=lambda step, done: steps.add(step))
            (await client.images.lock("team/debian:12", network="none")).write(tmp_path / "env.toml")
    assert {"packing layer 1 of 1", "publishing"} <= steps
    stored = sum(path.stat().st_size for path in store.rglob("*.z"))
    assert stored < 0.6 * made.size
    with up(store) as two:
        async with DSecClient(two.url, two.api_key) as client:
            assert await client.images.list() == []
            lock = Lock.read(tmp_path / "env.toml")
            assert await client.images.pull(lock.image, whole=True) == made
            async with Sandbox.create(lock=tmp_path / "env.toml", client=client, timeout=60) as sandbox:
                assert (await sandbox.run_shell("python3 -c 'print(6 * 7)'")).stdout == "42\n"
                assert (await sandbox.info()).image == "team/debian:12@1"
            assert await client.images.fsck(deep=True) == []
            with pytest.raises(ImageNotFound):
                await client.images.pull("team/other")
