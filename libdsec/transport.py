"""HTTP as the SDK speaks it: one session, typed bodies in msgpack, one place for retries and for turning answers into errors.

Owns connections, encodings, backoff and the mapping from HTTP answers to :mod:`libdsec.errors`. Knows no route: the callers name paths.

What is retried: connection failures and the ``unavailable`` error, for calls whose repetition the platform recognizes (they carry an
idempotency key or an exec_id), or whose repetition leaves things as the call did. Everything else is raised as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Generic, TypeVar
from urllib.parse import quote, quote_from_bytes

import aiohttp
import msgspec
from yarl import URL

from libdsec.config import UNIX
from libdsec.errors import (
    UNREACHABLE,
    AuthenticationError,
    Conflict,
    DSecError,
    ErrorEnvelope,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    QuotaExceeded,
    SandboxFailed,
    SandboxGone,
    Unavailable,
    from_body,
)
from libdsec.keepalive import keep_alive

MSGPACK = "application/msgpack"
NDJSON = "application/x-ndjson"
OCTETS = "application/octet-stream"

CONNECT_TIMEOUT_S = 10.0
"""A TCP connection that isn't there by then counts as refused."""
KEEPALIVE_S = 30.0
"""Idle connections are dropped by us before the server does it (after 75 s), so that no request meets one that is just being closed."""
READ_BUFFER = 4 << 20
"""Bytes that may wait in a response before its connection stops reading: large, so that one chunk is handled while the next ones arrive."""
SEND_CHUNK = 256 << 10
"""Bytes handed to the socket at a time when something large is sent. HTTP's framing copies a chunk once more, and larger ones leave the
processor's cache on the way."""
RETRY_FOR_S = 60.0
"""How long a call that reached the server before goes on trying: longer than a restart of any part takes."""
FIRST_CONTACT_S = 3.0
"""The same for a server that never answered: most likely it isn't running, and the caller should hear so soon."""
BACKOFF_MIN_S = 0.02
BACKOFF_MAX_S = 2.0
STEADY_S = 5.0
"""An attempt that lived this long was a working connection: the next failure starts a new row."""
LEAVE_S = 5.0
"""How long the rest of an answer is read that its reader leaves early: the server stops at once, so this is for a slow network."""
ERROR_BODY_LIMIT = 64 << 10
"""Bytes of an error body that is not ours (a proxy's page) which are looked at."""

T = TypeVar("T")
QueryValue = str | bytes | int | float | bool | None
Query = Mapping[str, QueryValue] | Sequence[tuple[str, QueryValue]]
"""Query parameters by name, or as pairs where a name may come more than once."""

_json_error = msgspec.json.Decoder(ErrorEnvelope)
_msgpack_error = msgspec.msgpack.Decoder(ErrorEnvelope)
_encoder = msgspec.msgpack.Encoder()


class Answer(Generic[T]):
    """The decoders of one type of answer, built once."""

    def __init__(self, kind: type[T]) -> None:
        self._msgpack: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._json: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)

    def decode(self, content_type: str, data: bytes) -> T:
        return self._msgpack.decode(data) if content_type.startswith(MSGPACK) else self._json.decode(data)

    def decode_line(self, line: bytes) -> T:
        return self._json.decode(line)


def encode(body: object) -> bytes:
    """``body`` as msgpack. Raises InvalidArgument for text that has no UTF-8 form."""
    try:
        return _encoder.encode(body)
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"text can't be encoded as UTF-8: {error.object[:80]!r}") from error


def build_url(base: str, path: str, query: Query | None = None) -> URL:
    """``base`` + ``path`` (already percent-encoded) + ``query``, whose values are percent-encoded here: bytes as they are, None left
    out."""
    if query:
        items = query.items() if isinstance(query, Mapping) else query
        pairs = "&".join(f"{quote(name)}={_query_value(value)}" for name, value in items if value is not None)
        if pairs:
            path = f"{path}?{pairs}"
    return URL(base + path, encoded=True)


def _query_value(value: str | bytes | float | bool | None) -> str:
    if isinstance(value, bytes):
        return quote_from_bytes(value, safe="/")
    if isinstance(value, bool):
        return "true" if value else "false"
    return quote(str(value), safe="/")


def error_of(status: int, content_type: str, data: bytes) -> DSecError:
    """The error that an answer outside 2xx stands for; an answer that isn't the platform's (a proxy's, say) is mapped by its status."""
    try:
        envelope = (_msgpack_error if content_type.startswith(MSGPACK) else _json_error).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        text = data[:200].decode("utf-8", "replace").strip()
        message = f"the server answered HTTP {status} without an error body{': ' + text if text else ''}"
        return _BY_STATUS.get(status, DSecError)(message)
    return from_body(envelope.error)


class Retry:
    """When a failed call is tried again: exponential backoff with jitter, within a budget that runs from the first failure of a row."""

    def __init__(self, budget_s: float, deadline: float | None = None) -> None:
        """``deadline``: the time (of the event loop's clock) after which no attempt starts, whatever the budget says."""
        self._budget_s = budget_s
        self._deadline = deadline
        self._failures = 0
        self._row_started = 0.0

    def delay(self, error: DSecError, *, attempt_started: float, now: float) -> float | None:
        """Seconds to wait before the next attempt, or None: give up and raise ``error``."""
        if self._failures == 0 or now - attempt_started > STEADY_S:
            self._failures = 0
            self._row_started = now
        ceiling = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2**self._failures)
        delay = error.retry_after if error.retry_after is not None else random.uniform(ceiling / 2, ceiling)
        self._failures += 1
        end = self._row_started + self._budget_s
        if self._deadline is not None:
            end = min(end, self._deadline)
        return delay if now + delay <= end else None


class Transport:
    """A session with one apiserver. It belongs to the event loop in which it is first used."""

    def __init__(self, url: str, api_key: str | None, project: str | None) -> None:
        self.url = url.rstrip("/")
        self._socket = self.url.removeprefix(UNIX) if self.url.startswith(UNIX) else None
        self._base = self.url if self._socket is None else "http://localhost"
        self._headers = {"Accept": MSGPACK, "Accept-Encoding": "identity", "User-Agent": "libdsec"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        if project is not None:
            self._headers["X-DSec-Project"] = project
        self._session: aiohttp.ClientSession | None = None
        self._pid = os.getpid()
        self._closed_because: DSecError | None = None
        self._answered = False

    async def open(self) -> None:
        """Make the session. Opening an open transport changes nothing; opening a closed one makes it usable again."""
        self._closed_because = None
        self._live_session()

    async def close(self, because: DSecError | None = None) -> None:
        """Close every connection. Later calls raise ``because``. Closing twice changes nothing."""
        if self._closed_because is None:
            self._closed_because = because or InvalidArgument("the client is closed: open() it again or make a new one")
        # In a forked child the connections are the parent's, and so is the kernel object that its event loop waits with.
        if self._session is not None and self._pid == os.getpid():
            session, self._session = self._session, None
            await session.close()

    @property
    def closed(self) -> bool:
        return self._closed_because is not None

    def at(self, path: str, query: Query | None = None) -> URL:
        """The URL of ``path`` on this server; see :func:`build_url`."""
        return build_url(self._base, path, query)

    def _live_session(self) -> aiohttp.ClientSession:
        if self._pid != os.getpid():
            raise InvalidArgument("this client was made before fork(): make a new one in the child")
        if self._session is None:
            if self._closed_because is not None:
                raise self._closed_because
            self._session = aiohttp.ClientSession(
                connector=self._connector(),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                auto_decompress=False,
                read_bufsize=READ_BUFFER,
                max_line_size=64 << 10,
            )
            # aiohttp would send a PUT a second time by itself when a kept connection breaks, and with it standard input or an append.
            self._session._retry_connection = False
        return self._session

    def _connector(self) -> aiohttp.BaseConnector:
        if self._socket is not None:
            return aiohttp.UnixConnector(self._socket, limit=0, keepalive_timeout=KEEPALIVE_S)
        return aiohttp.TCPConnector(
            limit=0, keepalive_timeout=KEEPALIVE_S, ttl_dns_cache=300, socket_factory=_make_socket, enable_cleanup_closed=False
        )

    def retry(self, deadline: float | None = None) -> Retry:
        """A fresh budget for one call."""
        return Retry(RETRY_FOR_S if self._answered else FIRST_CONTACT_S, deadline)

    def unreachable(self, error: Exception) -> Unavailable:
        """What a connection failure is to the caller."""
        hint = "" if self._answered else "; is the server running (`dsec up`), and is the address right?"
        detail = str(error) or type(error).__name__
        return Unavailable(f"no answer from {self.url}: {detail}{hint}", reason=UNREACHABLE)

    async def call(
        self,
        method: str,
        url: URL,
        answer: Answer[T],
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        deadline: float | None = None,
    ) -> T:
        """One request that may be repeated, and its decoded answer. ``body`` is msgpack.

        Raises what the server answers, or Unavailable when it can't be reached within the retry budget.
        """
        content_type, data = await self._exchange(method, url, body, headers, deadline)
        return answer.decode(content_type, data)

    async def send(
        self, method: str, url: URL, *, body: bytes | None = None, headers: Mapping[str, str] | None = None, deadline: float | None = None
    ) -> None:
        """Like :meth:`call`, for an answer without content."""
        await self._exchange(method, url, body, headers, deadline)

    async def _exchange(
        self, method: str, url: URL, body: bytes | None, headers: Mapping[str, str] | None, deadline: float | None
    ) -> tuple[str, bytes]:
        session = self._live_session()
        clock = asyncio.get_running_loop().time
        if body is not None:
            headers = _MSGPACK_BODY if headers is None else {**headers, "Content-Type": MSGPACK}
        retry: Retry | None = None
        while True:
            started = clock()
            try:
                async with session.request(method, url, data=body, headers=headers, allow_redirects=False) as response:
                    data = await response.read()
                    content_type = response.headers.get("Content-Type", "")
                self._answered = True
                if response.status < 300:
                    return content_type, data
                error = error_of(response.status, content_type, data)
                if not isinstance(error, Unavailable):
                    raise error
            except CONNECTION_ERRORS as failure:
                if self._closed_because is not None:
                    raise self._closed_because from failure
                error = self.unreachable(failure)
                error.__cause__ = failure
            retry = retry or self.retry(deadline)
            delay = retry.delay(error, attempt_started=started, now=clock())
            if delay is None:
                raise error
            await asyncio.sleep(delay)

    async def repeat(self, attempt: Callable[[], Awaitable[T]], *, deadline: float | None = None) -> T:
        """The result of ``attempt``, which is made again as long as it raises Unavailable and the retry budget lasts."""
        clock = asyncio.get_running_loop().time
        retry: Retry | None = None
        while True:
            started = clock()
            try:
                return await attempt()
            except Unavailable as error:
                retry = retry or self.retry(deadline)
                delay = retry.delay(error, attempt_started=started, now=clock())
                if delay is None or self.closed:
                    raise
            await asyncio.sleep(delay)

    @asynccontextmanager
    async def request(
        self,
        method: str,
        url: URL,
        *,
        data: bytes | AsyncIterable[bytes | memoryview] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """One attempt, answered by a response whose body is still to be read. Raises what the server answers; Unavailable when the
        connection fails, also while the body is being read inside the ``async with``; what ``data`` raises, and TypeError where it yields
        anything but bytes. A :class:`Source` tells which of the two an error came from."""
        session = self._live_session()
        source = data if data is None or isinstance(data, bytes | Source) else Source(data)
        try:
            async with session.request(method, url, data=source, headers=headers, allow_redirects=False) as response:
                self._answered = True
                if response.status >= 300:
                    content = await response.content.read(ERROR_BODY_LIMIT)
                    raise error_of(response.status, response.headers.get("Content-Type", ""), content)
                yield response
        except CONNECTION_ERRORS as failure:
            if isinstance(source, Source) and source.failure is not None:
                raise source.failure from None
            if self._closed_because is not None:
                raise self._closed_because from failure
            raise self.unreachable(failure) from failure

    async def lines(
        self,
        method: str,
        url: URL,
        answer: Answer[T],
        *,
        body: bytes | None = None,
        data: AsyncIterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[T, None]:
        """The items of an NDJSON answer, each as soon as its line is there. One attempt: a break raises Unavailable.

        ``body`` is a msgpack request body, ``data`` a stream of bytes; at most one of them is given.
        """
        async with self.open_lines(method, url, answer, body=body, data=data, headers=headers) as items:
            async for item in items:
                yield item

    @asynccontextmanager
    async def open_lines(
        self,
        method: str,
        url: URL,
        answer: Answer[T],
        *,
        body: bytes | None = None,
        data: AsyncIterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[Lines[T], None]:
        """:meth:`lines`, entered when the answer has begun, for a reader who may stop early and needs to know what was sent to it."""
        all_headers = {"Accept": NDJSON, "Content-Type": MSGPACK if body is not None else OCTETS, **(headers or {})}
        async with self.request(method, url, data=body if body is not None else data, headers=all_headers) as response:
            yield Lines(response, answer)

    async def websocket(self, url: URL, *, max_message: int = 4 << 20) -> aiohttp.ClientWebSocketResponse:
        """A WebSocket. Raises what the server answers instead of the upgrade, Unavailable when it can't be reached."""
        session = self._live_session()
        try:
            socket = await session.ws_connect(url, max_msg_size=max_message, compress=0, autoping=True)
        except aiohttp.WSServerHandshakeError as failure:
            raise error_of(failure.status, "", f"WebSocket {url.path}: {failure.message}".encode()) from failure
        except CONNECTION_ERRORS as failure:
            raise self.unreachable(failure) from failure
        self._answered = True
        return socket


class Source:
    """A request body from the caller in chunks that can be sent at once, remembering what the caller raised: that isn't a failure of the
    connection."""

    def __init__(self, items: AsyncIterable[bytes | memoryview]) -> None:
        self._items = items
        self.failure: Exception | None = None

    async def __aiter__(self) -> AsyncGenerator[bytes | memoryview, None]:
        # aiohttp sends a request's head along with the first piece of its body, and the server takes a connection without a head for a
        # dead one after 30 s. An empty piece sends the head alone: no chunk is made of it.
        yield b""
        try:
            async for item in self._items:
                if not isinstance(item, bytes | bytearray | memoryview):
                    raise TypeError(f"a source of content must yield bytes, not {type(item).__name__}")
                if len(item) <= SEND_CHUNK:
                    yield item
                    continue
                view = memoryview(item)
                for start in range(0, len(view), SEND_CHUNK):
                    yield view[start : start + SEND_CHUNK]
        except Exception as failure:
            self.failure = failure
            raise


class Lines(Generic[T]):
    """The items of an NDJSON response, each as soon as its line is complete. A wait for the next one that is cancelled loses nothing."""

    def __init__(self, response: aiohttp.ClientResponse, answer: Answer[T]) -> None:
        self._response = response
        self._answer = answer
        self._complete: deque[bytes] = deque()
        self._rest = b""

    def __aiter__(self) -> Lines[T]:
        return self

    async def __anext__(self) -> T:
        while not self._complete:
            chunk = await self._response.content.readany()
            if not chunk:
                last, self._rest = self._rest, b""
                if not last.strip():
                    raise StopAsyncIteration
                return self._answer.decode_line(last)
            *complete, self._rest = (self._rest + chunk).split(b"\n")
            self._complete.extend(filter(None, complete))
        return self._answer.decode_line(self._complete.popleft())

    async def left_over(self) -> list[T]:
        """Ends the answer from this side, and returns the items that the server had sent by then and nobody has taken.

        Our half of the connection is closed. A server takes that for a client that went away: it begins nothing more, and what it had
        handed over before still comes, in front of its own end. Over TLS a half can't be closed: then it is what has arrived.
        """
        connection = self._response.connection
        transport = None if connection is None else connection.transport
        if transport is not None and transport.can_write_eof():
            transport.write_eof()
            patience_s = LEAVE_S
        else:
            patience_s = 0.0
        items: list[T] = []
        # The answer that was cut short by us ends as a broken one.
        with contextlib.suppress(StopAsyncIteration, TimeoutError, *CONNECTION_ERRORS):
            async with asyncio.timeout(patience_s):
                while True:
                    items.append(await anext(self))
        return items


def _make_socket(address: tuple[int, int, int, str, tuple[str, int]]) -> socket.socket:
    """A socket that sends small requests at once and notices a vanished host."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Calls have no time limit: a host that vanished must be noticed without.
    keep_alive(made)
    return made


CONNECTION_ERRORS = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError)
"""What aiohttp raises when the network failed, as opposed to an answer."""
_MSGPACK_BODY = {"Content-Type": MSGPACK}
_BY_STATUS: dict[int, type[DSecError]] = {
    **{
        kind.status: kind
        for kind in (InvalidArgument, AuthenticationError, PermissionDenied, NotFound, Conflict, QuotaExceeded, SandboxGone, SandboxFailed)
    },
    **dict.fromkeys((502, 503, 504), Unavailable),
}
"""What an answer without an error body is taken for: a proxy's 502 to 504 say that the server can't be reached."""
