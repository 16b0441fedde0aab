"""The spawner's start after one that was cut off: what that left is taken for what it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import require_root
from tests.node.blobfs_node import SERVICE_UID, Layer, Node, running_node


@pytest.fixture(autouse=True)
def _root() -> None:
    require_root()


@pytest.fixture
def node() -> Iterator[Node]:
    with running_node() as running:
        yield running


def whole_layer(node: Node) -> Layer:
    """A layer whose data is here."""
    layer = node.layer({"file": b"content"})
    blob = node.state / "images" / "blobs" / layer.blob.hex
    blob.write_bytes(layer.blob.content)
    os.chown(blob, SERVICE_UID, SERVICE_UID)
    return layer


def test_a_start_that_made_no_scratch_filesystem_can_be_repeated(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = tmp_path / "mkfs.btrfs"
    idle.write_text("#!/bin/sh\n")
    idle.chmod(0o755)
    with monkeypatch.context() as changed:
        changed.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        with pytest.raises(AssertionError, match="mounting the scratch filesystem"):
            node.start_spawner()
    assert node.start_spawner().do("hello")["scratch"] > 0


@pytest.mark.parametrize("place", ["layers", "lazy"])
def test_a_place_that_nothing_was_mounted_on_yet_is_no_layer(node: Node, place: str) -> None:
    node.start_spawner()
    layer = whole_layer(node)
    node.kill(node.spawner_process)
    node.path(place, layer.meta).mkdir()
    spawner = node.start_spawner()
    assert spawner.do("layers")["layers"] == {}
    spawner.do("layer_mount", meta=layer.meta, blob=layer.blob.hex)
    assert node.path("layers", layer.meta, "file").read_bytes() == layer.files["file"]


def test_checked_metadata_is_relied_on_in_the_namespace_that_it_was_checked_for(node: Node) -> None:
    meta = node.run / "meta"
    meta.mkdir()
    earlier = meta / ("a" * 64)
    earlier.write_bytes(b"lost in a crash")
    spawner = node.start_spawner()
    assert not earlier.exists()
    layer = whole_layer(node)
    spawner.do("layer_mount", meta=layer.meta, blob=layer.blob.hex)
    node.kill(node.spawner_process)
    half_copied = meta / f"{layer.meta}.0.part"
    half_copied.write_bytes(b"")
    node.start_spawner()
    assert list(meta.iterdir()) == [meta / layer.meta]
