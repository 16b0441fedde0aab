"""The HTTP server under an ASGI app: uvicorn with the limits that it lacks, run beside others in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import socket
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from libdsec.keepalive import keep_alive

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveEvent, ASGISendEvent

BACKLOG = 4_096
"""Connections that may wait to be accepted: a client that opens one for each of 3,200 sandboxes at once is not turned away."""
KEEP_ALIVE_S = 75
"""How long an idle connection is kept: longer than clients keep theirs, so that they close first and never write into a closing one."""
STOP_GRACE_S = 5
"""How long requests under way may take to end once the service stops; streams are cut after it."""
HEADER_LIMIT = 64 * 1024
"""Bytes of a request before its body: request line and headers. Also what may come between two pieces of its body (sizes and extensions
of chunks) and behind it (trailers)."""
HEADER_DEADLINE_S = 30.0
"""How long a client may take for a request's head, counted from its first byte or from connecting; then it is not a client. And how long
for its trailers, and for what it still sends of a request that is answered."""
PIPELINE_LIMIT = 16
"""Requests on one connection that wait for the answer to the one before them. One read can hold 14,000, of 2 KB each once parsed."""
MESSAGE_LIMIT = 16 << 20
"""Bytes of one WebSocket message."""
SLICE_BYTES = 1024
"""Bytes of a WebSocket that are parsed before anybody looks at what they were: at most 170 frames, 2 ms. One read can hold 40,000."""
FRAMES_A_TURN = 64
"""Frames of one WebSocket that are handled before other connections have their turn."""


class LimitedHttp(HttpToolsProtocol):
    """uvicorn's HTTP protocol with everything but the body of a request bounded in size and in time, which authentication comes too late
    for.

    httptools itself collects headers without end, skips chunk extensions and empty lines without end, and gives trailers out as headers.
    """

    _loose_bytes = 0
    """Received since the last byte of a body, or the last end of a head or of a request: at most one read too few."""
    _in_head = True
    _eof = False
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        # uvicorn tells the newest request only: one that is served while others wait behind it would never end.
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        self._eof = True
        super().eof_received()

    def data_received(self, data: bytes) -> None:
        self._loose_bytes += len(data)
        super().data_received(data)
        # Judged after parsing: a short head followed by a long body in the same read is fine.
        if self._loose_bytes and not self.transport.is_closing():
            if self._loose_bytes > HEADER_LIMIT:
                self.send_400_response(f"The request line and headers, and what stands between chunks, may have {HEADER_LIMIT} bytes.")
            elif self._in_head and self._deadline is None:
                self._start_deadline()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)
        elif self._deadline is None:
            # A trailer. Nobody here wants any, and among the headers it could pass for one (RFC 9110, section 6.5.1).
            self._start_deadline()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._loose_bytes = 0
        self._stop_deadline()
        if len(self.pipeline) >= PIPELINE_LIMIT:
            # Ends the parsing of what was read, and by that the connection.
            raise ValueError("too many requests wait on this connection")
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is before:
            # It becomes a WebSocket.
            return
        self._unanswered.append(self.cycle)
        # uvicorn drops what is sent to a lost connection without a word. A create must know: nobody was told of that sandbox.
        # A server may put what is its own into the scope; uvicorn's type for it knows of no such key.
        # And whether the client itself ended the connection: one that was reset or went silent had no EOF, and its client may come again.
        own = {"dsec.connected": self._is_connected, "dsec.left": self._has_left, "dsec.cut": functools.partial(self._cut, self.cycle)}
        cast(dict[str, object], self.scope).update(own)

    def on_body(self, body: bytes) -> None:
        self._loose_bytes = 0
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            # uvicorn appends to a bytearray and copies that once more for the application. What waits alone is handed on as it is.
            if not cycle.body:
                cycle.body = body  # type: ignore[assignment]  # bytes() takes bytes as well
                body = b""
            elif isinstance(cycle.body, bytes):
                # Bytes would be copied with each piece that is added, and a read can hold 40,000.
                cycle.body = bytearray(cycle.body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        self._loose_bytes = 0
        self._stop_deadline()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        # Whoever is answered and still sends: long enough for a client that reads the answer only behind it, not for ever.
        if not self._in_head and not self._unanswered and self._deadline is None and not self.transport.is_closing():
            self._start_deadline()

    def send_400_response(self, msg: str) -> None:
        if self.transport.is_closing():
            return
        own = not self._in_head and len(self._unanswered) == 1 and not self.cycle.response_started
        if own:
            # Of the request that is being read, whose answer this is.
            self._unanswered[0].disconnected = True
            self._unanswered[0].message_event.set()
        if own or (self._in_head and not self._unanswered):
            super().send_400_response(msg)
        else:
            # In the middle of another answer, or behind its own one, it would be taken for a part of that.
            self.transport.close()

    def _is_connected(self) -> bool:
        return not self.transport.is_closing()

    def _has_left(self) -> bool:
        return self._eof

    def _cut(self, cycle: RequestResponseCycle) -> None:
        """Ends an answer before its end, for the client to see: uvicorn would take it for a failure of ours, and log it."""
        cycle.disconnected = True
        cycle.message_event.set()
        self.transport.close()

    def _start_deadline(self) -> None:
        self._deadline = self.loop.call_later(HEADER_DEADLINE_S, self.transport.close)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class LimitedWebSocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol, but tiny frames neither keep others waiting nor pile up, whether anybody reads them or not.

    What is received is parsed in slices. The next slice waits for the application to take the messages of the one before, and for a turn
    of the loop after some frames, whatever they are.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._received = memoryview(b"")
        """Read, and not parsed yet."""
        self._turn: asyncio.Handle | None = None
        self._pong: list[bytes] = []
        """What the newest ping gets once the client reads again."""
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._received = memoryview(b"")
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received = memoryview(bytes(self._received) + data if self._received else data)
        if self._turn is None:
            self._go_on()
        else:
            self.transport.pause_reading()

    def _go_on(self) -> None:
        """Handles what was received, until a message waits for the application or others must have their turn."""
        self._turn = None
        frames = 0
        while self._received and not self.read_paused:
            if frames >= FRAMES_A_TURN:
                self.transport.pause_reading()
                self._turn = self.loop.call_soon(self._go_on)
                return
            piece, self._received = self._received[:SLICE_BYTES], self._received[SLICE_BYTES:]
            self.conn.receive_data(bytes(piece))
            frames += len(self.conn.events)
            if self.conn.parser_exc is not None:
                self._received = memoryview(b"")
                self.handle_parser_exception()
                return
            self.handle_events()
        if not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    async def receive(self) -> ASGIReceiveEvent:
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            if self._turn is None:
                # Not at once: whoever takes message after message lets others have their turn by it.
                self._turn = self.loop.call_soon(self._go_on)
        return message

    async def send(self, message: ASGISendEvent) -> None:
        await self.writable.wait()
        if self.close_sent and self.transport.is_closing():
            # The client broke the rules, or answered no ping: it has gone, which is no failure of the application.
            raise ClientDisconnected
        await super().send(message)
        if self.close_sent and self._turn is None and self._received:
            # Its answer to the close may be in what no message of it was wanted for.
            self._turn = self.loop.call_soon(self._go_on)

    def handle_cont(self, event: Frame) -> None:
        # In one buffer: the limit of a message counts its bytes, and fragments may have none.
        whole: bytes | bytearray = self.frames[0] if self.frames else b""
        if not isinstance(whole, bytearray):
            whole = bytearray(whole)
        whole += event.data
        self.frames = [bytes(whole) if event.fin else whole]  # type: ignore[list-item]  # bytes by the time that anybody gets them
        if event.fin:
            self.send_receive_event_to_app()

    def handle_ping(self) -> None:
        if self.writable.is_set() or self.conn.close_rcvd is not None:
            super().handle_ping()
        elif pongs := self.conn.data_to_send():
            # To all pings of this slice. Only the newest must have one (RFC 6455, section 5.5.3).
            self._pong = pongs[-1:]

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._pong and not self.transport.is_closing():
            self.transport.write(self._pong.pop())


class Listener(uvicorn.Server):
    """One listening socket and the app behind it. ``serve`` runs until :meth:`stop`; signals are the caller's business."""

    def __init__(self, app: ASGIApp, bound: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=LimitedHttp,
                ws=LimitedWebSocket,
                # Sandbox output rarely compresses, and deflate costs more than the loopback.
                ws_per_message_deflate=False,
                ws_max_size=MESSAGE_LIMIT,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=STOP_GRACE_S,
            )
        )
        self._bound = bound
        self.listening = asyncio.Event()
        """Set once connections are accepted."""

    async def run_until_stopped(self) -> None:
        """Accept and answer until :meth:`stop`, then finish what is under way (at most ``STOP_GRACE_S``)."""
        await self.serve(sockets=[self._bound])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    def stop(self) -> None:
        """Accept nothing new from now on."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone: two servers share the process."""
        yield


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket; ``port`` 0 takes any free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # A client whose host vanished must end: a create counts what it was told, and whoever follows output holds a stream.
        keep_alive(bound)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"can't listen at {host}, port {port}: {error.strerror}") from error
    # Buffer sizes are left to the kernel, which grows them by need: a fixed size would switch that off, and 3,200 idle connections would
    # hold it.
    bound.setblocking(False)
    return bound


@contextlib.contextmanager
def bound_at(path: Path) -> Iterator[socket.socket]:
    """A bound Unix socket that every user of this machine may connect to, as they may to loopback: the keys tell who is who. Its name is
    gone when the block is left. Raises OSError."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as bound:
        # Left by an earlier service that was killed.
        path.unlink(missing_ok=True)
        bound.bind(str(path))
        try:
            path.chmod(0o666)
            bound.setblocking(False)
            yield bound
        finally:
            path.unlink(missing_ok=True)


def origin(bound: socket.socket) -> str:
    """``http://host:port`` by which this machine reaches a bound socket."""
    host, port = bound.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return f"http://{address}:{port}" if address.version == 4 else f"http://[{address}]:{port}"


def is_loopback(bound: socket.socket) -> bool:
    """Whether only this machine can reach the socket."""
    return ipaddress.ip_address(bound.getsockname()[0]).is_loopback
