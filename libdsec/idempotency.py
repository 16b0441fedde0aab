"""Idempotency keys of create requests: those that the SDK makes, and what is asked of a caller's."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from libdsec.errors import InvalidArgument

ONCE = "once:"
"""How a key begins that was made for one call: only its sender can repeat the request. When that closes its half of the connection, nobody
asks by the key again, so what was made under it and not told is taken back at once."""


def once_key() -> str:
    """A key that nobody else has."""
    return ONCE + secrets.token_hex(12)


def check_differ(keys: Iterable[str | None]) -> None:
    """Raises InvalidArgument, which names the second one, if two items have the same key."""
    first: dict[str, int] = {}
    for index, key in enumerate(keys):
        if key is not None and first.setdefault(key, index) != index:
            text = f"items {first[key]} and {index} have the same idempotency_key: each sandbox needs its own"
            raise InvalidArgument(text, field=f"items[{index}].idempotency_key")
