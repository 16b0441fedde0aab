"""What happened to a sandbox, bounded: the newest events for whoever asks, and the followers that wait for more."""

from __future__ import annotations

import asyncio

from dsec.edge.states import Step
from libdsec.schema import SandboxEvent

EVENTS_MAX = 200
"""Events kept of one sandbox."""
STEPS_MAX = 32
"""Transitions kept for the message of an illegal one."""


class EventLog:
    """The events of one sandbox, oldest first. Positions count from its first event, also from those dropped since."""

    __slots__ = ("_dropped", "_events", "_waiters", "steps")

    def __init__(self) -> None:
        self._events: list[SandboxEvent] = []
        self._dropped = 0
        self._waiters: list[asyncio.Future[None]] | None = None
        self.steps: list[Step] = []

    def add(self, event: SandboxEvent) -> None:
        """Appends an event and wakes the followers."""
        self._events.append(event)
        if len(self._events) > EVENTS_MAX:
            excess = len(self._events) - EVENTS_MAX
            del self._events[:excess]
            self._dropped += excess
        self.wake()

    def add_step(self, step: Step, reason: str | None) -> None:
        """Appends a transition, as history and as an event."""
        self.steps.append(step)
        del self.steps[:-STEPS_MAX]
        self.add(SandboxEvent(at=step.at, type="state", message=f"{step.new}: {reason}" if reason else step.new))

    def since(self, position: int) -> tuple[list[SandboxEvent], int]:
        """The events from ``position`` on that are still kept, and the position behind them."""
        return self._events[max(0, position - self._dropped) :], self._dropped + len(self._events)

    def newest(self, count: int) -> tuple[SandboxEvent, ...]:
        """The last ``count`` events."""
        return tuple(self._events[-count:])

    async def more(self, position: int) -> None:
        """Waits until there is an event at ``position``, or :meth:`wake` was called."""
        if position < self._dropped + len(self._events):
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._waiters is None:
            self._waiters = []
        self._waiters.append(waiter)
        await waiter

    def wake(self) -> None:
        """Lets every follower look again."""
        if self._waiters:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiters = None
