"""fsck: every kind of damage, on the node and in the shared store, is found, said, and mended where there is another copy."""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from dsec.images import leases
from dsec.images.blobs import hex_of
from dsec.images.catalog import Caller
from dsec.images.importing import draft
from dsec.images.shared import DOCUMENT_LIMIT, Listed
from dsec.images.shared_catalog import MANIFEST_LIMIT, manifest_key
from libdsec.errors import Conflict, ImageError, PermissionDenied
from libdsec.schema import ImageFinding, ImageInfo
from tests.unit.images_nodes import ADMIN, Node, content, node, quiet


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "shared")


@pytest.fixture
async def a(tmp_path: Path, url: str) -> AsyncIterator[Node]:
    async with node(tmp_path / "a", url) as made:
        yield made


async def check(node: Node, *, deep: bool = False, repair: bool = False) -> list[ImageFinding]:
    found: list[ImageFinding] = []
    await node.images.fsck(found.append, deep=deep, repair=repair)
    return found


def flip(path: Path) -> None:
    """Changes one byte in the middle; sizes stay."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    mode = path.stat().st_mode
    path.unlink()
    path.write_bytes(data)
    path.chmod(mode)


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-1])


async def test_a_layer_without_data_that_only_the_store_has_is_not_missing(a: Node, url: str, tmp_path: Path) -> None:
    await a.load("x", {})
    async with node(tmp_path / "b", url) as b:
        await b.images.locate("x", None, ())
        assert await check(b) == await check(b, deep=True) == []


async def test_what_is_whole_has_no_findings(a: Node) -> None:
    await a.load("x", {"data": content(1, 2 << 20)})
    assert await check(a) == await check(a, deep=True) == []


@pytest.mark.parametrize(
    ("part", "damage", "deep", "problem"),
    [
        ("z", Path.unlink, False, "missing"),
        ("z", cut, False, "corrupt"),
        ("z", flip, True, "corrupt"),
        ("idx", Path.unlink, False, "missing"),
        ("idx", flip, False, "corrupt"),
        ("zst", Path.unlink, False, "missing"),
        ("zst", flip, True, "corrupt"),
    ],
)
async def test_damage_in_the_store_is_found_and_mended_from_a_node_that_has_the_layer(
    part: str, damage: Callable[[Path], None], deep: bool, problem: str, a: Node, url: str, tmp_path: Path
) -> None:
    made = await a.load("x", {"data": content(2, 2 << 20)})
    [layer] = made.layers
    key = f"metas/{hex_of(layer.digest)}.zst" if part == "zst" else f"blobs/{hex_of(layer.blob or '')}.{part}"
    before = Path(url, key).read_bytes()
    damage(Path(url, key))
    [finding] = await check(a, deep=deep)
    assert (finding.where, finding.problem, finding.object, finding.image) == ("store", problem, key, "x@1")
    assert not finding.repaired
    async with node(tmp_path / "b", url) as b:
        [elsewhere] = await check(b, deep=deep, repair=True)
        assert not elsewhere.repaired and "can't be repaired here" in elsewhere.detail
    [finding] = await check(a, deep=deep, repair=True)
    assert finding.repaired
    assert Path(url, key).read_bytes() == before
    assert await check(a, deep=True) == []


@pytest.mark.parametrize(("damage", "deep"), [(cut, False), (flip, True)])
@pytest.mark.parametrize("part", ["digest", "blob", "index"])
async def test_damage_on_a_node_is_found_and_mended_from_the_store(
    part: str, damage: Callable[[Path], None], deep: bool, a: Node, tmp_path: Path, url: str
) -> None:
    made = await a.load("x", {"data": content(3, 2 << 20)})
    async with node(tmp_path / "b", url) as b:
        await b.images.pull("x", True, quiet)
        path = b.root / "images" / "blobs" / hex_of(getattr(made.layers[0], part))
        good = path.read_bytes()
        damage(path)
        deep = deep or part == "index"
        [finding] = await check(b, deep=deep)
        assert (finding.where, finding.problem, finding.image) == ("node", "corrupt", "x@1")
        [finding] = await check(b, deep=deep, repair=True)
        assert finding.repaired, finding.detail
        assert path.read_bytes() == good
        assert await check(b, deep=True) == []


@pytest.mark.parametrize("part", ["digest", "blob"])
async def test_what_no_store_has_is_mended_by_the_next_import(part: str, tmp_path: Path) -> None:
    async with node(tmp_path / "alone", None) as alone:
        contents = {"data": content(4, 1 << 20)}
        made = await alone.load("x", contents)
        path = alone.root / "images" / "blobs" / hex_of(getattr(made.layers[0], part))
        good = path.read_bytes()
        flip(path)
        [finding] = await check(alone, deep=True)
        assert path.exists(), "nobody asked for a repair"
        [finding] = await check(alone, deep=True, repair=True)
        assert not finding.repaired and "import the image again" in finding.detail
        [finding] = await check(alone, repair=True)
        assert (finding.problem, finding.repaired) == ("missing", False)
        assert (await alone.load("x", contents)).layers == made.layers
        assert path.read_bytes() == good
        assert await check(alone, deep=True) == []


async def test_what_no_store_has_stays_while_a_sandbox_runs_on_it(tmp_path: Path) -> None:
    async with node(tmp_path / "alone", None) as alone:
        made = await alone.load("x", {"data": content(14, 1 << 20)})
        blob = hex_of(made.layers[0].blob or "")
        path = alone.root / "images" / "blobs" / blob
        flip(path)
        alone.live.add(blob)
        [finding] = await check(alone, deep=True, repair=True)
        assert not finding.repaired and "in use" in finding.detail
        assert path.exists()
        alone.live.clear()
        await check(alone, deep=True, repair=True)
        assert not path.exists()


async def test_what_was_packed_and_no_store_has_is_said_and_left(tmp_path: Path) -> None:
    async with node(tmp_path / "alone", None) as alone:
        base = await alone.load("base", {"data": content(15, 1 << 20)})
        layers = [msgspec.structs.replace(layer, diff=True) for layer in base.layers]
        await alone.images._catalog.add(draft("packed", "base", layers, base.config), ADMIN, None)
        await alone.images.remove("base", ADMIN)
        path = alone.root / "images" / "blobs" / hex_of(layers[0].blob or "")
        flip(path)
        [finding] = await check(alone, deep=True, repair=True)
        assert not finding.repaired and "can't be imported again" in finding.detail
        assert path.exists()


async def test_what_lies_about_is_found(a: Node, url: str) -> None:
    gone = await a.load("gone", {"data": content(5, 1 << 20)})
    await a.images.remove("gone", ADMIN)
    old = time.time() - 7200
    (a.root / "images" / "blobs" / "notes.txt").write_text("mine")
    for name, text in {"uploads/ab.json": "{}", "gc.json": "{}", "blobs/half#2": "x", "leases/x.json": "{"}.items():
        Path(url, name).parent.mkdir(exist_ok=True)
        Path(url, name).write_text(text)
    for path in Path(url).rglob("*"):
        os.utime(path, (old, old))
    Path(url, manifest_key("bad", 1)).parent.mkdir()
    Path(url, manifest_key("bad", 1)).write_text("{")
    found = {(finding.where, finding.problem, finding.object) for finding in await check(a)}
    blob, meta = hex_of(gone.layers[0].blob or ""), hex_of(gone.layers[0].digest)
    assert found == {
        ("node", "half-made", "notes.txt"),
        ("node", "orphan", blob),
        ("node", "orphan", meta),
        ("node", "orphan", hex_of(gone.layers[0].index or "")),
        ("store", "orphan", f"blobs/{blob}.z"),
        ("store", "orphan", f"blobs/{blob}.idx"),
        ("store", "orphan", f"metas/{meta}.zst"),
        ("store", "half-made", "uploads/ab.json"),
        ("store", "half-made", "gc.json"),
        ("store", "half-made", "blobs/half#2"),
        ("store", "corrupt", "leases/x.json"),
        ("store", "corrupt", manifest_key("bad", 1)),
    }
    left = {finding.object for finding in await check(a, repair=True) if not finding.repaired}
    # Orphans in the store are gc's, which knows about leases; of a manifest that can't be read this node doesn't know what it said.
    assert left == {f"blobs/{blob}.z", f"blobs/{blob}.idx", f"metas/{meta}.zst", manifest_key("bad", 1)}
    await a.images.remove("bad@1", ADMIN)
    await a.images.collect_garbage()
    assert await check(a) == []


@pytest.mark.parametrize("damage", ["broken", "swollen", "another's"])
async def test_a_manifest_that_cant_be_read_is_written_again_by_a_node_that_knows_the_image(
    damage: str, a: Node, url: str, tmp_path: Path
) -> None:
    made = await a.load("team/x:1", {"data": content(20, 1 << 20)})
    other = await a.load("y", {"data": content(21, 1 << 20)})
    key = manifest_key("team/x:1", 1)
    before = Path(url, key).read_bytes()
    if damage == "broken":
        Path(url, key).write_text('{"bad')
    elif damage == "swollen":
        swell(Path(url, key), MANIFEST_LIMIT + 1)
    else:
        Path(url, key).write_bytes(Path(url, manifest_key("y", 1)).read_bytes())
    for path in Path(url).rglob("*"):
        os.utime(path, (1, 1))
    async with node(tmp_path / "b", url) as b:
        told = f"{re.escape(key)} in the shared store is broken: .*`dsec image fsck` tells more"
        with pytest.raises(ImageError, match=told):
            await b.images.find("team/x:1")
        with pytest.raises(ImageError, match=told):
            await b.images.collect_garbage()
        [finding] = [each for each in await check(b, repair=True) if each.object == key]
        assert not finding.repaired and "`dsec image rm team/x:1@1`" in finding.detail
        [finding] = await check(a)
        assert (finding.problem, finding.object, finding.image, finding.repaired) == ("corrupt", key, "team/x:1@1", False)
        [finding] = await check(a, repair=True)
        assert (finding.object, finding.repaired) == (key, True)
        assert Path(url, key).read_bytes() == before
        assert (await b.images.find("team/x:1"), await b.images.find("y")) == (made, other)
        await b.images.collect_garbage()
        assert await check(a, deep=True) == await check(b, deep=True) == []


async def test_a_manifest_is_written_again_only_with_its_layers_in_the_store(a: Node, url: str, tmp_path: Path) -> None:
    made = await a.load("x", {"data": content(22, 1 << 20)})
    key, frames = manifest_key("x", 1), f"blobs/{hex_of(made.layers[0].blob or '')}.z"
    async with node(tmp_path / "b", url) as b:
        await b.images.pull("x", False, quiet)
        Path(url, key).write_text("{")
        Path(url, frames).unlink()
        assert {finding.object: finding.repaired for finding in await check(b, repair=True)} == {key: False, frames: False}
        assert Path(url, key).read_text() == "{"
    assert [(finding.object, finding.repaired) for finding in await check(a, repair=True)] == [(key, True)]
    assert await check(a, deep=True) == []


@pytest.mark.parametrize("meanwhile", ["mended", "removed"])
async def test_what_became_of_a_broken_manifest_meanwhile_stays(meanwhile: str, a: Node, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await a.load("x", {"data": content(23, 1 << 20)})
    path = Path(url, manifest_key("x", 1))
    mended = path.read_bytes() + b" "
    path.write_text("{")
    shared = a.images._sharing
    assert shared is not None
    restore = shared.publisher.restore

    async def late(image: ImageInfo, project: str) -> ImageInfo:
        if meanwhile == "mended":
            path.write_bytes(mended)
        else:
            path.unlink()
        return await restore(image, project)

    monkeypatch.setattr(shared.publisher, "restore", late)
    [finding] = await check(a, repair=True)
    assert finding.repaired == (meanwhile == "mended")
    assert (path.read_bytes() if path.exists() else None) == (mended if meanwhile == "mended" else None)


async def test_an_admin_removes_a_manifest_that_cant_be_read_from_a_node_that_doesnt_know_the_image(
    a: Node, url: str, tmp_path: Path
) -> None:
    await a.load("x", {"data": content(24, 1 << 20)})
    path = Path(url, manifest_key("x", 1))
    path.write_text("{")
    async with node(tmp_path / "b", url) as b:
        with pytest.raises(PermissionDenied, match="only an admin"):
            await b.images.remove("x@1", Caller(project="p", admin=False))
        with pytest.raises(ImageError, match="fsck"):
            await b.images.remove("x", ADMIN)
        removed = await b.images.remove("x@1", ADMIN)
        assert (removed.name, removed.version, removed.layers) == ("x", 1, [])
        assert not path.exists()
        assert (await b.load("x", {"data": content(25, 1 << 20)})).version == 2


async def test_a_manifest_that_was_mended_meanwhile_is_not_removed(
    a: Node, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await a.load("x", {"data": content(26, 1 << 20)})
    path = Path(url, manifest_key("x", 1))
    good = path.read_bytes()
    path.write_text("{")
    async with node(tmp_path / "b", url) as b:
        shared = b.images._sharing
        assert shared is not None
        remove = shared.remove_broken

        async def late(name: str, version: int) -> None:
            path.write_bytes(good)
            await remove(name, version)

        monkeypatch.setattr(shared, "remove_broken", late)
        with pytest.raises(Conflict, match="repaired meanwhile"):
            await b.images.remove("x@1", ADMIN)
        assert path.read_bytes() == good


async def test_a_push_over_a_manifest_that_cant_be_read_names_it(a: Node, url: str) -> None:
    await a.load("x", {"data": content(27, 1 << 20)})
    Path(url, manifest_key("x", 1)).write_text("{")
    with pytest.raises(ImageError, match=r"images/x/1\.json in the shared store is broken"):
        await a.images.push("x@1", ADMIN, quiet)


async def test_a_crash_in_a_push_is_said_and_needs_no_repair(a: Node, url: str) -> None:
    """Frames without a table, a table without metadata, all without a manifest: nobody takes any of it for an image."""
    made: ImageInfo = await a.load("x", {"data": content(6, 1 << 20)})
    blob = hex_of(made.layers[0].blob or "")
    Path(url, manifest_key("x", 1)).unlink()
    Path(url, f"metas/{hex_of(made.layers[0].digest)}.zst").unlink()
    Path(url, f"blobs/{blob}.idx").unlink()
    assert await check(a) == []
    os.utime(Path(url, f"blobs/{blob}.z"), (1, 1))
    assert [(finding.problem, finding.object) for finding in await check(a)] == [("orphan", f"blobs/{blob}.z")]
    assert await a.images.push("x", ADMIN, quiet) == made
    assert await check(a, deep=True) == []


async def test_what_came_after_the_check_had_begun_is_not_missing(a: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await a.load("x", {"data": content(7, 1 << 20)})
    shared = a.images._sharing
    assert shared is not None
    listing = shared.blobs.list

    async def from_before(prefix: str, wanted: Callable[[str], bool] = lambda key: True) -> AsyncIterator[Sequence[Listed]]:
        async for batch in listing(prefix, wanted):
            yield [] if prefix in ("metas", "blobs") else batch

    monkeypatch.setattr(shared.blobs, "list", from_before)
    assert await check(a, deep=True) == []


@pytest.mark.parametrize("working", ["fsck", "gc"])
async def test_what_a_sandbox_began_to_use_meanwhile_is_no_orphan(a: Node, monkeypatch: pytest.MonkeyPatch, working: str) -> None:
    gone = await a.load("gone", {})
    await a.images.remove("gone", ADMIN)
    meta = hex_of(gone.layers[0].digest)
    blobs = a.images._blobs
    for method in ("names", "unneeded"):
        original = getattr(blobs, method)

        def started(*args: object, original: Callable[..., object] = original) -> object:
            listed = original(*args)
            a.live.add(meta)
            return listed

        monkeypatch.setattr(blobs, method, started)
    if working == "fsck":
        assert meta not in {finding.object for finding in await check(a, repair=True) if finding.where == "node"}
    else:
        await a.images._collect_local()
    assert blobs.has(meta)


async def test_what_goes_while_it_is_read_does_not_end_the_check(a: Node, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await a.load("x", {"data": content(8, 1 << 20)})
    key = f"metas/{hex_of(made.layers[0].digest)}.zst"
    shared = a.images._sharing
    assert shared is not None
    get = shared.blobs.get

    async def taken_away(wanted: str, limit: int = DOCUMENT_LIMIT) -> bytes:
        if wanted == key:
            Path(url, key).unlink(missing_ok=True)
        return await get(wanted, limit)

    monkeypatch.setattr(shared.blobs, "get", taken_away)
    [finding] = await check(a, deep=True)
    assert (finding.object, finding.image) == (key, "x@1")


async def test_two_manifests_that_disagree_about_a_layers_table_are_both_checked(a: Node, url: str) -> None:
    made = await a.load("x", {"data": content(9, 1 << 20)})
    index = made.layers[0].index or ""
    text = Path(url, manifest_key("x", 1)).read_text()
    Path(url, manifest_key("y", 1)).parent.mkdir()
    Path(url, manifest_key("y", 1)).write_text(text.replace('"name":"x"', '"name":"y"').replace(index, "sha256:" + "0" * 64))
    [finding] = await check(a)
    assert (finding.problem, finding.image) == ("corrupt", "y@1")
    assert finding.object.endswith(".idx")


def swell(path: Path, size: int) -> None:
    """A file of holes: so large that nobody may read it whole."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


async def test_objects_above_their_limit_are_faults_of_theirs_and_the_check_goes_on(a: Node, url: str) -> None:
    made = await a.load("x", {"data": content(10, 1 << 20)})
    [layer] = made.layers
    broken = await a.load("y", {"data": content(11, 1 << 20)})
    manifests = [manifest_key("big", 1), manifest_key("big", 2)]
    held = ["leases/big.json", "leases/huge.json"]
    parts = [f"metas/{hex_of(layer.digest)}.zst", f"blobs/{hex_of(layer.blob or '')}.idx"]
    for keys, limit in ((manifests, MANIFEST_LIMIT), (held, leases.LIMIT), (parts, DOCUMENT_LIMIT)):
        for key in keys:
            swell(Path(url, key), limit + 1)
    lost = f"blobs/{hex_of(broken.layers[0].blob or '')}.z"
    Path(url, lost).unlink()
    found = {finding.object: finding for finding in await check(a, deep=True)}
    assert found.keys() == {*manifests, *held, *parts, lost}
    assert all("can be right" in finding.detail for key, finding in found.items() if key != lost)
    left = {finding.object for finding in await check(a, deep=True, repair=True) if not finding.repaired}
    assert left == set(manifests), "this node doesn't know what they said"
    assert {finding.object for finding in await check(a, deep=True)} == set(manifests)


async def test_metadata_that_is_promised_above_its_limit_is_not_unpacked(a: Node, url: str) -> None:
    made = await a.load("x", {"data": content(12, 1 << 20)})
    text = Path(url, manifest_key("x", 1)).read_text()
    Path(url, manifest_key("y", 1)).parent.mkdir()
    forged = text.replace('"name":"x"', '"name":"y"').replace(f'"meta_bytes":{made.layers[0].meta_bytes}', f'"meta_bytes":{1 << 50}')
    Path(url, manifest_key("y", 1)).write_text(forged)
    [finding] = await check(a, deep=True)
    assert (finding.problem, finding.image) == ("corrupt", "y@1")
    assert "are allowed" in finding.detail


async def test_a_gc_file_above_its_limit_keeps_nobody_waiting(a: Node, url: str) -> None:
    swell(Path(url, "gc.json"), leases.LIMIT + 1)
    assert (await a.load("x", {"data": content(13, 1 << 20)})).version == 1
