"""Idle times, absolute lifetimes and the grace of orphans: one timer for all sandboxes of an edge."""

from __future__ import annotations

import asyncio

from dsec.edge.deadlines import next_look
from dsec.edge.endings import ORPHANED, Endings
from dsec.edge.inventory import Inventory
from dsec.edge.sandbox import Sandbox


class Lifetimes:
    """Stops the sandboxes whose time is over.

    Idle are those that for ``ttl_running_stop`` seconds had no request, no open stream, no running command or session command and no
    traffic through their ports. Leftover background processes don't count.
    """

    def __init__(self, inventory: Inventory, endings: Endings) -> None:
        self._inventory = inventory
        self._endings = endings
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def watch(self, sandbox: Sandbox) -> None:
        """From now on the sandbox's TTLs as they are in its record count."""
        record, clock = sandbox.record, self._inventory.clock
        left = None if record.ttl_total is None else record.created_at + record.ttl_total - clock.wall()
        sandbox.total_at = None if left is None else clock.monotonic() + left
        self._look_later(sandbox)

    def expire(self) -> None:
        """Looks at the sandboxes whose deadline has come. Called by the timer."""
        # It has fired: whether its time is past is not for the loop's clock to say, which uvloop rounds to milliseconds.
        self.close()
        now = self._inventory.clock.monotonic()
        for sandbox_id in self._inventory.deadlines.take_due(now):
            sandbox = self._inventory.get(sandbox_id)
            if sandbox is None or sandbox.state in ("stopping", "stopped"):
                continue
            since, ttl_idle = sandbox.idle_since(), _ttl_idle(sandbox)
            if sandbox.total_at is not None and sandbox.total_at <= now:
                self._endings.begin_stop(sandbox, f"lifetime of {sandbox.record.ttl_total:g} s is over")
            elif ttl_idle is not None and since is not None and since + ttl_idle <= now:
                self._endings.begin_stop(sandbox, f"idle for {ttl_idle:g} s")
            elif sandbox.orphan_until is not None and sandbox.orphan_until <= now:
                self._endings.begin_stop(sandbox, ORPHANED)
            else:
                self._look_later(sandbox)
        self._set_timer(now)

    def _look_later(self, sandbox: Sandbox) -> None:
        now = self._inventory.clock.monotonic()
        at = next_look(
            now=now,
            ttl_idle=_ttl_idle(sandbox),
            idle_since=sandbox.idle_since(),
            total_at=sandbox.total_at,
            orphan_until=sandbox.orphan_until,
        )
        if at is None or sandbox.state in ("stopping", "stopped"):
            self._inventory.deadlines.clear(sandbox.id)
            return
        self._inventory.deadlines.set(sandbox.id, at)
        self._set_timer(now)

    def _set_timer(self, now: float) -> None:
        at = self._inventory.deadlines.next()
        if at is None or self._inventory.closing:
            return
        loop = asyncio.get_running_loop()
        when = loop.time() + max(0.0, at - now)
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = loop.call_at(when, self.expire)


def _ttl_idle(sandbox: Sandbox) -> float | None:
    return sandbox.record.ttl_idle if sandbox.state == "running" else None
