"""Ports inside a sandbox: as a byte stream, as HTTP below the API, and as HTTP on an origin of its own."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path

import h11
from starlette.types import Scope
from websockets.client import ClientProtocol
from websockets.exceptions import WebSocketException
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Response as HandshakeResponse
from websockets.protocol import SEND_EOF, State
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from dsec.edge.call import Call, Disconnected, Socket
from dsec.edge.channel import ChannelError, Stream
from dsec.edge.sandbox import Sandbox
from dsec.edge.sandboxes import Sandboxes
from dsec.edge.turns import Turns
from libdsec.errors import InvalidArgument, NotFound, Unavailable
from libdsec.schema import PortUrl
from libdsec.signing import port_signature, port_url

HEAD_MAX = 64 << 10
"""Bytes of a response's head, or of one WebSocket frame's, that a server inside may send."""
MESSAGE_MAX = 16 << 20
"""Bytes of one WebSocket message from inside."""
FRAME_BYTES_AT_A_TIME = 2 << 10
"""What is parsed of a WebSocket at a time: the parser doesn't stop before the end of what it is given, and a frame can have two bytes."""
INFORMATIONAL_MAX = 32
"""Answers 1xx before the real one."""
BODY_BYTES_AT_A_TIME = 64 << 10
"""What is put together of small chunks before it is passed on."""
SECRET_BYTES = 32
STDOUT = 1

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""RFC 9110, section 7.6.1."""
_OURS = frozenset({b"authorization", b"cookie"})
"""What a request to the API carries for us and not for the program in the sandbox. Idempotency-Key isn't of it: no call to a port takes
one, and a program may."""
_OUR_PREFIX = b"x-dsec-"
"""How the names of headers begin that are for us wherever they are sent."""
_OUR_KEY = re.compile(rb"\s*bearer\s+dsec_", re.IGNORECASE)
"""How an Authorization header with a key of ours begins: it is for nobody inside, also where others are passed on."""
_HANDSHAKE = frozenset(
    {b"sec-websocket-key", b"sec-websocket-version", b"sec-websocket-extensions", b"sec-websocket-protocol", b"sec-websocket-accept"}
)
_UNSENDABLE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
"""No part of a header's value (RFC 9110, section 5.5). h11 lets some of it through, uvicorn fails at it."""
_NO_CODES = frozenset({CloseCode.NO_STATUS_RCVD, CloseCode.ABNORMAL_CLOSURE, CloseCode.TLS_HANDSHAKE})
_COOKIE_SCOPE = re.compile(rb";\s*(path|domain)\s*=[^;]*", re.IGNORECASE)

Headers = list[tuple[bytes, bytes]]


class PortSigner:
    """Makes and checks the signatures that stand in for a key on the ports' origin."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def from_file(cls, path: Path) -> PortSigner:
        """With the secret in ``path``: URLs given out stay good over a restart. It is made if there is none, or only a part of one, which
        would be easy to guess."""
        with suppress(FileNotFoundError):
            secret = path.read_bytes()
            if len(secret) == SECRET_BYTES:
                return cls(secret)
        secret = secrets.token_bytes(SECRET_BYTES)
        partial = path.with_name(f"{path.name}.part")
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret)
            file.flush()
            os.fsync(descriptor)
        # In place once it is whole, also after a crash of the machine: what is renamed has been written.
        partial.replace(path)
        return cls(secret)

    def key(self, sandbox: str) -> str:
        """What signs the addresses of one sandbox's ports."""
        return hmac.digest(self._secret, sandbox.encode(), hashlib.sha256).hex()

    def sign(self, sandbox: str, port: int) -> str:
        return port_signature(self.key(sandbox), port)

    def good(self, sandbox: str, port: int, signature: str) -> bool:
        return hmac.compare_digest(self.sign(sandbox, port).encode(), signature.encode("utf-8", "replace"))


class Ports:
    """The routes ``…/tcp``, ``…/ports`` and ``…/url``, and the app behind the ports' own origin."""

    def __init__(self, sandboxes: Sandboxes, signer: PortSigner) -> None:
        self._sandboxes = sandboxes
        self._signer = signer

    async def url(self, call: Call, sandbox: Sandbox) -> None:
        """GET …/url/{port}"""
        port = parse_port(call.names[0])
        await call.reply(PortUrl(url=port_url(self._sandboxes.config.ports_url, sandbox.id, self._signer.key(sandbox.id), port)))

    async def tcp(self, call: Call, socket: Socket, sandbox: Sandbox) -> None:
        """WS …/tcp/{port}"""
        port = parse_port(call.names[0])
        channel = await self._sandboxes.agents.channel(sandbox)
        await socket.accept()
        stream = await channel.open_port(port)
        try:
            await _both(_tcp_out(socket, stream), _tcp_in(socket, stream))
        finally:
            stream.detach()

    async def http(self, call: Call, sandbox: Sandbox) -> None:
        """ANY …/ports/{port}/{rest}: neither our key nor our cookies reach the program inside."""
        port, rest = parse_port(call.names[0]), call.names[1]
        prefix = _raw_path(call.scope).decode("ascii", "replace").removesuffix(rest).rstrip("/")
        await self._proxy(call, sandbox, port, rest, prefix, strip=_OURS)

    async def websocket(self, call: Call, socket: Socket, sandbox: Sandbox) -> None:
        """WS …/ports/{port}/{rest}"""
        port, rest = parse_port(call.names[0]), call.names[1]
        await self._proxy_websocket(call, socket, sandbox, port, rest, strip=_OURS)

    async def signed(self, call: Call, names: list[str], sandbox: Sandbox) -> None:
        """HTTP on the ports' origin: ``/<sandbox id>/<port>/<signature>/…``."""
        sandbox_id, port, signature, rest = names
        await self._proxy(call, sandbox, int(port), rest, f"/{sandbox_id}/{port}/{signature}", strip=frozenset())

    async def signed_websocket(self, call: Call, socket: Socket, names: list[str], sandbox: Sandbox) -> None:
        """WebSocket on the ports' origin."""
        _, port, _, rest = names
        await self._proxy_websocket(call, socket, sandbox, int(port), rest, strip=frozenset())

    def check(self, scope: Scope) -> list[str]:
        """The parts of a path on the ports' origin: id, port, signature, rest. Raises NotFound without telling more."""
        parts = _raw_path(scope).decode("ascii", "replace").lstrip("/").split("/", 3)
        if (
            len(parts) >= 3
            and parts[1].isascii()
            and parts[1].isdigit()
            and len(parts[1]) <= 5
            and self._signer.good(parts[0], int(parts[1]), parts[2])
        ):
            return [*parts[:3], parts[3] if len(parts) > 3 else ""]
        raise NotFound("there is nothing here")

    async def _proxy(self, call: Call, sandbox: Sandbox, port: int, rest: str, prefix: str, *, strip: frozenset[bytes]) -> None:
        stream = await self._open(sandbox, port)
        try:
            exchange = _Exchange(call, stream, port, prefix)
            await exchange.ask(_target(call.scope, rest), strip)
            await _both(exchange.answer(), exchange.feed())
        finally:
            stream.detach()
        if exchange.whole:
            await call.end()

    async def _open(self, sandbox: Sandbox, port: int) -> Stream:
        channel = await self._sandboxes.agents.channel(sandbox)
        try:
            return await channel.open_port(port)
        except ChannelError as error:
            raise Unavailable(f"sandbox {sandbox.id}: {error.message}", reason="port_closed", errno=error.errno or None) from error

    async def _proxy_websocket(
        self, call: Call, socket: Socket, sandbox: Sandbox, port: int, rest: str, *, strip: frozenset[bytes]
    ) -> None:
        stream = await self._open(sandbox, port)
        try:
            bridge = _Bridge(socket, stream, f"ws://localhost:{port}{_target(call.scope, rest).decode('ascii', 'replace')}", call.scope)
            await bridge.shake_hands(_forwarded(call.scope, strip | _HANDSHAKE | {b"host"}))
            await _both(bridge.outward(), bridge.inward())
        finally:
            stream.detach()


class _Exchange:
    """One HTTP request to a server inside, and its answer, streamed."""

    def __init__(self, call: Call, stream: Stream, port: int, prefix: str) -> None:
        self.whole = False
        """The answer has been passed on to its end."""
        self._call = call
        self._stream = stream
        self._port = port
        self._prefix = prefix.encode()
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_MAX)
        self._has_body = False

    async def ask(self, target: bytes, strip: frozenset[bytes]) -> None:
        """Sends the head of the request. Raises InvalidArgument for one that the listener let through and no server should see."""
        scope = self._call.scope
        host = self._call.header(b"host") or b""
        headers: Headers = [(b"host", b"localhost:%d" % self._port), (b"x-forwarded-host", host), (b"x-forwarded-prefix", self._prefix)]
        headers += _forwarded(scope, strip | {b"host", b"x-forwarded-host", b"x-forwarded-prefix", b"expect"})
        chunked = b"chunked" in (self._call.header(b"transfer-encoding") or b"").lower()
        self._has_body = chunked or (self._call.header(b"content-length") or b"0") != b"0"
        if chunked:
            headers = [(name, value) for name, value in headers if name != b"content-length"]
            headers.append((b"transfer-encoding", b"chunked"))
        headers.append((b"connection", b"close"))
        try:
            head = self._http.send(h11.Request(method=scope["method"], target=target, headers=headers))
        except h11.LocalProtocolError as error:
            raise InvalidArgument(f"this request can't be passed on: {error}") from error
        if not self._has_body:
            head = (head or b"") + (self._http.send(h11.EndOfMessage()) or b"")
        await self._stream.write(head or b"")

    async def feed(self) -> None:
        """Sends the body, then waits for the client to go away: raises Disconnected."""
        if self._has_body:
            try:
                async for chunk in self._call.chunks():
                    await self._stream.write(self._http.send(h11.Data(data=chunk)) or b"")
                await self._stream.write(self._http.send(h11.EndOfMessage()) or b"")
            except (ChannelError, h11.LocalProtocolError):
                # The server answered, or closed, without reading all of it: its answer counts.
                await asyncio.Event().wait()
        await self._call.gone()
        raise Disconnected

    async def answer(self) -> None:
        """Passes the answer on. Raises Unavailable if what comes isn't HTTP, or ends too early."""
        body = bytearray()
        informational = 0
        turns = Turns()
        try:
            while True:
                event = self._http.next_event()
                await turns.count()
                if isinstance(event, h11.Data):
                    body += event.data
                    if len(body) < BODY_BYTES_AT_A_TIME:
                        continue
                if body:
                    await self._call.send(bytes(body))
                    body.clear()
                if event is h11.NEED_DATA:
                    piece = await self._stream.read()
                    if piece is None and self._http.their_state is h11.SEND_RESPONSE and not self._http.trailing_data[0]:
                        raise Unavailable(f"the server on port {self._port} closed without an answer", reason="port_closed")
                    self._http.receive_data(b"" if piece is None else piece[2])
                elif isinstance(event, h11.Response):
                    await self._call.begin_raw(event.status_code, self._passed_back(event))
                elif isinstance(event, h11.EndOfMessage):
                    self.whole = True
                    return
                elif isinstance(event, h11.InformationalResponse):
                    informational += 1
                    if informational > INFORMATIONAL_MAX:
                        raise h11.RemoteProtocolError(f"more than {INFORMATIONAL_MAX} answers 1xx")
                elif not isinstance(event, h11.Data):
                    raise h11.RemoteProtocolError(f"{event} instead of an answer")
        except h11.RemoteProtocolError as error:
            if self._call.responding:
                raise Unavailable(f"the server on port {self._port} broke its answer off: {error}", reason="port_closed") from error
            raise Unavailable(f"the server on port {self._port} doesn't speak HTTP: {error}", reason="not_http") from error

    def _passed_back(self, response: h11.Response) -> Headers:
        """The headers of the answer for the client. Raises RemoteProtocolError for an answer that can't be passed on."""
        if response.status_code > 599:
            raise h11.RemoteProtocolError(f"there is no status {response.status_code}")
        headers: Headers = []
        named = _named_by_connection(list(response.headers))
        # Where there is no body, or one in chunks, a length may stand there and says nothing of what we send.
        unmeasured = response.status_code in (204, 304) or any(name == b"transfer-encoding" for name, _ in response.headers)
        for name, value in response.headers:
            if name in _HOP_BY_HOP or name in named or (name == b"content-length" and unmeasured):
                continue
            if _UNSENDABLE.search(value):
                raise h11.RemoteProtocolError(f"{name.decode('ascii', 'replace')} has a control character in it")
            if name == b"location" and value.startswith(b"/") and not value.startswith(b"//"):
                value = self._prefix + value
            elif name == b"set-cookie":
                # The origin is shared by all sandboxes: each keeps its cookies to its own paths.
                value = _COOKIE_SCOPE.sub(b"", value) + b"; Path=" + self._prefix + b"/"
            headers.append((name, value))
        return headers


class _Bridge:
    """A WebSocket of a client, and the one to the server inside that carries on its messages."""

    def __init__(self, socket: Socket, stream: Stream, url: str, scope: Scope) -> None:
        self._socket = socket
        self._stream = stream
        offered = [Subprotocol(name) for name in scope.get("subprotocols", [])]
        self._inside = ClientProtocol(parse_uri(url), subprotocols=offered or None, max_size=MESSAGE_MAX)
        self._waiting = memoryview(b"")
        """What has come and isn't parsed."""
        self._message = bytearray()
        self._text = False
        self._turns = Turns()

    async def shake_hands(self, headers: Headers) -> None:
        """Connects inside first; only if that works is the client accepted. Raises Unavailable."""
        request = self._inside.connect()
        for name, value in headers:
            request.headers[name.decode("ascii", "replace")] = value.decode("latin-1")
        self._inside.send_request(request)
        await self._flush()
        while self._inside.state is State.CONNECTING and self._inside.handshake_exc is None:
            await self._receive()
        if self._inside.state is not State.OPEN:
            raise Unavailable(f"the server inside refused the WebSocket: {self._inside.handshake_exc}", reason="refused")
        await self._socket.accept(self._inside.subprotocol)

    async def outward(self) -> None:
        """From the server inside to the client, until it closes."""
        while True:
            for event in self._inside.events_received():
                await self._turns.count()
                if isinstance(event, Frame):
                    await self._pass_out(event)
                else:
                    assert isinstance(event, HandshakeResponse)
            await self._flush()
            if self._inside.close_code is not None or self._inside.state is State.CLOSED:
                await self._socket.close(_sendable(self._inside.close_code))
                return
            await self._receive()

    async def _receive(self) -> None:
        """Has the next bytes from inside parsed, or their end."""
        if not self._waiting:
            piece = await self._stream.read()
            if piece is None:
                self._inside.receive_eof()
                return
            self._waiting = memoryview(piece[2])
        await self._turns.count()
        self._inside.receive_data(bytes(self._waiting[:FRAME_BYTES_AT_A_TIME]))
        self._waiting = self._waiting[FRAME_BYTES_AT_A_TIME:]

    async def inward(self) -> None:
        """From the client to the server inside, until it closes."""
        while (message := await self._socket.receive()) is not None:
            if isinstance(message, bytes):
                self._inside.send_binary(message)
            else:
                self._inside.send_text(message.encode())
            await self._flush()
        if self._inside.state is State.OPEN:
            self._inside.send_close(CloseCode.NORMAL_CLOSURE)
            await self._flush()

    async def _pass_out(self, frame: Frame) -> None:
        if frame.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            return
        if frame.opcode is not Opcode.CONT:
            self._text = frame.opcode is Opcode.TEXT
        self._message += frame.data
        if frame.fin:
            whole = bytes(self._message)
            self._message.clear()
            await self._socket.send(whole.decode("utf-8", "replace") if self._text else whole)

    async def _flush(self) -> None:
        # Pongs to as many pings as were parsed: one write for all.
        pieces = self._inside.data_to_send()
        if data := b"".join(pieces):
            await self._stream.write(data)
        if SEND_EOF in pieces:
            await self._stream.write_eof()


def _sendable(code: int | None) -> int:
    """The code by which to close towards the client, where the server inside closed with this one: some only say that there was none (RFC
    6455, section 7.4.1)."""
    return CloseCode.NORMAL_CLOSURE if code is None or code in _NO_CODES else code


async def _both(first: Coroutine[object, object, None], second: Coroutine[object, object, None]) -> None:
    """Runs both until one ends; the other is cancelled. What either raised is raised."""
    tasks = [asyncio.ensure_future(first), asyncio.ensure_future(second)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, WebSocketException):
            raise Unavailable(f"the WebSocket to the server inside broke: {outcome}", reason="refused") from outcome
        if isinstance(outcome, Exception):
            raise outcome


async def _tcp_out(socket: Socket, stream: Stream) -> None:
    while (piece := await stream.read()) is not None:
        await socket.send(piece[2])
    await socket.close()


async def _tcp_in(socket: Socket, stream: Stream) -> None:
    while (message := await socket.receive()) is not None:
        await stream.write(message if isinstance(message, bytes) else message.encode())
    await stream.write_eof()


def parse_port(text: str) -> int:
    """A TCP port number. Raises InvalidArgument."""
    if text.isascii() and text.isdigit() and 0 < int(text) < 65536:
        return int(text)
    raise InvalidArgument(f"{text[:16]!r} is no port: 1 to 65535", field="port")


def _raw_path(scope: Scope) -> bytes:
    raw: bytes | None = scope.get("raw_path")
    return raw.partition(b"?")[0] if raw is not None else scope["path"].encode()


def _target(scope: Scope, rest: str) -> bytes:
    query: bytes = scope["query_string"]
    return b"/" + rest.encode() + (b"?" + query if query else b"")


def _forwarded(scope: Scope, strip: frozenset[bytes]) -> Headers:
    """The request's headers but for those of this hop, those in ``strip``, and what is for us alone."""
    named = _named_by_connection(scope["headers"])
    return [
        # httptools leaves white space behind a value, which isn't of it (RFC 9110, section 5.5) and which h11 refuses to send.
        (name, value.rstrip(b" \t"))
        for name, value in scope["headers"]
        if name not in _HOP_BY_HOP
        and name not in named
        and name not in strip
        and not name.startswith(_OUR_PREFIX)
        and not (name == b"authorization" and _OUR_KEY.match(value))
    ]


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    values = [value for name, value in headers if name == b"connection"]
    return frozenset(token.strip().lower() for value in values for token in value.split(b","))
