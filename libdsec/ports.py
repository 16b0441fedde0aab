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
REFUSED = 1011
"""WebSocket close code with which the edge says that nothing listens on the port; the close reason says it in words."""


async def open_port(transport: Transport, url: URL) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection through the WebSocket at ``url``."""
    websocket = await transport.websocket(url)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=READ_LIMIT, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    carrier = _WebSocketTransport(websocket, protocol, loop)
    protocol.connection_made(carrier)
    return reader, asyncio.StreamWriter(carrier, protocol, reader, loop)


class _WebSocketTransport(asyncio.Transport):
    """What asyncio's streams need of a transport, on top of a WebSocket's binary messages."""

    def __init__(
        self, websocket: aiohttp.ClientWebSocketResponse, protocol: asyncio.StreamReaderProtocol, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__()
        self._websocket = websocket
        self._protocol = protocol
        self._loop = loop
        self._outgoing: deque[bytes] = deque()
        self._outgoing_size = 0
        self._protocol_paused = False
        self._closing = False
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._to_send = asyncio.Event()
        self._tasks = (loop.create_task(self._receive()), loop.create_task(self._send()))

    async def _receive(self) -> None:
        error: Exception | None = None
        try:
            while True:
                await self._may_read.wait()
                message = await self._websocket.receive()
                if message.type is not aiohttp.WSMsgType.BINARY:
                    break
                self._protocol.data_received(cast(bytes, message.data))
            if self._websocket.close_code == REFUSED:
                error = ConnectionRefusedError(str(message.extra or "nothing listens on that port"))
        except (aiohttp.ClientError, OSError) as failure:
            error = ConnectionResetError(str(failure))
        self._protocol.eof_received()
        self._finish(error)

    async def _send(self) -> None:
        try:
            while True:
                await self._to_send.wait()
                self._to_send.clear()
                while self._outgoing:
                    data = self._outgoing.popleft()
                    await self._websocket.send_bytes(data)
                    self._outgoing_size -= len(data)
                    self._allow_writing()
                if self._closing:
                    break
        except (aiohttp.ClientError, OSError) as failure:
            self._finish(ConnectionResetError(str(failure)))
            return
        with contextlib.suppress(aiohttp.ClientError, OSError):
            await self._websocket.close()
        self._finish(None)

    def _allow_writing(self) -> None:
        if self._protocol_paused and self._outgoing_size <= WRITE_LIMIT // 2:
            self._protocol_paused = False
            self._protocol.resume_writing()

    def _finish(self, error: Exception | None) -> None:
        if self._websocket is not None and not getattr(self, "_finished", False):
            self._finished = True
            self._closing = True
            self._loop.create_task(self._websocket.close())
            for task in self._tasks:
                if task is not asyncio.current_task():
                    task.cancel()
            self._protocol.connection_lost(error)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or not data:
            return
        self._outgoing.append(bytes(data))
        self._outgoing_size += len(data)
        self._to_send.set()
        if self._outgoing_size > WRITE_LIMIT and not self._protocol_paused:
            self._protocol_paused = True
            self._protocol.pause_writing()

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True
        self._to_send.set()

    def abort(self) -> None:
        self._finish(None)

    def pause_reading(self) -> None:
        self._may_read.clear()

    def resume_reading(self) -> None:
        self._may_read.set()
