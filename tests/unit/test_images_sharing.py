"""Two nodes and one store: what is imported on one is found, fetched and started on the other, and never goes while somebody needs it."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from edge_fakes import eventually
from sqlalchemy import text

from dsec.images import publishing
from dsec.images.blobs import hex_of
from dsec.images.catalog import Caller
from dsec.images.chunks import ChunkTable
from dsec.images.converter import Report
from dsec.images.importing import draft
from dsec.images.leases import Lease
from dsec.images.names import ByName, exact, locked
from dsec.images.packing import DIFF_LAYERS_MAX, PackedLayer
from dsec.images.shared import DirectoryBlobs, open_blobs
from dsec.images.shared_catalog import Manifest, manifest_key, name_key
from dsec.images.sharing import node_name
from libdsec.errors import Conflict, ImageError, ImageNotFound, InvalidArgument, NoCapacity, PermissionDenied, Unavailable
from libdsec.schema import ImageFinding, ImageInfo, ImportLine
from tests.unit.images_archives import member, tar
from tests.unit.images_nodes import ADMIN, Node, content, node, quiet
from tests.unit.seaweed import Seaweed, seaweed


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "shared")


@pytest.fixture
async def a(tmp_path: Path, url: str) -> AsyncIterator[Node]:
    async with node(tmp_path / "a", url) as made:
        yield made


@pytest.fixture
async def b(tmp_path: Path, url: str) -> AsyncIterator[Node]:
    async with node(tmp_path / "b", url) as made:
        yield made


def objects(url: str) -> set[str]:
    """The keys of what a directory store holds, but for leases."""
    paths = (path for path in Path(url).rglob("*") if path.is_file())
    return {str(path.relative_to(url)) for path in paths if path.parent.name != "leases"}


def layers_in(keys: set[str]) -> set[str]:
    return {key for key in keys if key.startswith(("metas/", "blobs/"))}


def age(url: str, seconds: float = 7200) -> None:
    """Makes the layers in a directory store older than gc's grace."""
    for path in (*Path(url, "metas").iterdir(), *Path(url, "blobs").iterdir()):
        os.utime(path, (time.time() - seconds,) * 2)


async def start_on(node: Node, name: str) -> list[bool]:
    """What the edge does before it mounts: whether each layer, top first, is to be read lazily."""
    await node.images.locate(name, None, ())
    environment = node.images.resolve(name, None, ())
    return [state.lazy for state in await node.images.ensure(environment)]


# -- publishing and finding


@pytest.mark.parametrize("kind", ["directory", "s3"])
async def test_an_image_imported_on_one_node_is_found_on_another_by_name(
    kind: str, tmp_path: Path, url: str, request: pytest.FixtureRequest
) -> None:
    shared = url if kind == "directory" else request.getfixturevalue("s3").url(tmp_path.name)
    async with node(tmp_path / "a", shared) as a, node(tmp_path / "b", shared) as b:
        steps: list[ImportLine] = []
        made = await a.load("team/python:3.11", {"usr/bin/python": content(1, 3 << 20)}, tell=steps.append)
        [layer] = made.layers
        assert layer.index is not None
        assert {line.step for line in steps} >= {"sending layer 1 of 1", "publishing"}
        with pytest.raises(ImageNotFound):
            b.images.get("team/python:3.11")
        await b.images.locate("team/python:3.11", None, ())
        environment = b.images.resolve("team/python:3.11", None, ())
        assert environment.image == "team/python:3.11@1"
        [state] = await b.images.ensure(environment)
        assert state.index is not None and f"sha256:{hashlib.sha256(state.index).hexdigest()}" == layer.index
        assert ChunkTable.decode(state.index).size == layer.blob_bytes
        # The metadata and the table are here, the data isn't.
        assert b.blobs() == {hex_of(layer.digest), hex_of(layer.index)}
        assert await b.images.find(f"team/python:3.11@{made.digest}") == made
        assert (await start_on(a, "team/python:3.11")) == [False]


async def test_an_image_is_pulled_whole_and_then_not_lazy(a: Node, b: Node) -> None:
    made = await a.load("base", {"data": content(2, 5 << 20)})
    assert await start_on(b, "base") == [True]
    lines: list[ImportLine] = []
    assert await b.images.pull("base", True, lines.append) == made
    assert max(line.done_bytes for line in lines) == made.layers[0].blob_bytes
    assert {line.total_bytes for line in lines if line.step == "fetching data"} == {made.layers[0].blob_bytes}
    assert await start_on(b, "base") == [False]
    assert hashlib.sha256((b.root / "images" / "blobs" / hex_of(made.layers[0].blob or "")).read_bytes()).hexdigest() in b.blobs()


async def test_packing_and_sending_tell_how_much_there_is(a: Node) -> None:
    lines: list[ImportLine] = []
    made = await a.load("base", {"data": content(3, 36 << 20)}, tell=lines.append)
    packed = {line.total_bytes for line in lines if line.step == "packing layer 1 of 1"}
    sent = [line for line in lines if line.step == "sending layer 1 of 1"]
    assert packed == {made.layers[0].blob_bytes}
    [stored] = {line.total_bytes for line in sent}
    assert stored is not None and sent[0].done_bytes == 0 and (8 << 20) < sent[-1].done_bytes <= stored < made.layers[0].blob_bytes


async def test_a_tag_made_where_the_data_is_not_is_found_everywhere(a: Node, b: Node, url: str) -> None:
    made = await a.load("x", {"data": content(12, 1 << 20)})
    before = layers_in(objects(url))
    tagged = await b.images.tag("x", "y", ADMIN, None, quiet)
    assert tagged.digest == made.digest and layers_in(objects(url)) == before
    await a.images.remove("x", ADMIN)
    age(url)
    await a.images.collect_garbage()
    assert layers_in(objects(url)) == before
    assert await start_on(a, "y") == [True]


async def test_what_another_project_packed_gets_no_other_name(a: Node) -> None:
    await a.load("base", {"data": b"1"})
    await pack_on(a, "base", "secret", 13)
    with pytest.raises(ImageNotFound):
        await a.images.tag("secret", "mine", Caller(project="theirs", admin=False), None, quiet)


async def test_versions_are_unique_among_nodes(a: Node, b: Node) -> None:
    loads = [(a if number % 2 else b).load("tool", {"n": str(number).encode()}, kind="toolkit") for number in range(8)]
    made = await asyncio.gather(*loads)
    assert sorted(info.version for info in made) == list(range(1, 9))
    assert (await a.images.find("tool@8")).digest == (await b.images.find("tool@8")).digest


async def test_a_version_is_not_given_again_after_its_image_was_removed_elsewhere(a: Node, b: Node) -> None:
    await a.load("x", {"a": b"1"})
    await b.images.remove("x", ADMIN)
    assert (await a.load("x", {"a": b"2"})).version == 2


async def test_a_newer_version_of_another_node_is_what_a_plain_name_means(a: Node, b: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await a.load("x", {"a": b"1"})
    await start_on(b, "x")
    await a.load("x", {"a": b"2"})
    assert b.images.resolve("x", None, ()).image == "x@1"
    monkeypatch.setattr("dsec.images.sharing.NAME_FRESH_S", 0.0)
    await b.images.locate("x", None, ())
    assert b.images.resolve("x", None, ()).image == "x@2"
    await a.images.remove("x@2", ADMIN)
    await b.images.locate("x", None, ())
    assert b.images.resolve("x", None, ()).image == "x@1"


async def test_calls_by_plain_name_see_at_once_what_another_node_made_and_starts_see_it_later(a: Node, b: Node) -> None:
    await a.load("x", {"a": b"1"})
    await start_on(b, "x")
    newer = await a.load("x", {"a": b"2"})
    await b.images.locate("x", None, ())
    assert b.images.resolve("x", None, ()).image == "x@1", "a start looks again after ten seconds only"
    assert await b.images.find("x") == newer
    assert b.images.resolve("x", None, ()).image == "x@2"
    newer = await a.load("x", {"a": b"3"})
    assert await b.images.pull("x", False, quiet) == newer
    newer = await a.load("x", {"a": b"4"})
    assert (await b.images.tag("x", "y", ADMIN, None, quiet)).digest == newer.digest


async def test_a_version_that_another_node_removed_is_found_no_more(a: Node, b: Node) -> None:
    kept, gone = await a.load("x", {"a": b"1"}), await a.load("x", {"a": b"2"})
    lock = locked("x", gone.digest)
    for reference in ("x@1", "x@2", lock):
        await start_on(b, reference)
    b.live.add(hex_of(gone.layers[0].digest))
    await a.images._catalog.remove([gone])
    shared = a.images._sharing
    assert shared is not None
    await shared.catalog.remove("x", 2)
    assert await b.images.find("x@2") == gone, "it is in use here"
    b.live.clear()
    await b.images.locate("x@2", None, ())
    assert b.images.get("x@2") == gone, "a start doesn't ask"
    for reference in (lock, "x@2"):
        with pytest.raises(ImageNotFound):
            await b.images.find(reference)
    with pytest.raises(ImageNotFound):
        await b.images.pull("x@2", False, quiet)
    assert await b.images.find("x@1") == kept


async def test_another_store_or_an_emptied_one_costs_nothing_that_is_here(tmp_path: Path, url: str) -> None:
    async with node(tmp_path / "a", url) as a:
        made = await a.load("x", {"data": content(1, 1 << 20)})
    for store in (str(tmp_path / "other"), url):
        async with node(tmp_path / "a", store) as a:
            for reference in ("x", "x@1"):
                assert await a.images.find(reference) == made
            await a.images.collect_garbage()
            assert a.images._blobs.has(made.layers[0].digest)
    async with node(tmp_path / "a", str(tmp_path / "other")) as a, node(tmp_path / "c", str(tmp_path / "other")) as c:
        await a.images.push("x", ADMIN, quiet)
        assert (await c.images.pull("x", True, quiet)).digest == made.digest


async def test_gc_forgets_what_another_node_has_removed(a: Node, b: Node) -> None:
    made = await a.load("x", {"data": content(1, 1 << 20)})
    await b.images.pull("x", True, quiet)
    await a.images.remove("x", ADMIN)
    await a.images.collect_garbage()
    b.live.add(hex_of(made.layers[0].digest))
    await b.images.collect_garbage()
    assert b.images.get("x@1") == made, "it is in use here"
    b.live.clear()
    await b.images.collect_garbage()
    assert b.images._catalog.find(ByName("x", 1)) is None
    assert not any(b.images._blobs.path(hex_of(digest)).exists() for digest in (made.layers[0].digest, made.layers[0].blob or ""))


@pytest.mark.parametrize("left", ["", "\n"])
def test_a_node_whose_name_was_lost_gets_another_one(tmp_path: Path, left: str) -> None:
    path = tmp_path / "node"
    path.write_text(left)
    assert len(name := node_name(path)) > 8
    assert node_name(path) == name
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("reference", ["x", "x@1"])
async def test_a_slow_store_does_not_keep_a_known_image_from_being_told(
    reference: str, a: Node, b: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await a.load("x", {"a": b"1"})
    await start_on(b, "x")
    shared = b.images._sharing
    assert shared is not None

    async def never(name: str) -> list[int]:
        return await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(shared.catalog, "versions", never)
    monkeypatch.setattr("dsec.images.sharing.LOOK_S", 0.01)
    async with asyncio.timeout(10):
        assert await b.images.find(reference) == made


async def test_an_image_that_is_pushed_while_the_store_is_looked_through_is_not_taken_for_a_removed_one(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node(tmp_path / "a", None) as a:
        await a.load("x", {"a": b"1"})
        second = await a.load("x", {"a": b"2"})
    async with node(tmp_path / "a", url) as a:
        await a.images.push("x@1", ADMIN, quiet)
        shared = a.images._sharing
        assert shared is not None
        versions = shared.catalog.versions

        async def pushed_behind_the_look(name: str) -> list[int]:
            found = await versions(name)
            monkeypatch.setattr(shared.catalog, "versions", versions)
            await a.images.push("x@2", ADMIN, quiet)
            return found

        monkeypatch.setattr(shared.catalog, "versions", pushed_behind_the_look)
        assert await a.images.find("x@1") and a.images.get("x@2").digest == second.digest


async def test_a_digest_is_found_by_the_name_beside_it_whatever_the_newest_version_is(a: Node, b: Node) -> None:
    first = await a.load("x", {"a": b"1"})
    await a.load("x", {"a": b"2"})
    assert (await b.images.find(locked("x", first.digest))).version == 1
    with pytest.raises(ImageNotFound):
        await b.images.find(f"x@sha256:{'0' * 64}")


async def test_a_name_of_another_project_is_refused_on_every_node(a: Node, b: Node) -> None:
    await a.load("mine", {"a": b"1"}, caller=Caller(project="one", admin=False))
    with pytest.raises(PermissionDenied):
        await b.load("mine", {"a": b"2"}, caller=Caller(project="two", admin=False))
    with pytest.raises(PermissionDenied):
        await b.images.remove("mine", Caller(project="two", admin=False))


@pytest.mark.parametrize("name", ["a/b:c", ".", "..", "a/../b", "x#1", "é~=%", "n" * 255, "ü" * 255, "A.json"])
async def test_any_name_is_one_safe_component_of_a_key(name: str, a: Node, b: Node) -> None:
    assert len(name_key(name)) < 256 and "/" not in name_key(name) and name_key(name) not in (".", "..")
    made = await a.load(name, {"a": b"1"})
    assert await b.images.find(name) == made


def test_different_names_have_different_keys() -> None:
    names = ["a/b", "a:b", "a=2Fb", "A", "a", "." * 3, "n" * 254, "n" * 255, "ü" * 254, "ü" * 255]
    assert len({name_key(name) for name in names}) == len(names)


# -- what is sent once, and what breaks off


class Counting(DirectoryBlobs):
    """A store that counts what is written to it, and fails where it is told to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.written: list[str] = []
        self.fail_at: str | None = None
        self.refused = 0

    async def _put(self, key: str, content: bytes | AsyncIterator[bytes]) -> None:
        self._check(key)
        await super()._put(key, content)

    async def put_new(self, key: str, data: bytes) -> bool:
        self._check(key)
        return await super().put_new(key, data)

    def _check(self, key: str) -> None:
        if self.fail_at is not None and self.fail_at in key:
            self.refused += 1
            raise Unavailable(f"cut while writing {key}")
        self.written.append(key)


async def test_a_layer_that_is_there_is_not_sent_again(tmp_path: Path, url: str, a: Node) -> None:
    await a.load("one", {"data": content(3, 1 << 20)})
    store = Counting(Path(url))
    async with node(tmp_path / "c", store) as c:
        await c.load("two", {"data": content(3, 1 << 20)})
        assert not [key for key in store.written if key.startswith(("blobs/", "metas/"))]
        assert manifest_key("two", 1) in store.written


@pytest.mark.parametrize("where", [".z", ".idx", "metas/", "images/x/1.json"])
async def test_a_push_that_breaks_off_shows_nothing_and_goes_on_later(where: str, tmp_path: Path, url: str, b: Node) -> None:
    store = Counting(Path(url))
    store.fail_at = where
    async with node(tmp_path / "a", store) as a:
        with pytest.raises(Unavailable, match="x@1 is made on this node"):
            await a.load("x", {"data": content(4, 1 << 20)}, key="k")
        with pytest.raises(ImageNotFound):
            await b.images.find("x")
        assert a.images.get("x").version == 1
    # The node comes back, and the store with it.
    store.fail_at = None
    before = len(store.written)
    async with node(tmp_path / "a", store) as a, asyncio.timeout(20):
        await eventually(Path(url, manifest_key("x", 1)).exists, within_s=20)
        assert await start_on(b, "x") == [True]
        sent = [key.rpartition(".")[2] for key in store.written[before:] if key.startswith(("blobs/", "metas/"))]
        assert sent == {".z": ["z", "idx", "zst"], ".idx": ["z", "idx", "zst"], "metas/": ["zst"], "images/x/1.json": []}[where]


async def test_an_import_is_refused_before_it_begins_when_the_store_cannot_be_reached(tmp_path: Path, s3: Seaweed) -> None:
    dead = open_blobs(f"s3://layers/x?endpoint=http://127.0.0.1:9&credentials={s3.home / 'credentials'}")
    async with node(tmp_path / "a", dead) as a:
        with pytest.raises(Unavailable):
            await a.load("x", {"a": b"1"})


async def test_an_image_made_before_there_was_a_store_is_pushed_when_asked(tmp_path: Path, url: str, b: Node) -> None:
    async with node(tmp_path / "a", None) as a:
        await a.load("old", {"data": content(5, 1 << 20)})
        with pytest.raises(InvalidArgument, match="--store"):
            await a.images.push("old", ADMIN, quiet)
    async with node(tmp_path / "a", url) as a:
        with pytest.raises(ImageNotFound):
            await b.images.find("old")
        pushed = await a.images.push("old", ADMIN, quiet)
        assert await a.images.push("old", ADMIN, quiet) == pushed == await b.images.find("old")
    await b.load("other", {"a": b"1"})
    async with node(tmp_path / "c", None) as c:
        await c.load("other", {"a": b"2"})
    async with node(tmp_path / "c", url) as c:
        with pytest.raises(Conflict, match="other@1"):
            await c.images.push("other@1", ADMIN, quiet)


async def test_two_nodes_that_send_the_same_blob_send_it_once(tmp_path: Path, url: str) -> None:
    store = Counting(Path(url))
    async with node(tmp_path / "a", store) as a, node(tmp_path / "b", store) as b:
        data = {"data": content(6, 4 << 20)}
        await asyncio.gather(a.load("x", data), b.load("y", data))
        assert len([key for key in store.written if key.endswith(".z")]) == 1


async def test_what_another_node_sent_between_the_look_and_the_claim_is_not_sent_again(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second packer's table may be another one, and the first one's manifest names the first."""
    store = Counting(Path(url))
    async with node(tmp_path / "a", store) as a, node(tmp_path / "b", store) as b:
        shared = b.images._sharing
        assert shared is not None
        claim = shared.publisher._claim

        async def late(blob: str) -> bool:
            if not Path(url, manifest_key("x", 1)).exists():
                await a.load("x", {"data": content(6, 1 << 20)})
            return await claim(blob)

        monkeypatch.setattr(shared.publisher, "_claim", late)
        made = await b.load("y", {"data": content(6, 1 << 20)})
        assert made.layers == (await a.images.find("x")).layers
        assert len([key for key in store.written if key.endswith(".z")]) == 1
        assert not list(Path(url, "uploads").iterdir())


async def test_a_claim_is_kept_on_when_it_could_not_be_renewed_once(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.images.publishing.CLAIM_REFRESH_S", 0.0)
    failures: list[Exception] = [Unavailable("cut"), OSError("stale file handle")]
    renewed = asyncio.Event()

    class Failing(DirectoryBlobs):
        async def put(self, key: str, data: bytes) -> None:
            if failures:
                raise failures.pop(0)
            renewed.set()

    async with node(tmp_path / "a", Failing(Path(url))) as a:
        shared = a.images._sharing
        assert shared is not None
        keeping = asyncio.create_task(shared.publisher._keep_claim("a" * 64))
        async with asyncio.timeout(20):
            await renewed.wait()
        keeping.cancel()


async def test_a_disk_that_gets_full_during_a_push_is_no_capacity(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr("dsec.images.publishing.pack", full)
    async with node(tmp_path / "a", url) as a:
        with pytest.raises(NoCapacity) as refusal:
            await a.load("x", {"data": content(6, 1 << 20)})
        assert refusal.value.reason == "disk"
        assert "x@1 is made on this node, but not yet in the shared store" in refusal.value.message


async def test_an_image_whose_push_fails_unforeseen_is_pushed_later(
    tmp_path: Path, url: str, b: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[Exception] = [Unavailable("cut"), KeyError("x")]
    pack = publishing.pack

    def failing(*args: Any, **more: Any) -> ChunkTable:
        if failures:
            raise failures.pop(0)
        return pack(*args, **more)

    monkeypatch.setattr("dsec.images.publishing.pack", failing)
    async with node(tmp_path / "a", url) as a:
        with pytest.raises(Unavailable):
            await a.load("x", {"data": content(6, 1 << 20)})
    monkeypatch.setattr("dsec.images.sharing.PUSH_RETRY_S", 0.01)
    async with node(tmp_path / "a", url):
        await eventually(Path(url, manifest_key("x", 1)).exists, within_s=20)
        assert await start_on(b, "x") == [True]
    assert not failures


# -- what is broken


async def test_a_forged_object_is_refused_not_used(a: Node, b: Node, url: str) -> None:
    made = await a.load("x", {"data": content(7, 3 << 20)})
    [layer] = made.layers
    frames = Path(url, "blobs", hex_of(layer.blob or "") + ".z")
    meta, table = Path(url, "metas", hex_of(layer.digest) + ".zst"), frames.with_suffix(".idx")
    for path in (meta, table):
        good = path.read_bytes()
        path.write_bytes(good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
        with pytest.raises(ImageError):
            await start_on(b, "x")
        path.write_bytes(good)
    assert await start_on(b, "x") == [True]
    good = frames.read_bytes()
    frames.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    with pytest.raises(ImageError, match="chunk 0"):
        await b.images.pull("x", True, quiet)
    frames.write_bytes(good[:-1000])
    with pytest.raises(ImageError, match="cut"):
        await b.images.pull("x", True, quiet)
    assert await start_on(b, "x") == [True]
    frames.write_bytes(good)
    await b.images.pull("x", True, quiet)
    assert await start_on(b, "x") == [False]


def republish(url: str, made: ImageInfo, meta: bytes, **says: object) -> None:
    """Puts other metadata under the only layer of an image, as somebody would who can write the store: every digest fits."""
    [layer] = made.layers
    digest = hashlib.sha256(meta).hexdigest()
    Path(url, "metas", f"{digest}.zst").write_bytes(zstandard.compress(meta))
    other = msgspec.structs.replace(layer, **({"digest": f"sha256:{digest}", "meta_bytes": len(meta)} | says))
    path = Path(url, manifest_key(made.name, made.version))
    manifest = msgspec.structs.replace(msgspec.json.decode(path.read_bytes(), type=Manifest), layers=(other,))
    path.write_bytes(msgspec.json.encode(manifest))


def other_owner(meta: bytearray) -> None:
    meta[1280 + 24] ^= 1


def compressed(meta: bytearray) -> None:
    meta[1024 + 80] |= 1


def longer(meta: bytearray) -> None:
    meta += bytes(4096)


@pytest.mark.parametrize("forge", [other_owner, compressed, longer])
async def test_metadata_that_no_converter_has_written_does_not_come_here(
    forge: Callable[[bytearray], None], a: Node, b: Node, url: str
) -> None:
    made = await a.load("x", {"data": content(9, 1 << 20)})
    meta = bytearray((a.root / "images/blobs" / hex_of(made.layers[0].digest)).read_bytes())
    forge(meta)
    republish(url, made, bytes(meta))
    with pytest.raises(ImageError, match="not a layer of ours"):
        await start_on(b, "x")
    assert not b.blobs()
    assert not list((b.root / "images/tmp").iterdir())
    findings: list[ImageFinding] = []
    await b.images.fsck(findings.append, deep=True, repair=False)
    assert [(finding.problem, "not a layer of ours" in finding.detail) for finding in findings if finding.object.startswith("metas/")] == [
        ("corrupt", True)
    ]


@pytest.mark.parametrize("says", [{"blob_bytes": 8192}, {"extra_ids": ()}, {"blob": None, "index": None, "blob_bytes": 0}])
async def test_a_manifest_that_says_something_else_of_a_layer_than_its_metadata_is_refused(
    says: dict[str, object], a: Node, b: Node, url: str
) -> None:
    made = await a.load_tar("x", tar([(member("data", uid=70_000), content(10, 1 << 20))]))
    meta = (a.root / "images/blobs" / hex_of(made.layers[0].digest)).read_bytes()
    republish(url, made, meta, **says)
    with pytest.raises(ImageError, match="something else"):
        await start_on(b, "x")
    assert not b.blobs()


@pytest.mark.parametrize("part", ["meta", "data"])
async def test_what_is_broken_here_is_not_sent(part: str, tmp_path: Path, url: str, b: Node) -> None:
    async with node(tmp_path / "a", None) as alone:
        [layer] = (await alone.load("x", {"data": content(11, 1 << 20)})).layers
    broken = tmp_path / "a/images/blobs" / hex_of(layer.digest if part == "meta" else layer.blob or "")
    broken.chmod(0o644)
    with broken.open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff")
    async with node(tmp_path / "a", url) as a:
        with pytest.raises(ImageError, match="broken"):
            await a.images.push("x", ADMIN, quiet)
    with pytest.raises(ImageNotFound):
        await b.images.find("x")


async def test_a_pull_that_broke_off_goes_on_where_it_was(tmp_path: Path, a: Node, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.images.pulling.RANGE_BYTES", 1 << 20)
    monkeypatch.setattr("dsec.images.pulling.RANGES_AT_ONCE", 1)
    made = await a.load("x", {"data": content(8, 12 << 20)})

    class Flaky(DirectoryBlobs):
        left = 3
        asked = 0

        async def get_range(self, key: str, offset: int, length: int) -> memoryview:
            if self.left == 0:
                raise Unavailable("cut")
            self.left -= 1
            self.asked += 1
            return await super().get_range(key, offset, length)

    store = Flaky(Path(url))
    async with node(tmp_path / "c", store) as c:
        with pytest.raises(Unavailable):
            await c.images.pull("x", True, quiet)
    async with node(tmp_path / "c", store) as c:
        store.left, store.asked = 1000, 0
        await c.images.pull("x", True, quiet)
        chunks = made.layers[0].blob_bytes >> 20
        assert 0 < store.asked <= chunks - 3 + 1
        assert await start_on(c, "x") == [False]


async def test_a_manifest_that_names_a_path_as_a_digest_is_refused(a: Node, b: Node, url: str) -> None:
    await a.load("x", {"a": b"1"})
    path = Path(url, manifest_key("x", 1))
    path.write_bytes(path.read_bytes().replace(b'"digest":"sha256:', b'"digest":"../../../'))
    with pytest.raises(ImageError, match="no digest"):
        await b.images.find("x")


# -- what was packed from sandboxes


async def pack_on(at: Node, base: str, name: str, seed: int) -> ImageInfo:
    """What the edge does when a sandbox of ``base`` is packed: its layer is that of an import that is gone again."""
    written = at.root / "written"
    async with node(written, None) as elsewhere:
        layer = (await elsewhere.load("written", {"more": content(seed, 1 << 20)})).layers[0]
    assert layer.blob is not None
    workspace = at.images._blobs.make_workspace()
    for file, digest in (("meta", layer.digest), ("blob", layer.blob)):
        shutil.copyfile(written / "images" / "blobs" / hex_of(digest), workspace / file)
    report = Report(
        meta=hex_of(layer.digest),
        meta_bytes=layer.meta_bytes,
        blob=hex_of(layer.blob),
        blob_bytes=layer.blob_bytes,
        entries=2,
        extra_ids=(),
        unnamed=layer.unnamed,
        dropped_xattrs=0,
    )
    packed = PackedLayer(report=report, directory=workspace, base=at.images.resolve(base, None, ()))
    return (await at.images.packing.store(packed, name, {}, ADMIN, None, quiet)).image


async def test_a_chain_that_was_packed_on_another_node_is_merged_all_the_same(a: Node, b: Node) -> None:
    await a.load("base", {"data": content(42, 1 << 20)})
    tip = "base"
    for number in range(DIFF_LAYERS_MAX):
        tip = (await pack_on(a, tip, f"step{number}", number)).name
    await a.images.push(tip, ADMIN, quiet)
    assert await start_on(b, tip) == [True] * (DIFF_LAYERS_MAX + 1)
    made = await pack_on(b, tip, "long", 43)
    assert [layer.diff for layer in made.layers] == [False, True]
    assert not b.images._puller.here(made.layers[:1]), "what isn't merged isn't fetched"


async def test_a_chain_that_cannot_be_fetched_stays_as_long_as_it_is(a: Node, b: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.images.packing.FETCHED_MAX", (DIFF_LAYERS_MAX << 20) - 1)
    await a.load("base", {"data": content(42, 1 << 20)})
    tip = "base"
    for number in range(DIFF_LAYERS_MAX):
        tip = (await pack_on(a, tip, f"step{number}", number)).name
    await a.images.push(tip, ADMIN, quiet)
    await start_on(b, tip)
    assert sum(layer.diff for layer in (await pack_on(b, tip, "long", 43)).layers) == DIFF_LAYERS_MAX + 1


async def test_a_packed_image_is_pushed_at_once(a: Node, b: Node, url: str) -> None:
    await a.load("base", {"data": content(40, 1 << 20)})
    made = await pack_on(a, "base", "packed", 41)
    # Less than a minute, after which it would be pushed in any case.
    await eventually(Path(url, manifest_key("packed", 1)).exists, within_s=20)
    assert (await b.images.find("packed")).digest == made.digest
    assert await start_on(b, "packed") == [True, True]


async def test_a_packed_image_does_not_wait_for_another_push_of_this_node(a: Node, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await a.load("base", {"data": content(40, 1 << 20)})
    shared = a.images._sharing
    assert shared is not None
    pushing, go_on = asyncio.Event(), asyncio.Event()
    push = shared.publisher.push

    async def slowly(image: ImageInfo, *args: Any) -> ImageInfo:
        if image.name == "an import":
            pushing.set()
            await go_on.wait()
        return await push(image, *args)

    monkeypatch.setattr(shared.publisher, "push", slowly)
    loading = asyncio.create_task(a.load("an import", {"a": b"1"}))
    await pushing.wait()
    await pack_on(a, "base", "packed", 42)
    await eventually(Path(url, manifest_key("packed", 1)).exists, within_s=20)
    assert not loading.done()
    go_on.set()
    await loading


async def test_what_an_image_rests_on_is_leased_until_it_is_pushed(tmp_path: Path, url: str, b: Node) -> None:
    store = Counting(Path(url))
    async with node(tmp_path / "a", store) as a:
        base = await a.load("base", {"data": content(43, 1 << 20)})
        needed = {hex_of(digest) for layer in base.layers for digest in (layer.digest, layer.blob) if digest is not None}
        shared = a.images._sharing
        assert shared is not None
        store.fail_at = "blobs/"
        packed = await pack_on(a, "base", "packed", 44)
        await eventually(lambda: store.refused > 0 and not shared._flights.busy(manifest_key("packed", 1)), within_s=20)
        await shared.lease.refresh()
        assert await Lease(shared.blobs, set).others() >= needed | {hex_of(layer.digest) for layer in packed.layers}
        with pytest.raises(Conflict, match="another node"):
            await b.images.remove("base", ADMIN)
        store.fail_at = None
        shared.push_soon()
        await eventually(lambda: not a.images._catalog.unpushed(), within_s=20)
        await shared.lease.refresh()
        assert (await Lease(shared.blobs, set).others()).isdisjoint(needed), "its manifest protects it now"
        await b.images.remove("base", ADMIN)
        age(url)
        await b.images.collect_garbage()
        assert await start_on(b, "packed") == [True, True]


async def test_what_an_image_rested_on_is_free_when_it_goes_before_it_is_pushed(tmp_path: Path, url: str, b: Node) -> None:
    store = Counting(Path(url))
    async with node(tmp_path / "a", store) as a:
        await a.load("base", {"data": content(45, 1 << 20)})
        store.fail_at = "blobs/"
        await pack_on(a, "base", "packed", 46)
        shared = a.images._sharing
        assert shared is not None
        await eventually(lambda: store.refused > 0 and not shared._flights.busy(manifest_key("packed", 1)), within_s=20)
        await a.images.remove("packed", ADMIN)
        await b.images.remove("base", ADMIN)


# -- removing and gc


async def test_an_image_in_use_on_another_node_is_not_removed(a: Node, b: Node) -> None:
    made = await a.load("x", {"a": b"1"})
    await start_on(b, "x")
    with pytest.raises(Conflict, match="another node"):
        await a.images.remove("x", ADMIN)
    b.live.add(made.layers[0].digest)
    with pytest.raises(Conflict, match="is in use"):
        await b.images.remove("x", ADMIN)


async def test_an_image_that_has_the_layers_of_one_in_use_is_not_removed_and_the_message_says_why(a: Node, b: Node) -> None:
    made = await a.load("x", {"a": b"1"})
    await a.images.tag("x", "y", ADMIN, None, quiet)
    await start_on(b, "x")
    why = "stop the sandboxes that run on it, or on an image made of it"
    with pytest.raises(Conflict, match=f"y@1 is in use on another node: {why}"):
        await a.images.remove("y", ADMIN)
    a.live.add(made.layers[0].digest)
    with pytest.raises(Conflict, match=f"y@1 is in use: {why}"):
        await a.images.remove("y", ADMIN)
    a.live.clear()


async def test_an_image_goes_though_its_base_is_in_use_and_the_base_stays(a: Node, b: Node) -> None:
    base = await a.load("x", {"a": b"1"})
    base_layer = hex_of(base.layers[0].digest)
    diff = (await a.load("other", {"b": b"2"})).layers[0]
    draft_of = draft("packed", "base", [diff, *base.layers], base.config)
    for _ in range(2):
        made = await a.images._made("packed", ADMIN, a.images._catalog.add(draft_of, ADMIN, None), quiet)
    # Sandboxes run on the base, here and on the other node.
    await start_on(b, "x")
    a.live.add(base_layer)
    assert await a.images.remove(exact("packed", made.version), ADMIN) == made
    a.live.add(hex_of(diff.digest))
    with pytest.raises(Conflict, match="packed@1 is in use"):
        await a.images.remove("packed@1", ADMIN)
    a.live.discard(hex_of(diff.digest))
    assert (await a.images.remove("packed", ADMIN)).version == 1
    with pytest.raises(Conflict, match="x@1 is in use"):
        await a.images.remove("x", ADMIN)
    for each in (a, b):
        await each.images.collect_garbage()
        assert each.images._blobs.has(base_layer)
    a.live.clear()


async def test_removing_a_name_removes_what_other_nodes_made_and_tells_the_newest(a: Node, b: Node, url: str) -> None:
    await a.load("x", {"a": b"1"})
    await start_on(b, "x")
    newest = await a.load("x", {"a": b"2"})
    assert await b.images.remove("x", ADMIN) == newest
    assert not [key for key in objects(url) if key.endswith(".json")]
    with pytest.raises(ImageNotFound):
        await a.images.remove("x", ADMIN)


async def test_an_image_that_is_being_pushed_is_not_removed(a: Node, b: Node, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = a.images._sharing
    assert shared is not None
    pushing, go_on = asyncio.Event(), asyncio.Event()
    push = shared.publisher.push

    async def slowly(*args: Any) -> ImageInfo:
        pushing.set()
        await go_on.wait()
        return await push(*args)

    monkeypatch.setattr(shared.publisher, "push", slowly)
    loading = asyncio.create_task(a.load("x", {"a": b"1"}))
    await pushing.wait()
    with pytest.raises(Conflict, match="pushed"):
        await a.images.remove("x", ADMIN)
    go_on.set()
    await loading
    await a.images.remove("x", ADMIN)
    with pytest.raises(ImageNotFound):
        await a.images.find("x")
    with pytest.raises(ImageNotFound):
        await b.images.find("x@1")


async def test_an_image_that_was_removed_is_not_pushed_any_more(tmp_path: Path, url: str) -> None:
    store = Counting(Path(url))
    store.fail_at = "images/x/1.json"
    async with node(tmp_path / "a", store) as a:
        with pytest.raises(Unavailable):
            await a.load("x", {"a": b"1"})
        [entry] = a.images._catalog.unpushed()
        await a.images.remove("x", ADMIN)
        store.fail_at = None
        shared = a.images._sharing
        assert shared is not None
        with pytest.raises(ImageNotFound, match="removed before"):
            await shared.push(entry, quiet)
        await a.images._catalog.pushed(entry.info)
    assert not Path(url, manifest_key("x", 1)).exists()
    # Nothing of it is left that would be in the way of another node's image of that number.
    async with node(tmp_path / "b", url) as b:
        assert (await b.load("x", {"a": b"2"})).version == 2
        Path(url, manifest_key("x", 1)).write_bytes(Path(url, manifest_key("x", 2)).read_bytes().replace(b'"version":2', b'"version":1'))
    async with node(tmp_path / "a", url) as a:
        assert (await a.images.find("x@1")).version == 1


async def test_what_a_crash_left_about_an_image_does_not_keep_its_name_from_being_known(tmp_path: Path, url: str, a: Node) -> None:
    made = await a.load("x", {"a": b"1"})
    async with node(tmp_path / "b", url) as b:
        async with b.images._catalog._store.engine.begin() as connection:
            await connection.execute(text("insert into image_shared (name, version) values ('x', 1)"))
        assert await b.images.find("x") == made


async def test_removing_an_image_of_before_there_was_a_store_leaves_the_stores_own(tmp_path: Path, url: str, b: Node) -> None:
    theirs = await b.load("other", {"a": b"1"}, caller=Caller(project="theirs", admin=False))
    await start_on(b, "other")
    async with node(tmp_path / "c", None) as c:
        await c.load("other", {"a": b"2"})
    async with node(tmp_path / "c", url) as c:
        assert c.images.get("other@1") != theirs
        await c.images.remove("other@1", ADMIN)
        assert Path(url, manifest_key("other", 1)).exists()
        assert await c.images.find("other@1") == theirs


async def test_an_image_that_the_store_has_for_another_project_is_not_removed(tmp_path: Path, url: str, b: Node) -> None:
    mine, theirs = Caller(project="mine", admin=False), Caller(project="theirs", admin=False)
    async with node(tmp_path / "c", None) as c:
        await c.load("x", {"a": b"1"}, caller=mine)
    await b.load("x", {"a": b"1"}, caller=theirs)
    async with node(tmp_path / "c", url) as c:
        with pytest.raises(PermissionDenied):
            await c.images.remove("x@1", mine)
    assert Path(url, manifest_key("x", 1)).exists()


async def test_a_broken_manifest_goes_with_its_image(a: Node, url: str) -> None:
    await a.load("x", {"a": b"1"})
    Path(url, manifest_key("x", 1)).write_text("{")
    await a.images.remove("x@1", ADMIN)
    assert not Path(url, manifest_key("x", 1)).exists()


async def test_a_sandbox_that_starts_during_a_removal_keeps_the_image(a: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await a.load("x", {"a": b"1"})
    shared = a.images._sharing
    assert shared is not None

    async def starting() -> set[str]:
        a.live.add(hex_of(made.layers[0].digest))
        return set()

    monkeypatch.setattr(shared.lease, "others", starting)
    with pytest.raises(Conflict, match="is in use"):
        await a.images.remove("x", ADMIN)
    assert await a.images.find("x@1") == made


async def test_what_runs_here_is_leased_and_known_although_its_image_was_removed_elsewhere(
    a: Node, b: Node, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.images.sharing.NAME_FRESH_S", 0.0)
    made = await a.load("x", {"data": content(31, 1 << 20)})
    [layer] = made.layers
    await start_on(b, "x")
    held = {hex_of(layer.digest), hex_of(layer.blob or "")}
    b.live |= held
    # The lease had lapsed when another node asked.
    Path(url, manifest_key("x", 1)).unlink()
    await b.images.locate("x", None, ())
    assert b.images.get("x@1") == made, "forgotten, its sandboxes could be neither forked nor packed"
    shared = b.images._sharing
    assert shared is not None
    await b.images._catalog.remove([made])
    await shared.lease.refresh()
    assert await Lease(shared.blobs, set).others() >= held, "also where the catalog knows nothing of it any more"
    b.live.clear()


async def test_a_start_on_mounted_layers_holds_them_again(a: Node, b: Node, url: str) -> None:
    made = await a.load("x", {"data": content(32, 1 << 20)})
    await start_on(b, "x")
    environment = b.images.resolve("x@1", None, ())
    shared = b.images._sharing
    assert shared is not None
    # Nobody has used them for longer than what starts is held for.
    shared.lease._held.clear()
    await shared.lease.refresh()
    await b.images.hold(environment)
    blob = hex_of(made.layers[0].blob or "")
    assert blob in await Lease(shared.blobs, set).others()
    shared.lease._held.clear()
    await shared.lease.refresh()
    await a.images.remove("x", ADMIN)
    age(url)
    await a.images.collect_garbage()
    with pytest.raises(ImageError, match="no data"):
        await b.images.hold(environment)


async def test_a_start_on_mounted_layers_goes_on_while_the_store_cannot_be_reached(
    a: Node, b: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await a.load("x", {"data": content(33, 1 << 20)})
    await start_on(b, "x")
    shared = b.images._sharing
    assert shared is not None
    shared.lease._held.clear()
    await shared.lease.refresh()

    async def cut(key: str, data: bytes) -> None:
        raise Unavailable("cut")

    monkeypatch.setattr(shared.blobs, "put", cut)
    await b.images.hold(b.images.resolve("x@1", None, ()))


async def test_gc_takes_from_the_store_what_nothing_names(a: Node, b: Node, url: str) -> None:
    kept = await a.load("kept", {"data": content(9, 1 << 20)})
    gone = await a.load("gone", {"data": content(10, 1 << 20)})
    await a.images.remove("gone", ADMIN)
    await a.images.collect_garbage()
    assert f"blobs/{hex_of(gone.layers[0].blob or '')}.z" in objects(url), "younger than the grace"
    age(url)
    removed = await a.images.collect_garbage()
    assert removed > 500_000
    [layer] = kept.layers
    data = hex_of(layer.blob or "")
    assert layers_in(objects(url)) == {f"metas/{hex_of(layer.digest)}.zst", f"blobs/{data}.z", f"blobs/{data}.idx"}
    assert await start_on(b, "kept") == [True]


async def test_gc_leaves_what_another_node_leases(tmp_path: Path, a: Node, b: Node, url: str) -> None:
    made = await a.load("x", {"data": content(11, 1 << 20)})
    await a.images.remove("x", ADMIN)
    b.live.add(made.layers[0].digest)
    store = open_blobs(url)
    lease = Lease(store, lambda: {hex_of(made.layers[0].digest), hex_of(made.layers[0].blob or "")})
    lease.node = "elsewhere"
    await lease.refresh()
    age(url)
    assert await a.images.collect_garbage() < 500_000 + made.size
    assert f"blobs/{hex_of(made.layers[0].blob or '')}.z" in objects(url)
    lease_file = Path(url, "leases", "elsewhere.json")
    lease_file.write_bytes(lease_file.read_bytes().replace(b'"at":', b'"at":-'))
    await a.images.collect_garbage()
    assert f"blobs/{hex_of(made.layers[0].blob or '')}.z" not in objects(url)


async def test_what_comes_to_need_a_condemned_layer_waits_for_the_gc(a: Node, b: Node, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The race that deletes data in stores without such a rule: gc has decided, an import finds the layer still there and skips it."""
    await a.load("x", {"data": content(12, 1 << 20)})
    await a.images.remove("x", ADMIN)
    age(url)
    store = open_blobs(url)
    deleting, go_on = asyncio.Event(), asyncio.Event()
    shared = a.images._sharing
    assert shared is not None
    delete = shared.gc._blobs.delete

    async def slowly(keys: Sequence[str]) -> None:
        if any(key.startswith("metas/") for key in keys):
            deleting.set()
            await go_on.wait()
        await delete(keys)

    monkeypatch.setattr(shared.gc._blobs, "delete", slowly)
    collecting = asyncio.create_task(a.images.collect_garbage())
    await deleting.wait()
    loading = asyncio.create_task(b.load("y", {"data": content(12, 1 << 20)}))
    await asyncio.sleep(1.5)
    assert not loading.done()
    go_on.set()
    await collecting
    made = await loading
    [layer] = made.layers
    assert await store.stat(f"blobs/{hex_of(layer.blob or '')}.z") is not None
    assert await store.stat(f"metas/{hex_of(layer.digest)}.zst") is not None


async def test_an_unreadable_lease_or_manifest_stops_gc(a: Node, url: str) -> None:
    await a.load("x", {"a": b"1"})
    await a.images.remove("x", ADMIN)
    await a.load("y", {"a": b"2"})
    age(url)
    before = objects(url)
    for path in (Path(url, "leases", "other.json"), Path(url, "images", "z", "1.json")):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"{")
        with pytest.raises(ImageError):
            await a.images.collect_garbage()
        path.unlink()
    assert layers_in(objects(url)) == layers_in(before)


async def test_a_gc_that_died_holds_others_up_for_ten_minutes_only(a: Node, url: str) -> None:
    await a.load("x", {"a": b"1"})
    await a.images.remove("x", ADMIN)
    age(url)
    Path(url, "gc.json").write_text(f'{{"node": "dead", "at": {time.time() - 60}, "digests": []}}')
    with pytest.raises(Conflict, match="dead"):
        await a.images.collect_garbage()
    Path(url, "gc.json").write_text(f'{{"node": "dead", "at": {time.time() - 700}, "digests": []}}')
    assert await a.images.collect_garbage() > 0
    assert not Path(url, "gc.json").exists()


async def test_a_restart_does_not_take_back_the_lease_of_live_sandboxes(tmp_path: Path, url: str, a: Node) -> None:
    made = await a.load("x", {"a": b"1"})
    async with node(tmp_path / "b", url) as b:
        await start_on(b, "x")
        name = (tmp_path / "b" / "images" / "node").read_text().strip()
    async with node(tmp_path / "b", url):
        assert (tmp_path / "b" / "images" / "node").read_text().strip() == name
        with pytest.raises(Conflict):
            await a.images.remove("x", ADMIN)
    assert made


async def test_a_gc_that_breaks_off_leaves_nothing_that_looks_whole(a: Node, b: Node, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.images.store_gc.BATCH", 1)
    kept = await a.load("kept", {"data": content(20, 1 << 20)})
    for number in range(3):
        await a.load(f"gone-{number}", {"data": content(21 + number, 1 << 20)})
        await a.images.remove(f"gone-{number}", ADMIN)
    age(url)
    shared = a.images._sharing
    assert shared is not None
    delete, left = shared.blobs.delete, [5]

    async def breaking(keys: Sequence[str]) -> None:
        if keys != ["gc.json"]:
            left[0] -= 1
            if left[0] < 0:
                raise Unavailable("cut")
        await delete(keys)

    monkeypatch.setattr(shared.blobs, "delete", breaking)
    with pytest.raises(Unavailable):
        await a.images.collect_garbage()
    monkeypatch.undo()
    there = layers_in(objects(url))
    for blob in {key[6:70] for key in there if key.startswith("blobs/")}:
        assert f"blobs/{blob}.z" in there, "a table without its frames would be taken for a whole blob"
    found: list[str] = []
    await a.images.fsck(lambda finding: found.append(f"{finding.where} {finding.problem}"), deep=True, repair=False)
    assert set(found) == {"store orphan"}
    # What is half gone is made whole by whoever needs it again, and taken by the next gc otherwise.
    again = await b.load("again", {"data": content(21, 1 << 20)})
    await a.images.collect_garbage()
    assert {key for key in layers_in(objects(url)) if key.endswith(".zst")} == {
        f"metas/{hex_of(info.layers[0].digest)}.zst" for info in (kept, again)
    }
    assert await start_on(a, "again") == [True] and await start_on(b, "again") == [False]


async def test_a_store_that_may_not_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "images").write_text("in the way")
    async with node(tmp_path / "a", str(tmp_path / "shared")) as a:
        with pytest.raises(Unavailable, match=r"shared"):
            await a.load("x", {"a": b"1"})


async def test_a_node_that_knew_an_image_is_told_when_its_data_is_gone(a: Node, b: Node, url: str) -> None:
    """Metadata and table are still here; without a look at the store the sandbox would start, and read errors."""
    await a.load("x", {"data": content(30, 1 << 20)})
    await b.images.pull("x", False, quiet)
    await a.images.remove("x", ADMIN)
    age(url)
    await a.images.collect_garbage()
    environment = b.images.resolve("x@1", None, ())
    with pytest.raises(ImageError, match="no data"):
        await b.images.ensure(environment)
