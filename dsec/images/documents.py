"""JSON that comes from outside: of archives, registries, the shared store."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


def decode(data: bytes, kind: type[T]) -> T:
    """Raises msgspec.DecodeError, also for what is nested deeper than Python's stack goes (in a field that nobody asked for, say)."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError as error:
        raise msgspec.DecodeError("it is nested too deeply") from error
