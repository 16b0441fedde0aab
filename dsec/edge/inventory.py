"""The live sandboxes of an edge, and the parts below it that everybody who works on them needs."""

from __future__ import annotations

from collections.abc import Iterator

from dsec.edge.cgroups import Cgroups
from dsec.edge.config import EdgeConfig
from dsec.edge.deadlines import Clock, Deadlines
from dsec.edge.journal import Journal
from dsec.edge.layers import LayerMounts
from dsec.edge.sandbox import Sandbox
from dsec.edge.spawner import NodeFacts, Spawner
from dsec.edge.tasks import Tasks


class Inventory:
    """What exists. A sandbox is in it from before its first kernel object is made until after its last one is gone."""

    spawner: Spawner
    facts: NodeFacts
    """The node as the spawner last told of it."""
    layers: LayerMounts

    def __init__(self, config: EdgeConfig, clock: Clock, cgroups: Cgroups) -> None:
        """``spawner``, ``facts`` and ``layers`` are there once the edge is open."""
        self.config = config
        self.clock = clock
        self.cgroups = cgroups
        self.journal = Journal(config.journal_path)
        self.deadlines = Deadlines()
        self.tasks = Tasks()
        self.epoch = 0
        """How many times this edge has been started."""
        self.closing = False
        self.unfinished: set[str] = set()
        """Sandboxes whose end failed half-way (the spawner or the journal was away): the sweep goes on with them."""
        self.snapshots: set[str] = set()
        """Those that somebody here is working on: the sweep removes all others."""
        self._by_id: dict[str, Sandbox] = {}
        self._by_key: dict[tuple[str, str], Sandbox] = {}

    def __iter__(self) -> Iterator[Sandbox]:
        return iter(self._by_id.values())

    async def refresh_facts(self) -> None:
        """Asks the spawner for the node as it is now. Raises SpawnerError."""
        self.facts = await self.spawner.hello()

    def get(self, sandbox: str) -> Sandbox | None:
        return self._by_id.get(sandbox)

    def by_key(self, project: str, key: str) -> Sandbox | None:
        """The sandbox that a project made under an idempotency key."""
        return self._by_key.get((project, key))

    def add(self, sandbox: Sandbox) -> None:
        self._by_id[sandbox.id] = sandbox
        if sandbox.record.key is not None:
            self._by_key[sandbox.record.project, sandbox.record.key] = sandbox

    def remove(self, sandbox: Sandbox) -> None:
        """Nothing of it is left, or it has never been. Repeatable."""
        self.deadlines.clear(sandbox.id)
        self.unfinished.discard(sandbox.id)
        if self._by_id.get(sandbox.id) is sandbox:
            del self._by_id[sandbox.id]
        key = sandbox.record.key
        if key is not None and self._by_key.get((sandbox.record.project, key)) is sandbox:
            del self._by_key[sandbox.record.project, key]
        sandbox.events.wake()
