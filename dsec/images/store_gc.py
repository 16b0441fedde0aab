"""Garbage in the shared store: what no manifest names and no lease needs. Safe beside imports, pushes and readers on other nodes.

The order is what makes it so (see :mod:`dsec.images.leases`): read the manifests, list the objects, write down what is condemned, and only
then read the leases and look for manifests that came meanwhile. A crash leaves ``gc.json``, which others heed for ten minutes, and objects
that the next run takes.

Nothing in a store can be replaced on condition that it still is what it was, but an object can be made by one of several only. So whoever
takes over from a gc that died first makes an object whose name is derived from what that one wrote.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from dsec.images.leases import GC_KEY, GC_S, LIMIT, CondemnedFile, Lease, decode_condemned, forget_leases, read_leases
from dsec.images.publishing import CLAIM_S
from dsec.images.shared import BlobMissing, Blobs, Listed
from dsec.images.shared_catalog import Held, SharedCatalog
from libdsec.errors import Conflict, Unavailable

GRACE_S = 3600.0
"""Objects younger than this stay, whatever nobody says: an upload's first objects are there before its manifest, and clocks differ."""
BATCH = 1000
"""Objects deleted between two looks at the time."""
TAKEOVERS = "gc"
"""The directory of takeovers, ``gc/<sha256 of what the dead gc wrote>.json``."""
TAKEOVER_KEPT_S = 6 * GC_S
"""For so long at least a takeover is remembered: a node that looked at the dead gc's file before it must not take over once more."""

_META = re.compile(r"metas/([0-9a-f]{64})\.zst\Z")
_BLOB = re.compile(r"blobs/([0-9a-f]{64})\.(?:z|idx)\Z")


@dataclass(frozen=True, slots=True)
class Garbage:
    """An object that nothing names, and the digest (hexadecimal) that it belongs to."""

    object: Listed
    digest: str


@dataclass(frozen=True, slots=True)
class _Condemned:
    """This node's ``gc.json``."""

    at: float
    data: bytes


def names_of(named: Mapping[str, Held]) -> Callable[[str], bool]:
    """Tells whether a manifest names an object, by its key; what belongs to no layer counts as named."""
    metas = set[str]().union(*(held.metas for held in named.values()))
    blobs = set[str]().union(*(held.blobs for held in named.values()))

    def is_named(key: str) -> bool:
        meta = _META.match(key)
        if meta is not None:
            return meta[1] in metas
        blob = _BLOB.match(key)
        return blob is None or blob[1] in blobs

    return is_named


async def unnamed(blobs: Blobs, named: Mapping[str, Held]) -> list[Garbage]:
    """Objects of layers that no manifest names."""
    is_named = names_of(named)
    prefixes = ("metas", "blobs")
    found = [each for prefix in prefixes async for batch in blobs.list(prefix, lambda key: not is_named(key)) for each in batch]
    return [Garbage(each, each.key.partition("/")[2].partition(".")[0]) for each in found]


class StoreGc:
    """Collects. ``known``: what this node knows already of manifests, by key; those aren't read."""

    def __init__(self, blobs: Blobs, catalog: SharedCatalog, lease: Lease, wall: Callable[[], float] = time.time) -> None:
        self.grace_s = GRACE_S
        self._blobs = blobs
        self._catalog = catalog
        self._lease = lease
        self._wall = wall
        self._one = asyncio.Lock()

    async def collect(self, known: Mapping[str, Held]) -> int:
        """Deletes; returns the bytes. Raises Conflict while another gc works, Unavailable, ImageError for a manifest or lease that can't be
        read: then nothing may go."""
        async with self._one:
            return await self._collect(known)

    async def _collect(self, known: Mapping[str, Held]) -> int:
        named = await self._catalog.held(known)
        old = self._wall() - self.grace_s
        condemned = [each for each in await unnamed(self._blobs, named) if each.object.modified < old]
        await self._drop_leftovers()
        if not condemned:
            return 0
        mine = await self._condemn(condemned)
        try:
            await self._lease.refresh()
            leased = set[str]().union(*(await read_leases(self._blobs, self._wall())).values())
            is_named = names_of(await self._catalog.held(named))
            doomed = [each for each in condemned if each.digest not in leased and not is_named(each.object.key)]
            await self._check_written(mine.data)
            return await self._delete(doomed, mine.at + GC_S / 2)
        finally:
            if await self._written(GC_KEY) == mine.data:
                await self._blobs.delete([GC_KEY])

    async def _condemn(self, condemned: list[Garbage]) -> _Condemned:
        """Writes down what is about to go. Raises Conflict while another gc works."""
        digests = sorted({each.digest for each in condemned})
        at = self._wall()
        mine = _Condemned(at, msgspec.json.encode(CondemnedFile(node=self._lease.node, at=at, digests=digests)))
        if await self._blobs.put_new(GC_KEY, mine.data):
            return mine
        await self._take_over()
        await self._blobs.put(GC_KEY, mine.data)
        return mine

    async def _take_over(self) -> None:
        """Gains the right to replace ``gc.json`` of a gc that died: of all that try one does. Raises Conflict for the others, and where
        that gc lives."""
        # One that has itself died before it replaced gc.json is taken over from in the same way.
        dead = await self._dead(GC_KEY)
        first = dead
        token = msgspec.json.encode(CondemnedFile(node=self._lease.node, at=self._wall(), digests=[]))
        while True:
            key = f"{TAKEOVERS}/{hashlib.sha256(dead).hexdigest()}.json"
            if await self._blobs.put_new(key, token):
                break
            dead = await self._dead(key)
        await self._check_written(first)

    async def _dead(self, key: str) -> bytes:
        """What a gc that is dead wrote there. Raises Conflict where it isn't."""
        data = await self._written(key)
        found = None if data is None else decode_condemned(data, self._wall())
        # One of our own is from before a crash.
        if data is None or (found is not None and found.node != self._lease.node):
            who = "another node" if found is None else f"the node {found.node}"
            raise Conflict(f"{who} is collecting garbage in the shared store: try again when it has ended", reason="gc")
        return data

    async def _check_written(self, data: bytes) -> None:
        """Raises Conflict where another gc has written since what is in ``gc.json``."""
        if await self._written(GC_KEY) != data:
            raise Conflict("another node has begun to collect garbage in the shared store: try again when it has ended", reason="gc")

    async def _written(self, key: str) -> bytes | None:
        try:
            return await self._blobs.get(key, LIMIT)
        except BlobMissing:
            return None

    async def _delete(self, doomed: list[Garbage], deadline: float) -> int:
        # Metadata before tables before frames: what is left of a layer after a crash is never taken for whole.
        doomed = sorted(doomed, key=lambda each: (each.object.key.startswith("blobs/"), each.object.key.endswith(".z")))
        removed = 0
        for start in range(0, len(doomed), BATCH):
            if self._wall() > deadline:
                raise Unavailable("the shared store was too slow for this gc: it stopped in time, and the next one goes on")
            part = doomed[start : start + BATCH]
            await self._blobs.delete([each.object.key for each in part])
            removed += sum(each.object.size for each in part)
        return removed

    async def _drop_leftovers(self) -> None:
        """What crashes left: claims and leases of dead nodes, takeovers of long ago, files that never became objects."""
        now = self._wall()
        stale = [each.key async for batch in self._blobs.list("uploads") for each in batch if each.modified < now - 2 * CLAIM_S]
        stale += [each.key async for batch in self._blobs.list(TAKEOVERS) for each in batch if each.modified < now - TAKEOVER_KEPT_S]
        if stale:
            await self._blobs.delete(stale)
        await forget_leases(self._blobs, now)
        for prefix in ("metas", "blobs"):
            await self._blobs.drop_staging(await self._blobs.staging(prefix, now - GRACE_S))
