"""Layers whose data is not whole on this node: shown by blobfs, fetched as they are read, ahead of it where an earlier run was recorded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import structlog

from dsec.edge.blobfs import Blobfs, BlobfsError, Listener
from dsec.edge.inventory import Inventory
from dsec.images.blobs import hex_of
from dsec.images.environments import Environment
from dsec.images.pulling import LayerState
from dsec.images.reads import BlobFigures
from dsec.images.traces import Touch
from libdsec.errors import DSecError
from libdsec.schema import ImageInfo

RECORD_S = 20.0
"""What is read of an image in so long after its first start on a node without a trace is its trace."""
COUNT_EVERY_S = 30.0
"""Between two looks at what sandboxes have read."""

_log = structlog.get_logger("dsec.edge")

ConnectBlobfs = Callable[[Listener, Callable[[], None]], Awaitable[Blobfs]]


class Images(Protocol):
    """What the edge needs of the image store."""

    async def locate(self, image: str, workspace: str | None, toolkits: Sequence[str]) -> None: ...
    def resolve(self, image: str, workspace: str | None, toolkits: Sequence[str]) -> Environment: ...
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
        self._adopted: set[str] = set()
        """Blobs that the image store has as a whole while blobfs still shows them."""
        self._seen: set[str] = set()
        """Digests of images whose trace was replayed, or is being recorded."""

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
                    await blobfs.register(hex_of(state.layer.blob), state.index)
            await self._look_ahead(environment, blobfs, {state.layer.digest for state in lazy})
        return frozenset(hex_of(state.layer.digest) for state in lazy)

    async def watch(self) -> None:
        """Adds up what was read and takes over what became whole while nobody listened, for ever."""
        while True:
            # Without a blob, blobfs may not be there at all, and needs not be.
            if self._connecting is not None or await asyncio.to_thread(_has_entries, self._blobs):
                try:
                    await self._count(await self._blobfs())
                except (BlobfsError, DSecError) as error:
                    _log.warning("what was read of images can't be counted", reason=str(error))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._looking.wait(), COUNT_EVERY_S)
            self._looking.clear()

    async def _count(self, blobfs: Blobfs) -> None:
        earlier = set(self._adopted)
        figures = (await blobfs.stats()).blobs
        read = {blob: BlobFigures(needed=one.needed, fetched=one.fetched, from_cache=one.from_cache) for blob, one in figures.items()}
        await self._images.record_reads(read)
        for blob, one in figures.items():
            if one.complete:
                await self._adopt(blob)
        # Not those of this look: a creation that was told before that its blob isn't whole may be about to mount it.
        for blob in earlier.intersection(figures):
            await self._let_go(blobfs, blob)

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
        """What the image store has as a whole, blobfs need not have as well: its file there is bounded by nobody. While it is mounted it
        stays."""
        try:
            await blobfs.forget(blob)
        except BlobfsError as error:
            if error.code != "conflict":
                raise
            return
        self._adopted.discard(blob)

    def on_failed(self, blob: str, reason: str) -> None:
        """Reads gave an error: the sandboxes that are made of it are told why."""
        now = self._inventory.clock.wall()
        for sandbox in self._inventory:
            if any(layer.blob == blob for layer in sandbox.record.layers):
                sandbox.note(now, "storage", f"data of its image can't be read: {reason}")

    def on_reconnected(self) -> None:
        """blobfs was restarted. It remembers its blobs; what became whole meanwhile nobody was told."""
        self._looking.set()

    # -- what an earlier run read

    async def _look_ahead(self, environment: Environment, blobfs: Blobfs, lazy: set[str]) -> None:
        """Replays the traces of the environment's images, or begins to record them."""
        for name in (environment.image, *([] if environment.workspace is None else [environment.workspace]), *environment.toolkits):
            info = self._images.get(name)
            blobs = {
                index: hex_of(layer.blob) for index, layer in enumerate(info.layers) if layer.blob is not None and layer.digest in lazy
            }
            if not blobs or info.digest in self._seen:
                continue
            self._seen.add(info.digest)
            touches = await self._images.trace(info)
            if touches is None:
                for blob in blobs.values():
                    await blobfs.trace_start(blob)
                self._inventory.tasks.start(self._record(info, blobs), f"record {name}")
            elif self._prefetch:
                for index, blob in blobs.items():
                    await blobfs.prefetch(blob, [touch.chunk for touch in touches if touch.layer == index])

    async def _record(self, image: ImageInfo, blobs: Mapping[int, str]) -> None:
        await asyncio.sleep(RECORD_S)
        try:
            blobfs = await self._blobfs()
            touches = [
                Touch(layer, chunk, milliseconds) for layer, blob in blobs.items() for chunk, milliseconds in await blobfs.trace_take(blob)
            ]
            if touches:
                await self._images.save_trace(image, sorted(touches, key=lambda touch: touch.ms))
        except (BlobfsError, DSecError) as error:
            # The next node records it.
            _log.warning("what was read of an image can't be recorded", image=image.digest, reason=str(error))

    async def _blobfs(self) -> Blobfs:
        if self._connecting is None or (self._connecting.done() and (self._connecting.cancelled() or self._connecting.exception())):
            self._connecting = asyncio.ensure_future(_as_coroutine(self._connect(self, self.on_reconnected)))
        return await asyncio.shield(self._connecting)


def _has_entries(directory: Path) -> bool:
    try:
        return any(directory.iterdir())
    except OSError:
        return False


async def _as_coroutine(connecting: Awaitable[Blobfs]) -> Blobfs:
    return await connecting
