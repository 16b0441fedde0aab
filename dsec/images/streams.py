"""Bytes on their way into the store: a request's body onto the disk, and compressed files into plain ones. All of it bounded.

Compression bombs are met by pulling: no step makes more than a megabyte at a time, and every byte is counted before it is written.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

import zstandard

from dsec.images.blobs import BlobDirectory
from dsec.images.limits import MIB
from dsec.images.threads import Check, to_end
from libdsec.errors import ImageError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Compression = Literal["none", "gzip", "zstd", "xz"]

PIECE = 1 * MIB
"""Bytes handled at a time."""
INPUT_PIECE = 64 << 10
"""Bytes of gzip or xz data given to the library at a time: behind each member it copies what is left of them, and a member may have 20."""
WRITE_BATCH = 4 * MIB
"""Bytes of a body that are collected before a thread writes them: one hop to it costs as much as writing 100 KB."""
XZ_MEMORY = 512 * MIB
"""What an xz stream may need; ``xz -9`` needs 65 MB."""
ZSTD_WINDOW = 128 * MIB
"""The largest window that ``zstd --long`` uses without asking for more."""
ROOM_CHECK = 64 * MIB
"""Bytes written between two looks at the free space."""

_MAGIC: tuple[tuple[bytes, Compression], ...] = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\xfd7zXZ\0", "xz"),
)


@dataclass
class Budget:
    """Bytes that may still be made of what the caller sent."""

    limit: int
    what: str
    used: int = 0

    def take(self, count: int) -> None:
        """Counts ``count`` bytes. Raises ImageError when that is more than there may be."""
        self.used += count
        if self.used > self.limit:
            raise ImageError(f"{self.what} exceeds {self.limit} bytes")


@dataclass
class Sink:
    """A file being written: counted, hashed, and stopped before the disk is full."""

    file: BinaryIO
    blobs: BlobDirectory
    size: int = 0
    _hash: hashlib._Hash = field(default_factory=hashlib.sha256)
    _unchecked: int = ROOM_CHECK

    def write(self, data: bytes) -> None:
        """Raises NoCapacity when the disk has no room, OSError when it fails."""
        self._unchecked += len(data)
        if self._unchecked >= ROOM_CHECK:
            self.blobs.check_room(len(data))
            self._unchecked = 0
        write_all(self.file, data)
        self._hash.update(data)
        self.size += len(data)

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


@dataclass(frozen=True)
class Stored:
    """A file in a workspace."""

    path: Path
    size: int
    digest: str


def write_all(file: BinaryIO, data: bytes) -> None:
    """Writes all of ``data`` to an unbuffered file, which may take less than it is given (on a disk that gets full). Raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def sha256_of(data: bytes) -> str:
    """The digest of ``data`` as registries write it."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


async def receive(body: AsyncIterator[bytes], path: Path, blobs: BlobDirectory, limit: int, progress: Callable[[int], None]) -> Stored:
    """Writes a body to ``path``, telling ``progress`` how many bytes are there. Raises ImageError beyond ``limit`` bytes."""
    budget = Budget(limit, "the upload")
    batch = bytearray()
    with path.open("xb", buffering=0) as file:
        sink = Sink(file, blobs)

        async def flush() -> None:
            data = bytes(batch)
            batch.clear()
            await to_end(lambda: sink.write(data))
            progress(sink.size)

        async for chunk in body:
            budget.take(len(chunk))
            batch += chunk
            if len(batch) >= WRITE_BATCH:
                await flush()
        if batch:
            await flush()
    return Stored(path, sink.size, sink.digest)


def compression_of(source: BinaryIO) -> Compression:
    """How what follows in ``source`` is compressed, by its first bytes."""
    start = source.read(8)
    return next((kind for magic, kind in _MAGIC if start.startswith(magic)), "none")


def unpack(
    source: BinaryIO, length: int, compression: Compression, path: Path, blobs: BlobDirectory, budget: Budget, check: Check
) -> Stored:
    """Writes what ``length`` bytes of ``source`` hold, decompressed, to ``path``. Raises ImageError for broken or too much data."""
    with path.open("xb", buffering=0) as file:
        sink = Sink(file, blobs)
        for piece in decompressed(source, length, compression, check):
            check()
            budget.take(len(piece))
            sink.write(piece)
    return Stored(path, sink.size, sink.digest)


def decompressed(source: BinaryIO, length: int, compression: Compression, check: Check) -> Iterator[bytes]:
    """The content of ``length`` bytes of ``source``, at most :data:`PIECE` bytes at a time; ``check`` is called for every piece that is
    read, as there may be no content in many. Raises ImageError for broken or cut data."""
    if compression == "none":
        yield from _pieces(source, length, PIECE, check)
    elif compression == "zstd":
        yield from _unzstd(_pieces(source, length, PIECE, check))
    elif compression == "gzip":
        yield from _inflate(_pieces(source, length, INPUT_PIECE, check))
    else:
        yield from _unxz(_pieces(source, length, INPUT_PIECE, check))


def _pieces(source: BinaryIO, length: int, size: int, check: Check) -> Iterator[bytes]:
    left = length
    while left:
        check()
        piece = source.read(min(size, left))
        if not piece:
            raise ImageError("the archive ends early")
        left -= len(piece)
        yield piece


def _inflate(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """One gzip member after the other (RFC 1952); zeros after the last one are padding."""
    member = zlib.decompressobj(wbits=31)
    begun = False
    try:
        for data in pieces:
            while data:
                if member.eof:
                    data = data.lstrip(b"\0")
                    if not data:
                        break
                    member = zlib.decompressobj(wbits=31)
                begun = True
                if made := member.decompress(data, PIECE):
                    yield made
                data = member.unused_data if member.eof else member.unconsumed_tail
            while not member.eof and (made := member.decompress(b"", PIECE)):
                yield made
    except zlib.error as error:
        raise ImageError(f"broken gzip data: {error}") from error
    if begun and not member.eof:
        raise ImageError("the gzip data ends early")


def _unxz(pieces: Iterator[bytes]) -> Iterator[bytes]:
    stream = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=XZ_MEMORY)
    try:
        for data in pieces:
            while data or not (stream.eof or stream.needs_input):
                if stream.eof:
                    data = data.lstrip(b"\0")
                    if not data:
                        break
                    stream = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=XZ_MEMORY)
                made = stream.decompress(data, PIECE)
                data = stream.unused_data if stream.eof else b""
                if made:
                    yield made
    except lzma.LZMAError as error:
        raise ImageError(f"broken xz data: {error}") from error
    if not stream.eof:
        raise ImageError("the xz data ends early")


class _Section(io.RawIOBase):
    """Pieces as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        if not self._rest:
            self._rest = memoryview(next(self._pieces, b""))
        room = memoryview(buffer).cast("B")
        count = min(len(room), len(self._rest))
        room[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def _unzstd(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """A cut frame goes unnoticed here; the tar in it then lacks its end mark, and is refused for that."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW)
    try:
        source = io.BufferedReader(_Section(pieces), PIECE)
        with decompressor.stream_reader(source, read_across_frames=True) as reader:
            while made := reader.read(PIECE):
                yield made
    except zstandard.ZstdError as error:
        raise ImageError(f"broken zstd data: {error}") from error
