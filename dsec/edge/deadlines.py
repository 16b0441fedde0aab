"""When what must be looked at: one heap and one timer for all sandboxes of an edge, with the clock as an argument."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """Where the edge takes its times from; tests bring their own."""

    monotonic: Callable[[], float] = time.monotonic
    """Seconds that never go back: for idle times and waits."""
    wall: Callable[[], float] = time.time
    """Unix seconds: for what is stored and shown."""


class Deadlines:
    """At most one deadline (monotonic seconds) for each sandbox. Setting one is O(log n); replaced ones are dropped when they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._due_at: dict[str, float] = {}

    def set(self, sandbox: str, at: float) -> None:
        """Replaces the sandbox's deadline."""
        self._due_at[sandbox] = at
        heapq.heappush(self._heap, (at, sandbox))
        if len(self._heap) > 64 + 4 * len(self._due_at):
            self._heap = [(at, sandbox) for sandbox, at in self._due_at.items()]
            heapq.heapify(self._heap)

    def clear(self, sandbox: str) -> None:
        """Removes the sandbox's deadline, if it has one."""
        self._due_at.pop(sandbox, None)

    def next(self) -> float | None:
        """The earliest deadline."""
        while self._heap and self._due_at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_due(self, now: float) -> list[str]:
        """The sandboxes whose deadline has come; their deadlines are removed."""
        due: list[str] = []
        while (at := self.next()) is not None and at <= now:
            sandbox = heapq.heappop(self._heap)[1]
            del self._due_at[sandbox]
            due.append(sandbox)
        return due


def next_look(
    *, now: float, ttl_idle: float | None, idle_since: float | None, total_at: float | None, orphan_until: float | None = None
) -> float | None:
    """When to look at a sandbox again (monotonic seconds), None: never.

    ``idle_since`` None means that it is in use; then the idle rule can't fire before a whole ``ttl_idle`` from now.
    """
    times: list[float] = []
    if ttl_idle is not None:
        times.append((now if idle_since is None else idle_since) + ttl_idle)
    if total_at is not None:
        times.append(total_at)
    if orphan_until is not None:
        times.append(orphan_until)
    return min(times, default=None)
