"""What the edge knows of a sandbox: state, changes, the end, figures, events, processes, diff; and the list of them."""

from __future__ import annotations

from typing import TypeVar, get_args

import msgspec

from dsec.edge.call import MSGPACK, NDJSON, Body, Call
from dsec.edge.cgroups import Usage
from dsec.edge.channel import Start
from dsec.edge.failures import of_builtin
from dsec.edge.ids import new_exec_id
from dsec.edge.record import Record
from dsec.edge.sandbox import Sandbox
from dsec.edge.sandboxes import LIST_LIMIT, Sandboxes
from dsec.edge.sequence import Sequence
from dsec.edge.states import ENDED
from libdsec.errors import InvalidArgument
from libdsec.schema import MB, Backend, DiffEntry, Metrics, PatchRequest, ProcessEntry, SandboxEvent, State

DIFF_LIMIT = 100_000
"""The most entries of a diff. They come from the spawner in pages of at most 3 MiB."""
LINES_AT_ONCE = 1_000
"""Lines sent in one piece."""
PROCESSES_MAX_BYTES = 8 << 20

T = TypeVar("T")

_patch_body = Body(PatchRequest)
_states: tuple[State, ...] = get_args(State)
_backends: tuple[Backend, ...] = get_args(Backend)
_to_json = msgspec.json.Encoder().encode
_to_msgpack = msgspec.msgpack.Encoder().encode


class _ProcessMap(msgspec.Struct):
    """A process as chronus describes it."""

    pid: int
    ppid: int
    uid: int
    state: str
    rss: int
    cpu_s: float
    argv: list[bytes]

    def entry(self) -> ProcessEntry:
        argv = [arg.decode("utf-8", "replace") for arg in self.argv]
        return ProcessEntry(pid=self.pid, ppid=self.ppid, uid=self.uid, state=self.state, rss=self.rss, cpu_s=self.cpu_s, argv=argv)


class Information:
    """The routes that need no command inside, but for the process list."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    async def list(self, call: Call) -> None:
        """GET /v1/sandboxes"""
        states = [_one_of("state", name, _states) for name in call.queries("state")]
        backend = call.text("backend")
        page = await self._sandboxes.page(
            call.project,
            states=states,
            backend=None if backend is None else _one_of("backend", backend.encode(), _backends),
            labels=dict(_label(pair) for pair in call.queries("label")),
            after=_position(call.text("cursor")),
            limit=call.integer("limit", LIST_LIMIT, least=1),
        )
        await call.reply(page)

    async def show(self, call: Call, target: Sandbox | Record) -> None:
        """GET /v1/sandboxes/{id}; POST …/attach, by which somebody says that he has the sandbox"""
        if isinstance(target, Sandbox):
            await call.reply(self._sandboxes.info(target))
        else:
            await call.reply(target.info(self._sandboxes.config.edge_id, 0.0))

    async def patch(self, call: Call, sandbox: Sandbox) -> None:
        """PATCH /v1/sandboxes/{id}"""
        change = await _patch_body.read(call)
        await call.reply(await self._sandboxes.patch(sandbox, change))

    async def stop(self, call: Call, target: Sandbox | Record) -> None:
        """DELETE /v1/sandboxes/{id}"""
        if isinstance(target, Sandbox):
            await call.reply(await self._sandboxes.stop(target, "stopped by request"))
        else:
            await call.reply(target.info(self._sandboxes.config.edge_id, 0.0))

    async def metrics(self, call: Call, sandbox: Sandbox) -> None:
        """GET …/metrics"""
        record = sandbox.record
        used = self._sandboxes.cgroups.usage(sandbox.id)
        if (end := record.exit) is not None:
            used = Usage(cpu_s=end.cpu_s, memory=0, memory_peak=end.memory_peak, pids=0, oom_kills=end.oom_kills)
        disk = await self._sandboxes.inventory.spawner.usage([sandbox.id])
        await call.reply(
            Metrics(
                at=self._sandboxes.clock.wall(),
                cpu_s=used.cpu_s,
                memory=used.memory,
                memory_peak=used.memory_peak,
                memory_limit=record.memory_mb * MB,
                pids=used.pids,
                pids_limit=record.pids,
                disk=disk.get(sandbox.id, 0) + record.inherited,
                disk_limit=record.disk_mb * MB,
                oom_kills=used.oom_kills,
                reads=await self._sandboxes.on_demand.reads_of(record),
            )
        )

    async def events(self, call: Call, target: Sandbox | Record) -> None:
        """GET …/events"""
        follow = call.flag("follow")
        await call.begin(MSGPACK if _wants_msgpack(call) else NDJSON)
        if isinstance(target, Record) or not follow:
            await _send_lines(call, target.events if isinstance(target, Record) else target.events.since(0)[0])
            await call.end()
            return
        async with call.until_disconnect():
            position = 0
            while True:
                found, position = target.events.since(position)
                if found:
                    await call.send(_lines(call, found))
                if target.state in ENDED and self._sandboxes.live(target.id) is not target:
                    break
                await target.events.more(position)
        await call.end()

    async def processes(self, call: Call, sandbox: Sandbox) -> None:
        """GET …/processes"""
        channel = await self._sandboxes.agents.channel(sandbox)
        start = Start(exec_id=new_exec_id(), builtin="processes", args={}, user="root", max_output=PROCESSES_MAX_BYTES)
        exit = await channel.run(start)
        if exit.exit_code != 0:
            raise of_builtin(exit, "processes")
        await call.reply([found.entry() for found in Sequence(_ProcessMap).feed(exit.stdout)])

    async def diff(self, call: Call, sandbox: Sandbox) -> None:
        """GET …/diff"""
        spawner = self._sandboxes.inventory.spawner
        left = min(call.integer("limit", DIFF_LIMIT, least=1), DIFF_LIMIT)
        # The first page before the answer begins: its errors have a status.
        entries, more = await spawner.diff(sandbox.id, left)
        await call.begin(MSGPACK if _wants_msgpack(call) else NDJSON)
        await _send_lines(call, entries)
        while more and entries and (left := left - len(entries)) > 0:
            entries, more = await spawner.diff(sandbox.id, left, entries[-1].path_bytes)
            await _send_lines(call, entries)
        await call.end()


async def _send_lines(call: Call, values: tuple[SandboxEvent, ...] | list[SandboxEvent] | list[DiffEntry]) -> None:
    for begin in range(0, len(values), LINES_AT_ONCE):
        await call.send(_lines(call, values[begin : begin + LINES_AT_ONCE]))


def _lines(call: Call, values: tuple[SandboxEvent, ...] | list[SandboxEvent] | list[DiffEntry]) -> bytes:
    if _wants_msgpack(call):
        return b"".join([_to_msgpack(value) for value in values])
    return b"".join([_to_json(value) + b"\n" for value in values])


def _wants_msgpack(call: Call) -> bool:
    return call.accepts_msgpack() and NDJSON not in (call.header(b"accept") or b"")


def _one_of(field: str, name: bytes, possible: tuple[T, ...]) -> T:
    for value in possible:
        if value == name.decode("utf-8", "replace"):
            return value
    raise InvalidArgument(f"{field} is one of {', '.join(map(str, possible))}", field=field)


def _label(pair: bytes) -> tuple[str, str]:
    name, equals, value = pair.decode("utf-8", "replace").partition("=")
    if not equals or not name:
        raise InvalidArgument("a label filter is name=value", field="label")
    return name, value


def _position(cursor: str | None) -> tuple[float, str]:
    if cursor is None:
        return (0.0, "")
    at, _, sandbox = cursor.partition(",")
    try:
        return (float(at), sandbox)
    except ValueError:
        raise InvalidArgument("this cursor was not given out here", field="cursor") from None
