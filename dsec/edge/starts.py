"""How sandboxes come to be: admission, idempotency keys, the journal before the act, and what a start that fails leaves: nothing."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Collection

import msgspec
import structlog

from dsec.edge import node
from dsec.edge.admission import Limits, NodeLoad, NodeSize, admit, clamp
from dsec.edge.agents import Agents
from dsec.edge.blobfs import BlobfsError
from dsec.edge.channel import ChannelError, ChannelLost
from dsec.edge.endings import SPAWNER_TRIES, Endings
from dsec.edge.failures import as_error
from dsec.edge.ids import new_sandbox_id
from dsec.edge.inventory import Inventory
from dsec.edge.journal import JournalError
from dsec.edge.layers import refer
from dsec.edge.lifetimes import Lifetimes
from dsec.edge.ondemand import Images, OnDemand
from dsec.edge.orphans import Orphans
from dsec.edge.record import Record
from dsec.edge.sandbox import Sandbox, refusal
from dsec.edge.slots import StartSlots
from dsec.edge.spawner import SandboxSpec, SpawnerError, SpawnerLost
from dsec.http_errors import incident
from dsec.images import Environment
from libdsec.errors import Conflict, DeadlineExceeded, DSecError, ImageNotFound, NoCapacity, Unavailable
from libdsec.schema import MB, RunArgs

_log = structlog.get_logger("dsec.edge")

HISTORY_BYTES = 8 * MB
"""Window of output that chronus keeps of each stream of a started command; less in small sandboxes, whose memory it is charged to."""
HISTORY_SHARE = 16
"""The window is at most this fraction of the sandbox's memory."""
LOAD_FRESH_S = 0.05
"""Memory figures are read again after this long: a few sandboxes start meanwhile, and each is counted with its expected memory."""
FACTS_FRESH_S = 1.0
"""The same for scratch and descriptors, whose reading costs more."""

_encode_args = msgspec.msgpack.Encoder().encode


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What a fork starts with: the files of another sandbox."""

    sandbox: str
    at: float
    """The moment whose files they are, Unix seconds."""
    inherited: int
    """Bytes of them that the quotas of those who begin with them don't count."""
    snapshot: str | None
    """None: every sandbox that is asked for exists already."""


class Starts:
    """Starts sandboxes, a bounded number at once."""

    def __init__(
        self,
        inventory: Inventory,
        images: Images,
        on_demand: OnDemand,
        agents: Agents,
        endings: Endings,
        lifetimes: Lifetimes,
        orphans: Orphans,
    ) -> None:
        self.slots = StartSlots(inventory.config.start_slots, inventory.config.start_queue)
        self.observe: Callable[[float], None] = lambda seconds: None
        """Told how long each creation took; set by the metrics."""
        self._inventory = inventory
        self._clock = inventory.clock
        self._images = images
        self._on_demand = on_demand
        self._agents = agents
        self._endings = endings
        self._lifetimes = lifetimes
        self._orphans = orphans
        self._load: NodeLoad | None = None
        self._load_at = 0.0
        self._facts_at = 0.0
        self._descriptors_free = 0

    async def create(self, project: str, args: RunArgs, deadline: float | None, origin: Origin | None = None) -> Sandbox:
        """One sandbox, running; the same one again if the project used ``args.idempotency_key`` before. ``args`` are valid.

        ``origin``: what it starts with instead of an empty writable layer. ``deadline``: the time of the event loop's clock by which it
        must be ready; None: no limit. Raises DeadlineExceeded (it is taken back), NoCapacity, ImageNotFound, Conflict (the key came with
        other arguments), SandboxGone (the key's sandbox has ended), Unavailable. Cancelled: with a key the creation goes on, without one it
        is taken back.

        The sandbox is asked for (:mod:`dsec.edge.orphans`): the caller has to call ``tell`` or ``give_up``.
        """
        begun = self._clock.monotonic()
        parent = b"" if origin is None else origin.sandbox.encode()
        fingerprint = hashlib.blake2b(_encode_args(args) + parent, digest_size=8).digest()
        try:
            async with asyncio.timeout_at(deadline):
                await self._images.locate(args.container_image, args.workspace, args.toolkits)
                sandbox = await self._known_or_begun(project, args, fingerprint, origin)
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed while the sandbox waited for its turn to start") from None
        # Without an await since it was found: the grace of an orphan can't end between.
        self._orphans.ask(sandbox)
        try:
            await self._created(sandbox, deadline)
            await self._orphans.claim(sandbox)
        except BaseException:
            await self._orphans.give_up(sandbox)
            raise
        self.observe(self._clock.monotonic() - begun)
        return sandbox

    async def _known_or_begun(self, project: str, args: RunArgs, fingerprint: bytes, origin: Origin | None) -> Sandbox:
        while True:
            sandbox = await self._known(project, args.idempotency_key, fingerprint)
            if sandbox is not None:
                return sandbox
            await self.slots.acquire()
            if args.idempotency_key is None or self._inventory.by_key(project, args.idempotency_key) is None:
                return self._begin(project, args, fingerprint, origin)
            # Another request with the key came while this one waited for its turn.
            self.slots.release()

    async def _known(self, project: str, key: str | None, fingerprint: bytes) -> Sandbox | None:
        """The sandbox of an idempotency key. One that is being taken back frees it: that is waited for."""
        while key is not None and (sandbox := self._inventory.by_key(project, key)) is not None:
            if sandbox.record.fingerprint != fingerprint:
                # The error tells of it.
                await self._orphans.keep(sandbox)
                raise _key_conflict(key, sandbox.id)
            if not sandbox.forget:
                return sandbox
            ending = sandbox.stopping or sandbox.starting
            if ending is None:
                raise Unavailable("the sandbox of this idempotency key is just being removed; try again", retry_after=1.0)
            await asyncio.wait([ending])
        return None

    def _begin(self, project: str, args: RunArgs, fingerprint: bytes, origin: Origin | None) -> Sandbox:
        """With a slot taken: decides whether the sandbox may start, and starts it. The slot is given back when that has ended."""
        inventory = self._inventory
        try:
            refused = admit(self._node_load(), self.slots.starting - 1, inventory.config.admission)
            if refused is not None:
                message = f"no sandbox can start on this node now: {refused.message}"
                raise NoCapacity(message, reason=refused.reason, retry_after=refused.retry_after)
            environment = self._images.resolve(args.container_image, args.workspace, args.toolkits)
            if environment.owners - {project}:
                # As if it weren't there: a project learns nothing of another one's.
                raise ImageNotFound(f"there is no image {args.container_image!r} in this project", field="container_image")
            facts = inventory.facts
            limits = clamp(args, NodeSize(cores=facts.cores, memory=facts.memory, scratch=facts.scratch))
            record = self._new_record(project, args, fingerprint, environment, limits)
            if origin is not None:
                record.forked_from, record.forked_at, record.inherited = origin.sandbox, origin.at, origin.inherited
            sandbox = Sandbox(record, self._clock.monotonic())
        except BaseException:
            self.slots.release()
            raise
        inventory.add(sandbox)
        sandbox.starting = inventory.tasks.start(self._start(sandbox, environment, origin), f"start {sandbox.id}")
        return sandbox

    def _new_record(self, project: str, args: RunArgs, fingerprint: bytes, environment: Environment, limits: Limits) -> Record:
        config = environment.config
        return Record(
            id=new_sandbox_id(self._inventory.config.edge_id, self._inventory.epoch),
            project=project,
            state="creating",
            created_at=self._clock.wall(),
            key=args.idempotency_key,
            fingerprint=fingerprint,
            image=environment.image,
            workspace=environment.workspace,
            toolkits=tuple(environment.toolkits),
            memory_mb=limits.memory_mb,
            cpu_cores=limits.cpu_cores,
            disk_mb=limits.disk_mb,
            pids=limits.pids,
            ttl_idle=args.ttl_running_stop,
            ttl_total=args.ttl_total,
            network=args.network,
            network_rules=args.network_rules,
            init_user=args.init_user,
            workdir=args.workdir or config.workdir or "/",
            labels=args.labels,
            notices=limits.notices,
            keep_on_failure=args.keep_on_failure,
            no_new_privs=args.no_new_privs,
            cpu_class=args.cpu_class,
            env={**config.env, **args.env},
            layers=refer(environment.layers),
            extra_ids=tuple(sorted({extra for layer in environment.layers for extra in layer.extra_ids})),
        )

    async def _created(self, sandbox: Sandbox, deadline: float | None) -> None:
        """Waits for a creation that this or another request began."""
        starting = sandbox.starting
        if starting is not None:
            sandbox.starters += 1
            try:
                async with asyncio.timeout_at(deadline):
                    error = await asyncio.shield(starting)
            except TimeoutError:
                self._give_up(sandbox, "the request's deadline passed")
                raise DeadlineExceeded("the request's deadline passed before the sandbox was ready; it is taken back") from None
            except asyncio.CancelledError:
                if sandbox.record.key is None and not self._inventory.closing:
                    self._give_up(sandbox, "the caller went away")
                raise
            finally:
                sandbox.starters -= 1
            if error is not None:
                raise error
        if sandbox.state != "running":
            # The error tells of it.
            await self._orphans.keep(sandbox)
            raise refusal(sandbox.record)

    def _give_up(self, sandbox: Sandbox, why: str) -> None:
        """The last request that waits for a creation takes it back."""
        if sandbox.starters == 1 and sandbox.state == "creating":
            self._endings.begin_stop(sandbox, why, forget=True)

    async def _start(self, sandbox: Sandbox, environment: Environment, origin: Origin | None) -> DSecError | None:
        """The creation itself. Ends with the sandbox running, or with nothing of it left and the reason as the value."""
        try:
            error = await self._try_start(sandbox, environment, origin)
            if error is not None and sandbox.state == "creating":
                sandbox.become("failed", "create", self._clock.wall(), error.message)
                await self._endings.take_back(sandbox)
            elif error is not None and sandbox.state == "running":
                # It runs, but the journal didn't take that: nobody may be told.
                self._endings.begin_stop(sandbox, error.message, forget=True)
            return error
        finally:
            sandbox.starting = None
            self.slots.release()

    async def _try_start(self, sandbox: Sandbox, environment: Environment, origin: Origin | None) -> DSecError | None:
        record = sandbox.record
        counted = False
        try:
            if not await self._inventory.journal.insert(record):
                return await self._key_used_up(sandbox)
            settled = await self._images.settle(environment)
            if settled is not environment:
                environment, record.layers = settled, refer(settled.layers)
            await self._mount_layers(record, environment)
            counted = True
            self._images.note_start(environment)
            if sandbox.state == "creating":
                aborts = await self._spawn(sandbox, environment, origin)
                await self._agents.connect(sandbox)
                await self._agents.make_workdir(sandbox)
                if origin is not None:
                    await self._agents.renew_machine_id(sandbox)
                self._check_readable(record, aborts)
            if sandbox.state == "creating":
                await self._run_from_now(sandbox)
                return None
            # Stopped meanwhile: the stop, which waits for us, removes everything.
            return refusal(record)
        except (DSecError, SpawnerError, BlobfsError, ChannelLost, ChannelError, JournalError, OSError) as failure:
            if isinstance(failure, SpawnerError) and failure.code == "not_found":
                # Of the node's: what the caller named was there.
                return Unavailable(f"what the sandbox is made of went away while it started: {failure.message}", retry_after=1.0)
            return as_error(failure)
        except Exception as failure:
            return incident(failure, f"create {record.id}")
        finally:
            if not counted:
                record.layers = ()

    async def _mount_layers(self, record: Record, environment: Environment) -> None:
        """With this the layers are mounted, and the sandbox counts as their user."""
        try:
            await self._mount(record, environment)
        except SpawnerError as error:
            if error.code != "not_found":
                raise
            # A file that was there a moment ago: a check of the images may just be replacing it, or blobfs has let it go.
            await self._mount(record, environment)

    async def _mount(self, record: Record, environment: Environment) -> None:
        layers = self._inventory.layers
        lazy: Collection[str] = ()
        if layers.missing(record.layers):
            lazy = await self._on_demand.provide(environment)
        elif layers.lazy(record.layers):
            # What is mounted is ready, but without a user nobody has kept other nodes from its data.
            await self._images.hold(environment)
        await layers.acquire(record.layers, lazy)
        record.layers = layers.as_mounted(record.layers)

    async def _mount_anew(self, record: Record, environment: Environment) -> None:
        """Mounts what the spawner has dropped of the layers of a sandbox, which is their user already."""
        layers, held = self._inventory.layers, record.layers
        await layers.compare(self._clock.monotonic())
        await self._mount_layers(record, environment)
        layers.release(held, self._clock.monotonic())

    def _check_readable(self, record: Record, aborts: int) -> None:
        """Raises Unavailable if the data of the layers was given up since there were ``aborts`` of that."""
        layers = self._inventory.layers
        if layers.aborts != aborts and any(layer.lazy for layer in record.layers):
            raise Unavailable("the data of its image could no longer be read when the sandbox had started; try again", retry_after=1.0)

    async def _key_used_up(self, sandbox: Sandbox) -> DSecError:
        """The journal has another sandbox under the key, and it isn't live: it has ended."""
        record = sandbox.record
        self._inventory.remove(sandbox)
        if sandbox.state == "creating":
            sandbox.become("failed", "create", self._clock.wall(), "its idempotency key was used before")
        earlier = None if record.key is None else await self._inventory.journal.find_key(record.project, record.key)
        if earlier is None:
            return Unavailable("the sandbox of this idempotency key is just being removed; try again", retry_after=0.5)
        if earlier.fingerprint != record.fingerprint:
            return _key_conflict(record.key, earlier.id)
        return refusal(earlier)

    async def _spawn(self, sandbox: Sandbox, environment: Environment, origin: Origin | None) -> int:
        """Has the spawner make it. Returns how often the data of lazy layers had been given up before that."""
        record, layers = sandbox.record, self._inventory.layers
        snapshot = None if origin is None else origin.snapshot
        if origin is not None and snapshot is None:
            raise Unavailable("a sandbox of this idempotency key ended just now; repeat the call", retry_after=0.5)
        spec = SandboxSpec(
            sandbox=record.id,
            layers=[layer.meta for layer in record.layers],
            hostname=record.id,
            memory=record.memory_mb * MB,
            cpu_millis=round(record.cpu_cores * 1000),
            pids=record.pids,
            disk=max(MB, record.disk_mb * MB - record.inherited),
            origin=snapshot,
            extra_ids=list(record.extra_ids),
            history=min(HISTORY_BYTES, record.memory_mb * MB // HISTORY_SHARE),
        )
        for attempt in range(1, SPAWNER_TRIES + 1):
            aborts = layers.aborts
            try:
                spawned = await self._inventory.spawner.create(spec)
                break
            except SpawnerError as error:
                lost = isinstance(error, SpawnerLost)
                if attempt == SPAWNER_TRIES or sandbox.state != "creating" or not (lost or error.code == "not_found"):
                    raise
                if lost:
                    # It may have died half-way: what the kernel has under the name goes first.
                    await self._endings.kill(record.id)
                else:
                    # Dropped since they were mounted: with blobfs, or by a spawner that was restarted. Nothing was made.
                    await self._mount_anew(record, environment)
        record.slot = spawned.slot
        record.socket = spawned.socket
        return aborts

    async def _run_from_now(self, sandbox: Sandbox) -> None:
        record = sandbox.record
        record.started_at = self._clock.wall()
        sandbox.become("running", "create", record.started_at)
        sandbox.touch(self._clock.monotonic())
        told = record.told
        await self._inventory.journal.update(record)
        if told is not False and record.told is not False:
            # A row that says it runs, and no more, is one of a told sandbox.
            sandbox.untold_in_journal = False
        self._lifetimes.watch(sandbox)

    def _node_load(self) -> NodeLoad:
        now = time.monotonic()
        if self._load is None or now - self._load_at > LOAD_FRESH_S:
            if now - self._facts_at > FACTS_FRESH_S:
                self._facts_at = now
                self._descriptors_free = node.descriptors_free()
                self._inventory.tasks.start(self._refresh_facts(), "facts")
            facts = self._inventory.facts
            self._load_at = now
            self._load = NodeLoad(
                memory=facts.memory,
                memory_available=node.memory_available(),
                pressure=node.memory_pressure(),
                scratch=facts.scratch,
                scratch_used=facts.scratch_used,
                descriptors_free=self._descriptors_free,
            )
        return self._load

    async def _refresh_facts(self) -> None:
        try:
            await self._inventory.refresh_facts()
        except SpawnerError as error:
            _log.info("the spawner can't be asked for the scratch disk now", error=str(error))


def _key_conflict(key: str | None, sandbox: str) -> Conflict:
    return Conflict(f"idempotency key {key!r} was used with other arguments, for sandbox {sandbox}", field="idempotency_key")
