"""The table of contents of an outer archive: numbers and counts that no tool writes are refused before anything is done with them."""

from __future__ import annotations

import io
import tarfile
from itertools import islice

import pytest

from dsec.images.members import EXTENSIONS_MAX, Members, headers
from libdsec.errors import ImageError
from tests.unit.images_archives import files, member, tar


def with_size(name: str, size: bytes) -> bytes:
    """A tar with one entry whose size field is as given, and its checksum right."""
    header = bytearray(member(name).tobuf(tarfile.USTAR_FORMAT))
    header[124:136] = size.ljust(12, b"\0")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(1024)


@pytest.mark.parametrize("size", [b"-1", b"-1000", b"+7", b"1_0", b"0o17", b"\xff" * 12])
@pytest.mark.parametrize("name", ["file", "directory/"])
def test_a_size_that_is_no_octal_number_is_refused(name: str, size: bytes) -> None:
    with pytest.raises(ImageError, match="the number"):
        list(islice(headers(io.BytesIO(with_size(name, size))), 10))


@pytest.mark.parametrize("size", [b"", b"00000000000", b"          0 ", b"0"])
def test_a_size_with_spaces_or_none_at_all_is_taken(size: bytes) -> None:
    [(name, _, _, found)] = headers(io.BytesIO(with_size("file", size)))
    assert (name, found.size) == ("file", 0)


def test_directories_count_as_members() -> None:
    archive = io.BytesIO(tar([member("same", tarfile.DIRTYPE)] * 20))
    Members.read(archive, 20)
    with pytest.raises(ImageError, match="more than 19"):
        Members.read(archive, 19)


def test_extension_headers_without_an_entry_are_bounded() -> None:
    extension = member("x", tarfile.XGLTYPE).tobuf(tarfile.USTAR_FORMAT)
    entry = files({"file": b""})
    assert len(list(headers(io.BytesIO(extension * EXTENSIONS_MAX + entry)))) == 1
    with pytest.raises(ImageError, match="extension headers"):
        list(headers(io.BytesIO(extension * (EXTENSIONS_MAX + 1) + entry)))
