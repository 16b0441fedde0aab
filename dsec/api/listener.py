"""The HTTP server under an ASGI app: uvicorn with the limits that it lacks, run beside others in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from libdsec.keepalive import keep_alive

BACKLOG = 4_096
"""Connections that may wait to be accepted: a client that opens one for each of 3,200 sandboxes at once is not turned away."""
KEEP_ALIVE_S = 75
"""How long an idle connection is kept: longer than clients keep theirs, so that they close first and never write into a closing one."""
STOP_GRACE_S = 5
"""How long requests under way may take to end once the service stops; streams are cut after it."""
HEADER_LIMIT = 64 * 1024
"""Bytes of a request before its body: request line and headers."""
HEADER_DEADLINE_S = 30.0
"""How long a client may take for a request's head, counted from its first byte or from connecting; then it is not a client. As long may one
go on with a body whose request has been answered."""
MESSAGE_LIMIT = 16 << 20
"""Bytes of one WebSocket message."""


class LimitedHttp(HttpToolsProtocol):
    """uvicorn's HTTP protocol with the head of a request bounded in size and in time, which authentication comes too late for.

    httptools itself collects headers without end.
    """

    _head_bytes = 0
    _in_head = True
    _idle_bytes = 0
    """Bytes since the last of a body: trailers, and what stands between chunks."""
    _eof = False
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        self._eof = True
        super().eof_received()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        else:
            self._idle_bytes += len(data)
        super().data_received(data)
        # Judged after parsing: a short head followed by a long body in the same read is fine.
        if self._in_head and self._head_bytes and not self.transport.is_closing():
            if self._head_bytes > HEADER_LIMIT:
                self.send_400_response(f"The request line and headers may have {HEADER_LIMIT} bytes.")
            elif self._deadline is None:
                self._start_deadline()
        elif self._idle_bytes > HEADER_LIMIT:
            self.transport.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        # Nobody here reads trailers; uvicorn would collect them with the headers.
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._idle_bytes = 0
        self._stop_deadline()
        # uvicorn drops what is sent to a lost connection without a word. A create must know: nobody was told of that sandbox.
        # A server may put what is its own into the scope; uvicorn's type for it knows of no such key.
        # And whether the client itself ended the connection: one that was reset or went silent had no EOF, and its client may come again.
        cast(dict[str, object], self.scope).update({"dsec.connected": self._is_connected, "dsec.left": self._has_left})
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._idle_bytes = 0
        cycle = self.cycle
        if cycle is None or cycle.body or cycle.response_complete:
            super().on_body(body)
            return
        # uvicorn appends to a bytearray and copies that once more for the application. What waits alone is handed on as it is.
        cycle.body = body  # type: ignore[assignment]  # bytes take += and bytes() as well
        super().on_body(b"")

    def on_message_complete(self) -> None:
        self._in_head = True
        self._idle_bytes = 0
        self._stop_deadline()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._in_head and self.cycle.response_complete and not self.transport.is_closing() and self._deadline is None:
            self._start_deadline()

    def _is_connected(self) -> bool:
        return not self.transport.is_closing()

    def _has_left(self) -> bool:
        return self._eof

    def _start_deadline(self) -> None:
        self._deadline = self.loop.call_later(HEADER_DEADLINE_S, self.transport.close)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Listener(uvicorn.Server):
    """One listening socket and the app behind it. ``serve`` runs until :meth:`stop`; signals are the caller's business."""

    def __init__(self, app: ASGIApp, bound: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=LimitedHttp,
                ws="websockets-sansio",
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
