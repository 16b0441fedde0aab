"""A TCP connection into a sandbox, carried by a WebSocket and shown as asyncio's own streams."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import cast

import aiohttp
from yarl import URL

from libdsec.transport import Transport

READ_LIMIT = 1 << 20
"""Bytes that wait unread before the connection stops reading; also the longest line of ``readline``."""
WRITE_LIMIT = 1 << 20
"""Bytes that wait unsent before ``drain`` waits."""
MESSAGE = 1 << 18
"""Bytes of one outgoing message at most."""
ORDERLY = frozenset({1000, 1001, 1005})
"""WebSocket close codes that are an end of file; any other is a broken connection, and its reason says why."""


async def open_port(transport: Transport, url: URL) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection through the WebSocket at ``url``. Raises what :meth:`Transport.websocket` raises."""
    websocket = await transport.websocket(url)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=READ_LIMIT, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    carrier = _WebSocketTransport(websocket, protocol, loop)
    protocol.connection_made(carrier)
    carrier.begin()
    return reader, asyncio.StreamWriter(carrier, protocol, reader, loop)


class _WebSocketTransport(asyncio.Transport):
    """What asyncio's streams need of a transport, on top of a WebSocket's binary messages. Two tasks carry the two directions."""

    def __init__(
        self, websocket: aiohttp.ClientWebSocketResponse, protocol: asyncio.StreamReaderProtocol, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__()
        self._websocket = websocket
        self._protocol = protocol
        self._loop = loop
        self._outgoing: deque[bytes] = deque()
        self._outgoing_size = 0
        self._writing_paused = False
        self._closing = False
        self._lost = False
        self._told = False
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._to_send = asyncio.Event()
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    def begin(self) -> None:
        """Start carrying; the protocol knows this transport by now."""
        self._tasks = (self._loop.create_task(self._receive()), self._loop.create_task(self._send()))

    async def _receive(self) -> None:
        error: Exception | None = None
        try:
            while True:
                await self._may_read.wait()
                message = await self._websocket.receive()
                if message.type is not aiohttp.WSMsgType.BINARY:
                    break
                self._protocol.data_received(cast(bytes, message.data))
            if self._websocket.close_code not in ORDERLY and not self._closing:
                error = ConnectionResetError(f"the connection into the sandbox broke: {message.extra or self._websocket.close_code}")
        except (aiohttp.ClientError, OSError) as failure:
            error = ConnectionResetError(str(failure))
        await self._end(error)

    async def _send(self) -> None:
        try:
            while self._outgoing or not self._closing:
                await self._to_send.wait()
                self._to_send.clear()
                while self._outgoing:
                    data = self._outgoing.popleft()
                    await self._websocket.send_bytes(data)
                    self._outgoing_size -= len(data)
                    self._allow_writing()
        except (aiohttp.ClientError, OSError) as failure:
            await self._end(ConnectionResetError(str(failure)))
            return
        await self._end(None)

    def _allow_writing(self) -> None:
        if self._writing_paused and self._outgoing_size <= WRITE_LIMIT // 2:
            self._writing_paused = False
            self._protocol.resume_writing()

    async def _end(self, error: Exception | None) -> None:
        """Whichever direction ends first ends the connection."""
        if self._lost:
            return
        self._lost = self._closing = True
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        with contextlib.suppress(aiohttp.ClientError, OSError):
            await self._websocket.close()
        self._tell_lost(error)

    def _tell_lost(self, error: Exception | None) -> None:
        if not self._told:
            self._told = True
            self._protocol.connection_lost(error)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing:
            return
        view = memoryview(data).cast("B")
        for start in range(0, len(view), MESSAGE):
            self._outgoing.append(bytes(view[start : start + MESSAGE]))
        self._outgoing_size += len(view)
        self._to_send.set()
        if self._outgoing_size > WRITE_LIMIT and not self._writing_paused:
            self._writing_paused = True
            self._protocol.pause_writing()

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """Send what waits, then close."""
        self._closing = True
        self._to_send.set()

    def abort(self) -> None:
        """Close at once; what waits is lost. No handshake: its frame would wait behind a peer that reads nothing."""
        self._closing = self._lost = True
        self._outgoing.clear()
        for task in self._tasks:
            task.cancel()
        connection = self._websocket._response.connection
        if connection is not None and connection.transport is not None:
            connection.transport.abort()
        self._websocket._response.close()
        self._loop.call_soon(self._tell_lost, None)

    def pause_reading(self) -> None:
        self._may_read.clear()

    def resume_reading(self) -> None:
        self._may_read.set()
