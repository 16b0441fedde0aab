"""Sandboxes whose creator went away before it was told of them: which are taken, when, and what keeps one."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from edge_fakes import Client, FakeClock, Node, eventually, open_edge

from dsec.edge import Edge, EdgeConfig
from dsec.edge.endings import ORPHANED
from dsec.edge.journal import JournalError
from dsec.edge.record import Record
from dsec.edge.sandbox import Sandbox
from libdsec import transport
from libdsec.idempotency import ONCE
from libdsec.keepalive import NOTICED_S
from libdsec.schema import DSecContainerRunArgs

ARGS = {"backend": "container", "container_image": "base"}
KEYED = {"args": ARGS | {"idempotency_key": "K"}}
ONCE_KEYED = {"args": ARGS | {"idempotency_key": ONCE + "K"}}
GRACE_S = EdgeConfig.orphan_grace_s


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def edge(node: Node, tmp_path: Path, clock: FakeClock) -> AsyncIterator[Edge]:
    async with open_edge(node, tmp_path, clock, start_slots=4) as edge:
        yield edge


async def make_untold(edge: Edge, node: Node, body: object = KEYED, *, leaves: bool = False) -> Sandbox:
    """A create request for one sandbox whose client goes away while it starts; ``leaves``: on purpose."""
    node.gate, gone = asyncio.Event(), asyncio.Event()
    node.creating.clear()
    creating = asyncio.ensure_future(Client(edge)("POST", "/v1/sandboxes", body, gone=gone, leaves=leaves))
    await node.creating.wait()
    (sandbox,) = edge.sandboxes.inventory
    gone.set()
    node.gate.set()
    node.gate = None
    await creating
    return sandbox


async def pass_time(edge: Edge, clock: FakeClock, seconds: float) -> None:
    clock.now += seconds
    edge.sandboxes.lifetimes.expire()
    await eventually(lambda: set(edge.sandboxes.counts()) <= {"running", "failed"})


async def journaled(edge: Edge, sandbox: str) -> Record:
    record = await edge.sandboxes.inventory.journal.find(sandbox)
    assert record is not None
    return record


def test_the_grace_is_longer_than_the_sdk_goes_on_asking() -> None:
    assert NOTICED_S + transport.RETRY_FOR_S + transport.CONNECT_TIMEOUT_S < GRACE_S


class TestTaken:
    async def test_an_untold_sandbox_is_stopped_after_the_grace_and_its_record_says_why(
        self, edge: Edge, node: Node, clock: FakeClock
    ) -> None:
        sandbox = await make_untold(edge, node)
        await pass_time(edge, clock, GRACE_S - 0.1)
        assert edge.sandboxes.counts() == {"running": 1}
        await pass_time(edge, clock, 0.2)
        assert not node.kernel and not edge.sandboxes.counts()
        answer = await Client(edge)("GET", f"/v1/sandboxes/{sandbox.id}")
        assert answer.error() == "410 sandbox_gone"
        assert answer.json()["error"]["reason"] == ORPHANED
        assert f"stopping: {ORPHANED}" in [event.message for event in sandbox.events.since(0)[0]]

    async def test_listing_it_is_not_asking_for_it(self, edge: Edge, node: Node, clock: FakeClock) -> None:
        await make_untold(edge, node)
        assert len((await Client(edge)("GET", "/v1/sandboxes")).json()["sandboxes"]) == 1
        await pass_time(edge, clock, GRACE_S)
        assert not node.kernel

    @pytest.mark.parametrize("below", ["", "/metrics", "/events", "/commands", "/diff"])
    async def test_reading_of_it_is_not_asking_for_it(self, edge: Edge, node: Node, clock: FakeClock, below: str) -> None:
        sandbox = await make_untold(edge, node)
        assert (await Client(edge)("GET", f"/v1/sandboxes/{sandbox.id}{below}")).status == 200
        await pass_time(edge, clock, GRACE_S)
        assert not node.kernel

    async def test_a_stranger_who_guesses_its_id_does_not_keep_it(self, edge: Edge, node: Node, clock: FakeClock) -> None:
        sandbox = await make_untold(edge, node)
        assert (await Client(edge, "q")("POST", f"/v1/sandboxes/{sandbox.id}/attach")).status == 404
        await pass_time(edge, clock, GRACE_S)
        assert not node.kernel

    async def test_without_a_key_it_is_stopped_at_once(self, edge: Edge, node: Node) -> None:
        sandbox = await make_untold(edge, node, {"args": ARGS})
        assert not node.kernel
        assert (await journaled(edge, sandbox.id)).reason == ORPHANED

    async def test_with_a_key_that_only_its_leaver_has_it_is_stopped_at_once_and_the_key_is_free(self, edge: Edge, node: Node) -> None:
        sandbox = await make_untold(edge, node, ONCE_KEYED, leaves=True)
        assert not node.kernel
        (line,) = (await Client(edge)("POST", "/v1/sandboxes", ONCE_KEYED)).lines()
        assert line["sandbox"]["id"] != sandbox.id

    @pytest.mark.parametrize(("body", "leaves"), [(ONCE_KEYED, False), (KEYED, True)])
    async def test_a_key_by_which_someone_may_ask_again_gives_it_the_grace(
        self, edge: Edge, node: Node, clock: FakeClock, body: dict[str, object], leaves: bool
    ) -> None:
        sandbox = await make_untold(edge, node, body, leaves=leaves)
        await pass_time(edge, clock, GRACE_S - 1)
        assert list(node.kernel) == [sandbox.id]
        await pass_time(edge, clock, 1)
        assert not node.kernel

    async def test_what_another_request_waits_for_stays_when_one_leaves(self, edge: Edge, node: Node) -> None:
        node.gate, gone = asyncio.Event(), asyncio.Event()
        leaving = asyncio.ensure_future(Client(edge)("POST", "/v1/sandboxes", ONCE_KEYED, gone=gone, leaves=True))
        await node.creating.wait()
        (sandbox,) = edge.sandboxes.inventory
        again = asyncio.ensure_future(Client(edge)("POST", "/v1/sandboxes", ONCE_KEYED))
        await eventually(lambda: sandbox.starters == 2)
        gone.set()
        node.gate.set()
        await leaving
        assert (await again).lines()[0]["sandbox"]["id"] == sandbox.id
        assert list(node.kernel) == [sandbox.id]

    async def test_of_a_broken_batch_only_what_was_told_stays(self, node: Node, tmp_path: Path, clock: FakeClock) -> None:
        async with open_edge(node, tmp_path, clock, start_slots=1) as edge:
            client, gone = Client(edge), asyncio.Event()
            creating = asyncio.ensure_future(client("POST", "/v1/sandboxes", KEYED | {"count": 3}, gone=gone))
            await eventually(lambda: client.answer.body.count(b"\n") == 1)
            node.gate = asyncio.Event()
            await eventually(lambda: len(list(edge.sandboxes.inventory)) > len(client.answer.lines()))
            told = {line["sandbox"]["id"] for line in client.answer.lines()}
            gone.set()
            node.gate.set()
            await creating
            assert told < set(node.kernel)
            await pass_time(edge, clock, GRACE_S)
            assert set(node.kernel) == told

    async def test_one_that_failed_and_was_to_be_inspected_goes_too(self, edge: Edge, node: Node, clock: FakeClock) -> None:
        sandbox = await make_untold(edge, node, {"args": KEYED["args"] | {"keep_on_failure": True}})
        node.kill_agent(sandbox.id)
        await eventually(lambda: sandbox.state == "failed" and sandbox.settling is None)
        await pass_time(edge, clock, GRACE_S - 1)
        assert node.kernel
        await pass_time(edge, clock, 1)
        assert not node.kernel

    async def test_a_second_broken_request_begins_the_grace_anew(self, edge: Edge, node: Node, clock: FakeClock) -> None:
        await make_untold(edge, node)
        await pass_time(edge, clock, GRACE_S - 1)
        client, gone, reading = Client(edge), asyncio.Event(), asyncio.Event()
        asking = asyncio.ensure_future(client("POST", "/v1/sandboxes", KEYED, gone=gone, reading=reading))
        await eventually(lambda: client.answer.waits.is_set())
        await pass_time(edge, clock, GRACE_S)
        assert edge.sandboxes.counts() == {"running": 1}
        gone.set()
        reading.set()
        await asking
        await pass_time(edge, clock, GRACE_S - 1)
        assert edge.sandboxes.counts() == {"running": 1}
        await pass_time(edge, clock, 1)
        assert not node.kernel


class TestKept:
    async def test_the_same_key_within_the_grace_tells_and_keeps_it(self, edge: Edge, node: Node, clock: FakeClock) -> None:
        sandbox = await make_untold(edge, node)
        await pass_time(edge, clock, GRACE_S - 1)
        (line,) = (await Client(edge)("POST", "/v1/sandboxes", KEYED)).lines()
        assert line["sandbox"]["id"] == sandbox.id
        await pass_time(edge, clock, 10 * GRACE_S)
        assert edge.sandboxes.counts() == {"running": 1}

    async def test_the_same_key_with_other_arguments_keeps_it_too_for_the_error_names_it(
        self, edge: Edge, node: Node, clock: FakeClock
    ) -> None:
        sandbox = await make_untold(edge, node)
        (line,) = (await Client(edge)("POST", "/v1/sandboxes", {"args": KEYED["args"] | {"memory_limit_mb": 512}})).lines()
        assert sandbox.id in line["error"]["message"]
        await pass_time(edge, clock, GRACE_S)
        assert edge.sandboxes.counts() == {"running": 1}

    async def test_so_does_the_same_key_when_it_has_failed_and_is_to_be_inspected(self, edge: Edge, node: Node, clock: FakeClock) -> None:
        body = {"args": KEYED["args"] | {"keep_on_failure": True}}
        sandbox = await make_untold(edge, node, body)
        node.kill_agent(sandbox.id)
        await eventually(lambda: sandbox.state == "failed" and sandbox.settling is None)
        (line,) = (await Client(edge)("POST", "/v1/sandboxes", body)).lines()
        assert sandbox.id in line["error"]["message"]
        await pass_time(edge, clock, GRACE_S)
        assert edge.sandboxes.counts() == {"failed": 1}

    @pytest.mark.parametrize(("method", "below"), [("POST", "/attach"), ("GET", "/exec"), ("POST", "/exec"), ("PATCH", "")])
    async def test_a_call_that_names_it_keeps_it(self, edge: Edge, node: Node, clock: FakeClock, method: str, below: str) -> None:
        sandbox = await make_untold(edge, node)
        body = {"command": "x"} if below == "/exec" else {}
        assert (await Client(edge)(method, f"/v1/sandboxes/{sandbox.id}{below}", body)).status == 200
        await pass_time(edge, clock, GRACE_S)
        assert edge.sandboxes.counts() == {"running": 1}

    @pytest.mark.parametrize("body", [{"args": ARGS}, KEYED])
    async def test_one_that_was_named_before_its_request_broke_is_kept(
        self, edge: Edge, node: Node, clock: FakeClock, body: dict[str, object]
    ) -> None:
        client, gone, reading = Client(edge), asyncio.Event(), asyncio.Event()
        creating = asyncio.ensure_future(client("POST", "/v1/sandboxes", body, gone=gone, reading=reading))
        await eventually(lambda: client.answer.waits.is_set())
        (sandbox,) = edge.sandboxes.inventory
        assert (await Client(edge)("POST", f"/v1/sandboxes/{sandbox.id}/attach")).status == 200
        gone.set()
        reading.set()
        await creating
        await pass_time(edge, clock, GRACE_S)
        assert edge.sandboxes.counts() == {"running": 1}

    @pytest.mark.parametrize("told_first", [True, False])
    async def test_one_of_two_requests_for_it_is_enough_to_tell(self, edge: Edge, node: Node, clock: FakeClock, told_first: bool) -> None:
        node.gate, gone, reading = asyncio.Event(), asyncio.Event(), asyncio.Event()
        breaking = asyncio.ensure_future(Client(edge)("POST", "/v1/sandboxes", KEYED, gone=gone))
        await node.creating.wait()
        again = asyncio.ensure_future(Client(edge)("POST", "/v1/sandboxes", KEYED, reading=reading))
        (sandbox,) = edge.sandboxes.inventory
        await eventually(lambda: sandbox.starters == 2)
        if told_first:
            reading.set()
        gone.set()
        node.gate.set()
        await breaking
        reading.set()
        await again
        assert again.result().lines()[0]["sandbox"]["id"] == sandbox.id
        await pass_time(edge, clock, GRACE_S)
        assert edge.sandboxes.counts() == {"running": 1}

    async def test_a_slow_reader_gets_the_last_lines_too(self, edge: Edge, node: Node) -> None:
        client, reading = Client(edge), asyncio.Event()
        ready: list[float] = []
        edge.sandboxes.starts.observe = ready.append
        creating = asyncio.ensure_future(client("POST", "/v1/sandboxes", {"args": ARGS, "count": 8}, reading=reading))
        await eventually(lambda: client.answer.waits.is_set())
        await eventually(lambda: len(ready) == 8)
        reading.set()
        assert {line["sandbox"]["id"] for line in (await creating).lines()} == set(node.kernel)
        assert len(node.kernel) == 8


class TestJournal:
    async def test_telling_writes_nothing(self, edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
        journal = edge.sandboxes.inventory.journal
        updates: list[str] = []
        update = journal.update
        monkeypatch.setattr(journal, "update", lambda record: updates.append(record.id) or update(record))
        made = (await Client(edge)("POST", "/v1/sandboxes", KEYED | {"count": 10})).lines()
        for line in made:
            await Client(edge)("POST", f"/v1/sandboxes/{line['sandbox']['id']}/attach")
        assert sorted(updates) == sorted(line["sandbox"]["id"] for line in made), "each once: that it runs"

    async def test_nobody_is_answered_before_the_journal_has_it_told(
        self, edge: Edge, node: Node, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sandbox = await make_untold(edge, node)
        assert (await journaled(edge, sandbox.id)).told is False
        journal = edge.sandboxes.inventory.journal
        update, may_write, writing = journal.update, asyncio.Event(), asyncio.Event()

        async def slow(record: Record) -> int:
            writing.set()
            await may_write.wait()
            return await update(record)

        monkeypatch.setattr(journal, "update", slow)
        calls = [
            asyncio.ensure_future(Client(edge)("POST", f"/v1/sandboxes/{sandbox.id}/attach")),
            asyncio.ensure_future(Client(edge)("POST", "/v1/sandboxes", KEYED)),
        ]
        await eventually(lambda: sandbox.askers == 2)
        await writing.wait()
        clock.now += GRACE_S
        edge.sandboxes.lifetimes.expire()
        assert not any(call.done() for call in calls) and sandbox.state == "running"
        may_write.set()
        assert (await calls[0]).json()["id"] == (await calls[1]).lines()[0]["sandbox"]["id"] == sandbox.id
        assert (await journaled(edge, sandbox.id)).told is True

    async def test_a_call_whose_told_cannot_be_written_is_refused_and_the_grace_goes_on(
        self, edge: Edge, node: Node, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sandbox = await make_untold(edge, node)

        async def fail(record: Record) -> int:
            raise JournalError("disk full")

        with monkeypatch.context() as broken:
            broken.setattr(edge.sandboxes.inventory.journal, "update", fail)
            assert (await Client(edge)("POST", f"/v1/sandboxes/{sandbox.id}/attach")).error() == "503 unavailable"
        await pass_time(edge, clock, GRACE_S)
        assert not node.kernel


class TestRestart:
    async def test_an_untold_one_gets_the_grace_from_the_restart_on(self, node: Node, tmp_path: Path, clock: FakeClock) -> None:
        async with open_edge(node, tmp_path, clock) as edge:
            await make_untold(edge, node)
            clock.now += GRACE_S - 1
        async with open_edge(node, tmp_path, clock) as edge:
            await pass_time(edge, clock, GRACE_S - 1)
            assert edge.sandboxes.counts() == {"running": 1}
            await pass_time(edge, clock, 1)
            assert not node.kernel

    @pytest.mark.parametrize("found_by", ["key", "call"])
    async def test_one_that_was_found_is_kept_over_it(self, node: Node, tmp_path: Path, clock: FakeClock, found_by: str) -> None:
        async with open_edge(node, tmp_path, clock) as edge:
            sandbox = await make_untold(edge, node)
            if found_by == "key":
                await Client(edge)("POST", "/v1/sandboxes", KEYED)
            else:
                await Client(edge)("POST", f"/v1/sandboxes/{sandbox.id}/attach")
        async with open_edge(node, tmp_path, clock) as edge:
            await pass_time(edge, clock, GRACE_S)
            assert edge.sandboxes.counts() == {"running": 1}

    async def test_one_that_was_told_is_kept_over_it(self, node: Node, tmp_path: Path, clock: FakeClock) -> None:
        async with open_edge(node, tmp_path, clock) as edge:
            await Client(edge)("POST", "/v1/sandboxes", KEYED)
        async with open_edge(node, tmp_path, clock) as edge:
            await pass_time(edge, clock, GRACE_S)
            assert edge.sandboxes.counts() == {"running": 1}

    async def test_one_that_ran_and_may_have_been_told_counts_as_told(self, node: Node, tmp_path: Path, clock: FakeClock) -> None:
        async with open_edge(node, tmp_path, clock) as edge:
            # As by kill -9 between the commit and the answer: neither told nor given up.
            await edge.sandboxes.create("p", DSecContainerRunArgs(container_image="base", idempotency_key="K"), None)
        async with open_edge(node, tmp_path, clock) as edge:
            await pass_time(edge, clock, GRACE_S)
            assert edge.sandboxes.counts() == {"running": 1}

    @pytest.mark.parametrize("asked_again", [False, True])
    async def test_one_that_was_still_being_created_counts_as_untold(
        self, node: Node, tmp_path: Path, clock: FakeClock, asked_again: bool
    ) -> None:
        await self.cut_off_a_create(node, tmp_path, clock, named=False)
        async with open_edge(node, tmp_path, clock) as edge:
            assert edge.sandboxes.counts() == {"running": 1}
            if asked_again:
                await Client(edge)("POST", "/v1/sandboxes", KEYED)
            await pass_time(edge, clock, GRACE_S)
            assert edge.sandboxes.counts() == ({"running": 1} if asked_again else {})

    async def test_one_that_was_named_while_it_was_created_is_kept(self, node: Node, tmp_path: Path, clock: FakeClock) -> None:
        await self.cut_off_a_create(node, tmp_path, clock, named=True)
        async with open_edge(node, tmp_path, clock) as edge:
            await pass_time(edge, clock, GRACE_S)
            assert edge.sandboxes.counts() == {"running": 1}

    async def cut_off_a_create(self, node: Node, state_dir: Path, clock: FakeClock, *, named: bool) -> None:
        """As by kill -9: in ``state_dir`` is left what the edge had written when its spawner began to work."""
        (state_dir / "killed").mkdir()
        async with open_edge(node, state_dir / "killed", clock) as edge:
            node.gate = asyncio.Event()
            creating = asyncio.ensure_future(Client(edge)("POST", "/v1/sandboxes", KEYED))
            await node.creating.wait()
            (sandbox,) = edge.sandboxes.inventory
            if named:
                assert (await Client(edge)("POST", f"/v1/sandboxes/{sandbox.id}/attach")).json()["state"] == "creating"
            for path in (state_dir / "killed").iterdir():
                shutil.copy(path, state_dir)
            creating.cancel()
            await asyncio.gather(creating, return_exceptions=True)
        node.gate = None
        node.make(sandbox.id)  # the spawner went on

    async def test_a_request_cut_off_by_a_soft_stop_leaves_an_untold_one(self, node: Node, tmp_path: Path, clock: FakeClock) -> None:
        async with open_edge(node, tmp_path, clock) as edge:
            client = Client(edge)
            creating = asyncio.ensure_future(client("POST", "/v1/sandboxes", KEYED, reading=asyncio.Event()))
            await eventually(lambda: client.answer.waits.is_set())
            creating.cancel()
            await asyncio.gather(creating, return_exceptions=True)
        async with open_edge(node, tmp_path, clock) as edge:
            assert edge.sandboxes.counts() == {"running": 1}
            await pass_time(edge, clock, GRACE_S)
            assert not node.kernel
