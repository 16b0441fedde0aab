"""The listener on a real socket: its limits, and what a stop does to requests under way."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from starlette.types import Receive, Scope, Send

from dsec.api import listener as listener_module
from dsec.api.errors import ErrorBoundary
from dsec.api.listener import HEADER_LIMIT, Listener, bind, is_loopback, origin
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
