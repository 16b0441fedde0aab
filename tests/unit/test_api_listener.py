"""The listener on a real socket: its limits, and what a stop does to requests under way."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from edge_fakes import eventually
from starlette.types import Receive, Scope, Send

from dsec.api import listener as listener_module
from dsec.api.errors import ErrorBoundary
from dsec.api.listener import HEADER_LIMIT, PIPELINE_LIMIT, LimitedWebSocket, Listener, bind, is_loopback, origin
from libdsec.errors import AuthenticationError
from libdsec.transport import Transport

DEADLINE_S = 10.0

App = Callable[[Scope, Receive, Send], Awaitable[None]]


@contextlib.asynccontextmanager
async def listening(app: App) -> AsyncIterator[tuple[Listener, str]]:
    bound = bind("127.0.0.1", 0)
    listener, url = Listener(app, bound), origin(bound)
    running = asyncio.create_task(listener.run_until_stopped())
    async with asyncio.timeout(DEADLINE_S):
        await listener.listening.wait()
    try:
        yield listener, url
    finally:
        listener.stop()
        async with asyncio.timeout(DEADLINE_S):
            await running


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


async def talk(url: str, *writes: bytes) -> bytes:
    """Send bytes as they are; returns everything until the other side closes."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(DEADLINE_S):
            for data in writes:
                writer.write(data)
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_a_head_without_end_is_refused_before_anybody_is_authenticated() -> None:
    async with listening(hello) as (_, url):
        answer = await talk(url, b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: ", b"a" * (HEADER_LIMIT + 1))
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert str(HEADER_LIMIT).encode() in answer
        # Nor are the empty lines that may stand before one.
        answer = await talk(url, b"\r\n" * (HEADER_LIMIT // 2 + 1))
        assert answer.startswith(b"HTTP/1.1 400 ")


async def test_a_body_arrives_as_it_was_sent_however_it_is_cut() -> None:
    body = random.Random(1).randbytes(3_000_000)
    received = bytearray()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        more = True
        while more:
            message = await receive()
            received.extend(message["body"])
            more = message["more_body"]
            await asyncio.sleep(0.001)  # what arrives meanwhile is collected
        await hello(scope, receive, send)

    cuts = [0, 1, 2, 1000, 70_000, 70_001, 1_000_000, 2_999_999, len(body)]
    head = f"PUT / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    async with listening(slow) as (_, url):
        answer = await talk(url, head, *(body[start:end] for start, end in itertools.pairwise(cuts)))
    assert answer.endswith(b"hello")
    assert bytes(received) == body


async def test_a_large_body_is_no_large_head() -> None:
    received = 0

    async def count(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal received
        more = True
        while more:
            message = await receive()
            received += len(message["body"])
            more = message["more_body"]
        await hello(scope, receive, send)

    size = 4 * HEADER_LIMIT
    async with listening(count) as (_, url):
        head = f"PUT / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n".encode()
        assert (await talk(url, head + b"b" * size)).endswith(b"hello")
    assert received == size


async def test_a_body_may_begin_and_go_on_as_late_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "HEADER_DEADLINE_S", 0.2)
    monkeypatch.setattr(listener_module, "KEEP_ALIVE_S", 0.2)
    received = bytearray()

    async def take(scope: Scope, receive: Receive, send: Send) -> None:
        more = True
        while more:
            message = await receive()
            assert message["type"] == "http.request"
            received.extend(message["body"])
            more = message["more_body"]
        await hello(scope, receive, send)

    async def late() -> AsyncIterator[bytes]:
        for piece in (b"one", b"two"):
            # Longer than any deadline of a connection without a request.
            await asyncio.sleep(0.5)
            yield piece

    async with listening(take) as (_, url):
        transport = Transport(url, None, None)
        # The second one goes over the connection of the first.
        for _ in range(2):
            async with transport.request("PUT", transport.at("/"), data=late()) as response:
                assert await response.read() == b"hello"
        await transport.close()
    assert bytes(received) == b"onetwo" * 2


async def test_whoever_never_finishes_a_head_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "HEADER_DEADLINE_S", 0.05)
    async with listening(hello) as (_, url):
        assert await talk(url, b"GET / HT") == b""
        assert await talk(url) == b""
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(DEADLINE_S):
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"hello")
            writer.write(b"GET / HT")
            assert await reader.read() == b""
        writer.close()


ENDLESS = {
    "trailers": b"0\r\n" + b"X-More: and more\r\n" * (HEADER_LIMIT // 8),
    "one trailer": b"0\r\nX-More: " + b"a" * 2 * HEADER_LIMIT,
    "a chunk's extension": b"5;" + b"a" * 2 * HEADER_LIMIT,
    "a chunk's size": b"0" * 2 * HEADER_LIMIT,
}


@pytest.mark.parametrize("kind", ENDLESS)
async def test_what_stands_between_and_behind_chunks_is_bounded(kind: str) -> None:
    seen: list[Scope] = []

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        await hello(scope, receive, send)

    async with listening(answer) as (_, url):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nb\r\n")
        async with asyncio.timeout(DEADLINE_S):
            # Also after the answer, behind which nobody waits for the rest.
            await reader.readuntil(b"hello")
            with contextlib.suppress(ConnectionError):
                for start in range(0, len(ENDLESS[kind]), 4096):
                    writer.write(ENDLESS[kind][start : start + 4096])
                    await writer.drain()
                assert await reader.read() == b""
        writer.close()
    assert [name for name, _ in seen[0]["headers"]] == [b"host", b"transfer-encoding"]


async def test_a_body_that_goes_on_after_its_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening(hello) as (_, url):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        monkeypatch.setattr(listener_module, "HEADER_DEADLINE_S", 0.05)
        async with asyncio.timeout(DEADLINE_S):
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nx")
            await reader.readuntil(b"hello")
            assert await reader.read() == b""
        writer.close()


async def test_trailers_are_no_headers_and_may_not_take_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[bytes] = []
    heads: list[list[tuple[bytes, bytes]]] = []

    async def take(scope: Scope, receive: Receive, send: Send) -> None:
        bodies.append(b"")
        while (message := await receive())["type"] == "http.request":
            bodies[-1] += message["body"]
            if not message["more_body"]:
                await hello(scope, receive, send)
                break
        heads.append(scope["headers"])

    head = b"POST / HTTP/1.1\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with listening(take) as (_, url):
        assert (await talk(url, head + b"1\r\nb\r\n0\r\nX-Sum: 1\r\n\r\n")).endswith(b"hello")
        monkeypatch.setattr(listener_module, "HEADER_DEADLINE_S", 0.05)
        # A body may take its time, but not what comes behind it.
        assert await talk(url, head + b"1\r\nb\r\n0\r\nX-Sum: 1\r\nX-Sum") == b""
    assert bodies == [b"b", b"b"]
    assert [[name for name, _ in one] for one in heads] == [[b"connection", b"transfer-encoding"]] * 2


async def test_a_body_of_tiny_chunks_arrives_whole() -> None:
    received = bytearray()

    async def take(scope: Scope, receive: Receive, send: Send) -> None:
        more = True
        while more:
            message = await receive()
            assert isinstance(message["body"], bytes)
            received.extend(message["body"])
            more = message["more_body"]
        await hello(scope, receive, send)

    sent = bytes(range(256)) * 200
    async with listening(take) as (_, url):
        head = b"PUT / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunks = b"".join([b"1\r\n%c\r\n" % byte for byte in sent])
        assert (await talk(url, head + chunks + b"0\r\n\r\n")).endswith(b"hello")
    assert bytes(received) == sent


async def test_a_client_may_ask_ahead_but_not_without_end() -> None:
    begun, may_answer = 0, asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal begun
        begun += 1
        await may_answer.wait()
        await hello(scope, receive, send)

    one = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    async with listening(slow) as (listener, url):
        assert await talk(url, one * 10_000) == b""
        assert begun == 1 and not listener.server_state.connections
        may_answer.set()
        last = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        assert (await talk(url, one * PIPELINE_LIMIT + last)).count(b"hello") == PIPELINE_LIMIT + 1


async def test_nothing_is_written_into_the_answer_to_an_earlier_request() -> None:
    async def begin(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100")]})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass

    async with listening(begin) as (_, url):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(DEADLINE_S):
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"begun")
            writer.write(b"this is no request\r\n\r\n")
            assert await reader.read() == b""
        writer.close()


async def test_who_asked_ahead_and_went_away_is_gone_for_every_request() -> None:
    begun, gone = asyncio.Event(), asyncio.Event()

    async def follow(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()

    async with listening(follow) as (_, url):
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(DEADLINE_S):
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
            await begun.wait()
            writer.close()
            await gone.wait()


async def test_an_answer_that_its_app_breaks_off_is_cut_and_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def break_off(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100")]})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        raise AuthenticationError("no longer")

    async with listening(ErrorBoundary(break_off)) as (_, url):
        assert (await talk(url, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")).endswith(b"\r\n\r\nbegun")
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_refused_websocket_gets_the_status_and_the_envelope() -> None:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        raise AuthenticationError("no key")

    async with listening(ErrorBoundary(refuse)) as (_, url), aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await session.ws_connect(url)
        assert caught.value.status == 401
        assert caught.value.headers is not None
        assert caught.value.headers["www-authenticate"] == "Bearer"


async def test_the_app_can_see_whether_what_it_sent_went_to_a_live_connection() -> None:
    seen: list[bool] = []
    ended = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        seen.append(scope["dsec.connected"]())
        while (await receive())["type"] != "http.disconnect":
            pass
        await send({"type": "http.response.body", "body": b"second", "more_body": True})
        seen.append(scope["dsec.connected"]())
        ended.set()

    async with listening(app) as (_, url):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(DEADLINE_S):
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"first")
            writer.close()
            await ended.wait()
    assert seen == [True, False]


async def test_a_stop_lets_the_request_under_way_end_and_takes_no_other() -> None:
    arrived, may_answer = asyncio.Event(), asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        arrived.set()
        await may_answer.wait()
        await hello(scope, receive, send)

    async with aiohttp.ClientSession() as session, listening(slow) as (listener, url):

        async def get() -> bytes:
            async with session.get(url) as response:
                return await response.read()

        under_way = asyncio.create_task(get())
        async with asyncio.timeout(DEADLINE_S):
            await arrived.wait()
            listener.stop()
            while True:
                try:
                    await talk(url)
                except OSError:
                    break
                await asyncio.sleep(0.01)
            may_answer.set()
            assert await under_way == b"hello"


async def test_a_stop_cuts_a_stream_that_would_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "STOP_GRACE_S", 0)
    cut = asyncio.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        try:
            await asyncio.Event().wait()
        finally:
            cut.set()

    async with aiohttp.ClientSession() as session, listening(endless) as (listener, url):
        response = await session.get(url)
        listener.stop()
        async with asyncio.timeout(DEADLINE_S):
            await cut.wait()
        response.close()


def test_addresses_are_told_as_this_machine_reaches_them() -> None:
    for host, url, loopback in [
        ("127.0.0.1", "http://127.0.0.1:", True),
        ("0.0.0.0", "http://127.0.0.1:", False),
        ("::1", "http://[::1]:", True),
    ]:
        with bind(host, 0) as bound:
            assert origin(bound) == f"{url}{bound.getsockname()[1]}"
            assert is_loopback(bound) is loopback


# --- WebSockets


def websocket_of(listener: Listener) -> LimitedWebSocket:
    """The one that is open."""
    (found,) = (one for one in listener.server_state.connections if isinstance(one, LimitedWebSocket))
    return found


def masked(head: int, payload: bytes = b"") -> bytes:
    """A frame of a client, masked by nothing."""
    assert len(payload) < 126
    return bytes((head, 0x80 | len(payload))) + bytes(4) + payload


@contextlib.asynccontextmanager
async def websocket(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection whose handshake is done, and on which frames are sent as bytes."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    key = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eHh4eHh4eHh4eHh4eHh4eA==\r\n\r\n"
    try:
        async with asyncio.timeout(DEADLINE_S):
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n" + key)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
            yield reader, writer
    finally:
        writer.close()


class Taker:
    """An app that takes the messages of a WebSocket, at once or when it may."""

    def __init__(self) -> None:
        self.messages: list[str | bytes] = []
        self.turns = 0
        """Of the event loop, while it took them."""
        self.may_take = asyncio.Event()
        self.may_take.set()
        self.ended = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await self.may_take.wait()
        counting = asyncio.create_task(self._count())
        while (message := await receive())["type"] == "websocket.receive":
            self.messages.append(message["text"] if message.get("bytes") is None else message["bytes"])
            if self.messages[-1] in ("last", b"last"):
                break
        counting.cancel()
        self.ended.set()

    async def _count(self) -> None:
        while True:
            self.turns += 1
            await asyncio.sleep(0)


CRUMBS = 20_000


@pytest.mark.parametrize("head", [0x82, 0x89, 0x8A], ids=["empty messages", "pings", "pongs"])
async def test_a_client_of_tiny_frames_leaves_turns_to_others(head: int) -> None:
    taker = Taker()
    async with listening(taker) as (_, url), websocket(url) as (_, writer):
        writer.write(masked(head) * CRUMBS + masked(0x82, b"last"))
        await taker.ended.wait()
    assert len(taker.messages) == 1 + (CRUMBS if head == 0x82 else 0)
    # One read can hold all of them.
    assert taker.turns > CRUMBS // 200


async def test_fragments_of_nothing_pile_up_nowhere() -> None:
    taker = Taker()
    async with listening(taker) as (listener, url), websocket(url) as (_, writer):
        writer.write(masked(0x01, b"la") + masked(0x00) * CRUMBS + masked(0x89, b"seen"))
        protocol = websocket_of(listener)
        await eventually(lambda: not protocol._received and bool(protocol.frames))
        assert len(protocol.frames) == 1
        writer.write(masked(0x00, b"s") + masked(0x80, b"t"))
        await taker.ended.wait()
    assert taker.messages == ["last"]


async def test_pings_of_a_client_that_reads_nothing_pile_up_nowhere() -> None:
    taker = Taker()
    async with listening(taker) as (listener, url), websocket(url) as (reader, writer):
        protocol = websocket_of(listener)
        for number in range(200):
            writer.write(masked(0x89, b"%0120d" % number) * 1_000)
            await writer.drain()
        writer.write(masked(0x89, b"newest"))
        newest = b"\x8a\x06newest"
        await eventually(lambda: protocol._pong == [newest])
        assert protocol.transport.get_write_buffer_size() < 1 << 20
        # It gets its pong once there is room for it.
        async with asyncio.timeout(DEADLINE_S):
            while await reader.readexactly(8) != newest:
                await reader.readexactly(114)


async def test_messages_wait_until_they_are_taken_and_come_in_order() -> None:
    taker = Taker()
    taker.may_take.clear()
    async with listening(taker) as (listener, url), websocket(url) as (_, writer):
        sent = [b"%d" % number for number in range(CRUMBS)]
        writer.write(b"".join([masked(0x82, one) for one in sent]) + masked(0x82, b"last"))
        protocol = websocket_of(listener)
        await eventually(lambda: bool(protocol._received))
        # Parsed are those of the first slice; the rest is kept as it came.
        assert protocol.queue.qsize() < 200
        taker.may_take.set()
        await taker.ended.wait()
    assert taker.messages == [*sent, b"last"]


async def test_a_client_that_breaks_the_rules_is_no_failure_of_the_app(caplog: pytest.LogCaptureFixture) -> None:
    ended = asyncio.Event()

    async def talker(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (await receive())["type"] == "websocket.receive":
            pass
        try:
            await send({"type": "websocket.send", "text": "still talking"})
        except OSError:
            ended.set()
            raise

    async with listening(talker) as (_, url), websocket(url) as (reader, writer):
        writer.write(masked(0x83))
        assert (await reader.read())[0] == 0x88
        await ended.wait()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
