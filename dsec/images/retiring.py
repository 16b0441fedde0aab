"""Whole blobs that the shared store has as well are a cache: it is bounded, and what no sandbox has used for longest goes first. What is
gone is read on demand again, as on a node that never had it; its metadata and chunk table stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from functools import partial

import structlog

from dsec.images.blobs import BlobDirectory, BlobFile, digest_of, hex_of
from dsec.images.catalog import Catalog
from dsec.images.pulling import Puller
from dsec.images.threads import to_end

CACHE_BYTES = 64 << 30
"""What they may take together, if nothing else is said: a dozen of the largest images known from production."""
LOOK_EVERY_S = 60.0
"""Between two looks when nothing was taken over."""
SETTLE_S = 5.0
"""After a blob was taken over: the other layers of its image mostly follow."""
RECENT_S = 720.0
"""What was used so recently stays. A sandbox that starts has its layers mounted well before, and a layer stays mounted for ten minutes
after its last sandbox: until then the file's space wouldn't come back."""

_log = structlog.get_logger("dsec.images")


class Retiring:
    """Looks now and then, and when it is asked to, between :meth:`start` and :meth:`close`."""

    def __init__(
        self,
        blobs: BlobDirectory,
        catalog: Catalog,
        puller: Puller,
        kept: Callable[[], set[str]],
        bound: int,
        *,
        changed: Callable[[], None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``kept``: digests (hexadecimal) of what has to stay: sandboxes, calls in progress or images that aren't pushed need it.
        ``bound``: bytes that all blobs may have which the shared store has too. ``changed`` is called when one goes."""
        self.changing = asyncio.Lock()
        """Whoever holds it finds that no blob is retired meanwhile."""
        self._blobs = blobs
        self._catalog = catalog
        self._puller = puller
        self._kept = kept
        self._bound = bound
        self._changed = changed
        self._wall = wall
        self._used: dict[str, float] = {}
        """Digest (hexadecimal) to the time of the last use since the last look, Unix seconds. Earlier ones are the files' times."""
        self._asked = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to look. Not before ``kept`` can tell what lives."""
        self._loop = asyncio.get_running_loop()
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    def soon(self) -> None:
        """Has it look before its time. For any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._asked.set)

    def note_use(self, blobs: Iterable[str]) -> None:
        """A sandbox starts from these blobs (hexadecimal), or is about to."""
        self._used.update(dict.fromkeys(blobs, self._wall()))

    async def retire(self) -> int:
        """Takes blobs out, oldest first, until those that the store has too are within the bound and the disk has its reserve free; returns
        their bytes. Raises Unavailable, OSError."""
        async with self.changing:
            now = self._wall()
            used, self._used = self._used, {}
            used |= dict.fromkeys(self._kept(), now)
            files = await to_end(lambda: self._look(used))
            excess = max(sum(file.size for file in files) - self._bound, self._blobs.shortage())
            # What has a second name is still shown by blobfs: its space wouldn't come back.
            old = [file for file in files if file.used_at <= now - RECENT_S and file.links == 1]
            retired = 0
            for file in sorted(old, key=lambda file: file.used_at):
                if retired >= excess:
                    break
                retired += await self._retire(digest_of(file.name))
            return retired

    def _look(self, used: dict[str, float]) -> list[BlobFile]:
        """The blobs that may be in the shared store, after the times of use were written to their files. Blocks."""
        found = []
        for file in self._blobs.files(lambda name: self._catalog.chunked(digest_of(name)) is not None):
            at = used.get(file.name, 0.0)
            found.append(self._blobs.touch(file, at) if at > file.used_at else file)
        return found

    async def _retire(self, blob: str) -> int:
        """Takes one out, if it can be had again and nobody needs it here; its bytes."""
        layer = self._catalog.chunked(blob)
        if layer is None or not await self._puller.can_be_had(layer) or not self._may_go(blob):
            return 0
        # Nobody comes between this and the question: a start that pinned the blob was heeded, a later one finds it gone.
        retired = self._blobs.retire([self._blobs.path(blob)])
        self._changed()
        return await to_end(partial(self._blobs.delete, retired))

    def _may_go(self, blob: str) -> bool:
        name = hex_of(blob)
        needed = name in self._used or name in self._kept()
        return self._blobs.has(blob) and not needed and self._catalog.chunked(blob) is not None

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), LOOK_EVERY_S)
                await asyncio.sleep(SETTLE_S)
            self._asked.clear()
            try:
                retired = await self.retire()
            except Exception as failure:
                # Whatever it is, the next look doesn't suffer for it.
                _log.warning("blobs that the shared store has too can't be retired now", error=str(failure))
            else:
                if retired:
                    _log.info("blobs that the shared store has too were retired", bytes=retired)
