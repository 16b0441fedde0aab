"""Signed addresses of ports inside sandboxes: made by the SDK and by the edge alike, checked by the edge."""

from __future__ import annotations

import base64
import hashlib
import hmac

SIGNATURE_BYTES = 16
"""128 bits can't be guessed through a network."""


def port_signature(key: str, port: int) -> str:
    """What stands in for an API key in the address of one port, and opens no other. ``key`` is the sandbox's ``ports_key``."""
    digest = hmac.digest(key.encode(), str(port).encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(digest[:SIGNATURE_BYTES]).decode("ascii").rstrip("=")


def port_url(origin: str, sandbox: str, key: str, port: int) -> str:
    """The address of a port inside, with a slash at its end. ``origin`` is the sandbox's ``ports_url``."""
    return f"{origin.rstrip('/')}/{sandbox}/{port}/{port_signature(key, port)}/"
