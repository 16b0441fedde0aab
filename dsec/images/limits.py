"""The bounds of an import: what a caller may send, and what it may become on our disk and in our memory."""

from __future__ import annotations

import os
from dataclasses import dataclass

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ImportLimits:
    """Sizes are bytes. The defaults hold the largest images known from production (12 GB unpacked) several times over."""

    upload: int = 32 * GIB
    """Of the request's body."""
    unpacked: int = 64 * GIB
    """Of everything that the body decompresses to, all layers together."""
    disk_reserve: int = 2 * GIB
    """Free space that an import leaves on the disk of the store."""
    entries: int = 4_000_000
    """Files of one layer."""
    metadata: int = 1 * GIB
    """Of one layer's names, attributes and extents; also what the converter may take of memory for them."""
    members: int = 10_000
    """Files in an OCI or docker archive (layers and descriptions, not what is in the layers)."""
    document: int = 4 * MIB
    """Of one JSON document in an archive."""
    layers: int = 500
    """Of one image; overlayfs takes no more than 500 in one mount."""
    collapse: int = 3 * GIB
    """Adjacent layers of an image become one as long as their archives together stay below this."""
    connections: int = 4
    """Layers of one image that are fetched from a registry at a time."""
    conversions: int = os.cpu_count() or 1
    """At a time: each keeps one core busy. Others wait."""
