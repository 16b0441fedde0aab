"""The seam Blobs, over a directory and over a real S3, and the chunks of a blob."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from dsec.images.chunks import STORED, ZEROS, ZSTD, ChunkTable, pack, unpack_frame
from dsec.images.shared import BlobMissing, Blobs, BlobsDenied, BlobTooLarge, Listed, open_blobs
from libdsec.errors import ImageError, InvalidArgument, NoCapacity, Unavailable
from tests.unit.seaweed import Seaweed, seaweed


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(params=["directory", "s3"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    if request.param == "directory":
        return open_blobs(str(tmp_path / "store"))
    server: Seaweed = request.getfixturevalue("s3")
    return open_blobs(server.url(f"{tmp_path.name}-{time.time_ns()}"))


async def listed(blobs: Blobs, prefix: str) -> list[Listed]:
    return sorted([each async for batch in blobs.list(prefix) for each in batch], key=lambda each: each.key)


async def test_objects_are_put_read_listed_and_deleted(blobs: Blobs, tmp_path: Path) -> None:
    content = os.urandom(3_000_000)
    (tmp_path / "file").write_bytes(content)
    await blobs.put_file("blobs/one.z", tmp_path / "file")
    await blobs.put("blobs/two.idx", b"table")
    await blobs.put("blobs/two.idx", b"another")
    assert await blobs.get("blobs/one.z") == content
    assert await blobs.get_range("blobs/one.z", 1000, 70_000) == content[1000:71_000]
    found = await listed(blobs, "blobs")
    assert [(each.key, each.size) for each in found] == [("blobs/one.z", len(content)), ("blobs/two.idx", 7)]
    assert abs(found[0].modified - time.time()) < 60
    seen = await blobs.stat("blobs/two.idx")
    assert seen is not None and (seen.key, seen.size, round(seen.modified)) == ("blobs/two.idx", 7, round(found[1].modified))
    assert sorted([key async for batch in blobs.names("blobs") for key in batch]) == ["blobs/one.z", "blobs/two.idx"]
    await blobs.delete(["blobs/none", "blobs/one.z", "blobs/neither"])
    assert await blobs.stat("blobs/one.z") is None
    assert await listed(blobs, "nothing") == []


async def test_a_request_outlasts_a_restart_of_the_store() -> None:
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        # More failures than the library repeats by itself, whose pauses then end within a second.
        status = b"200 OK" if connections > 8 else b"503 Service Unavailable"
        writer.write(b'HTTP/1.1 %s\r\nETag: "x"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n' % status)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await open_blobs(f"s3://layers/p?endpoint=http://127.0.0.1:{port}&anonymous=true").put("x", b"1")
        assert connections == 9


async def test_what_goes_wrong_with_files_is_an_error_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_blobs(str(tmp_path / "store"))
    await store.put("metas/one", b"1")
    (tmp_path / "store" / "metas" / "half#1").mkdir()
    with pytest.raises(Unavailable, match="deleting"):
        await store.drop_staging(["metas/half#1"])

    def fail(number: int) -> None:
        monkeypatch.setattr(os, "fsync", lambda descriptor: _raise(OSError(number, os.strerror(number))))

    fail(errno.EIO)
    with pytest.raises(Unavailable, match="writing metas/two"):
        await store.put("metas/two", b"2")
    fail(errno.EDQUOT)
    with pytest.raises(NoCapacity):
        await store.put_new("metas/three", b"3")
    monkeypatch.setattr(os, "scandir", lambda path: _raise(OSError(errno.ESTALE, "stale file handle")))
    with pytest.raises(Unavailable, match="listing metas: "):
        await listed(store, "metas")


def _raise(error: OSError) -> None:
    raise error


async def test_what_is_taken_away_while_it_is_synced_counts_as_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_blobs(str(tmp_path / "store"))
    opened = os.open

    def taken_away(path: str, flags: int, *more: int) -> int:
        (tmp_path / "store" / "metas" / "one").unlink(missing_ok=True)
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "open", taken_away)
    await store.put("metas/one", b"1")


async def test_a_file_in_several_parts_arrives_whole(blobs: Blobs, tmp_path: Path) -> None:
    content = os.urandom(40 << 20)
    (tmp_path / "file").write_bytes(content)
    await blobs.put_file("big", tmp_path / "file")
    parts = await asyncio.gather(*(blobs.get_range("big", offset, 8 << 20) for offset in range(0, 40 << 20, 8 << 20)))
    assert hashlib.sha256(b"".join(parts)).digest() == hashlib.sha256(content).digest()


async def test_of_many_that_make_the_same_object_one_does(blobs: Blobs) -> None:
    made = await asyncio.gather(*(blobs.put_new("images/a/1.json", str(number).encode()) for number in range(8)))
    assert sum(made) == 1
    assert await blobs.get("images/a/1.json") == str(made.index(True)).encode()


async def test_what_is_not_there_or_shorter_is_missing(blobs: Blobs) -> None:
    with pytest.raises(BlobMissing):
        await blobs.get("blobs/none")
    with pytest.raises(BlobMissing):
        await blobs.get_range("blobs/none", 0, 1)
    await blobs.put("blobs/short", b"12345")
    with pytest.raises(BlobMissing, match="cut"):
        await blobs.get_range("blobs/short", 3, 5)
    with pytest.raises(BlobMissing, match="cut"):
        await blobs.get_range("blobs/short", 30, 5)
    with pytest.raises(BlobTooLarge, match="at most 4"):
        await blobs.get("blobs/short", limit=4)


async def test_a_directory_put_that_breaks_off_leaves_no_object(tmp_path: Path) -> None:
    blobs = open_blobs(str(tmp_path / "store"))
    await blobs.put("blobs/a", b"1")
    (tmp_path / "store" / "blobs" / "b#3").write_bytes(b"half")
    assert [each.key for each in await listed(blobs, "blobs")] == ["blobs/a"]
    assert await blobs.staging("blobs", time.time() - 3600) == []
    assert await blobs.staging("", time.time() + 1) == ["blobs/b#3"]
    await blobs.drop_staging(["blobs/b#3"])
    assert sorted(path.name for path in (tmp_path / "store" / "blobs").iterdir()) == ["a"]


async def test_an_unreachable_store_is_unavailable_and_a_wrong_key_is_denied(s3: Seaweed, tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text("[default]\naws_access_key_id = tests\naws_secret_access_key = wrong\n")
    wrong = open_blobs(s3.url("x").replace(str(s3.home / "credentials"), str(tmp_path / "credentials")))
    with pytest.raises(BlobsDenied):
        await wrong.put("a", b"1")
    nobody = open_blobs(f"s3://layers/x?endpoint=http://127.0.0.1:9&credentials={s3.home / 'credentials'}")
    with pytest.raises(Unavailable) as refused:
        await nobody.get("a")
    assert refused.value.retriable


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("relative/path", "absolute directory"),
        ("gs://bucket", "absolute directory"),
        ("s3://", "bucket"),
        ("s3://bucket/x?endpoint=127.0.0.1", "http"),
        ("s3://bucket/x?secret=1", "secret"),
        ("s3://bucket/x?credentials=/nowhere", "can't be read"),
    ],
)
def test_a_wrong_store_says_why(url: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        open_blobs(url)


# -- chunks


def make_blob(path: Path) -> bytes:
    """Text, zeros, noise and a short end, in chunks of 64 KiB."""
    content = b"text " * 13107 + b"\0" + bytes(65536) + os.urandom(65536) + b"end"
    path.write_bytes(content[:65536] + content[65536:])
    return content


def test_a_blob_is_packed_and_unpacked_chunk_by_chunk(tmp_path: Path) -> None:
    content = make_blob(tmp_path / "blob")
    table = pack(tmp_path / "blob", tmp_path / "z", chunk_bytes=65536, threads=2)
    assert [chunk.flags for chunk in table.chunks] == [ZSTD, ZEROS, STORED, STORED]
    assert table.stored_bytes == (tmp_path / "z").stat().st_size
    again = ChunkTable.decode(table.encode())
    assert again == table
    assert table.encode()[:8] == b"DSECIDX1" and len(table.encode()) == 24 + 48 * 4
    frames = (tmp_path / "z").read_bytes()
    unpacked = [again.unpack(index, frames[chunk.offset : chunk.offset + chunk.length]) for index, chunk in enumerate(again.chunks)]
    assert b"".join(unpacked) == content


def test_the_same_blob_gives_the_same_frames_whatever_the_threads(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"".join(os.urandom(100) * 700 for _ in range(40)))
    tables = [pack(tmp_path / "blob", tmp_path / f"{threads}", chunk_bytes=65536, threads=threads) for threads in (1, 4)]
    assert tables[0] == tables[1]
    assert (tmp_path / "1").read_bytes() == (tmp_path / "4").read_bytes()


def test_a_hole_costs_nothing(tmp_path: Path) -> None:
    with (tmp_path / "blob").open("wb") as file:
        file.truncate(64 << 20)
    assert pack(tmp_path / "blob", tmp_path / "z").stored_bytes == 0


def test_a_changed_frame_is_refused(tmp_path: Path) -> None:
    make_blob(tmp_path / "blob")
    table = pack(tmp_path / "blob", tmp_path / "z", chunk_bytes=65536)
    frames = bytearray((tmp_path / "z").read_bytes())
    for index in (0, 2):
        chunk = table.chunks[index]
        frame = frames[chunk.offset : chunk.offset + chunk.length]
        frame[len(frame) // 2] ^= 1
        with pytest.raises(ImageError, match=f"chunk {index}"):
            table.unpack(index, bytes(frame))
        with pytest.raises(ImageError, match=f"chunk {index}"):
            table.unpack(index, bytes(frame[:-1]))


def test_a_table_that_lies_is_refused(tmp_path: Path) -> None:
    make_blob(tmp_path / "blob")
    good = pack(tmp_path / "blob", tmp_path / "z", chunk_bytes=65536).encode()
    assert ChunkTable.decode(good)
    lies = {
        "another magic": b"DSECIDX2" + good[8:],
        "cut": good[:-1],
        "too long": good + b"\0",
        "empty": b"",
        "no power of two": good[:8] + (65537).to_bytes(4, "little") + good[12:],
        "another count": good[:12] + (3).to_bytes(4, "little") + good[16:],
        "another size": good[:16] + (1 << 40).to_bytes(8, "little") + good[24:],
        "an offset elsewhere": good[:24] + (1).to_bytes(8, "little") + good[32:],
        "a frame that is too long": good[:32] + (70_000).to_bytes(4, "little") + good[36:],
        "an unknown kind": good[:36] + (3).to_bytes(4, "little") + good[40:],
    }
    for lie, table in lies.items():
        with pytest.raises(ImageError):
            pytest.fail(f"{lie}: {ChunkTable.decode(table)}")


def test_a_frame_that_promises_another_size_is_refused_before_it_is_unpacked() -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(1000))
    assert unpack_frame(frame, 1000, "chunk 1") == bytes(1000)
    with pytest.raises(ImageError, match="chunk 1 is broken: its frame promises 1000, 999 bytes"):
        unpack_frame(frame, 999, "chunk 1")
    with pytest.raises(ImageError, match="no size"):
        unpack_frame(zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000)), 1000, "chunk 1")
    # Its size field says a terabyte: no room is made for that.
    assert frame[4:7] == b"\x60\xe8\x02"
    with pytest.raises(ImageError, match="promises 1099511627776"):
        unpack_frame(frame[:4] + b"\xe0" + (1 << 40).to_bytes(8, "little") + frame[7:], 1000, "chunk 1")
    with pytest.raises(ImageError, match="chunk 1 is broken"):
        unpack_frame(b"nonsense", 8, "chunk 1")
