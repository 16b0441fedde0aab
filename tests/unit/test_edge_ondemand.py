"""Layers that are fetched as they are read, on an edge whose machine, image store and blobfs are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from edge_fakes import FakeClock, Images, Node, eventually
from prometheus_client import CollectorRegistry

from dsec.edge import Edge, EdgeConfig, ondemand
from dsec.edge.blobfs import BlobFigures as Figures
from dsec.edge.blobfs import Blobfs, BlobfsError, BlobfsLost, CacheFigures, Listener
from dsec.edge.spawner import SpawnerError
from dsec.images import Environment
from dsec.images.blobs import hex_of
from dsec.images.pulling import LayerState
from dsec.images.reads import BlobFigures
from dsec.images.traces import Touch
from libdsec.errors import ImageNotFound, Unavailable
from libdsec.schema import DSecContainerRunArgs, ImageConfig, ImageInfo, LayerInfo, SandboxInfo

META, BLOB = "a" * 64, "b" * 64
DIFF_META, DIFF_BLOB = "e" * 64, "f" * 64
BASE, DIFFED = "sha256:" + "1" * 64, "sha256:" + "2" * 64
"""Digests of the images ``base`` and ``diffed``, which has one layer more."""
INDEX = b"table"
HOURS = 3600.0


class FakeBlobfs(Blobfs):
    """Remembers what it was told. Its tables are where the real one has them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.registered: dict[str, bytes] = {}
        self.registrations: list[str] = []
        self.asked: list[list[str]] = []
        """For the figures of these."""
        self.prefetched: list[tuple[str, list[int]]] = []
        self.prefetch_fails: Exception | None = None
        self.traced: set[str] = set()
        self.trace_starts: list[str] = []
        self.trace_fails: BlobfsError | None = None
        self.begin = asyncio.Event()
        """No trace is started before."""
        self.begin.set()
        self.ended = asyncio.Event()
        """No trace is given out before."""
        self.ended.set()
        self.sealed: set[str] = set()
        self.before_seal: Callable[[], None] = lambda: None
        self.incomplete = False
        self.refuses = False
        self.complete: set[str] = set()
        self.mounted = False
        self.refused = 0
        """Calls to forget what is mounted."""
        self.stuck: set[str] = set()
        """Blobs whose files can't be removed."""
        self.listener: Listener | None = None
        self.reconnected: Callable[[], None] = lambda: None

    async def connect(self, listener: Listener, on_reconnected: Callable[[], None]) -> FakeBlobfs:
        self.listener, self.reconnected = listener, on_reconnected
        return self

    async def register(self, blob: str, index: bytes) -> None:
        if self.refuses:
            raise BlobfsError("invalid_argument", "no such table")
        self.registered[blob] = index
        self.registrations.append(blob)
        self.directory.mkdir(exist_ok=True)
        (self.directory / f"{blob}.idx").write_bytes(index)

    async def seal(self, blob: str) -> None:
        self.before_seal()
        if self.incomplete:
            raise BlobfsError("conflict", "it is not complete")
        self.sealed.add(blob)

    async def prefetch(self, blob: str, chunks: Sequence[int]) -> None:
        if self.prefetch_fails is not None:
            raise self.prefetch_fails
        self.prefetched.append((blob, list(chunks)))

    async def trace_start(self, blob: str) -> None:
        self.trace_starts.append(blob)
        if self.trace_fails is not None:
            raise self.trace_fails
        await self.begin.wait()
        self.traced.add(blob)

    async def trace_take(self, blob: str) -> list[tuple[int, int]]:
        await self.ended.wait()
        if blob not in self.traced:
            raise BlobfsError("conflict", f"no trace of {blob} was started")
        self.traced.remove(blob)
        return [(7, 20), (3, 10)]

    async def stats(self, blobs: Iterable[str]) -> CacheFigures:
        names = list(blobs)
        self.asked.append(names)
        known = [blob for blob in names if blob in self.registered]
        return CacheFigures(blobs={blob: Figures(size=1, fetched=5, complete=blob in self.complete) for blob in known})

    async def forget(self, blob: str) -> None:
        if self.mounted:
            self.refused += 1
            raise BlobfsError("conflict", "it is mounted")
        if blob in self.stuck:
            raise BlobfsError("internal", "Input/output error")
        del self.registered[blob]
        (self.directory / f"{blob}.idx").unlink()

    def close(self) -> None: ...


class LazyImages(Images):
    """No data is whole on the node."""

    def __init__(self) -> None:
        super().__init__()
        base = self.known["base"]
        layer = LayerInfo(digest=f"sha256:{DIFF_META}", blob=f"sha256:{DIFF_BLOB}", meta_bytes=1, blob_bytes=1)
        self.known["diffed"] = msgspec.structs.replace(base, layers=(layer, *base.layers), image="diffed@1")
        self.trace_of_base: list[Touch] | None = None
        self.trace_fails: Exception | None = None
        self.saved: dict[str, list[Touch]] = {}
        """By the image's digest."""
        self.save_fails: Exception | None = None
        self.recorded: dict[str, BlobFigures] = {}
        self.record_fails: Exception | None = None
        self.whole_layers: set[str] = set()
        """Metadata digests of layers whose data is whole here."""
        self.removed = False
        self.held: list[Path] = []
        self.adopted: list[tuple[str, Path]] = []
        self.unreachable = False
        self.whole = False
        self.holds = 0

    async def locate(self, image: str, workspace: str | None, toolkits: Sequence[str]) -> None:
        if self.unreachable:
            raise Unavailable("the store can't be reached")

    async def ensure(self, environment: Environment) -> list[LayerState]:
        def index(layer: LayerInfo) -> bytes | None:
            return None if layer.blob is None or self.whole or hex_of(layer.digest) in self.whole_layers else INDEX

        return [LayerState(layer, index(layer)) for layer in environment.layers]

    async def hold(self, environment: Environment) -> None:
        self.holds += 1

    def get(self, reference: str) -> ImageInfo:
        if self.removed:
            raise ImageNotFound("it was removed")
        layers = list(reversed(self.resolve(reference, None, ()).layers))
        name = reference.partition("@")[0]
        digest = DIFFED if name == "diffed" else BASE
        return ImageInfo(name=name, version=1, kind="base", digest=digest, layers=layers, config=ImageConfig(), created_at=0.0, size=1)

    async def trace(self, image: ImageInfo) -> list[Touch] | None:
        if self.trace_fails is not None:
            raise self.trace_fails
        return self.trace_of_base

    async def save_trace(self, image: ImageInfo, touches: Sequence[Touch]) -> None:
        if self.save_fails is not None:
            raise self.save_fails
        self.saved[image.digest] = list(touches)

    async def record_reads(self, figures: Mapping[str, BlobFigures]) -> None:
        if self.record_fails is not None:
            raise self.record_fails
        self.recorded.update(figures)

    def hold_blob(self, file: Path) -> Path:
        self.held.append(file)
        return file.with_suffix(".held")

    def adopt_blob(self, blob: str, held: Path) -> None:
        self.adopted.append((blob, held))

    def release_blob(self, held: Path) -> None:
        self.held.remove(held.with_suffix(""))


@pytest.fixture
def blobfs(tmp_path: Path) -> FakeBlobfs:
    return FakeBlobfs(tmp_path / "blobfs")


@pytest.fixture
def images() -> LazyImages:
    return LazyImages()


@asynccontextmanager
async def opened(
    node: Node, images: LazyImages, blobfs: FakeBlobfs, state_dir: Path, clock: FakeClock | None = None, **config: Any
) -> AsyncIterator[Edge]:
    edge = Edge(
        EdgeConfig(state_dir=state_dir, run_dir=state_dir, **config),
        images,
        connect_spawner=node.connect_spawner,
        connect_blobfs=blobfs.connect,
        connect_channel=node.connect_channel,
        clock=None if clock is None else clock.clock(),
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


async def create_on_new_mounts(edge: Edge, node: Node, image: str = "base") -> SandboxInfo:
    node.mounted.clear()
    edge.sandboxes.agents.on_blobs_aborted()
    return await create(edge, image)


async def stop(edge: Edge, sandbox_id: str) -> None:
    sandbox = edge.sandboxes.live(sandbox_id)
    assert sandbox is not None
    await edge.sandboxes.stop(sandbox, "stopped by request")


def storage_events(edge: Edge, sandbox_id: str) -> list[str]:
    sandbox = edge.sandboxes.live(sandbox_id)
    assert sandbox is not None
    return [event.message for event in sandbox.events.since(0)[0] if event.type == "storage"]


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
    assert images.saved == {BASE: [Touch(0, 3, 10), Touch(0, 7, 20)]} and not blobfs.prefetched


async def test_images_that_share_a_blob_share_its_recording(
    edge: Edge, images: LazyImages, blobfs: FakeBlobfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one would take the place of the first in blobfs, and only one of them could be taken."""
    monkeypatch.setattr(ondemand, "RECORD_S", 0.0)
    blobfs.ended.clear()
    await create(edge)
    await create(edge, "diffed")
    assert blobfs.trace_starts == [BLOB, DIFF_BLOB]
    blobfs.ended.set()
    await eventually(lambda: len(images.saved) == 2)
    shared = [Touch(0, 3, 10), Touch(0, 7, 20)]
    assert images.saved[BASE] == shared
    assert sorted(images.saved[DIFFED], key=lambda touch: touch.layer) == [*shared, Touch(1, 3, 10), Touch(1, 7, 20)]


async def test_nothing_is_mounted_before_its_reads_are_recorded(edge: Edge, node: Node, blobfs: FakeBlobfs) -> None:
    blobfs.begin.clear()
    creating = asyncio.ensure_future(create(edge))
    await eventually(lambda: bool(blobfs.trace_starts))
    for _ in range(100):
        await asyncio.sleep(0)
    assert node.mounts == 0
    blobfs.begin.set()
    assert (await creating).state == "running"


async def test_a_start_waits_for_no_recording_that_blobfs_lost_before_it_began(edge: Edge, blobfs: FakeBlobfs) -> None:
    blobfs.begin.clear()
    creating = asyncio.ensure_future(create(edge))
    await eventually(lambda: bool(blobfs.trace_starts))
    blobfs.reconnected()
    assert (await creating).state == "running"


async def test_an_image_that_is_whole_here_in_part_is_not_recorded(edge: Edge, node: Node, images: LazyImages, blobfs: FakeBlobfs) -> None:
    images.whole_layers = {META}
    await create(edge, "diffed")
    assert node.lazy == {DIFF_META} and not blobfs.trace_starts


async def test_a_recording_that_is_lost_for_one_layer_is_no_trace_and_is_made_anew(
    edge: Edge, node: Node, images: LazyImages, blobfs: FakeBlobfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ondemand, "RECORD_S", 0.0)
    blobfs.ended.clear()
    with structlog.testing.capture_logs() as logs:
        await create(edge, "diffed")
        blobfs.traced.remove(BLOB)
        blobfs.ended.set()
        await eventually(lambda: any(entry.get("image") == DIFFED for entry in logs))
    assert not images.saved
    await create_on_new_mounts(edge, node, "diffed")
    await eventually(lambda: bool(images.saved))
    assert {touch.layer for touch in images.saved[DIFFED]} == {0, 1}


async def test_a_trace_that_can_not_be_saved_is_recorded_again(
    edge: Edge, node: Node, images: LazyImages, blobfs: FakeBlobfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ondemand, "RECORD_S", 0.0)
    images.save_fails = Unavailable("the store can't be reached")
    with structlog.testing.capture_logs() as logs:
        await create(edge)
        await eventually(lambda: any(entry.get("image") == BASE for entry in logs))
    images.save_fails = None
    await create_on_new_mounts(edge, node)
    await eventually(lambda: bool(images.saved))


async def test_what_was_being_recorded_when_blobfs_was_restarted_is_recorded_anew(
    edge: Edge, node: Node, images: LazyImages, blobfs: FakeBlobfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ondemand, "RECORD_S", 0.0)
    blobfs.ended.clear()
    with structlog.testing.capture_logs() as logs:
        await create(edge)
        blobfs.reconnected()
        await eventually(lambda: any("restarted" in str(entry.get("reason")) for entry in logs))
    await create_on_new_mounts(edge, node)
    assert blobfs.trace_starts == [BLOB, BLOB]
    blobfs.ended.set()
    await eventually(lambda: bool(images.saved))


async def test_a_restarted_blobfs_is_told_again_what_to_fetch_ahead(edge: Edge, node: Node, images: LazyImages, blobfs: FakeBlobfs) -> None:
    images.trace_of_base = [Touch(0, 5, 0)]
    await create(edge)
    blobfs.reconnected()
    await create_on_new_mounts(edge, node)
    assert blobfs.prefetched == [(BLOB, [5]), (BLOB, [5])]


@pytest.mark.parametrize(
    "failure", [BlobfsError("invalid_argument", "chunk 5: it has 3"), BlobfsLost("blobfs has ended"), OverflowError("2^64")]
)
async def test_a_trace_that_can_not_be_replayed_fails_no_start(
    edge: Edge, images: LazyImages, blobfs: FakeBlobfs, failure: Exception
) -> None:
    images.trace_of_base = [Touch(0, 5, 0)]
    blobfs.prefetch_fails = failure
    with structlog.testing.capture_logs() as logs:
        assert (await create(edge)).state == "running"
    assert [entry for entry in logs if "base@1" in (str(entry.get("image")), str(entry.get("what")).rpartition(" ")[2])]


async def test_a_recording_that_can_not_be_begun_fails_no_start(edge: Edge, images: LazyImages, blobfs: FakeBlobfs) -> None:
    blobfs.trace_fails = BlobfsError("not_found", "it is not registered")
    with structlog.testing.capture_logs() as logs:
        assert (await create(edge)).state == "running"
        await eventually(lambda: any(entry.get("reason") == "it is not registered" for entry in logs))


async def test_a_trace_that_can_not_be_looked_up_fails_no_start_and_is_looked_up_again(
    edge: Edge, node: Node, images: LazyImages, blobfs: FakeBlobfs
) -> None:
    images.trace_of_base = [Touch(0, 5, 0)]
    images.trace_fails = Unavailable("the store can't be reached")
    assert (await create(edge)).state == "running"
    images.trace_fails = None
    await create_on_new_mounts(edge, node)
    assert blobfs.prefetched == [(BLOB, [5])]


async def test_an_image_that_is_removed_while_it_starts_has_no_trace_and_starts(edge: Edge, images: LazyImages) -> None:
    images.removed = True
    assert (await create(edge)).state == "running"


async def test_what_is_recorded_is_fetched_ahead_once(edge: Edge, images: LazyImages, blobfs: FakeBlobfs) -> None:
    images.trace_of_base = [Touch(0, 5, 0), Touch(0, 2, 9)]
    await create(edge)
    await create(edge)
    assert blobfs.prefetched == [(BLOB, [5, 2])] and not blobfs.traced


async def test_blobfs_is_asked_for_the_figures_of_a_bounded_number_of_blobs(
    edge: Edge, images: LazyImages, blobfs: FakeBlobfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for those that an earlier service registered."""
    monkeypatch.setattr(ondemand, "BLOBS_PER_CALL", 2)
    for digit in "34567":
        await blobfs.register(digit * 64, INDEX)
    await create(edge)
    blobfs.reconnected()
    await eventually(lambda: images.recorded.keys() == blobfs.registered.keys())
    assert max(map(len, blobfs.asked)) == 2 and len(images.recorded) == 6


async def test_what_no_sandbox_has_used_for_hours_is_counted_and_forgotten(
    node: Node, images: LazyImages, blobfs: FakeBlobfs, tmp_path: Path
) -> None:
    clock, stale = FakeClock(), "c" * 64
    await blobfs.register(stale, INDEX)
    async with opened(node, images, blobfs, tmp_path, clock) as edge:
        used = await create(edge)
        blobfs.reconnected()
        await eventually(lambda: BLOB in images.recorded)
        clock.now += 13 * HOURS
        images.recorded.clear()
        blobfs.reconnected()
        # BLOB's turn comes before.
        await eventually(lambda: stale not in blobfs.registered)
        assert blobfs.registered == {BLOB: INDEX} and stale in images.recorded
        await stop(edge, used.id)
        clock.now += 13 * HOURS
        blobfs.mounted = True
        blobfs.reconnected()
        await eventually(lambda: blobfs.refused == 1)
        blobfs.mounted = False
        blobfs.reconnected()
        await eventually(lambda: not blobfs.registered)


async def test_what_can_not_be_counted_is_not_forgotten(node: Node, images: LazyImages, blobfs: FakeBlobfs, tmp_path: Path) -> None:
    clock = FakeClock()
    await blobfs.register(BLOB, INDEX)
    async with opened(node, images, blobfs, tmp_path, clock):
        await eventually(lambda: BLOB in images.recorded)
        clock.now += 13 * HOURS
        images.record_fails = Unavailable("the database is locked")
        with structlog.testing.capture_logs() as logs:
            blobfs.reconnected()
            await eventually(lambda: any(entry.get("reason") == "the database is locked" for entry in logs))
        assert BLOB in blobfs.registered
        images.record_fails = None
        blobfs.reconnected()
        await eventually(lambda: not blobfs.registered)


async def test_a_blob_that_can_not_be_forgotten_keeps_no_other_from_it(
    node: Node, images: LazyImages, blobfs: FakeBlobfs, tmp_path: Path
) -> None:
    clock = FakeClock()
    await blobfs.register(BLOB, INDEX)
    await blobfs.register(DIFF_BLOB, INDEX)
    blobfs.stuck.add(BLOB)
    async with opened(node, images, blobfs, tmp_path, clock):
        await eventually(lambda: len(images.recorded) == 2)
        clock.now += 13 * HOURS
        blobfs.reconnected()
        await eventually(lambda: blobfs.registered.keys() == {BLOB})


async def test_what_was_forgotten_is_registered_and_fetched_ahead_again(
    node: Node, images: LazyImages, blobfs: FakeBlobfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ondemand, "COUNT_EVERY_S", 0.001)
    clock = FakeClock()
    images.trace_of_base = [Touch(0, 5, 0)]
    async with opened(node, images, blobfs, tmp_path, clock) as edge:
        await stop(edge, (await create(edge)).id)
        clock.now += 13 * HOURS
        await eventually(lambda: not blobfs.registered)
        await create_on_new_mounts(edge, node)
        assert blobfs.registered == {BLOB: INDEX} and blobfs.prefetched == [(BLOB, [5]), (BLOB, [5])]


async def test_a_blob_that_is_forgotten_just_before_its_mount_is_registered_again(edge: Edge, node: Node, blobfs: FakeBlobfs) -> None:
    node.fail_mount.append(SpawnerError("not_found", f"{BLOB}: No such file or directory"))
    assert (await create(edge)).state == "running"
    assert blobfs.registrations == [BLOB, BLOB] and node.lazy == {META}


async def test_a_full_disk_of_blobfs_is_an_event_of_the_sandboxes_that_read_through_it(
    node: Node, images: LazyImages, blobfs: FakeBlobfs, tmp_path: Path
) -> None:
    clock = FakeClock()
    async with opened(node, images, blobfs, tmp_path, clock) as edge:
        lazy = await create(edge)
        images.whole_layers = {META}
        clock.now += 1.0
        node.lazy.clear()
        await edge.sandboxes.inventory.layers.compare(clock.now)
        whole = await create(edge)
        assert blobfs.listener is not None
        with structlog.testing.capture_logs() as logs:
            blobfs.listener.on_uncached("No space left on device")
        assert [entry["reason"] for entry in logs] == ["No space left on device"]
        told = storage_events(edge, lazy.id)
        assert len(told) == 1 and "fetched each time it is read: No space left on device" in told[0]
        assert not storage_events(edge, whole.id)


async def test_a_disk_that_stays_full_is_not_told_each_time(node: Node, images: LazyImages, blobfs: FakeBlobfs, tmp_path: Path) -> None:
    clock = FakeClock()
    async with opened(node, images, blobfs, tmp_path, clock) as edge:
        first = await create(edge)
        assert blobfs.listener is not None
        blobfs.listener.on_uncached("No space left on device")
        clock.now += 59.0
        later = await create(edge)
        blobfs.listener.on_uncached("No space left on device")
        assert len(storage_events(edge, first.id)) == len(storage_events(edge, later.id)) == 1
        clock.now += ondemand.UNCACHED_EVERY_S
        blobfs.listener.on_uncached("No space left on device")
        assert len(storage_events(edge, first.id)) == 2


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


# -- what was read, for whoever asks now


async def test_what_was_read_is_told_when_asked_and_asked_once_for_several_callers(
    edge: Edge, images: LazyImages, blobfs: FakeBlobfs
) -> None:
    await create(edge)
    blobfs.complete.add(BLOB)
    await asyncio.gather(*(edge.count_reads() for _ in range(5)))
    assert images.recorded == {BLOB: BlobFigures(fetched=5)} and blobfs.asked == [[BLOB]]
    assert not images.adopted, "that is left to the next look"
    await edge.count_reads()
    assert blobfs.asked == [[BLOB], [BLOB]]


async def test_without_a_lazy_layer_blobfs_is_not_asked(edge: Edge, blobfs: FakeBlobfs) -> None:
    await edge.count_reads()
    assert blobfs.listener is None and not blobfs.asked


async def test_a_blobfs_that_fails_or_does_not_answer_holds_nobody_up_who_asks_what_was_read(
    edge: Edge, images: LazyImages, blobfs: FakeBlobfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(edge)

    async def lost(blobs: Iterable[str]) -> CacheFigures:
        raise BlobfsLost("it is gone")

    answer = asyncio.Event()
    stats = blobfs.stats

    async def slow(blobs: Iterable[str]) -> CacheFigures:
        await answer.wait()
        return await stats(blobs)

    monkeypatch.setattr(ondemand, "COUNT_WITHIN_S", 0.01)
    monkeypatch.setattr(blobfs, "stats", lost)
    with structlog.testing.capture_logs() as logs:
        await edge.count_reads()
        await eventually(lambda: any("can't be counted" in line["event"] for line in logs))
    monkeypatch.setattr(blobfs, "stats", slow)
    async with asyncio.timeout(10):
        await edge.count_reads()
    assert not images.recorded
    answer.set()
    await eventually(lambda: images.recorded == {BLOB: BlobFigures(fetched=5)})
