"""The client of blobfs, which shows blobs that are not whole on this node as files and fetches what is read of them.

See docs/wire.md, "blobfs verbs".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from dsec.edge.verbs import Peer, Verbs
from libdsec.schema import LayerReads

_MAX_CHUNKS_PER_CALL = 65_536
"""Chunks named in one call: 64 GB of a blob, and a frame well below its limit."""


class BlobfsError(Exception):
    """blobfs refused a call or failed at it. ``code`` is a code of :mod:`libdsec.errors`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class BlobfsLost(BlobfsError):
    """blobfs went away during the call, or could not be reached at all."""

    def __init__(self, message: str) -> None:
        super().__init__("unavailable", message)


class BlobFigures(msgspec.Struct, kw_only=True):
    """What was read of a blob since it was registered, in bytes. ``needed``: different ones that were asked for; ``fetched``: from the
    store."""

    size: int
    needed: int = 0
    fetched: int = 0
    from_cache: int = 0
    complete: bool = False


class CacheFigures(msgspec.Struct, kw_only=True):
    """The blobs that were asked for, and the cache that all share. ``connected``: whether the fetcher can be reached."""

    blobs: dict[str, BlobFigures] = {}
    cache_bytes: int = 0
    cache_used: int = 0
    connected: bool = False


class _Reads(msgspec.Struct):
    needed: int
    fetched: int
    from_cache: int


class _Nothing(msgspec.Struct):
    pass


class _Trace(msgspec.Struct):
    chunks: list[tuple[int, int]]


class _Complete(msgspec.Struct):
    blob: str


class _Failed(msgspec.Struct):
    blob: str
    reason: str


class _Uncached(msgspec.Struct):
    reason: str


_complete = msgspec.msgpack.Decoder(_Complete)
_failed = msgspec.msgpack.Decoder(_Failed)
_uncached = msgspec.msgpack.Decoder(_Uncached)


class Listener(Protocol):
    """Who is told what blobfs tells unasked."""

    def on_complete(self, blob: str, /) -> None:
        """Every chunk of the blob is on the node."""

    def on_failed(self, blob: str, reason: str, /) -> None:
        """Reads of the blob gave an error."""

    def on_uncached(self, reason: str, /) -> None:
        """Its disk takes no chunks: what is read of any blob is fetched each time."""


class Blobfs:
    """All verbs of blobfs; ``blob`` is a sha256 in hex everywhere. Every call raises BlobfsError, and BlobfsLost where it can't be
    reached."""

    def __init__(self, verbs: Verbs) -> None:
        """Use :meth:`connect`."""
        self._verbs = verbs

    @classmethod
    async def connect(cls, path: str, *, listener: Listener, on_reconnected: Callable[[], None]) -> Blobfs:
        """Connects to the socket at ``path``; raises BlobfsLost if nobody answers there for 10 s. ``on_reconnected()`` is called after each
        later connection: what was registered before may be unknown to it."""

        def tell(event: str, frame: bytes) -> None:
            if event == "complete":
                listener.on_complete(_complete.decode(frame).blob)
            elif event == "failed":
                failed = _failed.decode(frame)
                listener.on_failed(failed.blob, failed.reason)
            elif event == "uncached":
                listener.on_uncached(_uncached.decode(frame).reason)

        peer = Peer("blobfs", path, refused=BlobfsError, lost=BlobfsLost, on_event=tell, on_reconnected=on_reconnected)
        return cls(await Verbs.connect(peer))

    async def register(self, blob: str, index: bytes) -> None:
        """Shows the blob. ``index``: its chunk table, checked against the layer that names it. Repeatable."""
        await self._verbs.call("register", {"blob": blob, "index": index}, _Nothing)

    async def forget(self, blob: str) -> None:
        """Shows it no more and drops what the cache has of it. Code ``conflict`` while a layer of it is mounted."""
        await self._verbs.call("forget", {"blob": blob}, _Nothing)

    async def seal(self, blob: str) -> None:
        """Takes a complete blob out of the cache's bound: its file stays as it is from here on, and may be linked elsewhere. Code
        ``conflict`` if it isn't complete."""
        await self._verbs.call("seal", {"blob": blob}, _Nothing)

    async def prefetch(self, blob: str, chunks: Sequence[int]) -> None:
        """Fetches chunks in this order, behind whatever is read meanwhile."""
        for start in range(0, len(chunks), _MAX_CHUNKS_PER_CALL):
            part = list(chunks[start : start + _MAX_CHUNKS_PER_CALL])
            await self._verbs.call("prefetch", {"blob": blob, "chunks": part, "priority": "low"}, _Nothing)

    async def trace_start(self, blob: str) -> None:
        """Remembers from now on which chunks are touched first."""
        await self._verbs.call("trace_start", {"blob": blob}, _Nothing)

    async def trace_take(self, blob: str) -> list[tuple[int, int]]:
        """The chunks that were touched since, in order, each with milliseconds since the start; ends the trace."""
        return (await self._verbs.call("trace_take", {"blob": blob}, _Trace)).chunks

    async def stats(self, blobs: Iterable[str]) -> CacheFigures:
        """Figures of those of these blobs that are registered (130 bytes each in an answer, which has a limit), and of the cache."""
        return await self._verbs.call("stats", {"blobs": list(blobs)}, CacheFigures)

    async def reads_of(self, sandbox: str) -> LayerReads:
        """What a sandbox has read through blobfs since that was started."""
        reads = await self._verbs.call("reads", {"sandbox": sandbox}, _Reads)
        return LayerReads(needed=reads.needed, fetched=reads.fetched, from_cache=reads.from_cache)

    def close(self) -> None:
        """Disconnects, for good. What is mounted goes on. Repeatable."""
        self._verbs.close()
