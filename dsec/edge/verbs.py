"""Calls to a process of the node over a Unix socket: frames of a big-endian u32 length and a msgpack map, as docs/wire.md describes them.

One connection carries all calls. When it breaks, calls in flight fail: nobody knows whether they were carried out. The connection comes
back by itself, and calls made meanwhile wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

MAX_REPLY_BYTES = 4 << 20
"""A longer reply is not taken in, which its caller is told: the listing of 10,000 sandboxes has 2 MB."""
MAX_SKIPPED_BYTES = 256 << 20
"""A frame beyond this is nonsense, and nothing behind it can be found."""
SKIP_BYTES = 256 << 10
"""Read at once of a reply that is not taken in."""
FRONT_BYTES = 17
"""A reply up to the end of its id: the header of a map, "id", a number, each in its longest form."""
WAIT_FOR_PEER_S = 10.0
"""How long a call waits for a process that is being restarted (its supervisor retries after at most 5 s)."""
FIRST_RETRY_S = 0.02
LAST_RETRY_S = 0.5
"""Pauses between attempts to connect: a restart takes some 100 ms, and an attempt costs next to nothing."""

_T = TypeVar("_T")


class _Refusal(msgspec.Struct):
    code: str
    message: str


class _Head(msgspec.Struct):
    """What tells one incoming frame from another; the rest of a reply is decoded by whoever asked."""

    id: int | None = None
    error: _Refusal | None = None
    event: str | None = None


_head = msgspec.msgpack.Decoder(_Head)
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True)
class Peer:
    """Who is called, and what its failures are to the caller."""

    name: str
    """For messages: ``the spawner``."""
    path: str
    """Of its socket."""
    refused: Callable[[str, str], Exception]
    """Made of an error's code and message, when it refuses a call or fails at it."""
    lost: Callable[[str], Exception]
    """Made when it goes away during a call, or can't be reached for 10 s before it."""
    on_event: Callable[[str, bytes], None]
    """Told an event's name and frame. In the order of arrival, among the replies."""
    on_reconnected: Callable[[], None]
    """Called after each connection but the first: what happened meanwhile was not reported."""


class Verbs:
    """A peer's verbs. Cancelling a call doesn't take it back."""

    def __init__(self, peer: Peer) -> None:
        """Use :meth:`connect`."""
        self._peer = peer
        self._last_id = 0
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[_Connection] | None = None
        self._closed = False

    @classmethod
    async def connect(cls, peer: Peer) -> Verbs:
        """Connects; raises what ``peer.lost`` makes if nobody answers for 10 s."""
        verbs = cls(peer)
        try:
            await verbs._connected()
        except BaseException:
            verbs.close()
            raise
        return verbs

    async def call(self, verb: str, arguments: dict[str, object], result: type[_T]) -> _T:
        """Calls a verb. Raises what the peer's ``refused`` and ``lost`` make."""
        connection = await self._connected()
        self._last_id += 1
        request = _encoder.encode({"id": self._last_id, "verb": verb, **arguments})
        reply = await connection.request(self._last_id, request)
        try:
            return msgspec.msgpack.decode(reply, type=result)
        except msgspec.MsgspecError as error:
            raise self._peer.refused("internal", f"the answer of {self._peer.name} to {verb} can't be read: {error}") from error

    def close(self) -> None:
        """Disconnects, for good: calls in flight and later ones fail. Repeatable."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.close(self._closing)

    @property
    def _closing(self) -> str:
        return f"the connection to {self._peer.name} was closed"

    async def _connected(self) -> _Connection:
        """The connection that stands, or the next one, within 10 s."""
        if self._closed:
            raise self._peer.lost(self._closing)
        if self._connection is not None:
            return self._connection
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect(), name=f"connect to {self._peer.name}")
        connecting = self._connecting
        # Not wait_for: it would cancel what other calls wait for as well.
        await asyncio.wait([connecting], timeout=WAIT_FOR_PEER_S)
        if not connecting.done():
            raise self._peer.lost(f"{self._peer.name} has not answered at {self._peer.path} for {WAIT_FOR_PEER_S:.0f} s")
        if connecting.cancelled():
            raise self._peer.lost(self._closing)
        return connecting.result()

    async def _connect(self) -> _Connection:
        """Try until it works."""
        pause = FIRST_RETRY_S
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._peer.path)
            except OSError:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LAST_RETRY_S)
            else:
                self._connection = _Connection(reader, writer, self._peer, self._on_lost)
                return self._connection

    def _on_lost(self) -> None:
        self._connection = None
        if not self._closed:
            self._connecting = asyncio.create_task(self._connect(), name=f"reconnect to {self._peer.name}")
            self._connecting.add_done_callback(self._reconnected)

    def _reconnected(self, connecting: asyncio.Task[_Connection]) -> None:
        if not connecting.cancelled() and not self._closed:
            self._peer.on_reconnected()


class _Connection:
    """One connection, until it breaks: requests out, replies and events in."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: Peer, on_lost: Callable[[], None]) -> None:
        self._writer = writer
        self._peer = peer
        self._on_lost = on_lost
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._broken: str | None = None
        self._receiving = asyncio.create_task(self._receive(reader), name=f"replies of {peer.name}")

    async def request(self, number: int, request: bytes) -> bytes:
        """Sends a request and returns the whole reply to it."""
        if self._broken is not None:
            raise self._peer.lost(self._broken)
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        # Without waiting for room: requests are small, and the callers bound how many are under way.
        self._writer.write(len(request).to_bytes(4, "big") + request)
        try:
            return await reply
        finally:
            self._waiting.pop(number, None)

    def close(self, why: str) -> None:
        """Breaks it: whoever waits is told ``why``."""
        self._receiving.cancel()
        self._end(why)

    def _end(self, why: str) -> None:
        if self._broken is not None:
            return
        self._broken = why
        self._writer.transport.abort()
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(self._peer.lost(why))
        self._on_lost()

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        why = f"{self._peer.name} has ended"
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                if size <= MAX_REPLY_BYTES:
                    self._take(await reader.readexactly(size))
                elif size > MAX_SKIPPED_BYTES or not await self._skip(reader, size):
                    why = f"{self._peer.name} sent a frame of {size} bytes; {MAX_REPLY_BYTES} are the most"
                    break
        except (asyncio.IncompleteReadError, OSError):
            pass
        except msgspec.MsgspecError as error:
            why = f"{self._peer.name} sent a frame that can't be read: {error}"
        self._end(why)

    async def _skip(self, reader: asyncio.StreamReader, size: int) -> bool:
        """Reads past a reply that is too long and fails the call that it is for; False where that can't be told."""
        number = _number_of(await reader.readexactly(FRONT_BYTES))
        if number is None:
            return False
        left = size - FRONT_BYTES
        while left:
            piece = await reader.read(min(left, SKIP_BYTES))
            if not piece:
                raise asyncio.IncompleteReadError(piece, left)
            left -= len(piece)
        reply = self._waiting.get(number)
        if reply is not None and not reply.done():
            message = f"the answer of {self._peer.name} is too long: it has {size} bytes, {MAX_REPLY_BYTES} are the most"
            reply.set_exception(self._peer.refused("internal", message))
        return True

    def _take(self, frame: bytes) -> None:
        head = _head.decode(frame)
        if head.event is not None:
            # By the loop, as a reply's consequences are: all run in the order of arrival, and what a listener raises can't break the
            # connection.
            asyncio.get_running_loop().call_soon(self._peer.on_event, head.event, frame)
            return
        reply = None if head.id is None else self._waiting.get(head.id)
        # Nobody may be waiting any more, for the call was cancelled.
        if reply is None or reply.done():
            return
        if head.error is not None:
            reply.set_exception(self._peer.refused(head.error.code, head.error.message))
        else:
            reply.set_result(frame)


def _number_of(front: bytes) -> int | None:
    """The id of a reply of which only the beginning is known; docs/wire.md says that it stands first. None: it doesn't."""
    # Headers of maps with up to 15, 2^16 and 2^32 entries (https://github.com/msgpack/msgpack/blob/master/spec.md).
    header = 1 if front[0] >> 4 == 0x8 else {0xDE: 3, 0xDF: 5}.get(front[0])
    if header is None or front[header : header + 3] != b"\xa2id":
        return None
    kind, value = front[header + 3], front[header + 4 :]
    if kind <= 0x7F:
        return kind
    width = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}.get(kind)
    return None if width is None else int.from_bytes(value[:width], "big")
