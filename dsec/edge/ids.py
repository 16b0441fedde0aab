"""Ids of sandboxes: ``sb-<edge>-<epoch><random>``. The edge part routes a request without a lookup."""

from __future__ import annotations

import base64
import re
import secrets

RANDOM_BYTES = 12
"""96 bits: an id can't be guessed."""
_EPOCH_MASK = (1 << 20) - 1
SANDBOX_ID = re.compile(r"sb-[a-z0-9]{1,16}-[a-z2-7]{24}")


def _base32(data: bytes) -> str:
    return base64.b32encode(data).decode("ascii").rstrip("=").lower()


def new_sandbox_id(edge: str, epoch: int) -> str:
    """A new id; ``epoch`` counts the starts of the edge."""
    # 20 bits of epoch fill exactly 4 characters of base32.
    return f"sb-{edge}-{_base32(((epoch & _EPOCH_MASK) << 4).to_bytes(3, 'big'))[:4]}{_base32(secrets.token_bytes(RANDOM_BYTES))[:20]}"


def new_snapshot_id(edge: str) -> str:
    """A name for a snapshot: ``sn-<edge>-<random>``."""
    return f"sn-{edge}-{_base32(secrets.token_bytes(RANDOM_BYTES))[:20]}"


def new_exec_id() -> str:
    """A name for a command that the caller gave none."""
    return "ex-" + secrets.token_hex(8)


def edge_of(sandbox: str) -> str | None:
    """The edge that an id names; None for what is no sandbox id."""
    return sandbox.split("-")[1] if SANDBOX_ID.fullmatch(sandbox) else None
