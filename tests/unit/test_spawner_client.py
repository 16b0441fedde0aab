"""The spawner's client against a server in the test: what it sends, what it makes of answers, and what happens when the spawner dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from dsec.edge import verbs
from dsec.edge.spawner import (
    Denial,
    KernelSandbox,
    KillFigures,
    NodeFacts,
    PackOrder,
    SandboxSpec,
    Spawned,
    Spawner,
    SpawnerError,
    SpawnerLost,
    Taken,
)
from libdsec.schema import DiffEntry

DEADLINE_S = 10

Map = dict[str, object]
SPEC = SandboxSpec(
    sandbox="sb-e1-0123456789",
    layers=["ab" * 32],
    hostname="sb-e1-0123456789",
    memory=1 << 31,
    cpu_millis=2000,
    pids=1024,
    disk=10 << 30,
    extra_ids=[70_000],
    history=8 << 20,
)
FACTS: Map = {"version": "0.1.0", "kernel": "6.18.1", "cores": 2, "memory": 1 << 34, "cgroup": "hybrid"}


@dataclass
class FakeSpawner:
    """Listens where a spawner would. Requests pile up in ``requests``; the test answers them, in the order that it likes."""

    path: Path
    requests: asyncio.Queue[Map] = field(default_factory=asyncio.Queue)
    connections: asyncio.Queue[asyncio.StreamWriter] = field(default_factory=asyncio.Queue)
    server: asyncio.Server | None = None
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def start(self) -> None:
        self.server = await asyncio.start_unix_server(self._serve, self.path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        self.connections.put_nowait(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                self.requests.put_nowait(msgspec.msgpack.decode(await reader.readexactly(size), type=Map))
        writer.close()

    async def request(self) -> Map:
        return await asyncio.wait_for(self.requests.get(), DEADLINE_S)

    def send(self, frame: bytes) -> None:
        self.writers[-1].write(len(frame).to_bytes(4, "big") + frame)

    def reply(self, request: Map, result: Map) -> None:
        self.send(msgspec.msgpack.encode({"id": request["id"], **result}))

    def die(self) -> None:
        """As a killed process does: nobody listens, every connection is gone."""
        assert self.server is not None
        self.server.close()
        self.path.unlink(missing_ok=True)
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()


@dataclass
class Calls:
    """What the client told its owner."""

    exited: asyncio.Queue[tuple[str, int]] = field(default_factory=asyncio.Queue)
    denied: asyncio.Queue[Denial] = field(default_factory=asyncio.Queue)
    reconnected: asyncio.Event = field(default_factory=asyncio.Event)

    def on_blobs_aborted(self) -> None: ...

    def on_denied(self, denial: Denial) -> None:
        self.denied.put_nowait(denial)

    def on_exited(self, sandbox: str, status: int) -> None:
        self.exited.put_nowait((sandbox, status))


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[FakeSpawner]:
    server = FakeSpawner(tmp_path / "s")
    await server.start()
    yield server
    server.die()


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
async def spawner(fake: FakeSpawner, calls: Calls) -> AsyncIterator[Spawner]:
    opened = await connect(fake, calls)
    yield opened
    opened.close()


async def connect(fake: FakeSpawner, calls: Calls) -> Spawner:
    return await Spawner.connect(str(fake.path), listener=calls, on_reconnected=calls.reconnected.set)


async def answered(call: Awaitable[object], fake: FakeSpawner, result: Map) -> tuple[object, Map]:
    """What a call returns for an answer, and what it had sent (without the id)."""
    running = asyncio.ensure_future(call)
    request = await fake.request()
    fake.reply(request, result)
    del request["id"]
    return await asyncio.wait_for(running, DEADLINE_S), request


@pytest.mark.parametrize(
    ("call", "answer", "sent", "returned"),
    [
        (lambda s: s.layer_mount("ab", None), {}, {"verb": "layer_mount", "meta": "ab", "blob": None, "lazy": False}, None),
        (lambda s: s.layer_mount("ab", "cd", lazy=True), {}, {"verb": "layer_mount", "meta": "ab", "blob": "cd", "lazy": True}, None),
        (lambda s: s.layer_unmount("ab"), {}, {"verb": "layer_unmount", "meta": "ab"}, None),
        (lambda s: s.layers(), {"layers": {"ab": True}}, {"verb": "layers"}, {"ab": True}),
        (lambda s: s.hello(), FACTS, {"verb": "hello"}, msgspec.convert(FACTS, NodeFacts)),
        (
            lambda s: s.create(SPEC),
            {"pid": 7, "slot": 3, "socket": "/r/c/3", "timings": {"overlay": 120}},
            {"verb": "create", **{name: value for name, value in msgspec.structs.asdict(SPEC).items() if name != "origin"}},
            Spawned(pid=7, slot=3, socket="/r/c/3", timings={"overlay": 120}),
        ),
        (
            lambda s: s.create(msgspec.structs.replace(SPEC, origin="sn-e1-abc")),
            {"pid": 7, "slot": 3, "socket": "/r/c/3", "timings": {}},
            {
                "verb": "create",
                **{name: value for name, value in msgspec.structs.asdict(SPEC).items() if name != "origin"},
                "from": "sn-e1-abc",
            },
            Spawned(pid=7, slot=3, socket="/r/c/3"),
        ),
        (
            lambda s: s.snapshot("sb-1", "sn-e1-abc"),
            {"sync_us": 5, "freeze_us": 6},
            {"verb": "snapshot", "sandbox": "sb-1", "snapshot": "sn-e1-abc"},
            Taken(sync_us=5, freeze_us=6),
        ),
        (
            lambda s: s.snapshot_pack(PackOrder(snapshot="sn-e1-abc", exclude=("/x",), max_entries=1, max_bytes=2, max_meta=3)),
            {"report": "{}"},
            {"verb": "snapshot_pack", "snapshot": "sn-e1-abc", "exclude": ["/x"], "max_entries": 1, "max_bytes": 2, "max_meta": 3},
            "{}",
        ),
        (lambda s: s.snapshot_remove("sn-e1-abc"), {}, {"verb": "snapshot_remove", "snapshot": "sn-e1-abc"}, None),
        (lambda s: s.snapshots(), {"snapshots": ["sn-e1-abc"]}, {"verb": "snapshots"}, ["sn-e1-abc"]),
        (
            lambda s: s.kill("sb-1", keep_scratch=True),
            {"cpu_us": 5, "memory_peak": 6, "oom_kills": 1, "disk": 8},
            {"verb": "kill", "sandbox": "sb-1", "keep_scratch": True},
            KillFigures(cpu_us=5, memory_peak=6, oom_kills=1, disk=8),
        ),
        (lambda s: s.usage(iter(["sb-1"])), {"disk": {"sb-1": 4096}}, {"verb": "usage", "sandboxes": ["sb-1"]}, {"sb-1": 4096}),
        (
            lambda s: s.list(),
            {"sandboxes": [{"sandbox": "sb-1", "slot": 0, "pid": 9, "alive": True, "socket": "/r/c/0", "scratch": True, "later": 1}]},
            {"verb": "list"},
            [KernelSandbox(sandbox="sb-1", slot=0, pid=9, alive=True, socket="/r/c/0", scratch=True)],
        ),
    ],
)
async def test_each_verb_travels_as_the_contract_says(
    call: Callable[[Spawner], Awaitable[object]], answer: Map, sent: Map, returned: object, fake: FakeSpawner, spawner: Spawner
) -> None:
    assert await answered(call(spawner), fake, answer) == (returned, sent)


async def test_a_diff_keeps_names_that_are_not_utf8(fake: FakeSpawner, spawner: Spawner) -> None:
    entries = [{"path": b"/tmp/\xff", "kind": "written", "size": 3}]
    answer, sent = await answered(spawner.diff("sb-1", 10, b"/a"), fake, {"entries": entries, "more": True})
    assert answer == ([DiffEntry(path_bytes=b"/tmp/\xff", kind="written", size=3)], True)
    assert sent == {"verb": "diff", "sandbox": "sb-1", "limit": 10, "after": b"/a"}


async def test_replies_find_their_calls_in_any_order(fake: FakeSpawner, spawner: Spawner) -> None:
    first, second = asyncio.create_task(spawner.usage(["a"])), asyncio.create_task(spawner.usage(["b"]))
    requests = [await fake.request(), await fake.request()]
    for request in reversed(requests):
        fake.reply(request, {"disk": {str(request["sandboxes"]): int(str(request["id"]))}})
    assert (await first, await second) == ({"['a']": 1}, {"['b']": 2})


async def test_a_refusal_raises_its_code_and_message(fake: FakeSpawner, spawner: Spawner) -> None:
    with pytest.raises(SpawnerError, match="exists") as caught:
        await answered(spawner.create(SPEC), fake, {"error": {"code": "conflict", "message": "sb-1 exists"}})
    assert caught.value.code == "conflict"
    assert not isinstance(caught.value, SpawnerLost)


async def test_an_answer_without_what_it_must_have_is_an_error_of_that_call_only(fake: FakeSpawner, spawner: Spawner) -> None:
    with pytest.raises(SpawnerError, match="create") as caught:
        await answered(spawner.create(SPEC), fake, {"pid": 7})
    assert caught.value.code == "internal"
    assert (await answered(spawner.layers(), fake, {"layers": {}}))[0] == {}


async def test_events_reach_the_owner_between_replies(fake: FakeSpawner, spawner: Spawner, calls: Calls) -> None:
    await answered(spawner.layers(), fake, {"layers": {}})
    fake.send(msgspec.msgpack.encode({"event": "exited", "sandbox": "sb-1", "status": 9}))
    fake.send(msgspec.msgpack.encode({"event": "of a later version"}))
    assert await asyncio.wait_for(calls.exited.get(), DEADLINE_S) == ("sb-1", 9)
    fake.send(msgspec.msgpack.encode({"event": "denied", "sandbox": "sb-1", "call": "bpf", "pid": 7, "last": False}))
    assert await asyncio.wait_for(calls.denied.get(), DEADLINE_S) == Denial("sb-1", "bpf", 7, False)
    assert (await answered(spawner.layers(), fake, {"layers": {"ab": False}}))[0] == {"ab": False}


async def test_a_cancelled_call_leaves_the_others_alone_and_its_late_reply_is_dropped(fake: FakeSpawner, spawner: Spawner) -> None:
    cancelled = asyncio.create_task(spawner.kill("sb-1"))
    late = await fake.request()
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    fake.reply(late, {})
    assert (await answered(spawner.layers(), fake, {"layers": {}}))[0] == {}


async def test_calls_in_flight_are_lost_with_the_spawner_and_later_ones_wait_for_the_next(
    fake: FakeSpawner, spawner: Spawner, calls: Calls
) -> None:
    in_flight = asyncio.create_task(spawner.create(SPEC))
    await fake.request()
    fake.die()
    with pytest.raises(SpawnerLost):
        await in_flight
    later = asyncio.create_task(spawner.layers())
    await fake.start()
    fake.reply(await fake.request(), {"layers": {"ab": False}})
    assert await later == {"ab": False}
    assert calls.reconnected.is_set()


async def test_a_spawner_that_dies_unasked_is_found_again_unasked(fake: FakeSpawner, spawner: Spawner, calls: Calls) -> None:
    await asyncio.wait_for(fake.connections.get(), DEADLINE_S)
    fake.die()
    await fake.start()
    await asyncio.wait_for(fake.connections.get(), DEADLINE_S)
    await asyncio.wait_for(calls.reconnected.wait(), DEADLINE_S)
    assert (await answered(spawner.layers(), fake, {"layers": {}}))[0] == {}


async def test_a_spawner_that_stays_away_fails_calls_after_their_patience(
    fake: FakeSpawner, spawner: Spawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "WAIT_FOR_PEER_S", 0.05)
    fake.die()
    with pytest.raises(SpawnerLost):
        await spawner.layers()
    with pytest.raises(SpawnerLost, match="answered at"):
        await spawner.layers()


async def test_connecting_where_nobody_listens_fails(tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "WAIT_FOR_PEER_S", 0.05)
    with pytest.raises(SpawnerLost):
        await Spawner.connect(str(tmp_path / "s"), listener=calls, on_reconnected=calls.reconnected.set)
    assert [task for task in asyncio.all_tasks() if "spawner" in task.get_name() and not task.cancelling()] == []


@pytest.mark.parametrize("number_takes", [1, 2, 4, 8])
async def test_an_answer_that_is_too_long_fails_its_own_call_only(number_takes: int, fake: FakeSpawner, spawner: Spawner) -> None:
    too_long, other = asyncio.create_task(spawner.layers()), asyncio.create_task(spawner.usage(["a"]))
    requests = [await fake.request(), await fake.request()]
    # The number in every form that msgpack has for it.
    number = {1: b"", 2: b"\xcd", 4: b"\xce", 8: b"\xcf"}[number_takes] + int(str(requests[0]["id"])).to_bytes(number_takes, "big")
    fake.send(b"\xde\x00\x02\xa2id" + number + b"\xa6layers" + bytes(verbs.MAX_REPLY_BYTES))
    with pytest.raises(SpawnerError, match="too long") as caught:
        await too_long
    assert not isinstance(caught.value, SpawnerLost)
    fake.reply(requests[1], {"disk": {"a": 1}})
    assert await other == {"a": 1}
    assert len(fake.writers) == 1


@pytest.mark.parametrize(
    "garbage",
    [
        (verbs.MAX_REPLY_BYTES + 1).to_bytes(4, "big") + bytes(verbs.MAX_REPLY_BYTES + 1),
        (verbs.MAX_SKIPPED_BYTES + 1).to_bytes(4, "big"),
        b"\0\0\0\1\xc1",
        b"\0\0\0\1\x00",
    ],
)
async def test_a_frame_that_is_nonsense_breaks_the_connection_not_the_client(garbage: bytes, fake: FakeSpawner, spawner: Spawner) -> None:
    in_flight = asyncio.create_task(spawner.layers())
    await fake.request()
    fake.writers[-1].write(garbage)
    with pytest.raises(SpawnerLost, match="frame"):
        await in_flight
    assert (await answered(spawner.layers(), fake, {"layers": {}}))[0] == {}


async def test_answers_larger_than_a_socket_buffer_arrive_whole(fake: FakeSpawner, spawner: Spawner) -> None:
    many = {f"{number:064x}": False for number in range(20_000)}
    assert (await answered(spawner.layers(), fake, {"layers": many}))[0] == many


async def test_closing_fails_what_is_in_flight_and_what_comes_later(fake: FakeSpawner, calls: Calls) -> None:
    spawner = await connect(fake, calls)
    in_flight = asyncio.create_task(spawner.layers())
    await fake.request()
    spawner.close()
    spawner.close()
    with pytest.raises(SpawnerLost, match="closed"):
        await in_flight
    with pytest.raises(SpawnerLost, match="closed"):
        await spawner.layers()
    await asyncio.wait_for((await fake.connections.get()).wait_closed(), DEADLINE_S)
    assert fake.connections.empty()
    assert not calls.reconnected.is_set()
