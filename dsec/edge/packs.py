"""``POST /v1/sandboxes/{id}/pack``: a running sandbox becomes an image.

The sandbox stands still for the snapshot only; the layer is made of that while it runs on. A snapshot belongs to the request that had it
taken: whatever cuts that off, the sweep removes it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import msgspec
import structlog

from dsec.edge.call import NDJSON, Body, Call
from dsec.edge.endings import SPAWNER_TRIES
from dsec.edge.failures import as_error
from dsec.edge.ids import new_snapshot_id
from dsec.edge.inventory import Inventory
from dsec.edge.leftovers import Exclusion
from dsec.edge.sandbox import Sandbox, refusal
from dsec.edge.spawner import PackOrder, SpawnerError, SpawnerLost, Taken
from dsec.edge.validation import KEY_MAX, check_labels
from dsec.http_errors import incident
from dsec.images.catalog import Caller
from dsec.images.packing import PackedLayer
from libdsec.errors import DSecError, InvalidArgument, Unavailable, Unsupported
from libdsec.schema import ImageInfo, PackLine, PackRequest, PackResult

if TYPE_CHECKING:
    from dsec.edge.ondemand import Images
    from dsec.images.packing import Packing

RESULTS_KEPT = 1_000
"""Results that a repetition with the same key is told whole; of older ones it is told the image."""

_log = structlog.get_logger("dsec.edge")
_body = Body(PackRequest, large=("exclude",))
_to_json = msgspec.json.Encoder().encode
Tell = Callable[[str], None]


class Snapshots:
    """Snapshots of sandboxes, each for one request."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory

    @asynccontextmanager
    async def of(self, sandbox: Sandbox) -> AsyncIterator[tuple[str, Taken]]:
        """A snapshot of a running sandbox, for the length of the block. Raises what tells why there is none: SandboxGone, SandboxFailed,
        Unavailable (it doesn't stand still), SpawnerLost (it may be asked again)."""
        inventory = self._inventory
        snapshot = new_snapshot_id(inventory.config.edge_id)
        inventory.snapshots.add(snapshot)
        try:
            yield snapshot, await self._take(sandbox, snapshot)
        finally:
            if inventory.closing:
                # The next edge's sweep finds it.
                inventory.snapshots.discard(snapshot)
            else:
                inventory.tasks.start(self._drop(snapshot), f"drop {snapshot}")

    async def _take(self, sandbox: Sandbox, snapshot: str) -> Taken:
        try:
            return await self._inventory.spawner.snapshot(sandbox.id, snapshot)
        except SpawnerLost:
            raise
        except SpawnerError as error:
            if error.code == "not_found" and sandbox.state != "running":
                raise refusal(sandbox.record) from error
            if error.code in ("not_found", "timeout"):
                raise Unavailable(f"sandbox {sandbox.id} can't be kept as it is now: {error.message}", retry_after=1.0) from error
            raise

    async def _drop(self, snapshot: str) -> None:
        try:
            # What the spawner fails at now the sweep does later.
            with suppress(SpawnerError):
                await self._inventory.spawner.snapshot_remove(snapshot)
        finally:
            self._inventory.snapshots.discard(snapshot)


class Packs:
    """The pack route."""

    def __init__(self, inventory: Inventory, snapshots: Snapshots, images: Images, packing: Packing | None) -> None:
        """``packing`` None: this edge's image store takes none."""
        self._inventory = inventory
        self._snapshots = snapshots
        self._images = images
        self._packing = packing
        self._running: dict[str, asyncio.Task[PackLine]] = {}
        self._results: OrderedDict[str, PackResult] = OrderedDict()

    async def pack(self, call: Call, sandbox: Sandbox) -> None:
        """POST …/pack"""
        request = await _body.read(call)
        caller = Caller(project=call.project, admin=bool(call.scope.get("dsec.admin")))
        key = _key(call, sandbox)
        exclusion = Exclusion(request.exclude, leftovers=request.leftovers == "remove")
        check_labels(request.labels)
        if self._packing is None:
            raise Unsupported("this edge has no image store that takes packed sandboxes")
        lines: asyncio.Queue[PackLine | None] = asyncio.Queue()
        work = self._begin(key, sandbox, request, exclusion, caller, lambda step: lines.put_nowait(PackLine(step=step)))
        work.add_done_callback(lambda done: lines.put_nowait(None))
        await call.begin(NDJSON)
        try:
            async with call.until_disconnect():
                while (line := await lines.get()) is not None:
                    await call.send(_to_json(line) + b"\n")
                last = _cut_off() if work.cancelled() else work.result()
                await call.send(_to_json(last) + b"\n")
        finally:
            # Whoever has a key can ask again for what came of it.
            if key is None:
                work.cancel()
        await call.end()

    def _begin(
        self, key: str | None, sandbox: Sandbox, request: PackRequest, exclusion: Exclusion, caller: Caller, tell: Tell
    ) -> asyncio.Task[PackLine]:
        """The work on a request: what is under way for its key already, or something new."""
        known = None if key is None else self._running.get(key)
        if known is not None:
            return known
        work = self._inventory.tasks.start(self._outcome(key, sandbox, request, exclusion, caller, tell), f"pack {sandbox.id}")
        if key is not None:
            self._running[key] = work
            work.add_done_callback(lambda done: self._running.pop(key, None))
        return work

    async def _outcome(
        self, key: str | None, sandbox: Sandbox, request: PackRequest, exclusion: Exclusion, caller: Caller, tell: Tell
    ) -> PackLine:
        """The last line."""
        try:
            return PackLine(result=await self._known_or_made(key, sandbox, request, exclusion, caller, tell))
        except (DSecError, SpawnerError) as failure:
            return PackLine(error=as_error(failure).body())
        except Exception as failure:
            return PackLine(error=incident(failure, f"pack {sandbox.id}").body())

    async def _known_or_made(
        self, key: str | None, sandbox: Sandbox, request: PackRequest, exclusion: Exclusion, caller: Caller, tell: Tell
    ) -> PackResult:
        assert self._packing is not None
        if key is not None:
            if (earlier := self._results.get(key)) is not None:
                return earlier
            if (image := self._packing.made_by(key)) is not None:
                return _of_image(image)
        for attempt in range(1, SPAWNER_TRIES + 1):
            try:
                result = await self._make(key, sandbox, request, exclusion, caller, tell)
                break
            except SpawnerLost:
                # Its sandboxes live on, so there is something to begin anew with.
                if attempt == SPAWNER_TRIES or sandbox.state != "running":
                    raise
        if key is not None:
            self._results[key] = result
            if len(self._results) > RESULTS_KEPT:
                self._results.popitem(last=False)
        return result

    async def _make(
        self, key: str | None, sandbox: Sandbox, request: PackRequest, exclusion: Exclusion, caller: Caller, tell: Tell
    ) -> PackResult:
        assert self._packing is not None
        inventory, packing, record = self._inventory, self._packing, sandbox.record
        written = (await inventory.spawner.usage([sandbox.id])).get(sandbox.id, 0) + record.inherited
        packing.check(request.name, caller, written)
        base = await self._images.settle(self._images.resolve(record.image, record.workspace, record.toolkits))
        # They stay mounted, and so in the store, also if the sandbox ends meanwhile.
        held = record.layers
        await inventory.layers.acquire(held)
        try:
            tell("taking a snapshot")
            async with self._snapshots.of(sandbox) as (snapshot, taken):
                tell("making the layer")
                limits = packing.limits
                order = PackOrder(
                    snapshot=snapshot,
                    exclude=exclusion.globs,
                    max_entries=limits.entries,
                    max_bytes=limits.unpacked,
                    max_meta=limits.metadata,
                )
                report = packing.read_report(await self._pack(order))
                layer = PackedLayer(report=report, directory=inventory.config.state_dir / "packs" / snapshot, base=base)
                packed = await packing.store(layer, request.name, request.labels, caller, key, tell)
        finally:
            inventory.layers.release(held, inventory.clock.monotonic())
        sandbox.note(inventory.clock.wall(), "packed", f"as {packed.image.name}@{packed.image.version}")
        return PackResult(
            image=packed.image,
            bytes=packed.layer.meta_bytes + packed.layer.blob_bytes,
            entries=report.entries,
            removed=exclusion.told(report.removed),
            freeze_ms=taken.freeze_us / 1000,
            merged_layers=packed.merged,
        )

    async def _pack(self, order: PackOrder) -> str:
        try:
            return await self._inventory.spawner.snapshot_pack(order)
        except SpawnerError as error:
            if error.code == "invalid_argument":
                raise InvalidArgument(error.message, field="exclude") from error
            raise


def _cut_off() -> PackLine:
    return PackLine(error=Unavailable("the edge is being restarted; repeat the call", retry_after=1.0).body())


def _key(call: Call, sandbox: Sandbox) -> str | None:
    """The request's key, apart from those of other projects, sandboxes and kinds of requests. Raises InvalidArgument."""
    key = call.idempotency_key(KEY_MAX // 2)
    return None if key is None else f"{call.project}:pack:{sandbox.id}:{key}"


def _of_image(image: ImageInfo) -> PackResult:
    """The result of a pack of which only the image is still known."""
    top = image.layers[-1]
    return PackResult(image=image, bytes=top.meta_bytes + top.blob_bytes, entries=0)
