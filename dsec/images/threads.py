"""Blocking work that a cancelled call doesn't leave behind: what takes long is told to stop, and in any case waited for. So whatever the
caller holds (a slot, a workspace, an open file) it holds for as long as a thread uses it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

Check = Callable[[], None]
"""To be called before each piece of long work: it raises once nobody wants the rest."""


class Abandoned(Exception):
    """Raised in a thread whose work nobody wants any more."""


def unchecked() -> None:
    """The check of work that nobody stops."""


async def to_end(work: Callable[[], T]) -> T:
    """What ``work`` returns, done in a thread. Cancelled, it waits for the thread."""
    return await _waited_for(work, lambda: None)


async def in_pieces(work: Callable[[Check], T]) -> T:
    """What ``work`` returns, done in a thread. Cancelled, it has the check that ``work`` is given raise, and waits for the thread."""
    stopped = threading.Event()

    def check() -> None:
        if stopped.is_set():
            raise Abandoned

    return await _waited_for(lambda: work(check), stopped.set)


async def _waited_for(work: Callable[[], T], stop: Callable[[], None]) -> T:
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop()
        while not running.done():
            # Cancelled once more, it still doesn't go before the thread.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        if not running.cancelled():
            # What the thread ended with concerns nobody any more.
            running.exception()
        raise
