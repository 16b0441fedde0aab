"""Layers whose data is not whole on this node: shown by blobfs, fetched as they are read, ahead of it where an earlier run was recorded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import structlog

from dsec.edge.blobfs import BlobFigures as Figures
from dsec.edge.blobfs import Blobfs, BlobfsError, BlobfsLost, Listener
from dsec.edge.inventory import Inventory
from dsec.edge.record import Record
from dsec.edge.tasks import Tasks
from dsec.http_errors import incident
from dsec.images.blobs import hex_of
from dsec.images.environments import Environment
from dsec.images.pulling import LayerState
from dsec.images.reads import BlobFigures
from dsec.images.traces import Touch
from libdsec.errors import DSecError
from libdsec.schema import ImageInfo, LayerReads

RECORD_S = 20.0
"""What is read of an image in so long after its first start on a node without a trace is its trace."""
COUNT_EVERY_S = 30.0
"""Between two looks at what sandboxes have read."""
COUNT_WITHIN_S = 1.0
"""Whoever asks what was read waits no longer for blobfs to say it, and is told what it said last."""
BLOBS_PER_CALL = 2_000
"""Whose figures blobfs is asked for at once: 260 KB, of the 4 MiB that an answer may have."""
FORGET_AFTER_S = 12 * 3600.0
"""A blob that no sandbox has used for so long is forgotten, with what the cache has of it: else every one that was ever used would keep a
descriptor and a table in blobfs. What is used every day stays."""
UNCACHED_EVERY_S = 600.0
"""Between two events of a sandbox that say so: its log has 200, which one a minute would fill within hours."""

_log = structlog.get_logger("dsec.edge")

ConnectBlobfs = Callable[[Listener, Callable[[], None]], Awaitable[Blobfs]]


class Images(Protocol):
    """What the edge needs of the image store."""

    async def locate(self, image: str, workspace: str | None, toolkits: Sequence[str]) -> None: ...
    def resolve(self, image: str, workspace: str | None, toolkits: Sequence[str]) -> Environment: ...
    async def settle(self, environment: Environment) -> Environment: ...
    async def ensure(self, environment: Environment) -> list[LayerState]: ...
    async def hold(self, environment: Environment) -> None: ...
    def get(self, reference: str) -> ImageInfo: ...
    def hold_blob(self, file: Path) -> Path: ...
    def adopt_blob(self, blob: str, held: Path) -> None: ...
    def release_blob(self, held: Path) -> None: ...
    async def trace(self, image: ImageInfo) -> Sequence[Touch] | None: ...
    async def save_trace(self, image: ImageInfo, touches: Sequence[Touch]) -> None: ...
    def note_start(self, environment: Environment) -> None: ...
    async def record_reads(self, figures: Mapping[str, BlobFigures]) -> None: ...


class OnDemand:
    """Registers blobs with blobfs, tells it what to fetch ahead, and takes over what has become whole. It connects when it is first
    needed."""

    def __init__(self, inventory: Inventory, images: Images, connect: ConnectBlobfs, blobs: Path, *, prefetch: bool) -> None:
        """``blobs``: where blobfs keeps what it has fetched, a file a blob. ``prefetch``: whether recorded reads are fetched ahead."""
        self._inventory = inventory
        self._images = images
        self._connect = connect
        self._blobs = blobs
        self._prefetch = prefetch
        self._connecting: asyncio.Task[Blobfs] | None = None
        self._looking = asyncio.Event()
        """Set to have blobfs asked before its time."""
        self._asking = asyncio.Lock()
        """Figures are recorded in the order in which blobfs gave them: older ones would seem to be those of a new start of it."""
        self._counting: asyncio.Task[None] | None = None
        self._adopted: set[str] = set()
        """Blobs that the image store has as a whole while blobfs still shows them."""
        self._seen: dict[str, frozenset[str]] = {}
        """Blobs by the digest of their image, of those whose trace was replayed, is being recorded, or can't be recorded here."""
        self._recordings: dict[str, _Recording] = {}
        """Those under way, by blob."""
        self._used_at: dict[str, float] = {}
        """When each registered blob was last seen in use, or first seen at all; monotonic seconds."""
        self._told_uncached: dict[str, float] = {}
        """When each live sandbox was last told that nothing can be kept; monotonic seconds."""

    async def provide(self, environment: Environment) -> frozenset[str]:
        """Makes every layer ready to be mounted; the metadata digests (hex) of those that are to be mounted lazily.

        Raises ImageError, Unavailable, NoCapacity (of the image store), BlobfsError.
        """
        states = await self._images.ensure(environment)
        lazy = [state for state in states if state.index is not None]
        if lazy:
            blobfs = await self._blobfs()
            for state in lazy:
                if state.index is not None and state.layer.blob is not None:
                    self._used_at[hex_of(state.layer.blob)] = self._inventory.clock.monotonic()
                    await blobfs.register(hex_of(state.layer.blob), state.index)
            await self._look_ahead(environment, blobfs, {state.layer.digest for state in lazy})
        return frozenset(hex_of(state.layer.digest) for state in lazy)

    async def watch(self) -> None:
        """Adds up what was read and takes over what became whole while nobody listened, for ever."""
        while True:
            blobs = await asyncio.to_thread(_registered, self._blobs)
            # Without a blob, blobfs may not be there at all, and needs not be.
            if blobs:
                try:
                    await self._count(await self._blobfs(), blobs)
                except (BlobfsError, DSecError) as error:
                    _log.warning("what was read of images can't be counted", reason=str(error))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._looking.wait(), COUNT_EVERY_S)
            self._looking.clear()

    async def _count(self, blobfs: Blobfs, blobs: Sequence[str]) -> None:
        self._note_use(blobs)
        # Not those of this look: a creation that was told before that its blob isn't whole may be about to mount it.
        whole = set(self._adopted)
        for start in range(0, len(blobs), BLOBS_PER_CALL):
            # Before a blob is let go, and its figures with it.
            figures = await self._take_figures(blobfs, blobs[start : start + BLOBS_PER_CALL])
            for blob, one in figures.items():
                if one.complete:
                    await self._adopt(blob)
                if blob in whole or self._is_unused(blob):
                    await self._let_go(blobfs, blob)

    async def count(self) -> None:
        """Adds up what was read until now, once for all who ask meanwhile. Returns after COUNT_WITHIN_S where blobfs doesn't answer or
        isn't there; no failure of it is raised."""
        # Adopts nothing and lets nothing go, as :meth:`watch` does: that counts on time between two looks.
        if self._counting is None or self._counting.done():
            self._counting = self._inventory.tasks.start(self._take_all_figures(), "count what is read")
        await asyncio.wait([self._counting], timeout=COUNT_WITHIN_S)

    async def _take_all_figures(self) -> None:
        blobs = await asyncio.to_thread(_registered, self._blobs)
        try:
            for start in range(0, len(blobs), BLOBS_PER_CALL):
                await self._take_figures(await self._blobfs(), blobs[start : start + BLOBS_PER_CALL])
        except (BlobfsError, DSecError) as error:
            _log.warning("what was read of images can't be counted", reason=str(error))

    async def _take_figures(self, blobfs: Blobfs, blobs: Sequence[str]) -> Mapping[str, Figures]:
        """Asks blobfs for figures and hands them to the image store."""
        async with self._asking:
            figures = (await blobfs.stats(blobs)).blobs
            read = {blob: BlobFigures(needed=one.needed, fetched=one.fetched, from_cache=one.from_cache) for blob, one in figures.items()}
            await self._images.record_reads(read)
        return figures

    def _note_use(self, blobs: Sequence[str]) -> None:
        now, in_use = self._inventory.clock.monotonic(), self._inventory.layers.in_use()
        self._used_at = {blob: now if blob in in_use else self._used_at.get(blob, now) for blob in blobs}

    def _is_unused(self, blob: str) -> bool:
        now = self._inventory.clock.monotonic()
        return now - self._used_at.get(blob, now) >= FORGET_AFTER_S

    def close(self) -> None:
        """Disconnects. What is mounted goes on."""
        if self._connecting is not None and self._connecting.done() and not self._connecting.cancelled():
            if self._connecting.exception() is None:
                self._connecting.result().close()
        elif self._connecting is not None:
            self._connecting.cancel()

    # -- what blobfs tells

    def on_complete(self, blob: str) -> None:
        """All of it is here: from now on it is a blob like those that were made here."""
        self._inventory.tasks.start(self._adopt(blob), f"adopt blob {blob[:12]}")

    async def _adopt(self, blob: str) -> None:
        if blob in self._adopted:
            return
        try:
            held = await asyncio.to_thread(self._images.hold_blob, self._blobs / blob)
            try:
                # Only now that the file has a second name, which every blobfs respects. One that was started again after a seal wouldn't
                # know of it, and could give up chunks before the name is there.
                await (await self._blobfs()).seal(blob)
                await asyncio.to_thread(self._images.adopt_blob, blob, held)
            finally:
                await asyncio.to_thread(self._images.release_blob, held)
            self._adopted.add(blob)
        except (BlobfsError, DSecError, OSError) as error:
            # It goes on being read through blobfs, which has all of it.
            _log.warning("a complete blob can't be taken over", blob=blob, reason=str(error))

    async def _let_go(self, blobfs: Blobfs, blob: str) -> None:
        """What the image store has as a whole, blobfs need not have as well: its file there is bounded by nobody. The same goes for what
        nobody uses. While it is mounted it stays; a creation that was about to mount it registers it again."""
        try:
            await blobfs.forget(blob)
        except BlobfsLost:
            raise
        except BlobfsError as error:
            # One that can't be let go must not keep the others from being counted.
            if error.code != "conflict":
                _log.warning("a blob can't be forgotten", blob=blob, reason=str(error))
            return
        self._adopted.discard(blob)
        self._used_at.pop(blob, None)
        # What was fetched ahead of it is gone, too.
        for image in [image for image, blobs in self._seen.items() if blob in blobs]:
            del self._seen[image]

    def on_failed(self, blob: str, reason: str) -> None:
        """Reads gave an error: the sandboxes that are made of it are told why."""
        now = self._inventory.clock.wall()
        for sandbox in self._inventory:
            if any(layer.blob == blob for layer in sandbox.record.layers):
                sandbox.note(now, "storage", f"data of its image can't be read: {reason}")

    def on_uncached(self, reason: str) -> None:
        """blobfs' disk takes no chunks: the sandboxes that read through it are told why they are slow."""
        _log.warning("what is read on demand can't be kept", reason=reason)
        now, told = self._inventory.clock.monotonic(), self._told_uncached
        self._told_uncached = {}
        for sandbox in self._inventory:
            if not any(layer.lazy for layer in sandbox.record.layers):
                continue
            at = told.get(sandbox.id)
            if at is None or now - at >= UNCACHED_EVERY_S:
                at = now
                message = f"this node's disk takes no more data of its image, so that it is fetched each time it is read: {reason}"
                sandbox.note(self._inventory.clock.wall(), "storage", message)
            self._told_uncached[sandbox.id] = at

    def on_reconnected(self) -> None:
        """blobfs was restarted. It remembers its blobs; what became whole meanwhile nobody was told, and what it was to fetch ahead or to
        record is lost."""
        self._looking.set()
        self._seen.clear()
        for recording in self._recordings.values():
            recording.lose()

    async def reads_of(self, record: Record) -> LayerReads | None:
        """What a sandbox has read of layers that are loaded on demand. None: it has none, or blobfs doesn't answer."""
        if not any(layer.lazy for layer in record.layers):
            return None
        try:
            return await (await self._blobfs()).reads_of(record.id)
        except BlobfsError as error:
            _log.info("what a sandbox has read can't be told", sandbox=record.id, error=str(error))
            return None

    # -- what an earlier run read

    async def _look_ahead(self, environment: Environment, blobfs: Blobfs, lazy: set[str]) -> None:
        """Replays the traces of the environment's images, or begins to record them. A trace is a hint: no failure of it fails the start."""
        for name in (environment.image, *([] if environment.workspace is None else [environment.workspace]), *environment.toolkits):
            try:
                await self._look_ahead_of(self._images.get(name), blobfs, lazy)
            except Exception as failure:
                _log_hint_lost(name, failure)

    async def _look_ahead_of(self, image: ImageInfo, blobfs: Blobfs, lazy: set[str]) -> None:
        data = {index: layer for index, layer in enumerate(image.layers) if layer.blob is not None}
        blobs = {index: hex_of(layer.blob) for index, layer in data.items() if layer.blob is not None and layer.digest in lazy}
        if not blobs or image.digest in self._seen:
            return
        self._seen[image.digest] = frozenset(blobs.values())
        try:
            touches = await self._images.trace(image)
            if touches is not None:
                await self._replay(blobfs, blobs, touches)
            elif len(blobs) == len(data):
                # Of an image that is whole here in part, only the rest is read through blobfs.
                await self._begin_recording(image, blobfs, blobs)
        except BaseException:
            self._seen.pop(image.digest, None)
            raise

    async def _replay(self, blobfs: Blobfs, blobs: Mapping[int, str], touches: Sequence[Touch]) -> None:
        if self._prefetch:
            for index, blob in blobs.items():
                await blobfs.prefetch(blob, [touch.chunk for touch in touches if touch.layer == index])

    async def _begin_recording(self, image: ImageInfo, blobfs: Blobfs, blobs: Mapping[int, str]) -> None:
        """Returns when all that is read from here on is recorded, or it is clear that it can't be."""
        recordings = {index: self._recording(blobfs, blob) for index, blob in blobs.items()}
        self._inventory.tasks.start(self._save_trace(image, recordings), f"record {image.digest}")
        for recording in recordings.values():
            await recording.begun.wait()

    def _recording(self, blobfs: Blobfs, blob: str) -> _Recording:
        """The one that is under way, whichever image began it, or else a new one."""
        recording = self._recordings.get(blob)
        if recording is None:
            recording = self._recordings[blob] = _Recording(blobfs, blob, self._inventory.tasks)
            recording.when_ended(lambda: self._recordings.pop(blob))
        return recording

    async def _save_trace(self, image: ImageInfo, recordings: Mapping[int, _Recording]) -> None:
        """Makes a trace of the recordings of an image's layers, when they have ended. Without one of them there is none: half a trace would
        be replayed as a whole one."""
        try:
            read = {layer: await recording.touches() for layer, recording in recordings.items()}
            touches = [Touch(layer, chunk, milliseconds) for layer, first in read.items() for chunk, milliseconds in first]
            if touches:
                await self._images.save_trace(image, sorted(touches, key=lambda touch: touch.ms))
        except Exception as failure:
            # The next start tries again.
            self._seen.pop(image.digest, None)
            _log_hint_lost(image.digest, failure)

    async def _blobfs(self) -> Blobfs:
        if self._connecting is None or (self._connecting.done() and (self._connecting.cancelled() or self._connecting.exception())):
            self._connecting = asyncio.ensure_future(_as_coroutine(self._connect(self, self.on_reconnected)))
        return await asyncio.shield(self._connecting)


class _Recording:
    """What is read first of a blob within RECORD_S, for every image that has the blob: blobfs records it once at a time."""

    def __init__(self, blobfs: Blobfs, blob: str, tasks: Tasks) -> None:
        self._blobfs = blobfs
        self._blob = blob
        self.begun = asyncio.Event()
        """Set when reads are recorded, or it is clear that they can't be."""
        self._task = tasks.start(self._record(), f"record blob {blob[:12]}")
        self.when_ended(self.begun.set)

    def when_ended(self, call: Callable[[], object]) -> None:
        self._task.add_done_callback(lambda _: call())

    def lose(self) -> None:
        """Ends it without a result."""
        self._task.cancel()

    async def touches(self) -> list[tuple[int, int]]:
        """Waits for its end: chunks in the order of their first reads, each with milliseconds since it was begun. Raises BlobfsError."""
        await asyncio.wait([self._task])
        if self._task.cancelled():
            raise BlobfsLost("blobfs was restarted meanwhile")
        found = self._task.result()
        if isinstance(found, BlobfsError):
            raise found
        return found

    async def _record(self) -> list[tuple[int, int]] | BlobfsError:
        """An error is a value here: each image's trace is lost by it, which is told there."""
        try:
            await self._blobfs.trace_start(self._blob)
            self.begun.set()
            await asyncio.sleep(RECORD_S)
            return await self._blobfs.trace_take(self._blob)
        except BlobfsError as error:
            return error


def _log_hint_lost(image: str, failure: Exception) -> None:
    if isinstance(failure, (BlobfsError, DSecError)):
        _log.warning("what is read of an image can't be recorded or fetched ahead", image=image, reason=str(failure))
    else:
        incident(failure, f"the trace of {image}")


def _registered(directory: Path) -> list[str]:
    """The blobs whose tables blobfs has there. It knows all of them, also after restarts of either side."""
    try:
        return sorted(file.stem for file in directory.iterdir() if file.suffix == ".idx")
    except OSError:
        return []


async def _as_coroutine(connecting: Awaitable[Blobfs]) -> Blobfs:
    return await connecting
