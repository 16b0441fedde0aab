"""How many sandboxes start at once, and how many wait for their turn."""

from __future__ import annotations

import asyncio

from libdsec.errors import NoCapacity


class StartSlots:
    """First come, first served. ``queued`` counts the items of all open create requests that haven't ended."""

    def __init__(self, slots: int, queue: int) -> None:
        self.slots = slots
        self.starting = 0
        self.queued = 0
        self._queue = queue
        self._free = asyncio.Semaphore(slots)

    def enqueue(self, items: int) -> None:
        """Takes a request's items into the queue. Raises NoCapacity when it is full."""
        if self.queued + items > self._queue:
            raise NoCapacity(
                f"{self.queued} sandboxes wait to be started on this node, {items} more don't fit into its queue of {self._queue}",
                reason="start_queue",
                retry_after=max(1.0, self.queued / 500),
            )
        self.queued += items

    def dequeue(self, items: int) -> None:
        """The items have ended, one way or the other."""
        self.queued -= items

    async def acquire(self) -> None:
        """Waits for a slot; :meth:`release` gives it back."""
        await self._free.acquire()
        self.starting += 1

    def release(self) -> None:
        self.starting -= 1
        self._free.release()
