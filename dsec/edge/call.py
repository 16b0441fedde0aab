"""One HTTP request or WebSocket to the edge: bodies in, answers out, as thin as ASGI allows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Generic, TypeVar
from urllib.parse import unquote_to_bytes

import msgspec
from starlette.types import Message, Receive, Scope, Send

from dsec.http_errors import BodyTooLarge, invalid_body
from libdsec.errors import DSecError, ErrorEnvelope, InvalidArgument

BODY_MAX = 32 << 20
"""Bytes of a body that is decoded whole: 32,000 create items, or a command with 16 MiB of stdin in base64."""
JSON = b"application/json"
MSGPACK = b"application/msgpack"
NDJSON = b"application/x-ndjson"
OCTETS = b"application/octet-stream"

WS_REFUSED = 1011
"""WebSocket close code for what went wrong on our side of it, with the reason in words (at most 123 bytes)."""
WS_REASON_BYTES = 120

T = TypeVar("T")

_to_json = msgspec.json.Encoder().encode
_to_msgpack = msgspec.msgpack.Encoder().encode


class Disconnected(Exception):
    """The client went away; there is nobody to answer."""


class Body(Generic[T]):
    """The decoders of one kind of request body, built once. ``large``: the fields that may make it too large, to be named then."""

    def __init__(self, kind: type[T], *, large: Sequence[str] = ()) -> None:
        self._json = msgspec.json.Decoder(kind)
        self._msgpack = msgspec.msgpack.Decoder(kind)
        self._large = large

    async def read(self, call: Call) -> T:
        """The request's body. Raises InvalidArgument, which names the field, and Disconnected."""
        data = await call.body(self._large)
        msgpack = (call.header(b"content-type") or b"").startswith(MSGPACK)
        try:
            return self._msgpack.decode(data) if msgpack else self._json.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise invalid_body(error) from error


class Call:
    """The request, its path taken apart, and the one answer to it."""

    __slots__ = ("_query", "_receive", "_send", "names", "project", "responding", "scope")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.project: str = scope.get("dsec.project", "")
        self.names: Sequence[str] = ()
        """The variable parts of the path behind the sandbox's id, in order."""
        self.responding = False
        """Whether the answer has begun: from then on an error can only cut it off."""
        self._receive = receive
        self._send = send
        self._query: dict[str, list[bytes]] | None = None

    # --- the request

    def header(self, name: bytes) -> bytes | None:
        """The first header of that (lower-case) name."""
        for key, value in self.scope["headers"]:
            if key == name:
                return bytes(value)
        return None

    def idempotency_key(self, most: int) -> str | None:
        """What names this call and its repetitions: the ``Idempotency-Key`` header. Raises InvalidArgument unless it has 1 to ``most``
        printable characters: an empty one would be shared by all who send none."""
        given = self.header(b"idempotency-key")
        if given is None:
            return None
        key = given.decode("utf-8", "replace")
        if not 0 < len(key) <= most or not key.isprintable() or "\ufffd" in key:
            raise InvalidArgument(f"Idempotency-Key: 1 to {most} printable characters", field="idempotency_key")
        return key

    def accepts_msgpack(self) -> bool:
        """Whether the client wants msgpack instead of JSON."""
        return MSGPACK in (self.header(b"accept") or b"")

    def query(self, name: str) -> bytes | None:
        """A query parameter as the bytes that it stands for."""
        values = self.queries(name)
        return values[0] if values else None

    def queries(self, name: str) -> list[bytes]:
        """All values of a query parameter."""
        if self._query is None:
            self._query = {}
            for pair in self.scope["query_string"].split(b"&"):
                key, _, value = pair.replace(b"+", b" ").partition(b"=")
                if key:
                    self._query.setdefault(unquote_to_bytes(key).decode("utf-8", "replace"), []).append(unquote_to_bytes(value))
        return self._query.get(name, [])

    def text(self, name: str) -> str | None:
        """A query parameter as text. Raises InvalidArgument."""
        value = self.query(name)
        if value is None:
            return None
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise InvalidArgument(f"{name} is not UTF-8", field=name) from None

    def integer(self, name: str, default: int, *, least: int = 0) -> int:
        """A query parameter as a whole number of at least ``least``. Raises InvalidArgument."""
        value = self.query(name)
        if value is None:
            return default
        try:
            number = int(value)
        except ValueError:
            raise InvalidArgument(f"{name} is no whole number", field=name) from None
        if not least <= number < 1 << 63:
            raise InvalidArgument(f"{name} must be at least {least}", field=name)
        return number

    def flag(self, name: str, default: bool = False) -> bool:
        """A query parameter as a boolean. Raises InvalidArgument."""
        value = self.query(name)
        if value is None:
            return default
        if value in (b"true", b"1"):
            return True
        if value in (b"false", b"0"):
            return False
        raise InvalidArgument(f"{name} must be true or false", field=name)

    async def body(self, large: Sequence[str] = ()) -> bytes:
        """The whole body, at most :data:`BODY_MAX` bytes. Raises BodyTooLarge, Disconnected."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        first: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            if len(first) > BODY_MAX:
                raise _too_large(first, large)
            return first
        whole = bytearray(first)
        while message.get("more_body", False):
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            whole += message.get("body", b"")
            if len(whole) > BODY_MAX:
                raise _too_large(whole, large)
        return bytes(whole)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes in. Raises Disconnected when the client goes away before its end."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            chunk = message.get("body", b"")
            if chunk:
                yield chunk
            if not message.get("more_body", False):
                return

    async def gone(self) -> None:
        """Returns when the client has gone away, or the answer has ended. For requests whose body is read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def connected(self) -> bool:
        """Whether the connection to the client stands. Asked behind :meth:`send` without another await between, it says whether what was
        sent was handed to a live connection: a server drops silently what it is given for one that is lost."""
        connected = self.scope.get("dsec.connected")
        return connected is None or bool(connected())

    def left(self) -> bool:
        """Whether the client ended the connection itself, instead of losing it."""
        left = self.scope.get("dsec.left")
        return left is not None and bool(left())

    # --- the answer

    async def reply(self, value: object, status: int = 200) -> None:
        """``value`` (a struct, or a list of them) as JSON or msgpack."""
        if self.accepts_msgpack():
            await self._whole(status, MSGPACK, _to_msgpack(value))
        else:
            await self._whole(status, JSON, _to_json(value))

    async def reply_empty(self) -> None:
        """204."""
        self.responding = True
        await self._send({"type": "http.response.start", "status": 204, "headers": []})
        await self._send({"type": "http.response.body"})

    async def fail(self, error: DSecError) -> None:
        """The error as the answer. A WebSocket that isn't accepted yet is refused with it."""
        more = []
        if error.retry_after is not None:
            more.append((b"retry-after", b"%d" % max(1, round(error.retry_after))))
        await self._whole(error.status, JSON, _to_json(ErrorEnvelope(error.body())), more)

    async def begin(self, content_type: bytes, headers: Sequence[tuple[bytes, bytes]] = (), status: int = 200) -> None:
        """Begins an answer that is streamed by :meth:`send` and ended by :meth:`end`."""
        self.responding = True
        await self._send({"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type), *headers]})

    async def begin_raw(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Begins a streamed answer with exactly these headers."""
        self.responding = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, data: bytes) -> None:
        """A piece of a streamed answer; waits while the client doesn't read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """Ends a streamed answer."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _whole(self, status: int, content_type: bytes, data: bytes, more: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self.responding = True
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(data)), *more]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": data})

    @asynccontextmanager
    async def until_disconnect(self) -> AsyncIterator[None]:
        """Cancels what is inside when the client goes away, and raises Disconnected. For answers whose request is read; :meth:`end` comes
        after it."""
        task = asyncio.current_task()
        assert task is not None
        gone = False

        async def watch() -> None:
            nonlocal gone
            await self.gone()
            gone = True
            task.cancel()

        watcher = asyncio.get_running_loop().create_task(watch())
        try:
            yield
        except asyncio.CancelledError:
            if gone and task.uncancel() == 0:
                raise Disconnected from None
            raise
        finally:
            watcher.cancel()


class Socket:
    """A WebSocket: binary and text messages both ways."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.accepted = False
        self._scope = scope
        self._receive = receive
        self._send = send

    async def accept(self, subprotocol: str | None = None) -> None:
        message = await self._receive()
        if message["type"] != "websocket.connect":
            raise Disconnected
        await self._send({"type": "websocket.accept", "subprotocol": subprotocol})
        self.accepted = True

    async def receive(self) -> bytes | str | None:
        """The next message; None when the client has closed."""
        message: Message = await self._receive()
        if message["type"] != "websocket.receive":
            return None
        data: bytes | None = message.get("bytes")
        return data if data is not None else str(message["text"])

    async def send(self, data: bytes | str) -> None:
        await self._pass({"type": "websocket.send", "bytes" if isinstance(data, bytes) else "text": data})

    async def close(self, code: int = 1000, reason: str = "") -> None:
        short = reason.encode()[:WS_REASON_BYTES].decode("utf-8", "ignore")
        await self._pass({"type": "websocket.close", "code": code, "reason": short})

    async def _pass(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError:
            # How ASGI says that the client has closed (spec 2.4).
            raise Disconnected from None

    async def fail(self, error: DSecError) -> None:
        """Refuses the WebSocket with the error, or closes it with its message if it was accepted."""
        if self.accepted:
            await self.close(WS_REFUSED, error.message)
        elif "websocket.http.response" in self._scope.get("extensions", {}):
            data = _to_json(ErrorEnvelope(error.body()))
            headers = [(b"content-type", JSON), (b"content-length", b"%d" % len(data))]
            await self._send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
            await self._send({"type": "websocket.http.response.body", "body": data})
        else:
            await self.close(1008, error.message)


def _too_large(begin: bytes | bytearray, large: Sequence[str]) -> BodyTooLarge:
    """Names the field whose name stands last in what was read: the one that didn't end."""
    field = max(large, key=lambda name: begin.rfind(name.encode()), default=None)
    if field is not None and begin.rfind(field.encode()) < 0:
        field = None
    what = "the request body" if field is None else f"{field} makes the request body too large: it"
    return BodyTooLarge(f"{what} may have {BODY_MAX} bytes", field=field)
