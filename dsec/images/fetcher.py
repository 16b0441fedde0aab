"""Serves blobfs with ranges of what the shared store holds: ``python -m dsec.images.fetcher --store URL --socket PATH``.

A process of its own, without privileges and without state: it may die at any moment, and blobfs asks the next one again. Frames: big-endian
u32 length of what follows, msgpack map. Requests ``{id, blob, offset, length}``, a range of the blob's frames, any number at once; answers
in any order, ``{id, data}`` or ``{id, error, retry}``. ``retry`` false: asking again won't help (no such object, or a shorter one, or the
store refuses).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import struct
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import msgspec
import uvloop

from dsec.images.shared import Blobs, BlobsDenied, open_blobs
from libdsec.errors import DSecError, InvalidArgument

RETRY_FOR_S = 1.0
"""A request to the store is repeated so long: beyond that blobfs asks again, whose readers wait in any case."""
REQUEST_LIMIT = 4096
"""Bytes of a request's frame."""
RANGE_LIMIT = 64 << 20
"""Bytes of one range: a chunk has 16 MiB at most, and neighbours may be asked for together."""
MEMORY = 256 << 20
"""Bytes of ranges that are fetched or wait for blobfs to take them, all connections together; others wait for their turn."""
REQUESTS_AT_ONCE = 10_000
"""Of one connection. More than that, and it isn't read until some are answered."""

_BLOB = re.compile(r"[0-9a-f]{64}\Z")
_LENGTH = struct.Struct(">I")

_log = logging.getLogger("dsec.fetcher")


class Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A range of ``blobs/<blob>.z``."""

    id: int
    blob: str
    offset: int
    length: int


class Data(msgspec.Struct, kw_only=True):
    """The range."""

    id: int
    data: memoryview

    def pieces(self) -> tuple[bytes, memoryview]:
        """As msgpack, the data not copied."""
        empty = msgspec.msgpack.encode(Data(id=self.id, data=memoryview(b"")))
        # The type and length of what comes last: bin 32 instead of an empty bin 8.
        return empty[:-2] + b"\xc6" + _LENGTH.pack(len(self.data)), self.data


class Failure(msgspec.Struct, kw_only=True):
    """Why there is none."""

    id: int
    error: str
    retry: bool


class Memory:
    """So many bytes, taken and given back; who comes first gets them first, so a large request isn't starved by small ones."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._free = total
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def of(self, count: int) -> AsyncGenerator[None, None]:
        """``count`` bytes (at most all of them) for the body."""
        count = min(count, self._total)
        async with self._turn:
            while self._free < count:
                self._freed.clear()
                await self._freed.wait()
            self._free -= count
        try:
            yield
        finally:
            self._free += count
            self._freed.set()


class Fetcher:
    """Answers requests from ``blobs``."""

    def __init__(self, blobs: Blobs, memory: int = MEMORY) -> None:
        self._blobs = blobs
        self._memory = Memory(memory)

    async def serve(self, path: Path) -> asyncio.Server:
        """Listens at ``path``, in the place of an earlier fetcher. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        server = await asyncio.start_unix_server(self._connected, path, limit=REQUEST_LIMIT)
        os.chmod(path, 0o600)
        return server

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        uid = _peer_uid(writer)
        tasks: set[asyncio.Task[None]] = set()
        slots = asyncio.Semaphore(REQUESTS_AT_ONCE)
        turn = asyncio.Lock()
        try:
            if uid not in (os.getuid(), 0):
                _log.warning("the user %d may not connect", uid)
                return
            while (request := await _next(reader)) is not None:
                await slots.acquire()
                task = asyncio.create_task(self._answer(request, writer, turn))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                task.add_done_callback(lambda _: slots.release())
        except (msgspec.DecodeError, msgspec.ValidationError, InvalidArgument) as error:
            _log.warning("closing a connection that sent what is no request: %s", error)
        except ConnectionError:
            pass
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            writer.close()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter, turn: asyncio.Lock) -> None:
        async with self._memory.of(request.length):
            answer = await self._fetch(request)
            pieces = answer.pieces() if isinstance(answer, Data) else (msgspec.msgpack.encode(answer),)
            # Until the kernel has taken it the range counts as memory in use.
            async with turn:
                with contextlib.suppress(ConnectionError):
                    writer.writelines((_LENGTH.pack(sum(map(len, pieces))), *pieces))
                    await writer.drain()

    async def _fetch(self, request: Request) -> Data | Failure:
        if not _BLOB.match(request.blob) or not 0 < request.length <= RANGE_LIMIT or request.offset < 0:
            wanted = f"{request.length} at {request.offset} of {request.blob!r}"
            return Failure(id=request.id, error=f"a range has 1 to {RANGE_LIMIT} bytes of a blob in hexadecimal, not {wanted}", retry=False)
        try:
            return Data(id=request.id, data=await self._blobs.get_range(f"blobs/{request.blob}.z", request.offset, request.length))
        except DSecError as error:
            return Failure(id=request.id, error=error.message, retry=error.retriable and not isinstance(error, BlobsDenied))
        except Exception as failure:
            _log.exception("a range could not be fetched")
            return Failure(id=request.id, error=f"the fetcher broke: {failure}", retry=True)


async def _next(reader: asyncio.StreamReader) -> Request | None:
    """The next request; None at the end. Raises what the decoder raises, InvalidArgument for a frame that is too long."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > REQUEST_LIMIT:
            raise InvalidArgument(f"a frame of {length} bytes; a request has {REQUEST_LIMIT} at most")
        return msgspec.msgpack.decode(await reader.readexactly(length), type=Request)
    except asyncio.IncompleteReadError:
        return None


def _peer_uid(writer: asyncio.StreamWriter) -> int:
    peer: socket.socket = writer.get_extra_info("socket")
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid


async def run(url: str, path: Path) -> None:
    """Serves until SIGTERM or SIGINT. Raises InvalidArgument for a store that can't be, OSError for the socket."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    server = await Fetcher(open_blobs(url, retry_for_s=RETRY_FOR_S)).serve(path)
    async with server:
        await stopping.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a signal, 1 where it can't start."""
    parser = argparse.ArgumentParser(prog="python -m dsec.images.fetcher", description="Serves blobfs from the shared store.")
    parser.add_argument("--store", required=True, help="a directory, or s3://BUCKET/PREFIX?endpoint=URL&credentials=FILE")
    parser.add_argument("--socket", required=True, type=Path, help="where blobfs connects")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="dsec.fetcher: %(message)s", stream=sys.stderr)
    os.umask(0o077)
    try:
        uvloop.run(run(options.store, options.socket))
    except (DSecError, OSError) as error:
        print(f"dsec.fetcher: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
