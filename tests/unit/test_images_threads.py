"""Blocking work of the image store: what is cancelled stops, is waited for, and leaves no thread that goes on writing."""

from __future__ import annotations

import asyncio
import gzip
import io
import lzma
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from dsec.images import ImportLimits
from dsec.images.blobs import BlobDirectory
from dsec.images.downloads import Downloads
from dsec.images.streams import INPUT_PIECE, Compression, decompressed, write_all
from dsec.images.threads import Abandoned, Check, in_pieces, to_end, unchecked

DEADLINE_S = 20.0


class Work:
    """Work in a thread that goes on until its check raises, and what became of it."""

    def __init__(self) -> None:
        self.began, self.ended = threading.Event(), threading.Event()

    def __call__(self, check: Check) -> None:
        self.began.set()
        try:
            while not self.ended.wait(0.001):
                check()
        finally:
            self.ended.set()


async def test_cancelled_work_stops_at_its_next_piece_and_is_waited_for() -> None:
    work = Work()
    task = asyncio.create_task(in_pieces(work))
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.to_thread(work.began.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert work.ended.is_set()


async def test_work_is_waited_for_however_often_it_is_cancelled() -> None:
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        go_on.wait(DEADLINE_S)
        ended.set()

    task = asyncio.create_task(to_end(work))
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.to_thread(began.wait)
        for _ in range(3):
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=0.01)
            assert not done
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert ended.is_set()


async def test_what_work_raises_is_raised() -> None:
    def fail(check: Check) -> None:
        check()
        raise KeyError("x")

    with pytest.raises(KeyError):
        await in_pieces(fail)


# -- streams


@pytest.mark.parametrize(("compression", "pack"), [("gzip", gzip.compress), ("xz", lzma.compress)])
def test_members_without_content_are_read_in_small_pieces_and_can_be_stopped(
    compression: Compression, pack: Callable[[bytes], bytes]
) -> None:
    """What is left of a piece is copied behind each member, and nothing comes out by which one could stop."""
    data = pack(b"") * 10_000
    sizes: list[int] = []

    class Source(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            sizes.append(-1 if size is None else size)
            return super().read(size)

    assert list(decompressed(Source(data), len(data), compression, unchecked)) == []
    assert len(sizes) > 2 and max(sizes) <= INPUT_PIECE

    def stop_at_the_second_piece() -> None:
        if len(sizes) == 1:
            raise Abandoned

    sizes.clear()
    with pytest.raises(Abandoned):
        list(decompressed(Source(data), len(data), compression, stop_at_the_second_piece))
    assert len(sizes) == 1


def test_all_is_written_to_a_file_that_takes_a_part_at_a_time() -> None:
    class Slow(io.BytesIO):
        def write(self, data: object, /) -> int:
            return super().write(bytes(cast(memoryview, data))[:7])

    file = Slow()
    content = os.urandom(1000)
    write_all(file, content)
    assert file.getvalue() == content


# -- downloads


@pytest.fixture
def downloads(tmp_path: Path) -> Downloads:
    blobs = BlobDirectory(tmp_path, disk_reserve=0)
    blobs.open()
    return Downloads(blobs.downloads, blobs, ImportLimits(disk_reserve=0))


async def test_the_directory_stays_while_a_fetch_is_about_to_write_to_it(downloads: Downloads, tmp_path: Path) -> None:
    directory = tmp_path / "downloads"
    async with downloads.scope() as first:
        first.names.add("a")
        downloads.hold("a")
        directory.mkdir()
        async with downloads.scope():
            pass
        await downloads.sweep()
        assert directory.is_dir()
        (directory / "a").write_bytes(b"1")
    assert not directory.exists()


async def test_a_file_that_goes_while_the_directory_is_looked_through_does_not_matter(downloads: Downloads, tmp_path: Path) -> None:
    directory = tmp_path / "downloads"
    directory.mkdir()
    # A name without a file is what the look finds then.
    (directory / "gone").symlink_to(directory / "nowhere")
    await downloads.sweep()
    assert os.listdir(directory) == ["gone"]
