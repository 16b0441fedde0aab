"""Layers that are fetched as they are read, on an edge whose machine, image store and blobfs are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from edge_fakes import Images, Node, eventually
from prometheus_client import CollectorRegistry

from dsec.edge import Edge, EdgeConfig, ondemand
from dsec.edge.blobfs import BlobFigures as Figures
from dsec.edge.blobfs import Blobfs, BlobfsError, CacheFigures, Listener
from dsec.images import Environment
from dsec.images.pulling import LayerState
from dsec.images.reads import BlobFigures
from dsec.images.traces import Touch
from libdsec.errors import Unavailable
from libdsec.schema import DSecContainerRunArgs, ImageConfig, ImageInfo, SandboxInfo

META, BLOB = "a" * 64, "b" * 64
INDEX = b"table"


class FakeBlobfs(Blobfs):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.registered: dict[str, bytes] = {}
        self.prefetched: list[tuple[str, list[int]]] = []
        self.traced: set[str] = set()
        self.sealed: set[str] = set()
        self.before_seal: Callable[[], None] = lambda: None
        self.incomplete = False
        self.refuses = False
        self.complete: set[str] = set()
        self.mounted = False
        self.listener: Listener | None = None
        self.reconnected: Callable[[], None] = lambda: None

    async def connect(self, listener: Listener, on_reconnected: Callable[[], None]) -> FakeBlobfs:
        self.listener, self.reconnected = listener, on_reconnected
        return self

    async def register(self, blob: str, index: bytes) -> None:
        if self.refuses:
            raise BlobfsError("invalid_argument", "no such table")
        self.registered[blob] = index

    async def seal(self, blob: str) -> None:
        self.before_seal()
        if self.incomplete:
            raise BlobfsError("conflict", "it is not complete")
        self.sealed.add(blob)

    async def prefetch(self, blob: str, chunks: Sequence[int]) -> None:
        self.prefetched.append((blob, list(chunks)))

    async def trace_start(self, blob: str) -> None:
        self.traced.add(blob)

    async def trace_take(self, blob: str) -> list[tuple[int, int]]:
        self.traced.remove(blob)
        return [(7, 20), (3, 10)]

    async def stats(self, blobs: Iterable[str] | None = None) -> CacheFigures:
        return CacheFigures(blobs={blob: Figures(size=1, complete=blob in self.complete) for blob in self.registered})

    async def forget(self, blob: str) -> None:
        if self.mounted:
            raise BlobfsError("conflict", "it is mounted")
        del self.registered[blob]

    def close(self) -> None: ...


class LazyImages(Images):
    """The base's layer is not whole on the node."""

    def __init__(self) -> None:
        super().__init__()
        self.trace_of_base: list[Touch] | None = None
        self.saved: list[Touch] = []
        self.held: list[Path] = []
        self.adopted: list[tuple[str, Path]] = []
        self.unreachable = False
        self.whole = False
        self.holds = 0

    async def locate(self, image: str, workspace: str | None, toolkits: Sequence[str]) -> None:
        if self.unreachable:
            raise Unavailable("the store can't be reached")

    async def ensure(self, environment: Environment) -> list[LayerState]:
        return [LayerState(layer, INDEX if layer.blob and not self.whole else None) for layer in environment.layers]

    async def hold(self, environment: Environment) -> None:
        self.holds += 1

    def get(self, reference: str) -> ImageInfo:
        layers = list(reversed(self.resolve(reference, None, ()).layers))
        return ImageInfo(
            name="base", version=1, kind="base", digest="sha256:" + "d" * 64, layers=layers, config=ImageConfig(), created_at=0.0, size=1
        )

    async def trace(self, image: ImageInfo) -> list[Touch] | None:
        return self.trace_of_base

    async def save_trace(self, image: ImageInfo, touches: Sequence[Touch]) -> None:
        self.saved = list(touches)

    async def record_reads(self, figures: Mapping[str, BlobFigures]) -> None: ...

    def hold_blob(self, file: Path) -> Path:
        self.held.append(file)
        return file.with_suffix(".held")

    def adopt_blob(self, blob: str, held: Path) -> None:
        self.adopted.append((blob, held))

    def release_blob(self, held: Path) -> None:
        self.held.remove(held.with_suffix(""))


@pytest.fixture
def blobfs() -> FakeBlobfs:
    return FakeBlobfs()


@pytest.fixture
def images() -> LazyImages:
    return LazyImages()


@asynccontextmanager
async def opened(node: Node, images: LazyImages, blobfs: FakeBlobfs, state_dir: Path, **config: Any) -> AsyncIterator[Edge]:
    edge = Edge(
        EdgeConfig(state_dir=state_dir, run_dir=state_dir, **config),
        images,
        connect_spawner=node.connect_spawner,
        connect_blobfs=blobfs.connect,
        connect_channel=node.connect_channel,
        cgroups=node,
        registry=CollectorRegistry(),
    )
    await edge.open()
    try:
        yield edge
    finally:
        await edge.close()


@pytest.fixture
async def edge(node: Node, images: LazyImages, blobfs: FakeBlobfs, tmp_path: Path) -> AsyncIterator[Edge]:
    async with opened(node, images, blobfs, tmp_path) as edge:
        yield edge


async def create(edge: Edge, image: str = "base") -> SandboxInfo:
    return await edge.sandboxes.create("p", DSecContainerRunArgs(container_image=image), None)


async def test_a_layer_that_is_not_whole_is_registered_once_and_mounted_lazily(edge: Edge, node: Node, blobfs: FakeBlobfs) -> None:
    await asyncio.gather(*(create(edge) for _ in range(10)))
    assert blobfs.registered == {BLOB: INDEX}
    assert node.lazy == {META} and node.mounts == 1


async def test_a_start_on_lazy_layers_that_are_mounted_holds_them(edge: Edge, images: LazyImages) -> None:
    """Between two sandboxes nothing keeps other nodes from the data of what stays mounted."""
    first = await create(edge)
    assert images.holds == 0
    sandbox = edge.sandboxes.live(first.id)
    assert sandbox is not None
    await edge.sandboxes.stop(sandbox, "stopped by request")
    await create(edge)
    assert images.holds == 1


async def test_a_start_on_mounted_layers_that_are_whole_asks_nobody(edge: Edge, images: LazyImages) -> None:
    images.whole = True
    await create(edge)
    await create(edge)
    assert images.holds == 0


async def test_a_blobfs_that_refuses_fails_the_creation_with_its_words(edge: Edge, node: Node, blobfs: FakeBlobfs) -> None:
    blobfs.refuses = True
    with pytest.raises(Exception, match="no such table"):
        await create(edge)
    assert not node.kernel and not edge.in_use()


async def test_a_complete_blob_is_held_then_sealed_then_taken_over(
    edge: Edge, images: LazyImages, blobfs: FakeBlobfs, tmp_path: Path
) -> None:
    await create(edge)
    assert blobfs.listener is not None
    file = tmp_path / "blobfs" / BLOB
    at_the_seal: list[tuple[list[Path], int]] = []
    blobfs.before_seal = lambda: at_the_seal.append((list(images.held), len(images.adopted)))
    blobfs.listener.on_complete(BLOB)
    await eventually(lambda: bool(images.adopted) and not images.held)
    assert at_the_seal == [([file], 0)]
    assert images.adopted == [(BLOB, file.with_suffix(".held"))] and blobfs.sealed == {BLOB}


async def test_a_blob_that_a_restarted_blobfs_gave_up_in_part_is_not_taken_over(edge: Edge, images: LazyImages, blobfs: FakeBlobfs) -> None:
    await create(edge)
    assert blobfs.listener is not None
    asked = asyncio.Event()
    blobfs.incomplete, blobfs.before_seal = True, asked.set
    blobfs.listener.on_complete(BLOB)
    await asked.wait()
    await eventually(lambda: not images.held)
    assert images.adopted == []


async def test_reads_that_fail_are_events_of_the_sandboxes_that_use_the_blob(edge: Edge, blobfs: FakeBlobfs) -> None:
    sandbox = edge.sandboxes.live((await create(edge)).id)
    assert sandbox is not None and blobfs.listener is not None
    blobfs.listener.on_failed("f" * 64, "another blob")
    blobfs.listener.on_failed(BLOB, "the store is gone")
    told = [event.message for event in sandbox.events.since(0)[0] if event.type == "storage"]
    assert told == ["data of its image can't be read: the store is gone"]


async def test_without_a_blobfs_what_runs_on_lazy_layers_fails_and_tells_why(edge: Edge) -> None:
    info = await create(edge)
    edge.sandboxes.agents.on_blobs_aborted()
    sandbox = edge.sandboxes.live(info.id)
    assert sandbox is not None and sandbox.state == "failed"
    assert "blobfs" in (sandbox.record.reason or "")


async def test_nor_does_one_start_whose_data_was_given_up_behind_its_making(edge: Edge, node: Node) -> None:
    node.connect_gate = asyncio.Event()
    creating = asyncio.ensure_future(create(edge))
    await eventually(lambda: node.connecting == 1)
    edge.sandboxes.agents.on_blobs_aborted()
    node.connect_gate.set()
    with pytest.raises(Unavailable, match="could no longer be read"):
        await creating
    assert not node.kernel
    assert (await create(edge)).state == "running"


async def test_one_whose_data_was_given_up_before_its_making_starts_on_a_mount_of_its_own(edge: Edge, node: Node) -> None:
    node.gate = asyncio.Event()
    creating = asyncio.ensure_future(create(edge))
    await node.creating.wait()
    node.mounted.clear()
    edge.sandboxes.agents.on_blobs_aborted()
    node.gate.set()
    assert (await creating).state == "running"
    assert node.mounts == 2 and node.lazy == {META}


async def test_what_became_whole_while_blobfs_was_away_is_taken_over(edge: Edge, images: LazyImages, blobfs: FakeBlobfs) -> None:
    await create(edge)
    blobfs.complete.add(BLOB)
    blobfs.reconnected()
    await eventually(lambda: bool(images.adopted))


async def test_a_whole_blob_is_left_to_the_image_store_once_it_is_not_mounted(edge: Edge, images: LazyImages, blobfs: FakeBlobfs) -> None:
    await create(edge)
    blobfs.mounted = True
    blobfs.complete.add(BLOB)
    blobfs.reconnected()
    await eventually(lambda: bool(images.adopted))
    assert blobfs.registered == {BLOB: INDEX}
    blobfs.mounted = False
    blobfs.reconnected()
    await eventually(lambda: not blobfs.registered)


async def test_what_a_first_run_reads_is_recorded(
    edge: Edge, images: LazyImages, blobfs: FakeBlobfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ondemand, "RECORD_S", 0.01)
    await create(edge)
    await eventually(lambda: bool(images.saved))
    assert images.saved == [Touch(0, 3, 10), Touch(0, 7, 20)] and not blobfs.prefetched


async def test_what_is_recorded_is_fetched_ahead_once(edge: Edge, images: LazyImages, blobfs: FakeBlobfs) -> None:
    images.trace_of_base = [Touch(0, 5, 0), Touch(0, 2, 9)]
    await create(edge)
    await create(edge)
    assert blobfs.prefetched == [(BLOB, [5, 2])] and not blobfs.traced


async def test_fetching_ahead_can_be_switched_off(node: Node, images: LazyImages, blobfs: FakeBlobfs, tmp_path: Path) -> None:
    images.trace_of_base = [Touch(0, 5, 0)]
    async with opened(node, images, blobfs, tmp_path, prefetch=False) as edge:
        await create(edge)
        assert not blobfs.prefetched and not blobfs.traced


async def test_an_image_that_cannot_be_looked_up_starts_nothing(edge: Edge, node: Node, images: LazyImages) -> None:
    images.unreachable = True
    with pytest.raises(Unavailable):
        await create(edge)
    assert not node.kernel
