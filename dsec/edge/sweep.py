"""Memory, journal and kernel brought into agreement: at a start, after the spawner was away, and again every minute."""

from __future__ import annotations

import asyncio

import structlog

from dsec.edge.adoption import Verdict, judge
from dsec.edge.agents import Agents
from dsec.edge.channel import ChannelError, ChannelLost
from dsec.edge.endings import Endings
from dsec.edge.inventory import Inventory
from dsec.edge.journal import JournalError
from dsec.edge.lifetimes import Lifetimes
from dsec.edge.orphans import Orphans
from dsec.edge.record import Record
from dsec.edge.sandbox import Sandbox
from dsec.edge.spawner import KernelSandbox, SpawnerError
from dsec.http_errors import incident
from libdsec.errors import DSecError

_log = structlog.get_logger("dsec.edge")

ADOPT_AT_ONCE = 64
"""Connections made at the same time after a restart."""


class Sweep:
    """Adopts what lives, finishes what was begun, removes what has no owner."""

    def __init__(self, inventory: Inventory, agents: Agents, endings: Endings, lifetimes: Lifetimes, orphans: Orphans) -> None:
        self._inventory = inventory
        self._agents = agents
        self._endings = endings
        self._lifetimes = lifetimes
        self._orphans = orphans
        self._adopted = False
        """Every sandbox is known: what isn't has no owner."""
        self._due = False
        """A round was asked for before that."""

    # --- after a start

    async def adopt(self) -> None:
        """Decides about every sandbox that the journal or the kernel knows. Raises JournalError, SpawnerError."""
        records = {record.id: record for record in await self._inventory.journal.live()}
        kernel = {entry.sandbox: entry for entry in await self._inventory.spawner.list()}
        # All of them at once: the spawner's events find the one that they are about.
        sandboxes = {sandbox_id: self._register(record) for sandbox_id, record in records.items()}
        at_once = asyncio.Semaphore(ADOPT_AT_ONCE)

        async def settle(sandbox_id: str, verdict: Verdict) -> None:
            async with at_once:
                await self._adopt_one(sandbox_id, sandboxes.get(sandbox_id), kernel.get(sandbox_id), verdict)

        verdicts = {one: judge(records.get(one), kernel.get(one)) for one in sorted(records.keys() | kernel.keys())}
        await asyncio.gather(*(settle(sandbox_id, verdict) for sandbox_id, verdict in verdicts.items()))
        await self._drop_snapshots()
        await self._inventory.layers.compare(self._inventory.clock.monotonic())
        self._adopted = True
        if self._due:
            await self.round()

    def _register(self, record: Record) -> Sandbox:
        inventory = self._inventory
        sandbox = Sandbox(record, inventory.clock.monotonic())
        for event in record.events:
            sandbox.events.add(event)
        sandbox.oom_seen = inventory.cgroups.oom_kills(record.id)
        self._orphans.adopt(sandbox)
        inventory.add(sandbox)
        inventory.layers.adopt(record.layers)
        return sandbox

    async def _adopt_one(self, sandbox_id: str, sandbox: Sandbox | None, entry: KernelSandbox | None, verdict: Verdict) -> None:
        if sandbox is None:
            await self._endings.kill(sandbox_id)
            return
        if sandbox.state == "failed" and verdict in ("adopt", "fail", "lose"):
            # The spawner told of its end while it waited for its turn.
            return
        record = sandbox.record
        if verdict == "finish_stop":
            await self._endings.finish(sandbox)
        elif verdict == "take_back":
            await self._take_back(sandbox)
        elif verdict == "adopt" and entry is not None:
            await self._adopt_alive(sandbox, entry)
        elif verdict == "lose":
            await self._endings.end_unseen(sandbox, "lost", "nothing of it was left when the edge started again")
        elif verdict == "fail":
            await self._endings.end_unseen(sandbox, "failed", "its agent died while the edge was away")
        elif verdict == "release":
            record.keep_on_failure = False
            await self._endings.clear_failed(sandbox)
        else:
            self._lifetimes.watch(sandbox)

    async def _adopt_alive(self, sandbox: Sandbox, entry: KernelSandbox) -> None:
        record = sandbox.record
        record.slot, record.socket = entry.slot, entry.socket
        try:
            await self._agents.connect(sandbox)
            if record.state == "failed":
                sandbox.close_channel()
                return
            if record.state == "creating":
                await self._agents.make_workdir(sandbox)
                if record.forked_from is not None:
                    await self._agents.renew_machine_id(sandbox)
                record.started_at = self._inventory.clock.wall()
                sandbox.become("running", "adopt", record.started_at)
                await self._inventory.journal.update(record)
        except (ChannelLost, ChannelError, DSecError, OSError, TimeoutError) as error:
            if record.state == "creating":
                await self._take_back(sandbox)
            elif record.state == "running":
                # Else the spawner told of its end meanwhile.
                await self._endings.end_unseen(sandbox, "failed", f"its agent doesn't answer after the edge started again: {error}")
            return
        await self._agents.follow_running(sandbox)
        self._lifetimes.watch(sandbox)

    async def _take_back(self, sandbox: Sandbox) -> None:
        sandbox.become("failed", "adopt", self._inventory.clock.wall(), "its creation was cut off")
        await self._endings.take_back(sandbox)

    # --- later

    def on_spawner_back(self) -> None:
        """The spawner was restarted: agents may have died unseen. While sandboxes are being adopted, a round would take those whose turn
        hasn't come for nobody's: it comes after that."""
        if not self._adopted:
            self._due = True
        elif not self._inventory.closing:
            self._inventory.tasks.start(self.round(), "sweep after the spawner's return")

    async def forever(self) -> None:
        while True:
            await asyncio.sleep(self._inventory.config.sweep_every_s)
            await self.round()

    async def round(self) -> None:
        """Unowned kernel objects, unfinished ends, idle layers, old records, figures of the node. A part that fails doesn't keep the others
        from their work."""
        refresh = self._inventory.refresh_facts
        for step in (self._compare_with_kernel, self._drop_snapshots, self._finish, self._unmount_idle, self._prune, refresh):
            try:
                await step()
            except (SpawnerError, JournalError, DSecError) as error:
                _log.warning("a part of the sweep failed; the next round tries again", step=step.__name__, error=str(error))
            except Exception as error:
                incident(error, f"sweep {step.__name__}")

    async def _compare_with_kernel(self) -> None:
        inventory = self._inventory
        # Those that run before the kernel is asked must be in its answer; what is in the answer must be known after it.
        running = [sandbox for sandbox in inventory if sandbox.state == "running"]
        known = {sandbox.id for sandbox in inventory}
        kernel = {entry.sandbox: entry for entry in await inventory.spawner.list()}
        for sandbox_id in kernel:
            # One that was known before has ended while the kernel was asked.
            if sandbox_id not in known and inventory.get(sandbox_id) is None:
                _log.warning("swept a sandbox that nobody owns", sandbox=sandbox_id)
                await self._endings.kill(sandbox_id)
        for sandbox in running:
            entry = kernel.get(sandbox.id)
            if sandbox.state != "running" or sandbox.settling is not None:
                continue
            if entry is None or not entry.alive:
                self._endings.fail(sandbox, "nothing of it is left" if entry is None else "its agent died unseen")
            elif sandbox.channel is None:
                self._agents.reconnect(sandbox, "unseen")
        await inventory.layers.compare(inventory.clock.monotonic())

    async def _drop_snapshots(self) -> None:
        """A snapshot serves one request: what no request here works on is left of one that was cut off."""
        inventory = self._inventory
        for snapshot in await inventory.spawner.snapshots():
            if snapshot not in inventory.snapshots:
                await inventory.spawner.snapshot_remove(snapshot)

    async def _finish(self) -> None:
        for sandbox_id in list(self._inventory.unfinished):
            self._inventory.unfinished.discard(sandbox_id)
            sandbox = self._inventory.get(sandbox_id)
            if sandbox is not None:
                await self._endings.finish(sandbox)

    async def _unmount_idle(self) -> None:
        before = self._inventory.clock.monotonic() - self._inventory.config.layer_idle_s
        await self._inventory.layers.unmount_idle(before)

    async def _prune(self) -> None:
        config = self._inventory.config
        await self._inventory.journal.prune(before=self._inventory.clock.wall() - config.records_keep_s, keep=config.records_max)
