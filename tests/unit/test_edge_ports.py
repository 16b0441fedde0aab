"""Ports inside a sandbox through the real listener: what a server inside may do to its client, and what it may not do to the service."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest
import structlog
from edge_fakes import Client, FakeChannel
from starlette.types import ASGIApp, Receive, Scope, Send

from dsec.api.errors import ErrorBoundary
from dsec.api.listener import Listener, bind, origin
from dsec.edge import Edge

DEADLINE_S = 10.0
OK = b"HTTP/1.1 200 OK\r\n"
WS_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Inside:
    """The connection to a server inside, which answers ``request`` by these pieces and then closes, or waits."""

    def __init__(self, *pieces: bytes, closes: bool = True) -> None:
        self.got = bytearray()
        self.turns: list[int] = []
        """Of the event loop, when each piece was asked for."""
        self._pieces = list(pieces)
        self._closes = closes
        self._turn = 0

    async def read(self) -> tuple[int, int, bytes] | None:
        self.turns.append(self._turn)
        if not self._pieces:
            if not self._closes:
                await asyncio.Event().wait()
            return None
        return 1, 0, self._pieces.pop(0)

    async def write(self, data: bytes) -> None:
        self.got += data

    async def write_eof(self) -> None: ...

    def detach(self) -> None: ...

    async def count_turns(self) -> None:
        while True:
            self._turn += 1
            await asyncio.sleep(0)

    @property
    def headers(self) -> dict[str, str]:
        """Of the request."""
        lines = bytes(self.got).partition(b"\r\n\r\n")[0].decode().split("\r\n")[1:]
        return {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}


class InsideWebSocket(Inside):
    """One that shakes hands and then sends these frames."""

    def __init__(self, frames: bytes, *, closes: bool = True) -> None:
        super().__init__(b"", frames, closes=closes)

    async def read(self) -> tuple[int, int, bytes] | None:
        if not self.turns:
            accept = base64.b64encode(hashlib.sha1(self.headers["sec-websocket-key"].encode() + WS_GUID).digest())
            self._pieces[0] = (
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
                + accept
                + b"\r\n\r\n"
            )
        return await super().read()


@contextlib.asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[str]:
    bound = bind("127.0.0.1", 0)
    listener = Listener(ErrorBoundary(app), bound)
    running = asyncio.create_task(listener.run_until_stopped())
    try:
        await listener.listening.wait()
        yield origin(bound)
    finally:
        listener.stop()
        async with asyncio.timeout(DEADLINE_S):
            await running


class Ports:
    """A sandbox's port 8000, below the API and at the origin of its own."""

    def __init__(self, api: str, outside: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.api = api
        self.outside = outside
        self._monkeypatch = monkeypatch

    def lead_to(self, inside: Inside) -> None:
        async def open_port(channel: FakeChannel, port: int, host: bytes = b"") -> Inside:
            return inside

        self._monkeypatch.setattr(FakeChannel, "open_port", open_port)


@pytest.fixture
async def ports(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ports]:
    async def api(scope: Scope, receive: Receive, send: Send) -> None:
        scope["dsec.project"] = "p"
        await edge.app(scope, receive, send)

    client = Client(edge)
    made = await client("POST", "/v1/sandboxes", {"args": {"backend": "container", "container_image": "base"}})
    path = f"/v1/sandboxes/{made.lines()[0]['sandbox']['id']}"
    signed = (await client("GET", f"{path}/url/8000")).json()["url"].removeprefix("http://127.0.0.1:7071")
    async with served(api) as inner, served(edge.ports_app) as outer:
        yield Ports(f"{inner}{path}/ports/8000/", f"{outer}{signed}", monkeypatch)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(DEADLINE_S)) as opened:
        yield opened


@pytest.fixture
def no_failure_of_ours(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing is logged that would have somebody look for a fault in the service."""
    with structlog.testing.capture_logs() as logs, caplog.at_level(logging.WARNING):
        yield
    assert [entry for entry in logs if entry["log_level"] in ("warning", "error")] == []
    assert caplog.get_records("call") == []


# --- what a server inside answers


@pytest.mark.usefixtures("no_failure_of_ours")
@pytest.mark.parametrize(
    ("method", "answer", "status", "body", "length"),
    [
        ("GET", OK + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", 200, b"hello", None),
        ("GET", OK + b"Content-Length: 500\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", 200, b"hello", None),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 500\r\n\r\n", 304, b"", None),
        ("GET", b"HTTP/1.1 204 No Content\r\nContent-Length: 500\r\n\r\n", 204, b"", None),
        ("HEAD", OK + b"Content-Length: 500\r\n\r\n", 200, b"", "500"),
        ("GET", OK + b"Content-Length: 5\r\n\r\nhello", 200, b"hello", "5"),
        ("GET", b"HTTP/1.1 103 Early Hints\r\n\r\n" * 5 + OK + b"\r\nuntil it closes", 200, b"until it closes", None),
    ],
)
async def test_an_answer_has_the_length_that_it_has(
    ports: Ports, session: aiohttp.ClientSession, method: str, answer: bytes, status: int, body: bytes, length: str | None
) -> None:
    ports.lead_to(Inside(answer))
    async with session.request(method, ports.outside) as reply:
        assert (reply.status, await reply.read(), reply.headers.get("Content-Length")) == (status, body, length)


@pytest.mark.usefixtures("no_failure_of_ours")
@pytest.mark.parametrize("head", [b"Content-Length: 500\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n1f4\r\n"])
@pytest.mark.parametrize("way", ["api", "outside"])
async def test_an_answer_that_is_broken_off_inside_is_broken_off_outside(
    ports: Ports, session: aiohttp.ClientSession, head: bytes, way: str
) -> None:
    ports.lead_to(Inside(OK + head, b"the begin"))
    async with session.get(getattr(ports, way)) as reply:
        assert reply.status == 200
        assert await reply.content.readexactly(9) == b"the begin"
        with pytest.raises(aiohttp.ClientPayloadError):
            await reply.content.read()


@pytest.mark.usefixtures("no_failure_of_ours")
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "port_closed"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not_http"),
        (b"HTTP/1.1 777 Lucky\r\n\r\n", "not_http"),
        (OK + b"X-Bell: ding\x07\r\n\r\n", "not_http"),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n" * 1000 + OK + b"\r\n", "not_http"),
        (OK + b"X-Long: " + b"a" * (1 << 20), "not_http"),
    ],
)
async def test_what_is_no_answer_is_said_to_be_none(ports: Ports, session: aiohttp.ClientSession, answer: bytes, reason: str) -> None:
    ports.lead_to(Inside(answer) if answer else Inside())
    async with session.get(ports.outside) as reply:
        assert (reply.status, (await reply.json())["error"]["reason"]) == (503, reason)


# --- tiny things


@pytest.mark.parametrize("crumb", [b"1\r\nx\r\n", b"HTTP/1.1 103 Early Hints\r\n\r\n"])
async def test_crumbs_of_an_answer_leave_turns_to_others(
    ports: Ports, session: aiohttp.ClientSession, crumb: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.edge.ports.INFORMATIONAL_MAX", 1 << 20)
    chunked = OK + b"Transfer-Encoding: chunked\r\n\r\n"
    # Read whole before the next piece is asked for.
    inside = Inside(*((chunked, crumb * 10_000, b"0\r\n\r\n") if crumb[0] == ord("1") else (crumb * 10_000, chunked + b"0\r\n\r\n")))
    ports.lead_to(inside)
    counting = asyncio.create_task(inside.count_turns())
    async with session.get(ports.outside) as reply:
        assert await reply.read() == (b"x" * 10_000 if crumb[0] == ord("1") else b"")
    counting.cancel()
    last, before = inside.turns[-1], inside.turns[-2]
    assert last - before > 100


FRAMES = {"empty messages": b"\x81\x00", "fragments": b"\x00\x00", "pings": b"\x89\x00"}


@pytest.mark.parametrize("kind", FRAMES)
async def test_tiny_frames_from_inside_leave_turns_to_others_and_pile_up_nowhere(
    ports: Ports, session: aiohttp.ClientSession, kind: str
) -> None:
    begin, end = (b"\x01\x02ab", b"\x80\x02cd") if kind == "fragments" else (b"", b"\x81\x04abcd")
    inside = InsideWebSocket(begin + FRAMES[kind] * 10_000 + end, closes=False)
    ports.lead_to(inside)
    counting = asyncio.create_task(inside.count_turns())
    async with session.ws_connect(ports.outside, autoping=False) as socket:
        while (message := await socket.receive(DEADLINE_S)).data == "":
            pass
        assert (message.type, message.data) == (aiohttp.WSMsgType.TEXT, "abcd")
    counting.cancel()
    assert inside.turns[2] - inside.turns[1] > 100


@pytest.mark.usefixtures("no_failure_of_ours")
@pytest.mark.parametrize(("close", "code"), [(b"\x88\x00", 1000), (b"\x88\x02\x0f\xa0", 4000), (b"", 1000)])
async def test_a_websocket_closes_outside_as_it_did_inside(ports: Ports, session: aiohttp.ClientSession, close: bytes, code: int) -> None:
    ports.lead_to(InsideWebSocket(b"\x81\x02hi" + close))
    async with session.ws_connect(ports.outside) as socket:
        assert (await socket.receive(DEADLINE_S)).data == "hi"
        assert (await socket.receive(DEADLINE_S)).type is aiohttp.WSMsgType.CLOSE
        assert socket.close_code == code


# --- what a program inside gets to see


@pytest.mark.parametrize("value", ["Bearer dsec_abcdefgh_x", "bearer dsec_y", "BEARER   dsec_z"])
async def test_a_key_of_ours_reaches_no_program(ports: Ports, session: aiohttp.ClientSession, value: str) -> None:
    for url in (ports.api, ports.outside):
        inside = Inside(OK + b"Content-Length: 0\r\n\r\n")
        ports.lead_to(inside)
        async with session.get(url, headers={"Authorization": value, "X-DSec-Project": "p", "X-DSec-More": "m"}) as reply:
            assert reply.status == 200
        assert "dsec" not in bytes(inside.got).lower().decode().partition("\r\n\r\n")[0].replace("x-forwarded", "")
        inside = InsideWebSocket(b"\x88\x02\x03\xe8")
        ports.lead_to(inside)
        async with session.ws_connect(url, headers={"Authorization": value}) as socket:
            await socket.receive(DEADLINE_S)
        assert "authorization" not in inside.headers


@pytest.mark.parametrize("value", ["Bearer its-own", "Basic dXNlcjpkc2VjXw==", "dsec_x", "Bearer x-dsec_y"])
async def test_what_a_program_itself_asks_for_reaches_it(ports: Ports, session: aiohttp.ClientSession, value: str) -> None:
    inside = Inside(OK + b"Content-Length: 0\r\n\r\n")
    ports.lead_to(inside)
    async with session.get(ports.outside, headers={"Authorization": value, "Idempotency-Key": "its-own"}) as reply:
        assert reply.status == 200
    assert (inside.headers["authorization"], inside.headers["idempotency-key"]) == (value, "its-own")
    inside = Inside(OK + b"Content-Length: 0\r\n\r\n")
    ports.lead_to(inside)
    async with session.get(ports.api, headers={"Authorization": value, "Idempotency-Key": "its-own"}) as reply:
        assert reply.status == 200
    assert "authorization" not in inside.headers and inside.headers["idempotency-key"] == "its-own"


@pytest.mark.usefixtures("no_failure_of_ours")
@pytest.mark.parametrize("header", [b"X-Space: behind it \t", b"X-Empty:", b"X-Latin: caf\xe9", b"Transfer-Encoding: gzip, chunked"])
async def test_odd_requests_that_the_listener_takes_are_passed_on(ports: Ports, header: bytes) -> None:
    ports.lead_to(Inside(OK + b"Content-Length: 0\r\n\r\n"))
    host, _, path = ports.outside.removeprefix("http://").partition("/")
    reader, writer = await asyncio.open_connection(*host.split(":"))
    async with asyncio.timeout(DEADLINE_S):
        writer.write(f"GET /{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n".encode() + header + b"\r\n\r\n0\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()
