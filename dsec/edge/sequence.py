"""A sequence of msgpack values that arrives in pieces, as the builtins of chronus write it."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")

_FIXED = {0xC0: 1, 0xC2: 1, 0xC3: 1, 0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}
"""Constants and numbers: bytes of the whole value."""
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""bin and str: bytes of the length field."""
_COUNTED = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""array and map: bytes of the count field, values for each count."""


class Malformed(ValueError):
    """Not msgpack, or of a kind that the builtins don't write."""


class Sequence(Generic[T]):
    """Takes bytes, gives the values of type ``kind`` that are complete."""

    def __init__(self, kind: type[T]) -> None:
        self._decode = msgspec.msgpack.Decoder(list[kind]).decode  # type: ignore[valid-type]
        self._rest = b""

    def feed(self, data: bytes) -> list[T]:
        """The values that ``data`` completes. Raises Malformed, msgspec.ValidationError."""
        data = self._rest + data if self._rest else data
        count, end = _complete(data)
        self._rest = data[end:]
        if not count:
            return []
        # One array of what is complete: decoded in one go.
        return self._decode(b"\xdd" + count.to_bytes(4, "big") + data[:end])


def _complete(data: bytes) -> tuple[int, int]:
    """How many whole values ``data`` begins with, and where they end."""
    count, end, at, size = 0, 0, 0, len(data)
    while at < size:
        open_values = 1
        while open_values:
            if at >= size:
                return count, end
            head = data[at]
            open_values -= 1
            if head <= 0x7F or head >= 0xE0:
                at += 1
            elif head <= 0x8F:
                open_values += 2 * (head & 0x0F)
                at += 1
            elif head <= 0x9F:
                open_values += head & 0x0F
                at += 1
            elif head <= 0xBF:
                at += 1 + (head & 0x1F)
            elif head in _FIXED:
                at += _FIXED[head]
            elif head in _SIZED:
                width = _SIZED[head]
                at += 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "big")
            elif head in _COUNTED:
                width, each = _COUNTED[head]
                if at + 1 + width > size:
                    return count, end
                open_values += each * int.from_bytes(data[at + 1 : at + 1 + width], "big")
                at += 1 + width
            else:
                raise Malformed(f"byte {head:#x} begins no value that is expected here")
        if at > size:
            return count, end
        count += 1
        end = at
    return count, end
