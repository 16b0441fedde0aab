"""A data blob in chunks: each one zstd frame in ``<hex>.z``, and the table that says where it stands and what it must unpack to.

The table, little endian: magic, chunk_bytes u32, count u32, size u64, then ``count`` entries of 48 bytes: offset u64 and length u32 of the
frame, flags u32, sha256 of the chunk's content. Chunks of zeros have no frame.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import zstandard

from libdsec.errors import ImageError

CHUNK_BYTES = 256 << 10
"""Of a blob of up to 256 GiB: `cold-burst` fetches 27% less with it than with 1 MiB and writes 30% less, as small files are far apart."""
CHUNK_BYTES_MIN, CHUNK_BYTES_MAX = 4 << 10, 16 << 20
"""A reader keeps some whole chunks in memory, so a table can't ask for any size."""
COUNT_MAX = 1 << 20
"""Chunks of one blob: 16 TiB, EROFS' own limit, in the largest ones; a table of 48 MiB."""
ZSTD_LEVEL = 3
"""Measured on a 1 GB root with a compiler, two busy cores: level 1 197 MB/s to 29.5%, 3 198 MB/s to 26.5%, 6 79 MB/s to 24.9%, 9 26 MB/s to
24.6%, all in chunks of 1 MiB. Chunks of 256 KiB cost 1.3% more, of 4 MiB 1.3% less."""
KEEP_RATIO = 0.97
"""A frame larger than this share of its chunk isn't worth unpacking: the chunk is stored as it is."""

ZSTD, STORED, ZEROS = 0, 1, 2

_MAGIC = b"DSECIDX1"
_HEAD = struct.Struct("<8sIIQ")
_ENTRY = struct.Struct("<QII32s")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Where a chunk's frame stands in ``<hex>.z``, and the digest of its content."""

    offset: int
    length: int
    flags: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """The chunks of a blob of ``size`` bytes, in order; all but the last have ``chunk_bytes``."""

    chunk_bytes: int
    size: int
    chunks: tuple[Chunk, ...]

    @property
    def stored_bytes(self) -> int:
        """Length of ``<hex>.z``."""
        return max((chunk.offset + chunk.length for chunk in self.chunks), default=0)

    def length_of(self, index: int) -> int:
        """Bytes of a chunk's content."""
        return min(self.chunk_bytes, self.size - index * self.chunk_bytes)

    def encode(self) -> bytes:
        head = _HEAD.pack(_MAGIC, self.chunk_bytes, len(self.chunks), self.size)
        return head + b"".join(_ENTRY.pack(chunk.offset, chunk.length, chunk.flags, chunk.sha256) for chunk in self.chunks)

    @classmethod
    def decode(cls, data: bytes) -> ChunkTable:
        """Raises ImageError for what is no chunk table, or one that contradicts itself."""
        if len(data) < _HEAD.size:
            raise ImageError("the chunk table is cut")
        magic, chunk_bytes, count, size = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            raise ImageError("this is no chunk table")
        if not CHUNK_BYTES_MIN <= chunk_bytes <= CHUNK_BYTES_MAX or chunk_bytes & (chunk_bytes - 1) or count > COUNT_MAX:
            raise ImageError(f"a chunk table of {count} chunks of {chunk_bytes} bytes can't be")
        if count != -(-size // chunk_bytes) or len(data) != _HEAD.size + count * _ENTRY.size:
            raise ImageError(f"the chunk table has {len(data)} bytes and {count} chunks for a blob of {size} bytes")
        table = cls(chunk_bytes, size, tuple(Chunk(*entry) for entry in _ENTRY.iter_unpack(data[_HEAD.size :])))
        end = 0
        for index, chunk in enumerate(table.chunks):
            allowed = {ZSTD: range(1, chunk_bytes + 1), STORED: (table.length_of(index),), ZEROS: (0,)}.get(chunk.flags, ())
            if chunk.length not in allowed or (chunk.length and chunk.offset != end):
                raise ImageError(f"chunk {index} of the chunk table can't be: {chunk.length} bytes at {chunk.offset}, kind {chunk.flags}")
            end += chunk.length
        return table

    def unpack(self, index: int, frame: bytes | memoryview) -> bytes | memoryview:
        """The content of a chunk. Raises ImageError where it isn't what the table promises."""
        chunk, length = self.chunks[index], self.length_of(index)
        content: bytes | memoryview
        match chunk.flags:
            case 2:
                content = bytes(length)
            case 1:
                content = frame
            case _:
                content = unpack_frame(frame, length, f"chunk {index}")
        if len(content) != length or hashlib.sha256(content).digest() != chunk.sha256:
            raise ImageError(f"chunk {index} has another digest than the chunk table says: it is broken or forged")
        return content


def unpack_frame(frame: bytes | memoryview, size: int, what: str) -> bytes:
    """The content of a zstd frame, whose header must promise ``size`` bytes (Frame_Content_Size of RFC 8878): the library makes room for as
    many as that says, whatever ``max_output_size`` is. Raises ImageError that begins with ``what``."""
    try:
        promised = zstandard.frame_content_size(frame)
        if promised != size:
            raise ImageError(f"{what} is broken: its frame promises {'no size' if promised < 0 else promised}, {size} bytes are expected")
        return zstandard.ZstdDecompressor().decompress(frame)
    except zstandard.ZstdError as error:
        raise ImageError(f"{what} is broken: {error}") from error


def pack(
    source: Path,
    target: Path,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    level: int = ZSTD_LEVEL,
    threads: int = os.cpu_count() or 1,
    progress: Callable[[int], None] = lambda done: None,
    sha256: str | None = None,
) -> ChunkTable:
    """Writes the frames of ``source`` to ``target``. Blocks. ``chunk_bytes``: doubled until ``COUNT_MAX`` chunks hold the source.
    ``progress``: told the bytes of the source that are done. ``sha256``: what the source has to have, in hexadecimal: what a table says of
    chunks is believed by every reader. Raises ImageError where it has another one, OSError."""
    size = source.stat().st_size
    whole = hashlib.sha256()
    while size > chunk_bytes * COUNT_MAX:
        chunk_bytes *= 2
    chunks: list[Chunk] = []
    end = 0
    with source.open("rb") as reading, target.open("wb") as writing, ThreadPoolExecutor(threads) as pool:
        for index, (content, frame, flags, digest) in enumerate(_frames(pool, reading, size, chunk_bytes, level, 2 * threads)):
            whole.update(content)
            writing.write(frame)
            chunks.append(Chunk(end if frame else 0, len(frame), flags, digest))
            end += len(frame)
            progress(min(size, (index + 1) * chunk_bytes))
        if sha256 is not None and whole.hexdigest() != sha256:
            raise ImageError(f"the content of sha256:{sha256} on this node is broken: `dsec image fsck --deep` tells more")
        writing.flush()
        os.fsync(writing.fileno())
    return ChunkTable(chunk_bytes, size, tuple(chunks))


def _frames(
    pool: ThreadPoolExecutor, reading: BinaryIO, size: int, chunk_bytes: int, level: int, ahead: int
) -> Iterator[tuple[bytes, bytes, int, bytes]]:
    """Content, frame, kind and digest of every chunk in order; at most ``ahead`` of them are in memory."""
    descriptor = reading.fileno()
    offsets = iter(range(0, size, chunk_bytes))

    def submit(offset: int) -> Future[tuple[bytes, bytes, int, bytes]]:
        return pool.submit(_frame, descriptor, offset, min(chunk_bytes, size - offset), level)

    pending = deque(submit(offset) for offset in islice(offsets, ahead))
    while pending:
        yield pending.popleft().result()
        pending.extend(submit(offset) for offset in islice(offsets, 1))


def _frame(descriptor: int, offset: int, length: int, level: int) -> tuple[bytes, bytes, int, bytes]:
    content = os.pread(descriptor, length, offset)
    if len(content) != length:
        raise OSError(f"the blob ended at {offset + len(content)} while it was read")
    digest = hashlib.sha256(content).digest()
    if not content.strip(b"\0"):
        return content, b"", ZEROS, digest
    frame = zstandard.ZstdCompressor(level=level, write_checksum=False).compress(content)
    return (content, frame, ZSTD, digest) if len(frame) <= length * KEEP_RATIO else (content, content, STORED, digest)
