"""Acts that are done once however often they are asked for.

Some calls are something else when they are repeated: what was moved is no longer there to be moved, a signal is a second one. A client
whose answer was lost repeats them with the same ``Idempotency-Key``; what succeeded under it is then answered and not done again. What
failed is tried again.

The memory is a sandbox's, in this process: after a restart of the service a repetition is a new call.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from dsec.edge.call import Call
from dsec.edge.validation import KEY_MAX

if TYPE_CHECKING:
    from dsec.edge.sandbox import Sandbox

REMEMBERED = 128
"""Acts that are remembered of one sandbox: more than its clients have under way at once."""

Handler = Callable[[Call, "Sandbox"], Awaitable[None]]


class Acts:
    """What was done to one sandbox lately, and what is being done."""

    __slots__ = ("_done", "_under_way")

    def __init__(self) -> None:
        self._done: dict[bytes, None] = {}
        """Oldest first."""
        self._under_way: dict[bytes, asyncio.Event] = {}

    async def once(self, name: bytes, act: Callable[[], Awaitable[None]]) -> bool:
        """Does ``act``, or finds that it was done under this name: then False. Raises what ``act`` raises."""
        while (earlier := self._under_way.get(name)) is not None:
            await earlier.wait()
        if name in self._done:
            return False
        ended = self._under_way[name] = asyncio.Event()
        try:
            await act()
            self._done[name] = None
            if len(self._done) > REMEMBERED:
                del self._done[next(iter(self._done))]
        finally:
            del self._under_way[name]
            ended.set()
        return True


def once(handler: Handler) -> Handler:
    """A handler of calls that are answered by 204, as one that heeds their ``Idempotency-Key``."""

    async def serve(call: Call, sandbox: Sandbox) -> None:
        key = call.idempotency_key(KEY_MAX)
        if key is None:
            await handler(call, sandbox)
            return
        asked = call.scope["path"].encode() + b"?" + call.scope["query_string"] + b" " + key.encode()
        name = hashlib.blake2b(asked, digest_size=16).digest()
        if sandbox.acts is None:
            sandbox.acts = Acts()
        if not await sandbox.acts.once(name, lambda: handler(call, sandbox)):
            await call.reply_empty()

    return serve
