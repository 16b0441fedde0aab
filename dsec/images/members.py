"""The table of contents of an outer archive: an OCI layout or a ``docker save`` in a tar, which lies on our disk.

Reads only headers. Nothing is unpacked: a member is a range of the file. What layers hold is none of this module's business; their tars are
read by the converter.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from libdsec.errors import ImageError

RECORD = 512
EXTENSION_LIMIT = 64 << 10
"""Bytes of a PAX header or GNU long name: names in these archives are short."""
EXTENSIONS_MAX = 8
"""Extension headers before one entry; tools write a PAX header, or a long name and a long link."""
_REGULAR = b"0\0"
_LINK_DEPTH = 8


@dataclass(frozen=True, slots=True)
class Member:
    """A file in the archive: where its content lies."""

    offset: int
    size: int


class Members:
    """The files of an archive by normalized name; ``docker save`` writes a layer that occurs twice as a symlink to the first one."""

    def __init__(self, files: dict[str, Member], links: dict[str, str]) -> None:
        self._files = files
        self._links = links

    @classmethod
    def read(cls, archive: BinaryIO, limit: int) -> Members:
        """Raises ImageError for a broken archive, for more than ``limit`` entries, and for names and members with no business there."""
        files: dict[str, Member] = {}
        links: dict[str, str] = {}
        for count, (name, kind, link, member) in enumerate(headers(archive), 1):
            if count > limit:
                raise ImageError(f"the archive holds more than {limit} files and directories")
            path = _normalize(name)
            if kind == b"5":
                continue
            if path in files or path in links:
                raise ImageError(f"the archive holds {path!r} twice")
            if kind in _REGULAR:
                files[path] = member
            elif kind == b"2":
                links[path] = _link_target(path, link)
            else:
                raise ImageError(f"the archive holds {path!r}, which is neither file nor directory")
        return cls(files, links)

    def find(self, name: str) -> Member | None:
        """The member called ``name``, symlinks followed."""
        for _ in range(_LINK_DEPTH):
            if name not in self._links:
                return self._files.get(name)
            name = self._links[name]
        return None

    def get(self, name: str) -> Member:
        """Like :meth:`find`, but raises ImageError where there is none."""
        member = self.find(_normalize(name))
        if member is None:
            raise ImageError(f"the archive lacks {name!r}")
        return member


def headers(archive: BinaryIO) -> Iterator[tuple[str, bytes, str, Member]]:
    """Name, type, link and place of each entry, extensions applied. Raises ImageError where the archive is broken or just ends."""
    archive.seek(0, 2)
    length = archive.tell()
    position = 0
    path: str | None = None
    link: str | None = None
    size: int | None = None
    extensions = 0
    while True:
        archive.seek(position)
        header = archive.read(RECORD)
        if len(header) < RECORD:
            raise ImageError("the archive is truncated: it has no end mark")
        if not header.strip(b"\0"):
            return
        _check_sum(header)
        kind = header[156:157]
        stored = _number(header[124:136])
        position += RECORD
        if kind in b"Lxg":
            extensions += 1
            if extensions > EXTENSIONS_MAX:
                raise ImageError("the archive holds too many extension headers for one file")
            if stored > EXTENSION_LIMIT:
                raise ImageError("the archive holds an oversized extension header")
            body = archive.read(stored)
            if kind == b"L":
                path = _text(body.rstrip(b"\0"))
            elif kind == b"x":
                attributes = _pax(body)
                path = attributes.get("path", path)
                link = attributes.get("linkpath", link)
                if "size" in attributes:
                    size = _decimal(attributes["size"])
        else:
            stored = stored if size is None else size
            if kind not in b"0\0" and kind != b"7":
                stored = 0
            if position + stored > length:
                raise ImageError("the archive is truncated inside a file")
            name = path if path is not None else _header_name(header)
            if kind in _REGULAR and name.endswith("/"):
                kind = b"5"
            yield name, kind, link if link is not None else _field(header, 157, 100), Member(position, stored)
            path = link = size = None
            extensions = 0
        position += -(-stored // RECORD) * RECORD


def _normalize(name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise ImageError(f"the archive holds the name {name[:200]!r}, which leads outside")
    return "/".join(parts)


def _link_target(path: str, link: str) -> str:
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    if link.startswith("/") or target.startswith(".."):
        raise ImageError(f"the archive holds the link {path!r} to {link[:200]!r}, which leads outside")
    return target


def _check_sum(header: bytes) -> None:
    expected = _number(header[148:156])
    if sum(header[:148]) + 8 * ord(" ") + sum(header[156:]) != expected:
        raise ImageError("this is no tar archive, or a broken one: the checksum of a header is wrong")


def _number(field: bytes) -> int:
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.split(b"\0")[0].strip(b" ")
    # int() takes more than the format has: signs, underscores and prefixes.
    if digits.strip(b"01234567"):
        raise ImageError(f"the archive holds the number {field!r}")
    return int(digits or b"0", 8)


def _decimal(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise ImageError(f"the archive holds the number {text[:40]!r}")
    return int(text)


def _pax(body: bytes) -> dict[str, str]:
    attributes = {}
    while body and body[0]:
        digits, _, _ = body[:8].partition(b" ")
        length = _decimal(digits.decode("latin-1"))
        key, equals, value = body[len(digits) + 1 : length - 1].partition(b"=")
        if not equals or body[length - 1 : length] != b"\n":
            raise ImageError("the archive holds a broken PAX header")
        attributes[_text(key)] = _text(value)
        body = body[length:]
    return attributes


def _field(header: bytes, offset: int, length: int) -> str:
    return _text(header[offset : offset + length].split(b"\0")[0])


def _header_name(header: bytes) -> str:
    name = _field(header, 0, 100)
    prefix = _field(header, 345, 155) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
