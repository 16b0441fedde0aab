"""Paths inside a sandbox. They are bytes on Linux; text stands for its UTF-8 form, undecodable bytes for their surrogate escapes."""

from __future__ import annotations

from pathlib import PurePath
from typing import TypeAlias

from libdsec.errors import InvalidArgument

SandboxPath: TypeAlias = str | bytes | PurePath
"""A path inside the sandbox; a relative one counts from the sandbox's working directory."""


def path_bytes(path: SandboxPath, field: str = "path") -> bytes:
    """The bytes of a path. Raises InvalidArgument for an empty one and for one with a NUL byte."""
    raw = path if isinstance(path, bytes) else str(path).encode("utf-8", "surrogateescape")
    if not raw:
        raise InvalidArgument(f"{field} is empty", field=field)
    if b"\0" in raw:
        raise InvalidArgument(f"{field} has a NUL byte: {path!r}", field=field)
    return raw
