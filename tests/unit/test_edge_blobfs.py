"""The client of blobfs against a socket in the test: what it asks, and what it makes of what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dsec.edge.blobfs import BlobFigures, Blobfs

DEADLINE_S = 10
BLOB, OTHER = "a" * 64, "b" * 64

Map = dict[str, object]


class FakeServer:
    """Answers every request with the same, and tells events."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.requests: list[Map] = []
        self.answer: Map = {}
        self._connected: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def start(self) -> asyncio.Server:
        return await asyncio.start_unix_server(self._serve, self._path)

    async def tell(self, event: Map) -> None:
        """To the next one that connects."""
        _send(await asyncio.wait_for(self._connected.get(), DEADLINE_S), event)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connected.put_nowait(writer)
        while size := await reader.read(4):
            request = msgspec.msgpack.decode(await reader.readexactly(int.from_bytes(size, "big")), type=Map)
            self.requests.append(request)
            _send(writer, {"id": request["id"], **self.answer})
        writer.close()


def _send(writer: asyncio.StreamWriter, message: Map) -> None:
    frame = msgspec.msgpack.encode(message)
    writer.write(len(frame).to_bytes(4, "big") + frame)


class Told:
    """What the client told its owner."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()

    def on_complete(self, blob: str) -> None:
        self.events.put_nowait(("complete", blob))

    def on_failed(self, blob: str, reason: str) -> None:
        self.events.put_nowait(("failed", blob, reason))

    def on_uncached(self, reason: str) -> None:
        self.events.put_nowait(("uncached", reason))


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[FakeServer]:
    fake = FakeServer(tmp_path / "s")
    listening = await fake.start()
    yield fake
    listening.close()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
async def blobfs(server: FakeServer, told: Told, tmp_path: Path) -> AsyncIterator[Blobfs]:
    opened = await Blobfs.connect(str(tmp_path / "s"), listener=told, on_reconnected=lambda: None)
    yield opened
    opened.close()


@pytest.mark.usefixtures("blobfs")
@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ({"event": "complete", "blob": BLOB}, ("complete", BLOB)),
        ({"event": "failed", "blob": BLOB, "reason": "it is gone"}, ("failed", BLOB, "it is gone")),
        ({"event": "uncached", "reason": "No space left on device"}, ("uncached", "No space left on device")),
    ],
)
async def test_each_event_is_told(server: FakeServer, told: Told, event: Map, expected: tuple[str, ...]) -> None:
    await server.tell(event)
    assert await asyncio.wait_for(told.events.get(), DEADLINE_S) == expected


async def test_figures_are_asked_for_by_name(server: FakeServer, blobfs: Blobfs) -> None:
    server.answer = {
        "blobs": {BLOB: {"size": 9, "needed": 1, "fetched": 2, "from_cache": 3, "complete": True}},
        "cache_bytes": 100,
        "cache_used": 9,
        "connected": True,
    }
    found = await blobfs.stats([BLOB, OTHER])
    assert found.blobs == {BLOB: BlobFigures(size=9, needed=1, fetched=2, from_cache=3, complete=True)}
    assert [(request["verb"], request["blobs"]) for request in server.requests] == [("stats", [BLOB, OTHER])]
