"""Mutual exclusion by name: the same work is not done twice at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Flights:
    """Mutual exclusion by key. A lock exists only while somebody wants it."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def of(self, key: str) -> AsyncGenerator[None, None]:
        """Only one caller at a time is in here with the same key."""
        lock, wanted = self._locks.get(key) or (asyncio.Lock(), 0)
        self._locks[key] = (lock, wanted + 1)
        try:
            async with lock:
                yield
        finally:
            lock, wanted = self._locks.pop(key)
            if wanted > 1:
                self._locks[key] = (lock, wanted - 1)

    def busy(self, key: str) -> bool:
        """Whether somebody is in there with the key, or about to be."""
        return key in self._locks
