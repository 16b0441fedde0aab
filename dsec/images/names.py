"""What images are called, and what a reference means. Pure: values in, values out.

A name is any registry-like string (``python:3.11``, ``registry.example/team/sphinx-9658:official``). A reference is a name (its newest
version), ``name@3`` (that version), ``sha256:…`` (the image with that digest) or ``name@sha256:…`` (the same, and where another node finds
it).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from libdsec.errors import InvalidArgument

NAME_LIMIT = 255
"""Characters of a name. Long enough for any registry's, short enough for every database's key."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_LIKE_DIGEST = re.compile(r"sha256:", re.IGNORECASE)
_VERSION = re.compile(r"[1-9][0-9]{0,8}\Z")


@dataclass(frozen=True, slots=True)
class ByName:
    """The newest version of a name, or the one given."""

    name: str
    version: int | None = None


@dataclass(frozen=True, slots=True)
class ByDigest:
    """Whatever image has this digest."""

    digest: str
    name: str | None = None
    """Where a shared store is to be looked through for it."""


Reference = ByName | ByDigest


def check_name(name: str, *, field: str = "name") -> str:
    """``name`` if an image may be called so. Raises InvalidArgument that says why not."""
    if not name:
        raise InvalidArgument("an image needs a name", field=field)
    if len(name) > NAME_LIMIT:
        raise InvalidArgument(f"an image name may have {NAME_LIMIT} characters, this one has {len(name)}", field=field)
    if not name.isprintable() or " " in name or not _encodable(name):
        raise InvalidArgument("an image name may not hold spaces or characters that don't print", field=field)
    if "@" in name:
        raise InvalidArgument("an image name may not hold '@': it sets off the version, which is given by the store", field=field)
    if _LIKE_DIGEST.match(name):
        raise InvalidArgument("an image name may not look like a digest", field=field)
    if name.startswith("/") or name.endswith("/"):
        raise InvalidArgument("an image name may not begin or end with '/'", field=field)
    if not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise InvalidArgument("an image name may not hold '//' or parts that are '.' or '..': it stands in a path", field=field)
    return name


def _encodable(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def parse_reference(text: str) -> Reference | None:
    """What ``text`` refers to; None where no image can be called so."""
    if _DIGEST.match(text):
        return ByDigest(text)
    name, at, version = text.partition("@")
    if not name or len(name) > NAME_LIMIT:
        return None
    if not at:
        return ByName(name)
    if _DIGEST.match(version):
        return ByDigest(version, name)
    return ByName(name, int(version)) if _VERSION.match(version) else None


def locked(name: str, digest: str) -> str:
    """The reference that means this content for ever, on every node."""
    return f"{name}@{digest}"


def exact(name: str, version: int) -> str:
    """The reference that means this version for ever."""
    return f"{name}@{version}"
