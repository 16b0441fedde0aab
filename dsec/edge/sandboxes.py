"""The owner of every sandbox of this edge: what the routes ask, and the parts that do it, put together.

Every change is in the journal before it is done. What the caller sees is decided here; what the kernel does is the spawner's; what runs
inside is chronus's, behind a channel.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from dsec.edge.agents import Agents, ConnectChannel, connect_channel
from dsec.edge.cgroups import Cgroups
from dsec.edge.config import EdgeConfig
from dsec.edge.deadlines import Clock
from dsec.edge.endings import Endings
from dsec.edge.inventory import Inventory
from dsec.edge.layers import LayerMounts
from dsec.edge.lifetimes import Lifetimes
from dsec.edge.ondemand import ConnectBlobfs, Images, OnDemand
from dsec.edge.orphans import Orphans
from dsec.edge.record import Record
from dsec.edge.sandbox import Sandbox
from dsec.edge.spawner import Listener, Spawner
from dsec.edge.starts import Origin, Starts
from dsec.edge.states import ENDED
from dsec.edge.sweep import Sweep
from dsec.edge.validation import check_labels, check_rules, check_seconds
from libdsec.errors import SandboxNotFound
from libdsec.schema import Backend, PatchRequest, RunArgs, SandboxInfo, SandboxPage, State

LIST_LIMIT = 1_000
"""Entries of one page."""

ConnectSpawner = Callable[[Listener, Callable[[], None]], Awaitable[Spawner]]


class Sandboxes:
    """All sandboxes of one edge. :meth:`open` before anything else, :meth:`close` at the end; sandboxes live on after it."""

    def __init__(
        self,
        config: EdgeConfig,
        images: Images,
        *,
        connect_spawner: ConnectSpawner,
        connect_blobfs: ConnectBlobfs,
        ports_key: Callable[[str], str],
        connect_channel: ConnectChannel = connect_channel,
        clock: Clock | None = None,
        cgroups: Cgroups | None = None,
    ) -> None:
        self.config = config
        self.clock = clock or Clock()
        self.cgroups = cgroups or Cgroups(config.cgroup)
        self.inventory = Inventory(config, self.clock, self.cgroups)
        self.endings = Endings(self.inventory)
        self.agents = Agents(self.inventory, self.endings, connect_channel)
        self.lifetimes = Lifetimes(self.inventory, self.endings)
        self.orphans = Orphans(self.inventory, self.endings, self.lifetimes)
        self.on_demand = OnDemand(self.inventory, images, connect_blobfs, config.blobs_kept, prefetch=config.prefetch)
        self.starts = Starts(self.inventory, images, self.on_demand, self.agents, self.endings, self.lifetimes, self.orphans)
        self.sweep = Sweep(self.inventory, self.agents, self.endings, self.lifetimes, self.orphans)
        self._connect_spawner = connect_spawner
        self._ports_key = ports_key

    async def open(self) -> None:
        """Opens the journal, connects to the spawner, adopts what lives, sweeps what has no owner. Raises JournalError, SpawnerError."""
        inventory = self.inventory
        inventory.epoch = await inventory.journal.open()
        inventory.spawner = await self._connect_spawner(self.agents, self.sweep.on_spawner_back)
        inventory.layers = LayerMounts(inventory.spawner)
        await inventory.refresh_facts()
        await self.sweep.adopt()
        inventory.tasks.start(self.sweep.forever(), "sweep")
        inventory.tasks.start(self.on_demand.watch(), "watch what is read")

    async def close(self) -> None:
        """Ends the edge, not its sandboxes."""
        inventory = self.inventory
        inventory.closing = True
        self.lifetimes.close()
        await inventory.tasks.close()
        for sandbox in inventory:
            sandbox.close_channel()
        self.on_demand.close()
        inventory.spawner.close()
        await inventory.journal.close()

    async def create(self, project: str, args: RunArgs, deadline: float | None, origin: Origin | None = None) -> SandboxInfo:
        """See :meth:`dsec.edge.starts.Starts.create`; also for what the caller owes to ``orphans``."""
        return self.info(await self.starts.create(project, args, deadline, origin))

    async def stop(self, sandbox: Sandbox, reason: str) -> SandboxInfo:
        """See :meth:`dsec.edge.endings.Endings.stop`; tells how it was."""
        await self.endings.stop(sandbox, reason)
        return sandbox.record.info(self.config.edge_id, 0.0)

    async def patch(self, sandbox: Sandbox, change: PatchRequest) -> SandboxInfo:
        """Sets what ``change`` gives. Raises InvalidArgument."""
        record = sandbox.record
        for field, seconds in (("ttl_running_stop", change.ttl_running_stop), ("ttl_total", change.ttl_total)):
            if seconds:
                check_seconds(field, seconds)
        if change.labels is not None:
            check_labels(change.labels)
        check_rules(change.network_rules)
        if change.ttl_running_stop is not None:
            record.ttl_idle = change.ttl_running_stop or None
        if change.ttl_total is not None:
            record.ttl_total = change.ttl_total or None
        if change.labels is not None:
            record.labels = change.labels
        if change.network_rules is not None:
            record.network_rules = change.network_rules
        await self.inventory.journal.update(record)
        self.lifetimes.watch(sandbox)
        return self.info(sandbox)

    def live(self, sandbox: str) -> Sandbox | None:
        """The live sandbox of that id, whosever it is."""
        return self.inventory.get(sandbox)

    async def find(self, project: str, sandbox: str) -> Sandbox | Record:
        """The live sandbox, or the record of one that ended. Raises SandboxNotFound."""
        live = self.inventory.get(sandbox)
        if live is not None and live.record.project == project:
            return live
        record = None if live is not None else await self.inventory.journal.find(sandbox)
        if record is None or record.project != project:
            raise SandboxNotFound(f"there is no sandbox {sandbox!r}")
        return record

    def info(self, sandbox: Sandbox) -> SandboxInfo:
        """The sandbox as callers see it."""
        since = sandbox.idle_since()
        idle_s = 0.0 if since is None else max(0.0, self.clock.monotonic() - since)
        info = sandbox.record.info(self.config.edge_id, idle_s)
        info.ports_url, info.ports_key = self.config.ports_url, self._ports_key(sandbox.id)
        return info

    def counts(self) -> dict[str, int]:
        """Live sandboxes by state."""
        counts: dict[str, int] = {}
        for sandbox in self.inventory:
            counts[sandbox.state] = counts.get(sandbox.state, 0) + 1
        return counts

    async def page(
        self,
        project: str,
        *,
        states: Collection[State],
        backend: Backend | None,
        labels: dict[str, str],
        after: tuple[float, str],
        limit: int,
    ) -> SandboxPage:
        """At most ``limit`` sandboxes of a project behind the position ``after`` (created_at, id). Without ``states``: the live ones."""
        limit = min(limit, LIST_LIMIT)

        def wanted(record: Record) -> bool:
            return (
                (not states or record.state in states)
                and (backend is None or record.backend == backend)
                and (record.created_at, record.id) > after
                and all(record.labels.get(name) == value for name, value in labels.items())
            )

        found = [self.info(s) for s in self.inventory if s.record.project == project and wanted(s.record)]
        ended = [record for record in await self._ended(project, states, after, limit, wanted) if self.inventory.get(record.id) is None]
        found.extend(record.info(self.config.edge_id, 0.0) for record in ended)
        found.sort(key=lambda info: (info.created_at, info.id))
        cursor = f"{found[limit - 1].created_at!r},{found[limit - 1].id}" if len(found) > limit else None
        return SandboxPage(sandboxes=found[:limit], cursor=cursor)

    async def _ended(
        self, project: str, states: Collection[State], after: tuple[float, str], limit: int, wanted: Callable[[Record], bool]
    ) -> list[Record]:
        """The first records behind ``after`` that are wanted: one more than ``limit``, if there are as many."""
        asked = [state for state in states if state in ENDED]
        found: list[Record] = []
        while asked and len(found) <= limit:
            records = await self.inventory.journal.ended(project, asked, after, LIST_LIMIT)
            found.extend(filter(wanted, records))
            if len(records) < LIST_LIMIT:
                break
            after = (records[-1].created_at, records[-1].id)
        return found
