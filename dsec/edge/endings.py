"""How sandboxes end: stopped, failed, lost, or taken back before anybody was told of them. Each way leaves nothing, or says who goes on."""

from __future__ import annotations

import asyncio
from typing import Literal

import structlog

from dsec.edge.inventory import Inventory
from dsec.edge.journal import JournalError
from dsec.edge.sandbox import Sandbox
from dsec.edge.spawner import KillFigures, SpawnerError, SpawnerLost
from libdsec.errors import Unavailable
from libdsec.schema import ExitFigures

_log = structlog.get_logger("dsec.edge")

SPAWNER_TRIES = 3
"""Attempts of a call while the spawner is being restarted; each waits for it (10 s)."""
EVENTS_IN_RECORD = 50
"""Events kept in the record of a failed sandbox."""
ORPHANED = "its creator went away before it was told of it"
"""The reason in the record of an orphan that was stopped."""


class Endings:
    """Ends sandboxes, whatever state they are in."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._clock = inventory.clock

    async def stop(self, sandbox: Sandbox, reason: str, *, forget: bool = False) -> None:
        """Ends and removes a sandbox; returns when nothing of it is left. Repeatable. Raises Unavailable: then the sweep goes on.

        ``forget``: as of :meth:`begin_stop`.
        """
        if sandbox.state == "failed" and sandbox.settling is not None:
            await asyncio.wait([sandbox.settling])
        if self._inventory.get(sandbox.id) is sandbox:
            await asyncio.shield(self.begin_stop(sandbox, reason, forget=forget))

    def begin_stop(self, sandbox: Sandbox, reason: str, *, forget: bool = False) -> asyncio.Task[None]:
        """The same as a task, which goes on without the caller. ``forget``: nobody was told of it, so no record stays."""
        if sandbox.stopping is None:
            sandbox.forget = sandbox.forget or forget
            if sandbox.state not in ("stopping", "stopped"):
                sandbox.become("stopping", "stop", self._clock.wall(), reason)
            sandbox.stopping = self._inventory.tasks.start(self._stop(sandbox), f"stop {sandbox.id}")
        return sandbox.stopping

    def fail(self, sandbox: Sandbox, reason: str) -> None:
        """A running sandbox broke. What it holds is removed beside the caller."""
        kills = self._inventory.cgroups.oom_kills(sandbox.id)
        if kills > sandbox.oom_seen:
            reason += f"; the kernel killed {kills - sandbox.oom_seen} of its processes for memory"
        at = self._clock.wall()
        sandbox.become("failed", "watch", at, reason)
        sandbox.record.ended_at = at
        _log.warning("sandbox failed", sandbox=sandbox.id, reason=reason)
        sandbox.settling = self._inventory.tasks.start(self.clear_failed(sandbox), f"clear {sandbox.id}")

    async def end_unseen(self, sandbox: Sandbox, state: Literal["failed", "lost"], reason: str) -> None:
        """After a restart: a sandbox had ended while nobody looked."""
        at = self._clock.wall()
        sandbox.become(state, "adopt", at, reason)
        sandbox.record.ended_at = at
        if state == "lost":
            sandbox.record.keep_on_failure = False
        await self.clear_failed(sandbox)

    async def clear_failed(self, sandbox: Sandbox) -> None:
        """Removes what a failed sandbox still holds: all of it, or all but its scratch if it is to be inspected."""
        inventory, record = self._inventory, sandbox.record
        try:
            sandbox.close_channel()
            record.events = sandbox.events.newest(EVENTS_IN_RECORD)
            await inventory.journal.update(record)
            record.exit = _exit_figures(await self.kill(sandbox.id, keep_scratch=record.keep_on_failure))
            if not record.keep_on_failure:
                inventory.layers.release(record.layers, self._clock.monotonic())
                record.forget_workings()
            await inventory.journal.update(record)
        except (SpawnerError, JournalError) as error:
            _log.warning("a failed sandbox can't be removed now; the sweep will", sandbox=sandbox.id, error=str(error))
            inventory.unfinished.add(sandbox.id)
            return
        finally:
            sandbox.settling = None
        if not record.live:
            inventory.remove(sandbox)

    async def take_back(self, sandbox: Sandbox) -> None:
        """Removes a sandbox whose creation failed: kernel objects first, then its row, so that a crash between leaves it to the sweep."""
        inventory = self._inventory
        sandbox.forget = True
        sandbox.close_channel()
        try:
            await self.kill(sandbox.id)
            inventory.layers.release(sandbox.record.layers, self._clock.monotonic())
            # A stop that came meanwhile waits for this and finds none left to release.
            sandbox.record.layers = ()
            await inventory.journal.delete(sandbox.id)
        except (SpawnerError, JournalError) as error:
            _log.warning("a sandbox can't be taken back now; the sweep will", sandbox=sandbox.id, error=str(error))
            inventory.unfinished.add(sandbox.id)
            return
        inventory.remove(sandbox)

    async def finish(self, sandbox: Sandbox) -> None:
        """Goes on with an end that failed half-way."""
        if sandbox.state in ("stopping", "stopped"):
            await asyncio.wait([self.begin_stop(sandbox, "stopped")])
        elif sandbox.forget:
            await self.take_back(sandbox)
        else:
            await self.clear_failed(sandbox)

    async def kill(self, sandbox: str, *, keep_scratch: bool = False) -> KillFigures:
        """The spawner's kill, over its restarts. Raises SpawnerError."""
        for _ in range(1, SPAWNER_TRIES):
            try:
                return await self._inventory.spawner.kill(sandbox, keep_scratch=keep_scratch)
            except SpawnerLost:
                continue
        return await self._inventory.spawner.kill(sandbox, keep_scratch=keep_scratch)

    async def _stop(self, sandbox: Sandbox) -> None:
        inventory, record = self._inventory, sandbox.record
        inventory.deadlines.clear(sandbox.id)
        try:
            if sandbox.state == "stopping":
                await self._remove(sandbox)
            await (inventory.journal.delete(record.id) if sandbox.forget else inventory.journal.update(record))
        except (SpawnerError, JournalError) as error:
            sandbox.stopping = None
            inventory.unfinished.add(sandbox.id)
            raise Unavailable(f"sandbox {record.id} is being stopped, but {error}; repeat the call", retry_after=1.0) from error
        inventory.remove(sandbox)

    async def _remove(self, sandbox: Sandbox) -> None:
        """From stopping to stopped: says so in the journal, then removes everything that the kernel has of it."""
        record = sandbox.record
        written = self._inventory.journal.update(record)
        if sandbox.starting is not None:
            # The act of creating can't be recalled: it ends first, then everything goes.
            await asyncio.wait([sandbox.starting])
        await written
        sandbox.close_channel()
        figures = await self.kill(sandbox.id)
        record.exit = record.exit or _exit_figures(figures)
        self._inventory.layers.release(record.layers, self._clock.monotonic())
        record.ended_at = record.ended_at or self._clock.wall()
        sandbox.become("stopped", "stop", self._clock.wall(), record.reason)
        record.forget_workings()


def _exit_figures(figures: KillFigures) -> ExitFigures:
    return ExitFigures(cpu_s=figures.cpu_us / 1e6, memory_peak=figures.memory_peak, disk_bytes=figures.disk, oom_kills=figures.oom_kills)
