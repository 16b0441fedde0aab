"""Reads the metadata that our converter writes: the entries of a layer, without mounting it.

Only what ``dsec-mklayer`` makes is understood (see native/mklayer/src/erofs.rs for the layout): extended inodes, directories and symlinks
plain or with an inline tail, files by chunk indexes into one data blob. Everything is bounded by the file itself; what points outside it
is refused.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from libdsec.errors import ImageError

BLOCK = 4096
DEPTH_MAX = 4096
"""Components of a path: PATH_MAX, halved."""

_MAGIC = 0xE0F5E1E2
_SUPERBLOCK = 1024
_SLOT = 32
_INODE = struct.Struct("<HHHHQIIIIQII")
_INODE_BYTES = 64
_DIRENT = struct.Struct("<QHBB")
_XATTR_HEADER = 12
_PLAIN, _INLINE, _CHUNKED = 0, 2, 4
_HOLE = 0xFFFFFFFF
_XATTR_PREFIXES = {1: b"user.", 4: b"trusted.", 6: b"security."}


@dataclass(frozen=True, slots=True)
class Entry:
    """A name in a layer."""

    mode: int
    """With the type bits of stat(2)."""
    uid: int
    gid: int
    mtime_ns: int
    size: int
    rdev: int
    target: bytes
    """Of a symlink."""
    blocks: tuple[tuple[int, int], ...]
    """Where a file's data lies: first block in the blob and blocks, in order; holes have the block -1."""
    xattrs: tuple[tuple[bytes, bytes], ...]

    @property
    def is_whiteout(self) -> bool:
        """Hides what the layers below have under the name."""
        return stat.S_ISCHR(self.mode) and self.rdev == 0

    @property
    def is_opaque(self) -> bool:
        """Hides what the layers below have in the directory."""
        return (b"trusted.overlay.opaque", b"y") in self.xattrs


def entries(image: bytes) -> Iterator[tuple[bytes, Entry]]:
    """Path (without a leading slash; the root's is empty) and entry of everything in a layer, directories before what is in them. Raises
    ImageError for what is no such metadata."""
    try:
        yield from _walk(image)
    except (struct.error, IndexError, OverflowError) as error:
        raise ImageError(f"the metadata of the layer is broken: {error}") from error


def _walk(image: bytes) -> Iterator[tuple[bytes, Entry]]:
    (magic,) = struct.unpack_from("<I", image, _SUPERBLOCK)
    if magic != _MAGIC or image[_SUPERBLOCK + 12] != 12:
        raise ImageError("this is no EROFS metadata with blocks of 4 KiB")
    (root,) = struct.unpack_from("<H", image, _SUPERBLOCK + 14)
    pending = [(b"", root, 0)]
    seen: set[int] = set()
    while pending:
        path, number, depth = pending.pop()
        entry, content = _inode(image, number)
        yield path, entry
        if not stat.S_ISDIR(entry.mode):
            continue
        if number in seen or depth > DEPTH_MAX:
            raise ImageError("a directory of the layer is in itself")
        seen.add(number)
        below = [(path + b"/" + name if path else name, child, depth + 1) for name, child in _names(content)]
        pending.extend(reversed(below))


def _inode(image: bytes, number: int) -> tuple[Entry, bytes]:
    """An inode, and the content of a directory."""
    at = number * _SLOT
    form, xattr_units, mode, _, size, union, _, uid, gid, mtime, nanoseconds, _ = _INODE.unpack_from(image, at)
    if form & 1 != 1:
        raise ImageError("the layer has a compact inode, which our converter doesn't write")
    layout = form >> 1 & 7
    xattr_bytes = _XATTR_HEADER + (xattr_units - 1) * 4 if xattr_units else 0
    after = at + _INODE_BYTES + xattr_bytes
    content = b""
    blocks: tuple[tuple[int, int], ...] = ()
    if layout == _CHUNKED:
        blocks = _runs(image, after, size, union)
    elif stat.S_ISDIR(mode) or stat.S_ISLNK(mode):
        if size > len(image):
            raise ImageError("the layer has an entry larger than its metadata")
        whole = size if layout == _PLAIN else size // BLOCK * BLOCK
        content = image[union * BLOCK : union * BLOCK + whole] + (image[after : after + size - whole] if layout == _INLINE else b"")
        if len(content) != size:
            raise ImageError("the metadata of the layer is cut")
    entry = Entry(
        mode=mode,
        uid=uid,
        gid=gid,
        mtime_ns=struct.unpack("<q", struct.pack("<Q", mtime))[0] * 10**9 + nanoseconds,
        size=0 if stat.S_ISDIR(mode) else size,
        rdev=union if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else 0,
        target=content if stat.S_ISLNK(mode) else b"",
        blocks=blocks,
        xattrs=tuple(_xattrs(image[at + _INODE_BYTES : after])),
    )
    return entry, content


def _runs(image: bytes, after: int, size: int, form: int) -> tuple[tuple[int, int], ...]:
    """A file's chunks, those that follow each other in the blob as one run."""
    chunk_blocks = 1 << (form & 0x1F)
    chunks = -(-size // (chunk_blocks * BLOCK))
    start = -(-after // 8) * 8
    if start + chunks * 8 > len(image):
        raise ImageError("the layer has a file with more chunks than its metadata")
    runs: list[tuple[int, int]] = []
    left = -(-size // BLOCK)
    for _, _, block in struct.iter_unpack("<HHI", image[start : start + chunks * 8]):
        count = min(chunk_blocks, left)
        left -= count
        address = -1 if block == _HOLE else block
        last = runs[-1] if runs else None
        if last is not None and (address == last[0] == -1 or (last[0] >= 0 and address == last[0] + last[1])):
            runs[-1] = (last[0], last[1] + count)
        else:
            runs.append((address, count))
    return tuple(runs)


def _names(content: bytes) -> Iterator[tuple[bytes, int]]:
    """Names and inode numbers of a directory, without the two dots."""
    for start in range(0, len(content), BLOCK):
        block = content[start : start + BLOCK]
        (first,) = struct.unpack_from("<H", block, 8)
        count = first // _DIRENT.size
        if not count > 0 or first % _DIRENT.size or first > len(block):
            raise ImageError("the layer has a directory that can't be read")
        records = [_DIRENT.unpack_from(block, index * _DIRENT.size) for index in range(count)]
        ends = [record[1] for record in records[1:]] + [len(block)]
        for (number, offset, _, _), end in zip(records, ends, strict=True):
            name = block[offset:end].rstrip(b"\0")
            if not name or b"/" in name:
                raise ImageError("the layer has a name that can't be")
            if name not in (b".", b".."):
                yield name, number


def _xattrs(area: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = _XATTR_HEADER
    while at + 4 <= len(area):
        name_length, index, value_length = struct.unpack_from("<BBH", area, at)
        name = area[at + 4 : at + 4 + name_length]
        value = area[at + 4 + name_length : at + 4 + name_length + value_length]
        yield _XATTR_PREFIXES.get(index, b"?") + name, value
        at += -(-(4 + name_length + value_length) // 4) * 4
