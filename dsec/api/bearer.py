"""The form of an API key: ``dsec_<id>_<secret>``, as made by :func:`mint` and taken apart by :func:`split`.

The secret is 160 bits from the system's generator, so that its plain SHA-256 is as safe to store, or to show in a process list, as a slow
hash: password hashes are slow because passwords can be guessed, and nobody guesses 160 bits. Checking a key then costs a microsecond a
request.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from typing import NamedTuple

ID_BYTES = 5
"""8 base32 characters: 40 bits, enough that ids of one store don't collide; ids are no secret."""
SECRET_BYTES = 20
"""32 base32 characters: 160 bits."""

_KEY = re.compile(r"dsec_([a-z2-7]{8})_([a-z2-7]{32})")
_SEED = re.compile(r"([a-z2-7]{8}):([0-9a-f]{64})")


class Seed(NamedTuple):
    """What the store keeps of a key: enough to recognize it, nothing to forge it with."""

    id: str
    digest: bytes
    """SHA-256 of the secret."""

    @classmethod
    def parse(cls, text: str) -> Seed:
        """Read what ``str()`` of a Seed gives (``<id>:<digest in hex>``). Raises ValueError."""
        match = _SEED.fullmatch(text)
        if match is None:
            raise ValueError("a key seed reads <id>:<sha256 in hex>")
        return cls(match[1], bytes.fromhex(match[2]))

    def __str__(self) -> str:
        return f"{self.id}:{self.digest.hex()}"


class MintedKey(NamedTuple):
    """A new key: ``text`` for the one who will use it, ``seed`` for the store."""

    text: str
    seed: Seed


def mint() -> MintedKey:
    """Make a key."""
    key_id, secret = _random_base32(ID_BYTES), _random_base32(SECRET_BYTES)
    return MintedKey(f"dsec_{key_id}_{secret}", Seed(key_id, _digest(secret)))


def split(text: str) -> Seed | None:
    """The id and digest of a key as presented by a caller, or None if it hasn't the form of one."""
    match = _KEY.fullmatch(text)
    return None if match is None else Seed(match[1], _digest(match[2]))


def prefix(key_id: str) -> str:
    """The part of a key that may be shown: it names the key and gives nothing of the secret away."""
    return f"dsec_{key_id}_"


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("ascii")).digest()


def _random_base32(size: int) -> str:
    return base64.b32encode(secrets.token_bytes(size)).decode("ascii").rstrip("=").lower()
