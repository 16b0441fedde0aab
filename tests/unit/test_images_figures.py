"""What is known of images besides their layers: what was read, what was touched first, and how two of them differ."""

from __future__ import annotations

import stat
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dsec.images import ImageStore
from dsec.images.catalog import Caller
from dsec.images.erofs import entries
from dsec.images.importing import ImportRequest, draft
from dsec.images.reads import BlobFigures
from dsec.images.traces import Touch, Traces
from libdsec.errors import ImageError, ImageNotFound, InvalidArgument, Unavailable
from libdsec.schema import ImageInfo
from tests.unit.images_archives import OciImage, files, member, tar
from tests.unit.images_nodes import ADMIN, Node, content, node, quiet


@pytest.fixture
async def a(tmp_path: Path) -> AsyncIterator[Node]:
    async with node(tmp_path / "a", str(tmp_path / "shared")) as made:
        yield made


async def load(images: ImageStore, name: str, archive: bytes) -> ImageInfo:
    async def body() -> AsyncIterator[bytes]:
        yield archive

    request = ImportRequest(name=name, kind="base", format=None, at="/", caller=ADMIN, idempotency_key=None)
    return await images.import_archive(request, body(), lambda line: None)


# -- reading metadata


async def test_the_reader_sees_every_entry_that_a_tar_had(a: Node) -> None:
    long = "d/" + "n" * 200
    entries_in = [
        member("d", tarfile.DIRTYPE, mode=0o1777, uid=5, gid=70_000, mtime=-5),
        (member("d/file", mode=0o4755, uid=1, mtime=1_700_000_000, pax_headers={"SCHILY.xattr.user.k": "v"}), b"x" * 10_000),
        (member("d/empty"), b""),
        # A hard link's entry says what the file is like once more.
        member(
            "d/again", tarfile.LNKTYPE, linkname="d/file", mode=0o4755, uid=1, mtime=1_700_000_000, pax_headers={"SCHILY.xattr.user.k": "v"}
        ),
        member("link", tarfile.SYMTYPE, linkname="d/" + "t" * 3000, mode=0o777),
        member("null", tarfile.CHRTYPE, devmajor=1, devminor=3),
        member("pipe", tarfile.FIFOTYPE),
        *(member(f"{long}{number}", tarfile.DIRTYPE) for number in range(300)),
    ]
    made = await load(a.images, "x", tar(entries_in))
    [layer] = made.layers
    read = dict(entries((a.root / "images" / "blobs" / layer.digest.removeprefix("sha256:")).read_bytes()))
    assert set(read) == {b"", b"d", b"d/file", b"d/empty", b"d/again", b"link", b"null", b"pipe"} | {
        f"{long}{number}".encode() for number in range(300)
    }
    assert (read[b"d"].mode, read[b"d"].uid, read[b"d"].gid, read[b"d"].mtime_ns) == (stat.S_IFDIR | 0o1777, 5, 70_000, -5 * 10**9)
    file = read[b"d/file"]
    assert (file.mode, file.size, file.mtime_ns) == (stat.S_IFREG | 0o4755, 10_000, 1_700_000_000 * 10**9)
    assert file.xattrs == ((b"user.k", b"v"),)
    assert read[b"d/again"] == file and file.blocks == ((0, 3),)
    assert read[b"link"].target == b"d/" + b"t" * 3000
    assert read[b"null"].rdev == (1 << 8) + 3 and not read[b"null"].is_whiteout


async def test_broken_metadata_is_refused_not_followed(a: Node) -> None:
    made = await a.load("x", {f"d{number}/f": b"1" for number in range(50)})
    good = (a.root / "images" / "blobs" / made.layers[0].digest.removeprefix("sha256:")).read_bytes()
    with pytest.raises(ImageError):
        list(entries(b""))
    with pytest.raises(ImageError):
        list(entries(bytes(8192)))
    for at in range(1280, len(good), 37):
        broken = good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :]
        try:
            assert len(list(entries(broken))) < 10_000
        except ImageError:
            pass
    for end in range(1300, len(good) // 2, 301):
        with pytest.raises(ImageError):
            list(entries(good[:end]))


# -- differences


async def test_a_diff_names_added_removed_and_changed_paths_with_sizes(a: Node) -> None:
    await a.load("x", {"same": b"1", "gone": b"22", "grown": b"1", "dir/below": b"1"})
    await a.load("x", {"same": b"1", "grown": b"4444", "new": b"333", "dir": b"now a file"})
    found = {change.path: (change.kind, change.size_before, change.size) for change in await a.images.diff("x@1", "x@2", ADMIN)}
    assert found == {
        "gone": ("removed", 0, 2),
        "grown": ("changed", 1, 4),
        "new": ("added", 0, 3),
        "dir": ("changed", 0, 10),
        "dir/below": ("removed", 0, 1),
    }
    assert await a.images.diff("x@1", "x@1", ADMIN) == []


async def test_a_diff_sees_what_the_layers_give_together(a: Node) -> None:
    lower = files({"etc/a": b"1", "etc/b": b"2", "opt/c": b"3"})
    upper = files({"etc/.wh.a": b"", "opt/.wh..wh..opq": b"", "opt/d": b"4"})
    await load(a.images, "one", OciImage.of([lower]).archive())
    await load(a.images, "two", OciImage.of([lower, upper]).archive())
    kinds = {change.path: change.kind for change in await a.images.diff("one", "two", ADMIN) if change.kind != "changed"}
    assert kinds == {"etc/a": "removed", "opt/c": "removed", "opt/d": "added"}


async def test_what_was_packed_from_a_sandbox_is_compared_by_its_own_project_only(a: Node) -> None:
    mine, other = Caller(project="mine", admin=False), Caller(project="other", admin=False)
    base = await a.load("base", {"a": b"1"}, caller=mine)
    layers = [msgspec.structs.replace(layer, diff=True) for layer in base.layers]
    await a.images._catalog.add(draft("packed", "base", layers, base.config), mine, None)
    assert await a.images.diff("base", "packed", mine) == await a.images.diff("base", "packed", ADMIN) == []
    assert await a.images.diff("base", "base", other) == []
    for pair in (("base", "packed"), ("packed", "base")):
        with pytest.raises(ImageNotFound, match="'packed'"):
            await a.images.diff(*pair, other)


# -- reads


async def test_reads_are_summed_over_restarts_of_both_sides(tmp_path: Path) -> None:
    async with node(tmp_path / "n", None) as one:
        info = await one.load("x", {"data": content(1, 4 << 20)})
        blob = info.layers[0].blob or ""
        environment = one.images.resolve("x", None, ())
        for _ in range(4):
            one.images.note_start(environment)
        await one.images.record_reads({blob: BlobFigures(needed=1 << 20, fetched=2 << 20, from_cache=100)})
        await one.images.record_reads({blob: BlobFigures(needed=2 << 20, fetched=3 << 20, from_cache=300)})
        # blobfs began anew.
        await one.images.record_reads({blob: BlobFigures(needed=1 << 20, fetched=1 << 20, from_cache=50)})
    async with node(tmp_path / "n", None) as one:
        reads = await one.images.stats("x")
        assert (reads.image, reads.size, reads.needed) == ("x@1", info.layers[0].blob_bytes, 2 << 20)
        assert (reads.fetched, reads.from_cache, reads.sandboxes) == (4 << 20, 350, 4)
        assert reads.fraction == pytest.approx((2 << 20) / reads.size) and reads.fetched_per_sandbox == 1 << 20
        # blobfs is another process and went on counting.
        await one.images.record_reads({blob: BlobFigures(needed=1 << 20, fetched=1 << 20, from_cache=50)})
        assert await one.images.stats("x") == reads
        await one.images.record_reads({blob: BlobFigures(needed=1 << 20, fetched=1 << 20, from_cache=75)})
        assert (await one.images.stats("x")).from_cache == 375


async def test_what_was_read_is_counted_before_it_is_told(a: Node, tmp_path: Path) -> None:
    info = await a.load("x", {"data": content(3, 1 << 20)})
    async with node(tmp_path / "b", str(tmp_path / "shared")) as b:
        await b.images.pull("x", True, quiet)

        async def count() -> None:
            await b.images.record_reads({info.layers[0].blob or "": BlobFigures(needed=4096, fetched=1 << 18)})

        assert (await b.images.stats("x")).needed is None
        b.images.count_reads = count
        reads = await b.images.stats("x")
        assert (reads.needed, reads.fetched) == (4096, 1 << 18)


async def test_of_an_image_that_is_whole_here_it_is_not_known_what_is_read(a: Node, tmp_path: Path) -> None:
    info = await a.load("x", {"data": content(2, 1 << 20)})
    reads = await a.images.stats("x")
    assert (reads.needed, reads.fraction, reads.fetched) == (None, None, 0)
    await load(a.images, "empty", tar([member("dir", tarfile.DIRTYPE)]))
    assert (await a.images.stats("empty")).needed == 0
    async with node(tmp_path / "b", str(tmp_path / "shared")) as b:
        reads = await b.images.stats("x")
        assert (reads.needed, reads.fraction) == (0, 0.0), "blobfs would have seen it"
        await b.images.record_reads({info.layers[0].blob or "": BlobFigures(needed=4096, fetched=1 << 18)})
        await b.images.pull("x", True, quiet)
        assert (await b.images.stats("x")).needed == 4096, "of before it was whole"


# -- traces


def named(info: ImageInfo, digest: str, *, index: str | None = None) -> ImageInfo:
    """Another image, or (with ``index``) one packed in other chunks."""
    layers = info.layers if index is None else tuple(msgspec.structs.replace(layer, index=index) for layer in info.layers)
    return msgspec.structs.replace(info, digest=digest, layers=layers)


async def test_a_trace_recorded_on_one_node_is_replayed_on_another(a: Node, tmp_path: Path) -> None:
    info = await a.load("x", {"data": b"1"})
    touches = [Touch(0, 3, 0), Touch(0, 1, 12), Touch(1, 0, 40)]
    async with node(tmp_path / "b", str(tmp_path / "shared")) as b:
        known = await b.images.find("x")
        await a.images.save_trace(known, touches)
        assert await b.images.trace(known) == touches
        assert (tmp_path / "shared" / "traces" / f"{info.digest[7:]}.json").exists()
        assert await b.images.trace(named(known, "sha256:" + "0" * 64)) is None
    with pytest.raises(InvalidArgument):
        await a.images.save_trace(info, [Touch(0, -1, 0)])


async def test_a_trace_of_other_chunks_is_none_and_is_recorded_anew(a: Node, tmp_path: Path) -> None:
    await a.load("x", {"data": b"1"})
    async with node(tmp_path / "b", str(tmp_path / "shared")) as b:
        before = await b.images.find("x")
        after = named(before, before.digest, index="sha256:" + "7" * 64)
        await a.images.save_trace(before, [Touch(0, 3, 0)])
        assert await b.images.trace(before) == [Touch(0, 3, 0)]
        assert await b.images.trace(after) is None
        await b.images.save_trace(after, [Touch(0, 12, 0)])
    async with node(tmp_path / "c", str(tmp_path / "shared")) as c:
        assert await c.images.trace(after) == [Touch(0, 12, 0)]
        assert await c.images.trace(before) is None


async def test_a_trace_that_cannot_be_read_is_none(a: Node, tmp_path: Path) -> None:
    info = await a.load("x", {"data": b"1"})
    (tmp_path / "shared" / "traces").mkdir()
    for written in ('{"image": "another", "chunks": []}', "{", f'{{"image": "{info.digest}", "chunks": [[0, 1, 2]]}}'):
        (tmp_path / "shared" / "traces" / f"{info.digest[7:]}.json").write_text(written)
        assert await Traces(tmp_path / "own", a.images._traces._shared).of(info) is None


async def test_a_disk_that_takes_no_trace_is_no_reason_not_to_have_it(a: Node, tmp_path: Path) -> None:
    info, touches = await a.load("x", {"data": b"1"}), [Touch(0, 3, 0)]
    await a.images.save_trace(info, touches)
    (tmp_path / "file").write_text("in the way")
    traces = Traces(tmp_path / "file", a.images._traces._shared)
    assert await traces.of(info) == touches
    other = named(info, "sha256:" + "3" * 64)
    with pytest.raises(Unavailable, match="can't be kept"):
        await traces.save(other, touches)
    assert await traces.of(other) == touches
