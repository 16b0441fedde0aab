"""What this node needs of the shared store, said aloud, so that no other node's gc or removal takes it: ``leases/<node>.json``.

A gc condemns before it deletes: it writes ``gc.json`` with what it is about to take, and reads the leases after that. Whoever begins to
need something writes a lease first and reads ``gc.json`` after that. So one of the two always sees the other: a lease that comes too late
for the gc waits until it has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import msgspec

from dsec.images.documents import decode
from dsec.images.shared import BlobMissing, Blobs, BlobTooLarge
from libdsec.errors import ImageError, Unavailable

LEASE_S = 600.0
"""For so long a lease counts after it was written: a node that was cut off comes back within."""
REFRESH_S = 60.0
HOLD_S = 120.0
"""What a sandbox is about to start from is held for so long: by then it is in use, or never will be."""
GC_KEY = "gc.json"
GC_S = 600.0
"""A gc that hasn't spoken for so long is dead."""
POLL_S = 0.5
LIMIT = 256 << 20


class LeaseFile(msgspec.Struct, kw_only=True):
    """A lease as it stands in the store."""

    node: str
    at: float
    """Unix seconds, by the node's clock."""
    digests: list[str]
    """Of metadata and data blobs, in hexadecimal."""


class CondemnedFile(msgspec.Struct, kw_only=True):
    """What a gc is about to delete."""

    node: str
    at: float
    digests: list[str]
    """In hexadecimal."""


class Lease:
    """This node's lease. ``needed`` gives the digests (hexadecimal) that live sandboxes and uploads need now."""

    def __init__(self, blobs: Blobs, needed: Callable[[], set[str]], wall: Callable[[], float] = time.time) -> None:
        self.node = ""
        """Set before anything else is called."""
        self._blobs = blobs
        self._needed = needed
        self._wall = wall
        self._held: dict[str, float] = {}
        """Digest to the wall time until which it is held."""
        self._written: frozenset[str] = frozenset()
        self._cleared: frozenset[str] = frozenset()
        """Those of the written ones that no gc had condemned when they got there."""
        self._written_at = 0.0
        self._writing = asyncio.Lock()

    @property
    def key(self) -> str:
        return f"leases/{self.node}.json"

    async def hold(self, digests: Iterable[str], for_s: float = 0.0, within_s: float | None = None) -> bool:
        """From the return of this no gc and no removal takes these digests (hexadecimal), for so many seconds and as long as ``needed``
        gives them. Waits for a gc that has condemned one of them. False: they were held before; True: what is there now stays, but an
        earlier gc may have taken it. Raises Unavailable (also where the lease can't be written within ``within_s``), NoCapacity."""
        wanted = frozenset(digests)
        now = self._wall()
        if for_s:
            self._held.update(dict.fromkeys(wanted, now + for_s))
        if wanted <= self._cleared and now - self._written_at < LEASE_S / 2:
            return False
        try:
            async with asyncio.timeout(within_s), self._writing:
                if not wanted <= self._written or now - self._written_at >= LEASE_S / 2:
                    await self._write()
        except TimeoutError:
            raise Unavailable(f"the lease couldn't be written to the shared store within {within_s} s") from None
        await self._wait_for_gc(wanted)
        self._cleared |= wanted & self._written
        return True

    async def refresh(self) -> None:
        """Writes the lease anew. Called every REFRESH_S. Raises Unavailable, NoCapacity."""
        async with self._writing:
            await self._write()

    async def others(self) -> set[str]:
        """Digests (hexadecimal) that other nodes hold. Raises Unavailable, and ImageError for a lease that can't be read: then nobody
        knows."""
        return set().union(*(held for node, held in (await read_leases(self._blobs, self._wall())).items() if node != self.node))

    async def _write(self) -> None:
        now = self._wall()
        self._held = {digest: until for digest, until in self._held.items() if until > now}
        digests = frozenset(self._needed() | set(self._held))
        if digests or self._written:
            await self._blobs.put(self.key, msgspec.json.encode(LeaseFile(node=self.node, at=now, digests=sorted(digests))))
        # Where the one before counted no longer, a gc or a removal may have come between.
        lapsed = self._wall() - self._written_at >= LEASE_S
        self._cleared = frozenset() if lapsed else self._cleared & digests
        self._written, self._written_at = digests, now

    async def _wait_for_gc(self, wanted: frozenset[str]) -> None:
        while True:
            condemned = await read_condemned(self._blobs, self._wall())
            if condemned is None or wanted.isdisjoint(condemned.digests):
                return
            await asyncio.sleep(POLL_S)


async def read_leases(blobs: Blobs, now: float) -> dict[str, set[str]]:
    """Digests (hexadecimal) by node, of the leases that are valid at ``now``. Raises ImageError for one that can't be read."""
    found: dict[str, set[str]] = {}
    keys = [each.key async for batch in blobs.list("leases") for each in batch]
    for key in keys:
        try:
            lease = decode(await blobs.get(key, LIMIT), LeaseFile)
        except BlobMissing:
            continue
        except (msgspec.DecodeError, BlobTooLarge) as error:
            raise ImageError(f"{key} in the shared store is no lease ({error}): `dsec image fsck --repair` removes it") from error
        if lease.at + LEASE_S > now:
            found[lease.node] = set(lease.digests)
    return found


async def read_condemned(blobs: Blobs, now: float) -> CondemnedFile | None:
    """What a gc that lives is about to take; None: there is none."""
    try:
        return decode_condemned(await blobs.get(GC_KEY, LIMIT), now)
    except (BlobMissing, BlobTooLarge):
        # No gc writes so much, and what isn't a gc's is waited for by nobody.
        return None


def decode_condemned(data: bytes, now: float) -> CondemnedFile | None:
    """What a gc wrote down; None if it is dead."""
    try:
        condemned = decode(data, CondemnedFile)
    except msgspec.DecodeError:
        # Half a file can't be: puts are whole. Somebody else's then, and no reason to wait for ever.
        return None
    return condemned if condemned.at + GC_S > now else None


async def forget_leases(blobs: Blobs, now: float) -> None:
    """Removes the leases of nodes that have been silent for ten times their validity."""
    stale = []
    async for batch in blobs.list("leases"):
        stale += [each.key for each in batch if each.modified < now - 10 * LEASE_S]
    if stale:
        await blobs.delete(stale)


async def keep_refreshed(lease: Lease, told: Callable[[Exception], None]) -> None:
    """Refreshes the lease for ever, whatever an attempt fails with; ``told`` of that."""
    while True:
        try:
            await lease.refresh()
        except Exception as failure:
            told(failure)
        await asyncio.sleep(REFRESH_S)
