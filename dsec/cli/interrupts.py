"""Ctrl-C, SIGTERM and SIGHUP: they cancel a command, and what it must undo it undoes to the end, however many come."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

UNHEARD_S = 10.0
"""So long after the first signal, and after the start of what must be undone, further ones change nothing: a person presses Ctrl-C again
when nothing seems to happen, and who closes a terminal or stops a unit sends several kinds."""
STUCK_S = 2.0
"""An event loop that hasn't heard of a signal by then stands in a write to a pipe or terminal that nobody reads."""


@contextlib.contextmanager
def cancelled_by_signals() -> Iterator[None]:
    """The running task is cancelled by the first signal, and again by those that come ``UNHEARD_S`` later. What is ignored (nohup, a
    shell's background job) stays so."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    first: float | None = None
    heard = False

    def cancel() -> None:
        nonlocal heard
        heard = True
        task.cancel()

    def interrupted(_: int, __: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        first = now if first is None else first
        if not heard and now - first > STUCK_S:
            raise KeyboardInterrupt
        if now == first or now - first >= UNHEARD_S:
            loop.call_soon_threadsafe(cancel)

    with contextlib.ExitStack() as handlers:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            handlers.enter_context(_handled(number, interrupted))
        yield


@contextlib.contextmanager
def ctrl_c_goes_to(handler: Callable[[], bool]) -> Iterator[None]:
    """Ctrl-C calls ``handler`` in the event loop instead of ending the command, unless that returns False: it wants no more of them."""
    loop = asyncio.get_running_loop()
    previous = signal.getsignal(signal.SIGINT)

    def call(number: int, frame: FrameType | None) -> None:
        if not handler() and callable(previous):
            previous(number, frame)

    def interrupted(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(call, number, frame)

    with _handled(signal.SIGINT, interrupted):
        yield


@contextlib.contextmanager
def _handled(number: signal.Signals, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    # Not the event loop's own handlers: those are never called while it stands in a blocking write, and when one is removed Python's
    # default comes back for a moment.
    previous = signal.getsignal(number)
    if previous is signal.SIG_IGN:
        yield
        return
    signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, previous)


async def finished(work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` gives. Cancelling the caller doesn't end it before it has had ``UNHEARD_S``; the cancellation goes on afterwards."""
    task = asyncio.ensure_future(work)
    started = time.monotonic()
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
            if time.monotonic() - started >= UNHEARD_S:
                task.cancel()
    if cancelled is None:
        return task.result()
    await asyncio.gather(task, return_exceptions=True)
    raise cancelled
