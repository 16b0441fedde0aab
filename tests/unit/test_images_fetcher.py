"""The fetcher: ranges of frames over its socket, as blobfs asks for them, with stores that are slow, gone, cut and back again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from edge_fakes import eventually

from dsec.images.fetcher import Fetcher
from dsec.images.shared import DirectoryBlobs, open_blobs
from libdsec.errors import Unavailable
from tests.unit.seaweed import seaweed

BLOB = "ab" * 32
SIZE = 8 << 20


class Client:
    """What blobfs does."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, path: Path) -> Client:
        return cls(*await asyncio.open_unix_connection(path, limit=1 << 26))

    def ask(self, number: int, offset: int, length: int, blob: str = BLOB) -> None:
        self.send(msgspec.msgpack.encode({"id": number, "blob": blob, "offset": offset, "length": length}))

    def send(self, frame: bytes) -> None:
        self.writer.write(struct.pack(">I", len(frame)) + frame)

    async def answer(self) -> dict[str, object]:
        async with asyncio.timeout(30):
            (length,) = struct.unpack(">I", await self.reader.readexactly(4))
            answer: dict[str, object] = msgspec.msgpack.decode(await self.reader.readexactly(length))
            return answer

    async def data(self) -> bytes:
        data = (await self.answer())["data"]
        assert isinstance(data, bytes)
        return data


class Held(DirectoryBlobs):
    """A store that answers when it is let, counts what it is asked for at once, and can be cut off."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.go = asyncio.Event()
        self.go.set()
        self.cut = False
        self.now = self.most = 0

    async def get_range(self, key: str, offset: int, length: int) -> memoryview:
        self.now += length
        self.most = max(self.most, self.now)
        try:
            await self.go.wait()
            if self.cut:
                raise Unavailable("the network is down")
            return await super().get_range(key, offset, length)
        finally:
            self.now -= length


@pytest.fixture
def content() -> bytes:
    return os.urandom(SIZE)


@pytest.fixture
async def store(tmp_path: Path, content: bytes) -> Held:
    made = Held(tmp_path / "store")
    await made.put(f"blobs/{BLOB}.z", content)
    return made


@pytest.fixture
async def client(tmp_path: Path, store: Held) -> AsyncIterator[Client]:
    server = await Fetcher(store, memory=4 << 20).serve(tmp_path / "fetch.sock")
    made = await Client.connect(tmp_path / "fetch.sock")
    yield made
    made.writer.close()
    server.close()


async def test_many_ranges_at_once_come_back_right(client: Client, content: bytes) -> None:
    ranges = {number: (number * 7919 % (SIZE - 70_000), 1 + number * 131 % 70_000) for number in range(400)}
    for number, (offset, length) in ranges.items():
        client.ask(number, offset, length)
    for _ in range(400):
        answer = await client.answer()
        offset, length = ranges.pop(int(str(answer["id"])))
        assert answer["data"] == content[offset : offset + length]
    assert not ranges


async def test_memory_is_bounded_however_much_is_asked_for(client: Client, store: Held) -> None:
    store.go.clear()
    for number in range(100):
        client.ask(number, 0, 1 << 20)
    await client.writer.drain()
    await eventually(lambda: store.now >= 4 << 20)
    store.go.set()
    for _ in range(100):
        assert len(await client.data()) == 1 << 20
    assert store.most == 4 << 20


async def test_what_is_missing_is_not_to_be_asked_for_again_and_what_is_cut_off_is(client: Client, store: Held) -> None:
    client.ask(1, 0, 10, blob="cd" * 32)
    assert {**await client.answer(), "error": ""} == {"id": 1, "error": "", "retry": False}
    client.ask(2, SIZE - 5, 10)
    answer = await client.answer()
    assert answer["retry"] is False and "cut" in str(answer["error"])
    store.cut = True
    client.ask(3, 0, 10)
    assert await client.answer() == {"id": 3, "error": "the network is down", "retry": True}
    store.cut = False
    client.ask(4, 0, 10)
    assert len(await client.data()) == 10


@pytest.mark.parametrize(
    "frame",
    [{"blob": "../../etc/passwd"}, {"length": 0}, {"length": 1 << 30}, {"offset": -1}, {"blob": BLOB[:-1]}, {"blob": BLOB.upper()}],
)
async def test_a_range_that_cannot_be_is_refused(client: Client, frame: dict[str, object]) -> None:
    client.send(msgspec.msgpack.encode({"id": 9, "blob": BLOB, "offset": 0, "length": 1, **frame}))
    answer = await client.answer()
    assert answer["id"] == 9 and answer["retry"] is False


@pytest.mark.parametrize("frame", [b"\xc1", b"\x80", msgspec.msgpack.encode({"id": "x"}), bytes(5000)])
async def test_what_is_no_request_closes_the_connection(client: Client, frame: bytes) -> None:
    client.send(frame)
    assert await client.reader.read() == b""


async def test_a_client_that_goes_away_leaves_nothing_behind(tmp_path: Path, client: Client, store: Held) -> None:
    store.go.clear()
    for number in range(50):
        client.ask(number, 0, 1 << 20)
    await client.writer.drain()
    client.writer.close()
    await eventually(lambda: not store.now)
    store.go.set()
    other = await Client.connect(tmp_path / "fetch.sock")
    other.ask(1, 0, 4 << 20)
    assert len(await other.data()) == 4 << 20
    other.writer.close()


def start(url: str, path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "dsec.images.fetcher", "--store", url, "--socket", str(path)])


async def connect(path: Path) -> Client:
    """Waits for the process to listen."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await Client.connect(path)
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(0.05)


async def test_the_process_serves_a_real_s3_and_outlives_its_death(tmp_path: Path) -> None:
    (tmp_path / "s3").mkdir()
    with seaweed(tmp_path / "s3") as server:
        url = server.url("fetcher")
        await open_blobs(url).put(f"blobs/{BLOB}.z", bytes(range(256)) * 100)
        process = start(url, tmp_path / "fetch.sock")
        try:
            client = await connect(tmp_path / "fetch.sock")
            client.ask(1, 10, 5)
            assert await client.answer() == {"id": 1, "data": bytes(range(10, 15))}
            client.ask(2, 0, 1, blob="00" * 32)
            assert (await client.answer())["retry"] is False
            # A fetcher that is killed is replaced by another one at the same place.
            process.kill()
            process.wait()
            assert await client.reader.read() == b""
            process = start(url, tmp_path / "fetch.sock")
            client = await connect(tmp_path / "fetch.sock")
            server.process.send_signal(signal.SIGSTOP)
            client.ask(3, 256, 4)
            await asyncio.sleep(0.5)
            server.process.send_signal(signal.SIGCONT)
            assert await client.answer() == {"id": 3, "data": bytes(range(4))}
            server.process.kill()
            server.process.wait()
            client.ask(4, 0, 4)
            answer = await client.answer()
            assert answer["retry"] is True and "data" not in answer
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0


async def test_another_user_may_not_connect(tmp_path: Path, store: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.images.fetcher._peer_uid", lambda writer: os.getuid() + 1)
    server = await Fetcher(store).serve(tmp_path / "fetch.sock")
    assert (tmp_path / "fetch.sock").stat().st_mode & 0o777 == 0o600
    client = await Client.connect(tmp_path / "fetch.sock")
    client.ask(1, 0, 1)
    # Closed before the question was read, the connection ends by a reset.
    with contextlib.suppress(ConnectionResetError):
        assert await client.reader.read() == b""
    server.close()


def test_a_wrong_store_is_said_and_ends_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dsec.images.fetcher", "--store", "nowhere", "--socket", str(tmp_path / "x")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "absolute directory" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "x").exists()
