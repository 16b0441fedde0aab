"""Gives the event loop to others once in so many events: what has arrived already is handled without a pause that would do so."""

from __future__ import annotations

import asyncio

EVENTS_AT_A_TIME = 64
"""Chunks, frames and the like that are looked at before others have a turn: whoever sends them may make them as small as he likes."""


class Turns:
    """Counts what one task handles."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = EVENTS_AT_A_TIME

    async def count(self, events: int = 1) -> None:
        """So many more events."""
        self._left -= events
        if self._left <= 0:
            self._left = EVENTS_AT_A_TIME
            await asyncio.sleep(0)
