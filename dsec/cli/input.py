"""This program's standard input, whatever it is."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

CHUNK = 1 << 20


async def read_chunks(descriptor: int) -> AsyncIterator[bytes]:
    """What can be read from a pipe, a terminal, a file or a device, as it comes.

    The descriptor stays as it is: O_NONBLOCK would hold for everybody who shares it, such as the shell whose terminal it is. A wait can be
    given up at any time, and holds no thread: the interpreter waits for those at its end. Raises OSError.
    """
    while True:
        await _until_readable(descriptor)
        chunk = await asyncio.to_thread(os.read, descriptor, CHUNK)
        if not chunk:
            return
        yield chunk


async def _until_readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def readable() -> None:
        if not ready.done():
            ready.set_result(None)

    try:
        loop.add_reader(descriptor, readable)
    except PermissionError:
        # epoll_ctl(2): a regular file, a directory or /dev/null, which are always ready.
        return
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)
