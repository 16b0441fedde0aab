"""The life of sandboxes on an edge whose machine is a fake: creation, idempotency, end, failure, adoption, lifetimes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from edge_fakes import Client, FakeClock, Node, eventually, make_edge, open_edge

from dsec.edge import Edge
from dsec.edge.channel import Exit
from dsec.edge.spawner import SpawnerError, SpawnerLost
from dsec.edge.sweep import ADOPT_AT_ONCE
from libdsec.errors import Conflict, DeadlineExceeded, DSecError, ImageNotFound, SandboxFailed, SandboxGone, Unavailable
from libdsec.schema import DSecContainerRunArgs, PatchRequest, SandboxInfo


def args(**changes: object) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(container_image="base", **changes)  # type: ignore[arg-type]


async def create(edge: Edge, **changes: object) -> SandboxInfo:
    return await edge.sandboxes.create("p", args(**changes), None)


def nothing_left(edge: Edge, node: Node) -> bool:
    return not node.kernel and not edge.sandboxes.counts() and not edge.in_use()


class TestCreate:
    async def test_a_sandbox_runs_with_what_was_asked_for(self, edge: Edge, node: Node) -> None:
        info = await edge.sandboxes.create(
            "p", DSecContainerRunArgs(container_image="configured", cpu_cores_limit=64, env={"B": "call"}), None
        )
        spec = node.specs[info.id]
        assert info.state == "running"
        assert info.image == "configured@2"
        assert spec.layers == ["c" * 64, "a" * 64]
        assert spec.extra_ids == [70_000]
        assert spec.cpu_millis == 2000
        assert info.notices
        sandbox = edge.sandboxes.live(info.id)
        assert sandbox is not None
        assert sandbox.env == {b"A": b"image", b"B": b"call"}

    async def test_an_images_workdir_is_made_if_it_is_missing(self, edge: Edge, node: Node) -> None:
        info = await edge.sandboxes.create("p", DSecContainerRunArgs(container_image="configured", init_user="1000"), None)
        builtins = [(start.builtin, start.args) for start in node.agent(info.id).started]
        assert builtins == [
            ("mkdir", {"path": b"/work", "parents": False, "mode": 0o755}),
            ("chown", {"path": b"/work", "owner": "1000"}),
        ]

    async def test_a_workdir_that_exists_keeps_its_owner(self, edge: Edge, node: Node) -> None:
        node.directories.add(b"/work")
        info = await edge.sandboxes.create("p", DSecContainerRunArgs(container_image="configured", init_user="1000"), None)
        assert [start.builtin for start in node.agent(info.id).started] == ["mkdir"]

    async def test_a_layer_is_mounted_once_for_all_its_sandboxes(self, edge: Edge, node: Node) -> None:
        await asyncio.gather(*(create(edge) for _ in range(20)))
        assert node.mounts == 1
        assert edge.in_use() == {"a" * 64, "b" * 64}

    async def test_an_unknown_image_is_refused_and_nothing_is_left(self, edge: Edge, node: Node) -> None:
        with pytest.raises(ImageNotFound):
            await edge.sandboxes.create("p", DSecContainerRunArgs(container_image="nope"), None)
        assert nothing_left(edge, node)
        assert edge.sandboxes.starts.slots.starting == 0

    async def test_a_refusal_of_the_spawner_leaves_nothing(self, edge: Edge, node: Node) -> None:
        node.fail_create.append(SpawnerError("image_error", "the layer is broken"))
        with pytest.raises(DSecError, match="the layer is broken") as caught:
            await create(edge, idempotency_key="k")
        assert caught.value.code == "image_error"
        assert nothing_left(edge, node)
        assert (await create(edge, idempotency_key="k")).state == "running"

    async def test_a_spawner_that_dies_during_a_create_is_asked_again_after_what_it_left_is_gone(self, edge: Edge, node: Node) -> None:
        node.fail_create.append(SpawnerLost("it ended"))
        info = await create(edge)
        assert node.kills == [(info.id, False)]
        assert list(node.kernel) == [info.id]

    async def test_a_spawner_that_stays_away_is_unavailable(self, edge: Edge, node: Node) -> None:
        node.fail_create.extend([SpawnerLost("it ended")] * 3)
        with pytest.raises(Unavailable):
            await create(edge)
        assert nothing_left(edge, node)

    async def test_starts_are_bounded_and_the_rest_waits_its_turn(self, node: Node, tmp_path: Path) -> None:
        node.gate = asyncio.Event()
        async with open_edge(node, tmp_path, start_slots=3) as edge:
            creating = [asyncio.ensure_future(create(edge)) for _ in range(10)]
            await node.creating.wait()
            await asyncio.sleep(0.02)
            assert edge.sandboxes.starts.slots.starting == 3
            node.gate.set()
            assert len({info.id for info in await asyncio.gather(*creating)}) == 10

    async def test_a_deadline_that_passes_takes_the_sandbox_back(self, edge: Edge, node: Node) -> None:
        node.gate = asyncio.Event()
        with pytest.raises(DeadlineExceeded):
            await edge.sandboxes.create("p", args(idempotency_key="k"), asyncio.get_running_loop().time() + 0.02)
        node.gate.set()
        await eventually(lambda: nothing_left(edge, node))
        assert (await create(edge, idempotency_key="k")).state == "running"

    async def test_a_repeated_call_waits_until_the_one_taken_back_is_gone(self, edge: Edge, node: Node) -> None:
        node.gate = asyncio.Event()
        with pytest.raises(DeadlineExceeded):
            await edge.sandboxes.create("p", args(idempotency_key="k"), asyncio.get_running_loop().time() + 0.02)
        again = asyncio.ensure_future(create(edge, idempotency_key="k"))
        await asyncio.sleep(0.01)
        assert not again.done()
        node.gate.set()
        assert (await again).state == "running"
        assert len(node.kernel) == 1


class TestIdempotency:
    async def test_the_same_key_is_the_same_sandbox(self, edge: Edge) -> None:
        first = await create(edge, idempotency_key="k")
        assert (await create(edge, idempotency_key="k")).id == first.id

    async def test_a_repeated_call_waits_for_the_one_being_created(self, edge: Edge, node: Node) -> None:
        node.gate = asyncio.Event()
        calls = [asyncio.ensure_future(create(edge, idempotency_key="k")) for _ in range(5)]
        await node.creating.wait()
        node.gate.set()
        assert len({info.id for info in await asyncio.gather(*calls)}) == 1
        assert len(node.kernel) == 1

    async def test_another_projects_key_is_another_sandbox(self, edge: Edge) -> None:
        first = await create(edge, idempotency_key="k")
        other = await edge.sandboxes.create("q", args(idempotency_key="k"), None)
        assert other.id != first.id

    async def test_a_key_with_other_arguments_is_a_conflict(self, edge: Edge) -> None:
        await create(edge, idempotency_key="k")
        with pytest.raises(Conflict):
            await create(edge, idempotency_key="k", memory_limit_mb=512)

    async def test_the_key_of_an_ended_sandbox_says_so(self, edge: Edge, node: Node) -> None:
        info = await create(edge, idempotency_key="k")
        await stop(edge, info)
        with pytest.raises(SandboxGone, match="stopped by request"):
            await create(edge, idempotency_key="k")
        assert nothing_left(edge, node)

    async def test_the_key_finds_its_sandbox_after_a_restart(self, node: Node, tmp_path: Path) -> None:
        async with open_edge(node, tmp_path) as edge:
            first = await create(edge, idempotency_key="k")
        async with open_edge(node, tmp_path) as edge:
            assert (await create(edge, idempotency_key="k")).id == first.id


async def stop(edge: Edge, info: SandboxInfo) -> SandboxInfo:
    sandbox = edge.sandboxes.live(info.id)
    assert sandbox is not None
    return await edge.sandboxes.stop(sandbox, "stopped by request")


class TestStop:
    async def test_stop_removes_everything_and_tells_what_it_used(self, edge: Edge, node: Node) -> None:
        ended = await stop(edge, await create(edge))
        assert ended.state == "stopped"
        assert ended.reason == "stopped by request"
        assert ended.exit is not None
        assert ended.exit.cpu_s == 2.0
        assert nothing_left(edge, node)

    async def test_stops_at_the_same_time_are_one(self, edge: Edge, node: Node) -> None:
        info = await create(edge)
        await asyncio.gather(*(stop(edge, info) for _ in range(5)))
        assert node.kills == [(info.id, False)]

    async def test_a_stop_that_races_a_create_leaves_nothing(self, edge: Edge, node: Node) -> None:
        node.gate = asyncio.Event()
        creating = asyncio.ensure_future(create(edge))
        await node.creating.wait()
        sandbox_id = next(iter(edge.sandboxes.inventory)).id
        sandbox = edge.sandboxes.live(sandbox_id)
        assert sandbox is not None
        stopping = asyncio.ensure_future(edge.sandboxes.stop(sandbox, "stopped by request"))
        await asyncio.sleep(0.01)
        assert not stopping.done()
        node.gate.set()
        with pytest.raises(SandboxGone):
            await creating
        assert (await stopping).state == "stopped"
        assert nothing_left(edge, node)

    async def test_a_stop_during_a_creation_that_failed_leaves_the_layers_to_the_others_that_use_them(self, edge: Edge, node: Node) -> None:
        other = await create(edge)
        node.fail_create.append(SpawnerError("image_error", "the layer is broken"))
        node.kill_gate = asyncio.Event()
        creating = asyncio.ensure_future(create(edge))
        await eventually(lambda: edge.sandboxes.counts() == {"running": 1, "failed": 1})
        (failed,) = [sandbox for sandbox in edge.sandboxes.inventory if sandbox.id != other.id]
        stopping = asyncio.ensure_future(edge.sandboxes.stop(failed, "stopped by request"))
        await eventually(lambda: failed.stopping is not None)
        node.kill_gate.set()
        await stopping
        with pytest.raises(DSecError, match="the layer is broken"):
            await creating
        assert edge.in_use() == {"a" * 64, "b" * 64}
        await stop(edge, other)
        assert nothing_left(edge, node)

    async def test_a_stop_while_the_spawner_is_away_is_finished_by_the_sweep(self, edge: Edge, node: Node) -> None:
        info = await create(edge)
        node.fail_kill.extend([SpawnerLost("it ended")] * 3)
        with pytest.raises(Unavailable):
            await stop(edge, info)
        assert edge.sandboxes.counts() == {"stopping": 1}
        await edge.sandboxes.sweep.round()
        assert nothing_left(edge, node)

    async def test_a_stop_can_be_repeated_after_it_failed(self, edge: Edge, node: Node) -> None:
        info = await create(edge)
        node.fail_kill.extend([SpawnerLost("it ended")] * 3)
        with pytest.raises(Unavailable):
            await stop(edge, info)
        assert (await stop(edge, info)).state == "stopped"
        assert nothing_left(edge, node)


class TestFailure:
    async def test_a_killed_agent_makes_its_sandbox_failed_with_the_reason(self, edge: Edge, node: Node) -> None:
        info = await create(edge)
        node.kill_agent(info.id)
        await eventually(lambda: nothing_left(edge, node))
        record = await edge.sandboxes.find("p", info.id)
        assert record.state == "failed"
        ended = record.info("e1", 0)  # type: ignore[union-attr]
        assert ended.reason == "its agent was killed by signal 9"
        assert ended.exit is not None

    async def test_a_call_in_flight_when_the_agent_dies_is_told_the_reason(self, edge: Edge, node: Node) -> None:
        node.held = True
        info = await create(edge)
        calling = asyncio.ensure_future(Client(edge)("POST", f"/v1/sandboxes/{info.id}/exec", {"command": "sleep 9"}))
        await eventually(lambda: node.agent(info.id).running() == 1)
        node.kill_agent(info.id)
        answer = await calling
        assert answer.error() == "424 sandbox_failed"
        assert answer.json()["error"]["reason"] == "its agent was killed by signal 9"

    async def test_a_memory_kill_is_part_of_the_reason(self, edge: Edge, node: Node) -> None:
        info = await create(edge)
        node.oom[info.id] = 2
        node.kill_agent(info.id)
        await eventually(lambda: nothing_left(edge, node))
        record = await edge.sandboxes.find("p", info.id)
        assert "killed 2 of its processes for memory" in str(record.info("e1", 0).reason)  # type: ignore[union-attr]

    async def test_a_channel_that_breaks_while_the_agent_lives_is_made_again(self, edge: Edge, node: Node) -> None:
        node.held = True
        info = await create(edge)
        sandbox = edge.sandboxes.live(info.id)
        assert sandbox is not None
        calling = asyncio.ensure_future(Client(edge)("POST", f"/v1/sandboxes/{info.id}/exec", {"command": "x", "exec_id": "job"}))
        await eventually(lambda: node.agent(info.id).running() == 1)
        broken = node.agent(info.id).channel
        assert broken is not None
        broken.lose("the connection was reset")
        assert (await calling).error() == "503 unavailable"
        assert sandbox.state == "running"
        again = asyncio.ensure_future(Client(edge)("POST", f"/v1/sandboxes/{info.id}/exec", {"command": "x", "exec_id": "job"}))
        await eventually(lambda: sandbox.channel is not None)
        node.agent(info.id).end("job", Exit(exit_code=3))
        assert (await again).json()["exit_code"] == 3

    async def test_a_channel_that_breaks_again_while_what_runs_is_being_followed_is_made_again(self, edge: Edge, node: Node) -> None:
        node.held = True
        info = await create(edge)
        sandbox, agent = edge.sandboxes.live(info.id), node.agent(info.id)
        assert sandbox is not None
        await Client(edge)("POST", f"/v1/sandboxes/{info.id}/exec", {"command": "x", "exec_id": "job", "mode": "start"})
        agent.broken_listings = 2
        assert agent.channel is not None
        agent.channel.lose("the connection was reset")
        await eventually(lambda: not agent.broken_listings and sandbox.settling is None)
        assert (sandbox.state, sandbox.channel) == ("running", agent.channel)
        assert (await Client(edge)("GET", f"/v1/sandboxes/{info.id}/exec")).status == 200

    async def test_the_sweep_connects_a_running_sandbox_that_has_no_channel(self, edge: Edge) -> None:
        info = await create(edge)
        sandbox = edge.sandboxes.live(info.id)
        assert sandbox is not None
        sandbox.close_channel()
        await edge.sandboxes.sweep.round()
        await eventually(lambda: sandbox.channel is not None and sandbox.settling is None)
        assert sandbox.state == "running"

    async def test_keep_on_failure_keeps_the_scratch_until_stop(self, edge: Edge, node: Node) -> None:
        info = await create(edge, keep_on_failure=True)
        node.kill_agent(info.id)
        await eventually(lambda: (info.id, True) in node.kills)
        sandbox = edge.sandboxes.live(info.id)
        assert sandbox is not None
        assert sandbox.state == "failed"
        assert (await Client(edge)("GET", f"/v1/sandboxes/{info.id}/diff")).status == 200
        assert (await Client(edge)("POST", f"/v1/sandboxes/{info.id}/exec", {"command": "x"})).error() == "424 sandbox_failed"
        ended = await stop(edge, info)
        assert (ended.state, ended.reason) == ("stopped", "its agent was killed by signal 9")
        assert nothing_left(edge, node)

    async def test_agents_that_died_while_the_spawner_was_away_are_found_when_it_is_back(self, edge: Edge, node: Node) -> None:
        info = await create(edge)
        node.kernel[info.id].alive = False
        node.on_reconnected()
        await eventually(lambda: nothing_left(edge, node))
        with pytest.raises(SandboxFailed):
            from dsec.edge.sandbox import refusal

            raise refusal(await edge.sandboxes.find("p", info.id))  # type: ignore[arg-type]


class TestRestart:
    async def test_running_sandboxes_are_adopted_and_take_commands(self, node: Node, tmp_path: Path) -> None:
        async with open_edge(node, tmp_path) as edge:
            infos = [await create(edge, labels={"n": str(number)}) for number in range(20)]
        async with open_edge(node, tmp_path) as edge:
            assert edge.sandboxes.counts() == {"running": 20}
            assert edge.in_use() == {"a" * 64, "b" * 64}
            for info in infos:
                answer = await Client(edge)("POST", f"/v1/sandboxes/{info.id}/exec", {"command": "true"})
                assert answer.json()["exit_code"] == 0

    async def test_a_command_that_runs_over_the_restart_is_found_by_its_name(self, node: Node, tmp_path: Path) -> None:
        node.held = True
        async with open_edge(node, tmp_path) as edge:
            info = await create(edge)
            await Client(edge)("POST", f"/v1/sandboxes/{info.id}/exec", {"command": "x", "exec_id": "job", "mode": "start"})
        async with open_edge(node, tmp_path) as edge:
            waiting = asyncio.ensure_future(Client(edge)("GET", f"/v1/sandboxes/{info.id}/exec/job/wait"))
            await asyncio.sleep(0)
            node.agent(info.id).end("job", Exit(exec_id="job", exit_code=5))
            assert (await waiting).json()["exit_code"] == 5

    async def test_kernel_objects_without_a_row_are_swept(self, node: Node, tmp_path: Path) -> None:
        node.make("sb-e1-unknown")
        async with open_edge(node, tmp_path) as edge:
            assert nothing_left(edge, node)

    async def test_rows_without_kernel_objects_are_lost(self, node: Node, tmp_path: Path) -> None:
        async with open_edge(node, tmp_path) as edge:
            info = await create(edge)
        node.kernel.clear()
        async with open_edge(node, tmp_path) as edge:
            assert nothing_left(edge, node)
            assert (await edge.sandboxes.find("p", info.id)).state == "lost"

    async def test_an_agent_that_died_meanwhile_makes_its_sandbox_failed(self, node: Node, tmp_path: Path) -> None:
        async with open_edge(node, tmp_path) as edge:
            info = await create(edge)
        node.kernel[info.id].alive = False
        async with open_edge(node, tmp_path) as edge:
            assert nothing_left(edge, node)
            assert (await edge.sandboxes.find("p", info.id)).state == "failed"

    @pytest.mark.parametrize("key", [None, "k"])
    async def test_a_create_cut_off_before_it_was_told_is_taken_back_unless_its_key_can_ask_for_it(
        self, node: Node, tmp_path: Path, key: str | None
    ) -> None:
        first = make_edge(node, tmp_path)
        await first.open()
        node.gate = asyncio.Event()
        creating = asyncio.ensure_future(create(first, idempotency_key=key))
        await node.creating.wait()
        await first.close()
        creating.cancel()
        await asyncio.gather(creating, return_exceptions=True)
        node.gate = None
        (row,) = await rows(tmp_path)
        node.make(row)  # the spawner went on
        async with open_edge(node, tmp_path) as edge:
            if key is None:
                assert nothing_left(edge, node)
            else:
                assert edge.sandboxes.counts() == {"running": 1}
                assert (await create(edge, idempotency_key=key)).id == row

    async def test_a_stop_cut_off_is_finished(self, node: Node, tmp_path: Path) -> None:
        first = make_edge(node, tmp_path)
        await first.open()
        info = await create(first)
        sandbox = first.sandboxes.live(info.id)
        assert sandbox is not None
        sandbox.become("stopping", "stop", 1.0, "stopped by request")
        await first.sandboxes.inventory.journal.update(sandbox.record)
        await first.close()
        async with open_edge(node, tmp_path) as edge:
            assert nothing_left(edge, node)
            record = await edge.sandboxes.find("p", info.id)
            assert record.state == "stopped"

    async def test_a_kept_failed_sandbox_is_kept_over_a_restart(self, node: Node, tmp_path: Path) -> None:
        async with open_edge(node, tmp_path) as edge:
            info = await create(edge, keep_on_failure=True)
            node.kill_agent(info.id)
            await eventually(lambda: (info.id, True) in node.kills)
            await eventually(lambda: edge.sandboxes.live(info.id).settling is None)  # type: ignore[union-attr]
        async with open_edge(node, tmp_path) as edge:
            assert edge.sandboxes.counts() == {"failed": 1}
            await stop(edge, info)
            assert nothing_left(edge, node)

    async def test_a_spawner_that_comes_back_during_the_adoption_ends_no_sandbox_whose_turn_has_not_come(
        self, node: Node, tmp_path: Path
    ) -> None:
        count = ADOPT_AT_ONCE + 6
        async with open_edge(node, tmp_path) as edge:
            await asyncio.gather(*(create(edge) for _ in range(count)))
        node.connect_gate, node.connecting = asyncio.Event(), 0
        edge = make_edge(node, tmp_path)
        opening = asyncio.ensure_future(edge.open())
        await eventually(lambda: node.connecting == ADOPT_AT_ONCE)
        node.make("sb-e1-unknown")
        node.on_reconnected()
        for _ in range(10):
            await asyncio.sleep(0)
        assert node.kills == []
        node.connect_gate.set()
        await opening
        assert edge.sandboxes.counts() == {"running": count}
        assert node.kills == [("sb-e1-unknown", False)]
        await edge.close()

    async def test_agents_that_die_during_the_adoption_make_their_sandboxes_failed(self, node: Node, tmp_path: Path) -> None:
        async with open_edge(node, tmp_path) as edge:
            await asyncio.gather(*(create(edge) for _ in range(ADOPT_AT_ONCE + 1)))
        node.connect_gate, node.connecting = asyncio.Event(), 0
        edge = make_edge(node, tmp_path)
        opening = asyncio.ensure_future(edge.open())
        await eventually(lambda: node.connecting == ADOPT_AT_ONCE)
        for sandbox in list(node.kernel):
            node.kill_agent(sandbox)
        await eventually(lambda: set(edge.sandboxes.counts()) <= {"failed"})
        node.connect_gate.set()
        await opening
        await eventually(lambda: nothing_left(edge, node))
        await edge.close()


async def test_the_figures_of_the_node_are_no_older_than_the_last_sweep(edge: Edge, node: Node) -> None:
    node.scratch_used = 7
    await edge.sandboxes.sweep.round()
    assert edge.node_info().scratch_used == 7


async def rows(state_dir: Path) -> list[str]:
    from dsec.edge.journal import Journal

    journal = Journal(state_dir / "journal.sqlite")
    await journal.open()
    try:
        return [record.id for record in await journal.live()]
    finally:
        await journal.close()


class TestLifetimes:
    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock()

    @pytest.fixture
    async def edge(self, node: Node, tmp_path: Path, clock: FakeClock) -> AsyncIterator[Edge]:
        async with open_edge(node, tmp_path, clock) as edge:
            yield edge

    async def go(self, edge: Edge, clock: FakeClock, seconds: float) -> None:
        clock.now += seconds
        edge.sandboxes.lifetimes.expire()
        await eventually(lambda: set(edge.sandboxes.counts()) <= {"running"})

    async def test_an_idle_sandbox_is_stopped(self, edge: Edge, node: Node, clock: FakeClock) -> None:
        info = await create(edge, ttl_running_stop=10)
        await self.go(edge, clock, 9.9)
        assert edge.sandboxes.counts() == {"running": 1}
        await self.go(edge, clock, 0.2)
        assert nothing_left(edge, node)
        answer = await Client(edge)("POST", f"/v1/sandboxes/{info.id}/exec", {"command": "x"})
        assert answer.error() == "410 sandbox_gone"
        assert answer.json()["error"]["reason"] == "idle for 10 s"

    async def test_a_request_starts_the_idle_time_again(self, edge: Edge, clock: FakeClock) -> None:
        info = await create(edge, ttl_running_stop=10)
        await self.go(edge, clock, 9)
        await Client(edge)("POST", f"/v1/sandboxes/{info.id}/exec", {"command": "x"})
        await self.go(edge, clock, 9)
        assert edge.sandboxes.counts() == {"running": 1}
        await self.go(edge, clock, 1.1)
        assert edge.sandboxes.counts() == {}

    async def test_looking_at_a_sandbox_does_not_keep_it(self, edge: Edge, clock: FakeClock) -> None:
        info = await create(edge, ttl_running_stop=10)
        await self.go(edge, clock, 9)
        for path in ("", "/metrics", "/events"):
            assert (await Client(edge)("GET", f"/v1/sandboxes/{info.id}{path}")).status == 200
        await self.go(edge, clock, 1.1)
        assert edge.sandboxes.counts() == {}

    async def test_a_running_command_keeps_its_sandbox_and_idle_counts_from_its_end(self, edge: Edge, node: Node, clock: FakeClock) -> None:
        node.held = True
        info = await create(edge, ttl_running_stop=10)
        await Client(edge)("POST", f"/v1/sandboxes/{info.id}/exec", {"command": "x", "exec_id": "job", "mode": "start"})
        await self.go(edge, clock, 25)
        assert edge.sandboxes.counts() == {"running": 1}
        node.agent(info.id).end("job")
        sandbox = edge.sandboxes.live(info.id)
        assert sandbox is not None
        await eventually(lambda: sandbox.last_used == clock.now)
        await self.go(edge, clock, 9.9)
        assert edge.sandboxes.counts() == {"running": 1}
        await self.go(edge, clock, 10)
        assert edge.sandboxes.counts() == {}

    async def test_an_open_stream_keeps_its_sandbox(self, edge: Edge, node: Node, clock: FakeClock) -> None:
        node.held = True
        info = await create(edge, ttl_running_stop=10)
        waiting = asyncio.ensure_future(Client(edge)("POST", f"/v1/sandboxes/{info.id}/exec", {"command": "x", "exec_id": "job"}))
        await eventually(lambda: node.agent(info.id).running() == 1)
        await self.go(edge, clock, 100)
        assert edge.sandboxes.counts() == {"running": 1}
        node.agent(info.id).end("job")
        await waiting

    async def test_the_absolute_lifetime_ends_a_busy_sandbox(self, edge: Edge, node: Node, clock: FakeClock) -> None:
        node.held = True
        info = await create(edge, ttl_total=60)
        await Client(edge)("POST", f"/v1/sandboxes/{info.id}/exec", {"command": "x", "exec_id": "job", "mode": "start"})
        await self.go(edge, clock, 59)
        assert edge.sandboxes.counts() == {"running": 1}
        await self.go(edge, clock, 1)
        assert nothing_left(edge, node)

    async def test_a_ttl_can_be_set_and_removed(self, edge: Edge, clock: FakeClock) -> None:
        info = await create(edge, ttl_total=60)
        sandbox = edge.sandboxes.live(info.id)
        assert sandbox is not None
        await edge.sandboxes.patch(sandbox, PatchRequest(ttl_total=0))
        await self.go(edge, clock, 1000)
        assert edge.sandboxes.counts() == {"running": 1}
        await edge.sandboxes.patch(sandbox, PatchRequest(ttl_running_stop=5))
        await self.go(edge, clock, 5)
        assert edge.sandboxes.counts() == {}

    async def test_the_absolute_lifetime_counts_over_a_restart(self, edge: Edge, node: Node, clock: FakeClock, tmp_path: Path) -> None:
        await create(edge, ttl_total=60)
        await edge.close()
        clock.now += 50
        async with open_edge(node, tmp_path, clock) as again:
            await self.go(again, clock, 9)
            assert again.sandboxes.counts() == {"running": 1}
            await self.go(again, clock, 1)
            assert again.sandboxes.counts() == {}

    async def test_an_idle_layer_is_unmounted_after_a_while(self, edge: Edge, node: Node, clock: FakeClock) -> None:
        info = await create(edge)
        clock.now += 10_000
        await edge.sandboxes.sweep.round()
        assert node.mounted
        await stop(edge, info)
        await edge.sandboxes.sweep.round()
        assert node.mounted
        clock.now += 601
        await edge.sandboxes.sweep.round()
        assert not node.mounted

    async def test_records_are_gone_after_a_day(self, edge: Edge, clock: FakeClock) -> None:
        info = await create(edge)
        await stop(edge, info)
        clock.now += 86_300
        await edge.sandboxes.sweep.round()
        assert (await Client(edge)("GET", f"/v1/sandboxes/{info.id}")).error() == "410 sandbox_gone"
        clock.now += 200
        await edge.sandboxes.sweep.round()
        assert (await Client(edge)("GET", f"/v1/sandboxes/{info.id}")).error() == "404 sandbox_not_found"


class TestSweep:
    async def test_the_sweep_leaves_sandboxes_being_created_alone(self, edge: Edge, node: Node) -> None:
        node.gate = asyncio.Event()
        creating = asyncio.ensure_future(create(edge))
        await node.creating.wait()
        await edge.sandboxes.sweep.round()
        node.gate.set()
        assert (await creating).state == "running"
        await edge.sandboxes.sweep.round()
        assert edge.sandboxes.counts() == {"running": 1}

    async def test_a_part_that_fails_does_not_keep_the_others_from_their_work(self, edge: Edge, node: Node) -> None:
        node.make("sb-e1-unknown")
        node.fail_kill.append(SpawnerError("internal", "no"))
        await edge.sandboxes.sweep.round()
        assert node.kernel
        await edge.sandboxes.sweep.round()
        assert not node.kernel
