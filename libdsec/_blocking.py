"""What the generated :mod:`libdsec.sync` stands on: one event loop in a thread of its own, and ways across.

All sync clients of a process share the loop. A call from it hands over a coroutine and waits; a KeyboardInterrupt cancels the call.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Coroutine, Iterable, Iterator
from typing import TypeAlias, TypeVar

from libdsec.streams import ByteSource

T = TypeVar("T")

BlockingByteSource: TypeAlias = bytes | bytearray | memoryview | str | Iterable[bytes]
"""Content to send: bytes, text (sent as UTF-8), or an iterable of bytes."""


class _LoopThread:
    """An event loop that runs until the process ends."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="libdsec.sync", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Afterwards nothing is waited for any more: a generator that is collected while the interpreter ends must not hang."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


_lock = threading.Lock()
_current: _LoopThread | None = None
_ended = False


def _loop() -> asyncio.AbstractEventLoop:
    global _current
    with _lock:
        if _current is None or _current.pid != os.getpid():
            # The first use, or the first one after a fork: threads don't come along.
            _current = _LoopThread()
        return _current.loop


@atexit.register
def _end() -> None:
    global _ended
    _ended = True
    if _current is not None and _current.pid == os.getpid():
        _current.stop()


def run(call: Awaitable[T]) -> T:
    """The result of an awaitable, carried out on the loop thread."""
    coroutine = call if isinstance(call, Coroutine) else _awaited(call)
    if _ended:
        coroutine.close()
        raise RuntimeError("the process is ending: libdsec.sync can't be used any more")
    future = asyncio.run_coroutine_threadsafe(coroutine, _loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def _awaited(call: Awaitable[T]) -> T:
    return await call


def iterate(items: AsyncIterable[T]) -> Iterator[T]:
    """The items of an async iterable, one at a time. Closing the generator closes the source."""
    source = aiter(items)
    try:
        while True:
            try:
                yield run(anext(source))
            except StopAsyncIteration:
                return
    finally:
        close = getattr(source, "aclose", None)
        if close is not None and not _ended:
            run(close())


async def async_iterable(items: Iterable[bytes]) -> AsyncIterator[bytes]:
    """The items of an iterable, fetched in a worker thread: it may block without holding up other calls."""
    source = iter(items)
    done = object()
    while (item := await asyncio.to_thread(next, source, done)) is not done:
        assert isinstance(item, bytes)
        yield item


def async_source(source: BlockingByteSource) -> ByteSource:
    """Content from the caller in the form that the async SDK takes."""
    return source if isinstance(source, bytes | bytearray | memoryview | str) else async_iterable(source)


class BlockingReader:
    """The receiving side of a connection; the calls of :class:`asyncio.StreamReader`, blocking."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._async = reader

    def read(self, n: int = -1) -> bytes:
        """Up to ``n`` bytes as soon as some are there, b"" at the end; with -1 everything until the end."""
        return run(self._async.read(n))

    def readline(self) -> bytes:
        """Up to and with the next newline, or what was left at the end."""
        return run(self._async.readline())

    def readexactly(self, n: int) -> bytes:
        """Exactly ``n`` bytes. Raises asyncio.IncompleteReadError at the end."""
        return run(self._async.readexactly(n))

    def readuntil(self, separator: bytes = b"\n") -> bytes:
        """Up to and with ``separator``. Raises asyncio.IncompleteReadError at the end."""
        return run(self._async.readuntil(separator))

    def at_eof(self) -> bool:
        """Whether the end was reached and everything read."""
        return self._async.at_eof()


class BlockingWriter:
    """The sending side of a connection; the calls of :class:`asyncio.StreamWriter`, blocking."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._async = writer

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send ``data``, waiting while the other side is slow."""
        run(self._write(data))

    async def _write(self, data: bytes | bytearray | memoryview) -> None:
        self._async.write(data)
        await self._async.drain()

    def drain(self) -> None:
        """Wait until not too much is unsent."""
        run(self._async.drain())

    def close(self) -> None:
        """Send what waits, then close both directions."""
        run(self._close())

    async def _close(self) -> None:
        self._async.close()
        await self._async.wait_closed()

    def is_closing(self) -> bool:
        """Whether the connection is closed or about to be."""
        return self._async.is_closing()


def blocking_streams(streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> tuple[BlockingReader, BlockingWriter]:
    """A connection for blocking callers."""
    reader, writer = streams
    return BlockingReader(reader), BlockingWriter(writer)
