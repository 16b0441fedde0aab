"""Background work with an owner: every task is awaited at close, and what it raises is logged."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

import structlog

_log = structlog.get_logger("dsec.edge")

T = TypeVar("T")


class Tasks:
    """The running background tasks of one owner."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[object]] = set()

    def start(self, work: Coroutine[object, object, T], name: str) -> asyncio.Task[T]:
        """Runs ``work`` until it ends or :meth:`close` cancels it."""
        task: asyncio.Task[T] = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """Cancels everything and waits for its end."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background task failed", task=task.get_name(), exc_info=error)
