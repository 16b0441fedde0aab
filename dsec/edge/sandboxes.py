"""The owner of every sandbox of this edge: creation, end, failure, adoption, lifetimes.

Every change is in the journal before it is done. What the caller sees is decided here; what the kernel does is the spawner's; what runs
inside is chronus's, behind a channel.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Literal, Protocol

import msgspec
import structlog

from dsec.edge import node
from dsec.edge.admission import Limits, NodeLoad, NodeSize, admit, clamp
from dsec.edge.adoption import Verdict, judge
from dsec.edge.cgroups import Cgroups
from dsec.edge.channel import Channel, ChannelError, ChannelLost, Exit, Start, Stream
from dsec.edge.commands import CommandEntry, shorten
from dsec.edge.config import EdgeConfig
from dsec.edge.deadlines import Clock, Deadlines, next_look
from dsec.edge.failures import as_error, incident, of_builtin
from dsec.edge.ids import new_exec_id, new_sandbox_id
from dsec.edge.journal import Journal, JournalError
from dsec.edge.layers import LayerMounts, refer
from dsec.edge.record import Record
from dsec.edge.sandbox import Sandbox, os_encode, refusal
from dsec.edge.slots import StartSlots
from dsec.edge.spawner import KernelSandbox, KillFigures, NodeFacts, SandboxSpec, Spawner, SpawnerError, SpawnerLost
from dsec.edge.states import ENDED, takes
from dsec.edge.tasks import Tasks
from dsec.edge.validation import check_labels, check_rules, check_seconds
from dsec.images import Environment
from libdsec.errors import Conflict, DeadlineExceeded, DSecError, NoCapacity, SandboxNotFound, Unavailable
from libdsec.schema import (
    MB,
    Backend,
    ExitFigures,
    PatchRequest,
    RunArgs,
    SandboxInfo,
    SandboxPage,
    State,
)

_log = structlog.get_logger("dsec.edge")

HISTORY_BYTES = 8 * MB
"""Window of output that chronus keeps of each stream of a started command; less in small sandboxes, whose memory it is charged to."""
HISTORY_SHARE = 16
"""The window is at most this fraction of the sandbox's memory."""
CONNECT_TIMEOUT_S = 10.0
"""For the first connection to a new agent; it listens before the spawner answers."""
RECONNECT_TIMEOUT_S = 3.0
"""For a connection to an agent that was there a moment ago."""
STATUS_WAIT_S = 1.0
"""How long a broken channel waits for the spawner to tell how the agent ended."""
SPAWNER_TRIES = 3
"""Attempts of a call while the spawner is being restarted; each waits for it (10 s)."""
ADOPT_AT_ONCE = 64
"""Connections made at the same time after a restart."""
LOAD_FRESH_S = 0.05
"""Memory figures are read again after this long: a few sandboxes start meanwhile, and each is counted with its expected memory."""
FACTS_FRESH_S = 1.0
"""The same for scratch and descriptors, whose reading costs more."""
LIST_LIMIT = 1_000
EVENTS_IN_RECORD = 50
"""Events kept in the record of a failed sandbox."""

_fingerprint = msgspec.msgpack.Encoder().encode


class Resolver(Protocol):
    """What the edge needs of the image store."""

    def resolve(self, image: str, workspace: str | None, toolkits: Sequence[str]) -> Environment: ...


ConnectChannel = Callable[[str, Callable[[ChannelLost], None], float], Awaitable[Channel]]
ConnectSpawner = Callable[[Callable[[str, int], None], Callable[[], None]], Awaitable[Spawner]]


async def connect_channel(path: str, on_lost: Callable[[ChannelLost], None], timeout_s: float) -> Channel:
    """The real :data:`ConnectChannel`."""
    return await Channel.connect(path, on_lost=on_lost, timeout_s=timeout_s)


class Sandboxes:
    """All sandboxes of one edge. :meth:`open` before anything else, :meth:`close` at the end; sandboxes live on after it."""

    def __init__(
        self,
        config: EdgeConfig,
        images: Resolver,
        *,
        connect_spawner: ConnectSpawner,
        connect_channel: ConnectChannel = connect_channel,
        clock: Clock | None = None,
        cgroups: Cgroups | None = None,
    ) -> None:
        self.config = config
        self.clock = clock or Clock()
        self.cgroups = cgroups or Cgroups(config.cgroup)
        self.slots = StartSlots(config.start_slots, config.start_queue)
        self.spawner: Spawner
        self.facts: NodeFacts
        self.layers: LayerMounts
        self.create_seconds: Callable[[float], None] = lambda seconds: None
        """Told how long each creation took; set by the metrics."""
        self._images = images
        self._journal = Journal(config.journal_path)
        self._connect_spawner = connect_spawner
        self._connect_channel = connect_channel
        self._by_id: dict[str, Sandbox] = {}
        self._by_key: dict[tuple[str, str], Sandbox] = {}
        self._deadlines = Deadlines()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = Tasks()
        self._unfinished: set[str] = set()
        """Sandboxes whose end failed half-way (the spawner or the journal was away): the sweep goes on with them."""
        self._epoch = 0
        self._load: NodeLoad | None = None
        self._load_at = 0.0
        self._facts_at = 0.0
        self._descriptors_free = 0
        self._closing = False

    # --- the edge's own life

    async def open(self) -> None:
        """Opens the journal, connects to the spawner, adopts what lives, sweeps what has no owner. Raises JournalError, SpawnerError."""
        self._epoch = await self._journal.open()
        self.spawner = await self._connect_spawner(self._on_exited, self._on_spawner_back)
        self.facts = await self.spawner.hello()
        self.layers = LayerMounts(self.spawner)
        await self._adopt()
        self._tasks.start(self._sweep_forever(), "sweep")

    async def close(self) -> None:
        """Ends the edge, not its sandboxes."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.close()
        for sandbox in self._by_id.values():
            if sandbox.channel is not None:
                sandbox.channel.close()
        self.spawner.close()
        await self._journal.close()

    def counts(self) -> dict[str, int]:
        """Live sandboxes by state."""
        counts: dict[str, int] = {}
        for sandbox in self._by_id.values():
            counts[sandbox.state] = counts.get(sandbox.state, 0) + 1
        return counts

    # --- looking up

    async def find(self, project: str, sandbox: str) -> Sandbox | Record:
        """The live sandbox, or the record of one that ended. Raises SandboxNotFound."""
        live = self._by_id.get(sandbox)
        if live is not None and live.record.project == project:
            return live
        record = None if live is not None else await self._journal.find(sandbox)
        if record is None or record.project != project:
            raise SandboxNotFound(f"there is no sandbox {sandbox!r}")
        return record

    def live(self, sandbox: str) -> Sandbox | None:
        """The live sandbox of that id, whosever it is."""
        return self._by_id.get(sandbox)

    def info(self, sandbox: Sandbox) -> SandboxInfo:
        """The sandbox as callers see it."""
        since = sandbox.idle_since()
        idle_s = 0.0 if since is None else max(0.0, self.clock.monotonic() - since)
        return sandbox.record.info(self.config.edge_id, idle_s)

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

        found = [self.info(s) for s in self._by_id.values() if s.record.project == project and wanted(s.record)]
        ended = [state for state in states if state in ENDED]
        position = after
        while ended:
            records = await self._journal.ended(project, ended, position, LIST_LIMIT)
            matching = [record.info(self.config.edge_id, 0.0) for record in records if wanted(record) and record.id not in self._by_id]
            found.extend(matching)
            if len(records) < LIST_LIMIT or len(matching) > limit:
                break
            position = (records[-1].created_at, records[-1].id)
        found.sort(key=lambda info: (info.created_at, info.id))
        cursor = f"{found[limit - 1].created_at!r},{found[limit - 1].id}" if len(found) > limit else None
        return SandboxPage(sandboxes=found[:limit], cursor=cursor)

    async def channel(self, sandbox: Sandbox) -> Channel:
        """The channel of a sandbox that takes calls. Raises SandboxFailed, SandboxGone, Conflict."""
        while True:
            if not takes(sandbox.state, "use"):
                raise self.refuse(sandbox)
            if sandbox.channel is not None:
                return sandbox.channel
            if sandbox.settling is None:
                raise Unavailable(f"sandbox {sandbox.id} is being connected", retry_after=0.2)
            await asyncio.wait([sandbox.settling])

    async def verdict(self, sandbox: Sandbox) -> DSecError:
        """What a channel that broke under a request means for the caller."""
        if self._closing:
            return Unavailable("the edge is being restarted; the command goes on: repeat the call with the same exec_id", retry_after=0.5)
        if sandbox.settling is not None:
            await asyncio.wait([sandbox.settling])
        if sandbox.state == "running":
            return Unavailable(
                f"the connection to sandbox {sandbox.id} broke and is back; repeat the call with the same exec_id", retry_after=0.1
            )
        return self.refuse(sandbox)

    def refuse(self, sandbox: Sandbox) -> DSecError:
        """The error for a call that the sandbox's state doesn't take."""
        if sandbox.state == "creating":
            return Conflict(f"sandbox {sandbox.id} is being created", retry_after=0.2)
        if sandbox.state == "running":
            return Conflict(f"sandbox {sandbox.id} is running")
        if sandbox.state in ("pausing", "paused", "resuming"):
            return Conflict(f"sandbox {sandbox.id} is {sandbox.state}", retry_after=1.0)
        return refusal(sandbox.record)

    # --- creation

    async def create(self, project: str, args: RunArgs, deadline: float | None) -> SandboxInfo:
        """One sandbox, running; the same one again if the project used ``args.idempotency_key`` before. ``args`` are valid.

        ``deadline``: the time of the event loop's clock by which it must be ready; None: no limit. Raises DeadlineExceeded (it is taken
        back), NoCapacity, ImageNotFound, Conflict (the key came with other arguments), SandboxGone (the key's sandbox has ended),
        Unavailable. Cancelled: with a key the creation goes on, without one it is taken back.
        """
        begun = self.clock.monotonic()
        fingerprint = hashlib.blake2b(_fingerprint(args), digest_size=8).digest()
        sandbox = self._known(project, args.idempotency_key, fingerprint)
        if sandbox is None:
            try:
                async with asyncio.timeout_at(deadline):
                    await self.slots.acquire()
            except TimeoutError:
                raise DeadlineExceeded("the request's deadline passed while the sandbox waited for its turn to start") from None
            sandbox = self._known(project, args.idempotency_key, fingerprint)
            if sandbox is not None:
                self.slots.release()
            else:
                sandbox = self._begin(project, args, fingerprint)
        info = await self._created(sandbox, deadline)
        self.create_seconds(self.clock.monotonic() - begun)
        return info

    def _known(self, project: str, key: str | None, fingerprint: bytes) -> Sandbox | None:
        sandbox = None if key is None else self._by_key.get((project, key))
        if sandbox is not None and sandbox.record.fingerprint != fingerprint:
            raise Conflict(f"idempotency key {key!r} was used with other arguments, for sandbox {sandbox.id}", field="idempotency_key")
        return sandbox

    def _begin(self, project: str, args: RunArgs, fingerprint: bytes) -> Sandbox:
        """With a slot taken: decides whether the sandbox may start, and starts it. The slot is given back when that has ended."""
        try:
            refused = admit(self._node_load(), self.slots.starting - 1, self.config.admission)
            if refused is not None:
                raise NoCapacity(
                    f"no sandbox can start on this node now: {refused.message}", reason=refused.reason, retry_after=refused.retry_after
                )
            environment = self._images.resolve(args.container_image, args.workspace, args.toolkits)
            limits = clamp(args, NodeSize(cores=self.facts.cores, memory=self.facts.memory, scratch=self.facts.scratch))
            record = self._new_record(project, args, fingerprint, environment, limits)
            sandbox = Sandbox(record, self.clock.monotonic())
        except BaseException:
            self.slots.release()
            raise
        self._register(sandbox)
        sandbox.starting = self._tasks.start(self._start(sandbox), f"start {sandbox.id}")
        return sandbox

    def _new_record(self, project: str, args: RunArgs, fingerprint: bytes, environment: Environment, limits: Limits) -> Record:
        config = environment.config
        return Record(
            id=new_sandbox_id(self.config.edge_id, self._epoch),
            project=project,
            state="creating",
            created_at=self.clock.wall(),
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

    async def _created(self, sandbox: Sandbox, deadline: float | None) -> SandboxInfo:
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
                if sandbox.record.key is None and not self._closing:
                    self._give_up(sandbox, "the caller went away")
                raise
            finally:
                sandbox.starters -= 1
            if error is not None:
                raise error
        if sandbox.state == "running":
            return self.info(sandbox)
        raise self.refuse(sandbox)

    def _give_up(self, sandbox: Sandbox, why: str) -> None:
        """The last request that waits for a creation takes it back."""
        if sandbox.starters == 1 and sandbox.state == "creating":
            self._begin_stop(sandbox, why, forget=True)

    async def _start(self, sandbox: Sandbox) -> DSecError | None:
        """The creation itself. Ends with the sandbox running, or with nothing of it left and the reason as the value."""
        record = sandbox.record
        counted = False
        error: DSecError
        try:
            if not await self._journal.insert(record):
                return await self._key_used_up(sandbox)
            await self.layers.acquire(record.layers)
            counted = True
            if sandbox.state == "creating":
                await self._spawn(sandbox)
                await self._connect(sandbox, CONNECT_TIMEOUT_S)
                await self._make_workdir(sandbox)
            if sandbox.state == "creating":
                await self._run_from_now(sandbox)
                return None
            # Stopped meanwhile: the stop, which waits for us, removes everything.
            return refusal(record)
        except (DSecError, SpawnerError, ChannelLost, ChannelError, JournalError, OSError) as failure:
            error = as_error(failure)
        except Exception as failure:
            error = incident(failure, f"create {record.id}")
        finally:
            sandbox.starting = None
            self.slots.release()
            if not counted:
                record.layers = ()
        if sandbox.state == "creating":
            sandbox.become("failed", "create", self.clock.wall(), error.message)
            await self._take_back(sandbox)
        elif sandbox.state == "running":
            # It runs, but the journal didn't take that: nobody may be told.
            self._begin_stop(sandbox, error.message, forget=True)
        return error

    async def _key_used_up(self, sandbox: Sandbox) -> DSecError:
        """The journal has another sandbox under the key, and it isn't live: it has ended."""
        record = sandbox.record
        self._unregister(sandbox)
        sandbox.become("failed", "create", self.clock.wall(), "its idempotency key was used before")
        earlier = None if record.key is None else await self._journal.find_key(record.project, record.key)
        if earlier is None:
            return Unavailable("the sandbox of this idempotency key is just being removed; try again", retry_after=0.5)
        if earlier.fingerprint != record.fingerprint:
            return Conflict(
                f"idempotency key {record.key!r} was used with other arguments, for sandbox {earlier.id}", field="idempotency_key"
            )
        return refusal(earlier)

    async def _spawn(self, sandbox: Sandbox) -> None:
        record = sandbox.record
        spec = SandboxSpec(
            sandbox=record.id,
            layers=[layer.meta for layer in record.layers],
            hostname=record.id,
            memory=record.memory_mb * MB,
            cpu_millis=round(record.cpu_cores * 1000),
            pids=record.pids,
            disk=record.disk_mb * MB,
            extra_ids=list(record.extra_ids),
            no_new_privs=record.no_new_privs,
            cpu_class=record.cpu_class,
            history=min(HISTORY_BYTES, record.memory_mb * MB // HISTORY_SHARE),
        )
        for attempt in range(1, SPAWNER_TRIES + 1):
            try:
                spawned = await self.spawner.create(spec)
                break
            except SpawnerLost:
                if attempt == SPAWNER_TRIES or sandbox.state != "creating":
                    raise
                # It may have died half-way: what the kernel has under the name goes first.
                await self.spawner.kill(record.id)
        record.slot = spawned.slot
        record.socket = spawned.socket

    async def _connect(self, sandbox: Sandbox, timeout_s: float) -> None:
        lost = functools.partial(self._on_channel_lost, sandbox)
        sandbox.channel = await self._connect_channel(sandbox.record.socket, lost, timeout_s)

    async def _make_workdir(self, sandbox: Sandbox) -> None:
        """Makes the working directory if it is missing, for the user that commands run as."""
        record = sandbox.record
        if record.workdir == "/" or sandbox.channel is None:
            return
        path = os_encode(record.workdir)
        try:
            try:
                await self._builtin(sandbox, "mkdir", {"path": path, "parents": False, "mode": 0o755})
            except DSecError as error:
                if error.errno == 17:  # EEXIST: the image has it
                    return
                await self._builtin(sandbox, "mkdir", {"path": path, "parents": True, "mode": 0o755})
            if record.init_user != "root":
                await self._builtin(sandbox, "chown", {"path": path, "owner": record.init_user})
        except DSecError as error:
            error.field = error.field or "workdir"
            raise

    async def _builtin(self, sandbox: Sandbox, name: str, args: dict[str, object]) -> None:
        assert sandbox.channel is not None
        exit = await sandbox.channel.run(Start(exec_id=new_exec_id(), builtin=name, args=args, user="root"))
        if exit.exit_code != 0:
            raise of_builtin(exit, name)

    async def _run_from_now(self, sandbox: Sandbox) -> None:
        record = sandbox.record
        record.started_at = self.clock.wall()
        sandbox.become("running", "create", record.started_at)
        sandbox.last_used = self.clock.monotonic()
        await self._journal.update(record)
        self._set_total(sandbox)
        self._arm(sandbox)

    async def _take_back(self, sandbox: Sandbox) -> None:
        """Removes a sandbox that nobody was told about: kernel objects first, then its row, so that a crash between leaves it to the
        sweep."""
        self._close_channel(sandbox)
        try:
            await self._kill(sandbox.id)
            await self._journal.delete(sandbox.id)
        except (SpawnerError, JournalError) as error:
            _log.warning("a sandbox can't be taken back now; the sweep will", sandbox=sandbox.id, error=str(error))
            self._unfinished.add(sandbox.id)
            return
        self.layers.release(sandbox.record.layers, self.clock.monotonic())
        self._unregister(sandbox)

    # --- the end

    async def stop(self, sandbox: Sandbox, reason: str) -> SandboxInfo:
        """Ends and removes a sandbox from whatever state, and tells how it was; returns when nothing of it is left. Raises Unavailable."""
        if sandbox.state == "failed" and sandbox.settling is not None:
            await asyncio.wait([sandbox.settling])
        if self._by_id.get(sandbox.id) is sandbox:
            await asyncio.shield(self._begin_stop(sandbox, reason))
        return sandbox.record.info(self.config.edge_id, 0.0)

    def _begin_stop(self, sandbox: Sandbox, reason: str, *, forget: bool = False) -> asyncio.Task[None]:
        if sandbox.stopping is None:
            sandbox.forget = sandbox.forget or forget
            if sandbox.state not in ("stopping", "stopped"):
                sandbox.become("stopping", "stop", self.clock.wall(), reason)
            sandbox.stopping = self._tasks.start(self._stop(sandbox), f"stop {sandbox.id}")
        return sandbox.stopping

    async def _stop(self, sandbox: Sandbox) -> None:
        record = sandbox.record
        self._deadlines.clear(sandbox.id)
        try:
            if sandbox.state == "stopping":
                await self._remove(sandbox)
            await (self._journal.delete(record.id) if sandbox.forget else self._journal.update(record))
        except (SpawnerError, JournalError) as error:
            sandbox.stopping = None
            self._unfinished.add(sandbox.id)
            raise Unavailable(f"sandbox {record.id} is being stopped, but {error}; repeat the call", retry_after=1.0) from error
        self._unregister(sandbox)

    async def _remove(self, sandbox: Sandbox) -> None:
        """From stopping to stopped: says so in the journal, then removes everything that the kernel has of it."""
        record = sandbox.record
        written = self._journal.update(record)
        if sandbox.starting is not None:
            # The act of creating can't be recalled: it ends first, then everything goes.
            await asyncio.wait([sandbox.starting])
        await written
        self._close_channel(sandbox)
        figures = await self._kill(sandbox.id)
        record.exit = record.exit or _exit_figures(figures)
        self.layers.release(record.layers, self.clock.monotonic())
        record.ended_at = record.ended_at or self.clock.wall()
        sandbox.become("stopped", "stop", self.clock.wall(), record.reason)
        record.forget_workings()

    async def _kill(self, sandbox: str, *, keep_scratch: bool = False) -> KillFigures:
        for attempt in range(1, SPAWNER_TRIES + 1):
            try:
                return await self.spawner.kill(sandbox, keep_scratch=keep_scratch)
            except SpawnerLost:
                if attempt == SPAWNER_TRIES:
                    raise
        raise AssertionError("the loop returns or raises")

    def _close_channel(self, sandbox: Sandbox) -> None:
        channel, sandbox.channel = sandbox.channel, None
        if channel is not None:
            channel.close()

    # --- failure

    def _on_exited(self, sandbox_id: str, status: int) -> None:
        """The spawner says that an agent is dead."""
        sandbox = self._by_id.get(sandbox_id)
        if sandbox is None or self._closing:
            return
        if sandbox.dead is not None and not sandbox.dead.done():
            sandbox.dead.set_result(status)
        elif sandbox.state == "running" and sandbox.settling is None:
            self._fail(sandbox, _how_it_ended(status))

    def _on_channel_lost(self, sandbox: Sandbox, lost: ChannelLost) -> None:
        sandbox.channel = None
        if sandbox.state == "running" and not self._closing and sandbox.settling is None:
            sandbox.dead = asyncio.get_running_loop().create_future()
            sandbox.settling = self._tasks.start(self._settle(sandbox, lost), f"settle {sandbox.id}")

    async def _settle(self, sandbox: Sandbox, lost: ChannelLost) -> None:
        """A channel broke: is the agent still there? Then it is connected again; else the sandbox has failed."""
        try:
            if await self._reconnected(sandbox):
                sandbox.note(self.clock.wall(), "channel", f"the channel broke ({lost}) and was made again")
                return
            assert sandbox.dead is not None
            try:
                async with asyncio.timeout(STATUS_WAIT_S):
                    reason = _how_it_ended(await sandbox.dead)
            except TimeoutError:
                reason = f"the channel to its agent broke and can't be made again: {lost}"
        finally:
            sandbox.settling = None
            sandbox.dead = None
        if sandbox.state == "running":
            self._fail(sandbox, reason)

    async def _reconnected(self, sandbox: Sandbox) -> bool:
        try:
            await self._connect(sandbox, RECONNECT_TIMEOUT_S)
        except (ChannelLost, ChannelError, OSError, TimeoutError):
            return False
        if sandbox.state == "running":
            await self._follow_running(sandbox)
        else:
            self._close_channel(sandbox)
        return True

    def _fail(self, sandbox: Sandbox, reason: str) -> None:
        kills = self.cgroups.oom_kills(sandbox.id)
        if kills > sandbox.oom_seen:
            reason += f"; the kernel killed {kills - sandbox.oom_seen} of its processes for memory"
        at = self.clock.wall()
        sandbox.become("failed", "watch", at, reason)
        sandbox.record.ended_at = at
        _log.warning("sandbox failed", sandbox=sandbox.id, reason=reason)
        sandbox.settling = self._tasks.start(self._clear_failed(sandbox), f"clear {sandbox.id}")

    async def _clear_failed(self, sandbox: Sandbox) -> None:
        """Removes what a failed sandbox still holds: all of it, or all but its scratch if it is to be inspected."""
        record = sandbox.record
        try:
            self._close_channel(sandbox)
            record.events = sandbox.events.newest(EVENTS_IN_RECORD)
            await self._journal.update(record)
            record.exit = _exit_figures(await self._kill(sandbox.id, keep_scratch=record.keep_on_failure))
            if not record.keep_on_failure:
                self.layers.release(record.layers, self.clock.monotonic())
                record.forget_workings()
            await self._journal.update(record)
        except (SpawnerError, JournalError) as error:
            _log.warning("a failed sandbox can't be removed now; the sweep will", sandbox=sandbox.id, error=str(error))
            self._unfinished.add(sandbox.id)
            return
        finally:
            sandbox.settling = None
        if not record.live:
            self._unregister(sandbox)

    # --- commands that outlive their request

    def follow(self, sandbox: Sandbox, stream: Stream, ended: Callable[[Exit], None]) -> None:
        """Watches a started command to its end, for the idle rule, and hands its exit to ``ended``."""
        self._tasks.start(self._follow(sandbox, stream, ended), f"follow {stream.exec_id}")

    async def _follow(self, sandbox: Sandbox, stream: Stream, ended: Callable[[Exit], None]) -> None:
        try:
            ended(await stream.wait())
        except (ChannelLost, ChannelError):
            return  # whoever watches the channel settles what that means
        finally:
            sandbox.touch(self.clock.monotonic())

    async def _follow_running(self, sandbox: Sandbox) -> None:
        """After a new connection: watches the commands that run since before."""
        channel = sandbox.channel
        if channel is None or not channel.running:
            return
        try:
            for entry in await channel.list():
                if not entry.running:
                    continue
                command = shorten(b" ".join(entry.argv).decode("utf-8", "replace"))
                sandbox.command_started(CommandEntry(exec_id=entry.exec_id, command=command, started_at=entry.started_ms / 1000))
                self.follow(sandbox, await channel.attach(entry.exec_id), lambda exit: None)
        except (ChannelLost, ChannelError) as error:
            _log.info("running commands can't be followed", sandbox=sandbox.id, error=str(error))

    # --- changes and lifetimes

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
        await self._journal.update(record)
        self._set_total(sandbox)
        self._arm(sandbox)
        return self.info(sandbox)

    def _set_total(self, sandbox: Sandbox) -> None:
        record = sandbox.record
        left = None if record.ttl_total is None else record.created_at + record.ttl_total - self.clock.wall()
        sandbox.total_at = None if left is None else self.clock.monotonic() + left

    def _arm(self, sandbox: Sandbox) -> None:
        """Sets when to look at the sandbox's lifetime again."""
        now = self.clock.monotonic()
        at = next_look(now=now, ttl_idle=self._ttl_idle(sandbox), idle_since=sandbox.idle_since(), total_at=sandbox.total_at)
        if at is None or sandbox.state == "stopping":
            self._deadlines.clear(sandbox.id)
            return
        self._deadlines.set(sandbox.id, at)
        self._set_timer(now)

    def _ttl_idle(self, sandbox: Sandbox) -> float | None:
        return sandbox.record.ttl_idle if sandbox.state == "running" else None

    def _set_timer(self, now: float) -> None:
        at = self._deadlines.next()
        if at is None or self._closing:
            return
        loop = asyncio.get_running_loop()
        when = loop.time() + max(0.0, at - now)
        if self._timer is not None:
            if not self._timer.cancelled() and loop.time() < self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = loop.call_at(when, self.expire)

    def expire(self) -> None:
        """Stops the sandboxes whose time is over. Called by the timer."""
        now = self.clock.monotonic()
        for sandbox_id in self._deadlines.take_due(now):
            sandbox = self._by_id.get(sandbox_id)
            if sandbox is None or sandbox.state == "stopping":
                continue
            since, ttl_idle = sandbox.idle_since(), self._ttl_idle(sandbox)
            if sandbox.total_at is not None and sandbox.total_at <= now:
                self._begin_stop(sandbox, f"lifetime of {sandbox.record.ttl_total:g} s is over")
            elif ttl_idle is not None and since is not None and since + ttl_idle <= now:
                self._begin_stop(sandbox, f"idle for {ttl_idle:g} s")
            else:
                self._arm(sandbox)
        self._set_timer(now)

    # --- adoption and sweep

    async def _adopt(self) -> None:
        """After a start: brings memory, journal and kernel into agreement."""
        records = {record.id: record for record in await self._journal.live()}
        kernel = {entry.sandbox: entry for entry in await self.spawner.list()}
        at_once = asyncio.Semaphore(ADOPT_AT_ONCE)

        async def settle(sandbox_id: str) -> None:
            async with at_once:
                record, entry = records.get(sandbox_id), kernel.get(sandbox_id)
                await self._adopt_one(sandbox_id, record, entry, judge(record, entry))

        await asyncio.gather(*(settle(sandbox_id) for sandbox_id in sorted(records.keys() | kernel.keys())))

    async def _adopt_one(self, sandbox_id: str, record: Record | None, entry: KernelSandbox | None, verdict: Verdict) -> None:
        if record is None:
            await self._kill(sandbox_id)
            return
        sandbox = Sandbox(record, self.clock.monotonic())
        sandbox.oom_seen = self.cgroups.oom_kills(sandbox_id)
        self._register(sandbox)
        self.layers.adopt(record.layers)
        if verdict == "finish_stop":
            await asyncio.wait([self._begin_stop(sandbox, "stopped")])
        elif verdict == "take_back":
            sandbox.become("failed", "adopt", self.clock.wall(), "its creation was cut off")
            await self._take_back(sandbox)
        elif verdict == "adopt":
            assert entry is not None
            await self._adopt_alive(sandbox, entry)
        elif verdict == "lose":
            self._end_unseen(sandbox, "lost", "nothing of it was left when the edge started again")
            await self._clear_failed(sandbox)
        elif verdict == "fail":
            self._end_unseen(sandbox, "failed", "its agent died while the edge was away")
            await self._clear_failed(sandbox)
        elif verdict == "release":
            record.keep_on_failure = False
            await self._clear_failed(sandbox)
        else:
            self._set_total(sandbox)
            self._arm(sandbox)

    async def _adopt_alive(self, sandbox: Sandbox, entry: KernelSandbox) -> None:
        record = sandbox.record
        record.slot, record.socket = entry.slot, entry.socket
        try:
            await self._connect(sandbox, CONNECT_TIMEOUT_S)
            if record.state == "creating":
                await self._make_workdir(sandbox)
                record.started_at = self.clock.wall()
                sandbox.become("running", "adopt", record.started_at)
                await self._journal.update(record)
        except (ChannelLost, ChannelError, DSecError, OSError, TimeoutError) as error:
            if record.state == "creating":
                sandbox.become("failed", "adopt", self.clock.wall(), "its creation was cut off")
                await self._take_back(sandbox)
            else:
                self._end_unseen(sandbox, "failed", f"its agent doesn't answer after the edge started again: {error}")
                await self._clear_failed(sandbox)
            return
        await self._follow_running(sandbox)
        self._set_total(sandbox)
        self._arm(sandbox)

    def _end_unseen(self, sandbox: Sandbox, state: Literal["failed", "lost"], reason: str) -> None:
        at = self.clock.wall()
        sandbox.become(state, "adopt", at, reason)
        sandbox.record.ended_at = at
        if state == "lost":
            sandbox.record.keep_on_failure = False

    def _on_spawner_back(self) -> None:
        """The spawner was restarted: agents may have died unseen."""
        if not self._closing:
            self._tasks.start(self._compare_with_kernel(), "compare")

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(self.config.sweep_every_s)
            await self.sweep()

    async def sweep(self) -> None:
        """One round: unowned kernel objects, unfinished ends, idle layers, old records."""
        for step in (self._compare_with_kernel, self._finish_unfinished, self._unmount_idle, self._prune):
            try:
                await step()
            except (SpawnerError, JournalError, DSecError) as error:
                _log.warning("a part of the sweep failed; the next round tries again", step=step.__name__, error=str(error))
            except Exception as error:
                incident(error, f"sweep {step.__name__}")

    async def _compare_with_kernel(self) -> None:
        running = {sandbox.id for sandbox in self._by_id.values() if sandbox.state == "running"}
        kernel = {entry.sandbox: entry for entry in await self.spawner.list()}
        for sandbox_id in kernel:
            if sandbox_id not in self._by_id:
                _log.warning("swept a sandbox that nobody owns", sandbox=sandbox_id)
                await self._kill(sandbox_id)
        for sandbox_id in running:
            sandbox, entry = self._by_id.get(sandbox_id), kernel.get(sandbox_id)
            if sandbox is None or sandbox.state != "running" or sandbox.settling is not None:
                continue
            if entry is None or not entry.alive:
                self._fail(sandbox, "nothing of it is left" if entry is None else "its agent died unseen")
        await self.layers.forget_unmounted()

    async def _finish_unfinished(self) -> None:
        for sandbox_id in list(self._unfinished):
            self._unfinished.discard(sandbox_id)
            sandbox = self._by_id.get(sandbox_id)
            if sandbox is None:
                continue
            if sandbox.state in ("stopping", "stopped"):
                await asyncio.wait([self._begin_stop(sandbox, "stopped")])
            elif sandbox.record.ended_at is not None:
                await self._clear_failed(sandbox)
            else:
                await self._take_back(sandbox)

    async def _unmount_idle(self) -> None:
        await self.layers.unmount_idle(self.clock.monotonic() - self.config.layer_idle_s)

    async def _prune(self) -> None:
        await self._journal.prune(before=self.clock.wall() - self.config.records_keep_s, keep=self.config.records_max)

    # --- the tables and the node

    def _register(self, sandbox: Sandbox) -> None:
        self._by_id[sandbox.id] = sandbox
        if sandbox.record.key is not None:
            self._by_key[sandbox.record.project, sandbox.record.key] = sandbox

    def _unregister(self, sandbox: Sandbox) -> None:
        self._deadlines.clear(sandbox.id)
        self._unfinished.discard(sandbox.id)
        if self._by_id.get(sandbox.id) is sandbox:
            del self._by_id[sandbox.id]
        key = sandbox.record.key
        if key is not None and self._by_key.get((sandbox.record.project, key)) is sandbox:
            del self._by_key[sandbox.record.project, key]
        sandbox.events.wake()

    def _node_load(self) -> NodeLoad:
        now = time.monotonic()
        if self._load is None or now - self._load_at > LOAD_FRESH_S:
            if now - self._facts_at > FACTS_FRESH_S:
                self._facts_at = now
                self._descriptors_free = node.descriptors_free()
                self._tasks.start(self._refresh_facts(), "facts")
            self._load_at = now
            self._load = NodeLoad(
                memory=self.facts.memory,
                memory_available=node.memory_available(),
                pressure=node.memory_pressure(),
                scratch=self.facts.scratch,
                scratch_used=self.facts.scratch_used,
                descriptors_free=self._descriptors_free,
            )
        return self._load

    async def _refresh_facts(self) -> None:
        try:
            self.facts = await self.spawner.hello()
        except SpawnerError as error:
            _log.info("the spawner can't be asked for the scratch disk now", error=str(error))


def _exit_figures(figures: KillFigures) -> ExitFigures:
    return ExitFigures(cpu_s=figures.cpu_us / 1e6, memory_peak=figures.memory_peak, disk_bytes=figures.disk, oom_kills=figures.oom_kills)


def _how_it_ended(status: int) -> str:
    code = os.waitstatus_to_exitcode(status) if status >= 0 else status
    return f"its agent was killed by signal {-code}" if code < 0 else f"its agent ended with exit code {code}"
