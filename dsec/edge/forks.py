"""``POST /v1/sandboxes/{id}/fork``: sandboxes that start with the files that another one has at one moment.

All children begin as copies of one snapshot, whose data they share until they write. They run on the same layers; processes don't come
along.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack

import msgspec

from dsec.edge.call import Body, Call
from dsec.edge.create import Batch, deadline_of, plan
from dsec.edge.endings import SPAWNER_TRIES
from dsec.edge.packs import Snapshots
from dsec.edge.record import Record
from dsec.edge.sandbox import Sandbox
from dsec.edge.sandboxes import Sandboxes
from dsec.edge.spawner import SpawnerLost
from dsec.edge.starts import Origin
from dsec.edge.validation import KEY_MAX
from libdsec.errors import InvalidArgument
from libdsec.schema import MB, CreateRequest, DSecContainerRunArgs, ForkRequest, RunArgs

_body = Body(ForkRequest, large=("env", "labels"))


class Forks:
    """The fork route."""

    def __init__(self, sandboxes: Sandboxes, snapshots: Snapshots, count: Callable[[str], None]) -> None:
        """``count`` is told the outcome of each item: ``ok`` or the error's code."""
        self._sandboxes = sandboxes
        self._snapshots = snapshots
        self._count = count

    async def fork(self, call: Call, sandbox: Sandbox) -> None:
        """POST …/fork"""
        request = await _body.read(call)
        args = child_args(sandbox.record, request)
        items = plan(CreateRequest(args=args, count=request.count), call.idempotency_key(KEY_MAX))
        deadline = deadline_of(request.timeout_s)
        starts = self._sandboxes.starts
        async with AsyncExitStack() as leaving:
            origin = await self._origin(call.project, sandbox, args, items, leaving)
            batch = Batch(self._sandboxes, call, items, deadline, self._count, origin)
            starts.slots.enqueue(len(items))
            try:
                await batch.run()
            finally:
                starts.slots.dequeue(len(items))

    async def _origin(self, project: str, parent: Sandbox, args: RunArgs, items: list[RunArgs], leaving: AsyncExitStack) -> Origin:
        """What the children start with, until ``leaving`` is left. Raises InvalidArgument where their disk limit is below what they
        inherit."""
        inventory = self._sandboxes.inventory
        held = parent.record.inherited + (await inventory.spawner.usage([parent.id])).get(parent.id, 0)
        if held >= args.disk_limit_mb * MB:
            raise InvalidArgument(
                f"disk_limit_mb is {args.disk_limit_mb}, and the files of {parent.id} take {-(-held // MB)} MB", field="disk_limit_mb"
            )
        # Full quota groups count it in the children too.
        inherited = held if inventory.facts.quotas == "simple" else 0
        keys = [item.idempotency_key for item in items]
        if all(key is not None and inventory.by_key(project, key) is not None for key in keys):
            # A repetition: whatever is asked for is there, or on its way.
            return Origin(sandbox=parent.id, at=inventory.clock.wall(), inherited=inherited, snapshot=None)
        for attempt in range(1, SPAWNER_TRIES + 1):
            try:
                snapshot, _ = await leaving.enter_async_context(self._snapshots.of(parent))
                return Origin(sandbox=parent.id, at=inventory.clock.wall(), inherited=inherited, snapshot=snapshot)
            except SpawnerLost:
                if attempt == SPAWNER_TRIES or parent.state != "running":
                    raise
        raise AssertionError("the last attempt returns or raises")


def child_args(record: Record, request: ForkRequest) -> RunArgs:
    """The arguments of a sandbox like that of ``record``, changed as the request says. Pure."""
    inherited = {
        "backend": record.backend,
        "container_image": record.image,
        "workspace": record.workspace,
        "toolkits": record.toolkits,
        "memory_limit_mb": record.memory_mb,
        "cpu_cores_limit": record.cpu_cores,
        "disk_limit_mb": record.disk_mb,
        "pids_limit": record.pids,
        "ttl_running_stop": record.ttl_idle,
        "ttl_total": record.ttl_total,
        "network": record.network,
        "network_rules": record.network_rules,
        "init_user": record.init_user,
        "workdir": record.workdir,
        "env": {**record.env, **(request.env or {})},
        "labels": record.labels,
        "cpu_class": record.cpu_class,
        "no_new_privs": record.no_new_privs,
        "keep_on_failure": record.keep_on_failure,
        "idempotency_key": request.idempotency_key,
    }
    overrides = {
        "memory_limit_mb": request.memory_limit_mb,
        "cpu_cores_limit": request.cpu_cores_limit,
        "disk_limit_mb": request.disk_limit_mb,
        "pids_limit": request.pids_limit,
        "ttl_running_stop": request.ttl_running_stop,
        "ttl_total": request.ttl_total,
        "labels": request.labels,
    }
    given = {name: value for name, value in overrides.items() if value is not None}
    return msgspec.convert({**inherited, **given}, DSecContainerRunArgs)
