"""Processes that the kernel kills for memory: which command is told of it, which events there are, and the counter that is read."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest
from edge_fakes import Agent, Client, Node, eventually, make_edge, open_edge

from dsec.edge import Edge
from dsec.edge.cgroups import Cgroups, KillCounter
from dsec.edge.channel import Exit
from dsec.edge.commands import COMMANDS_MAX
from dsec.edge.record import Record
from dsec.edge.sandbox import Command, Sandbox
from libdsec.schema import CommandEntry, DSecContainerRunArgs

ITS_OWN = "the kernel killed it for memory"


class Commands:
    """The commands of one sandbox: each runs until the test ends it."""

    def __init__(self, edge: Edge, node: Node, sandbox: str) -> None:
        self.sandbox = sandbox
        self._node = node
        self._client = Client(edge)
        self._path = f"/v1/sandboxes/{sandbox}"
        self._calls: dict[str, asyncio.Task[object]] = {}

    @property
    def agent(self) -> Agent:
        return self._node.agent(self.sandbox)

    async def begin(self, exec_id: str) -> None:
        body = {"command": "x", "exec_id": exec_id}
        self._calls[exec_id] = asyncio.ensure_future(self._client("POST", f"{self._path}/exec", body))
        await eventually(lambda: exec_id in self.agent.commands)

    def kill_for_memory(self, count: int = 1) -> None:
        self._node.oom[self.sandbox] = self._node.oom.get(self.sandbox, 0) + count

    async def end(self, exec_id: str, *, killed: bool = False, timed_out: bool = False) -> bool:
        """Whether its caller is told that it was killed for memory."""
        exit = Exit(exec_id=exec_id, exit_code=137, signal=9, timed_out=timed_out) if killed else Exit(exec_id=exec_id)
        self.agent.end(exec_id, exit)
        return (await self._calls[exec_id]).json()["oom_killed"]

    async def events(self) -> list[tuple[str, str | None]]:
        """Message and exec_id of those about memory."""
        events = (await self._client("GET", f"{self._path}/events")).lines()
        return [(event["message"], event.get("exec_id")) for event in events if event["type"] == "oom"]

    async def history(self) -> dict[str, tuple[int | None, bool]]:
        """Exit code and memory kill of each command."""
        entries = (await self._client("GET", f"{self._path}/commands")).json()
        return {entry["exec_id"]: (entry["exit_code"], entry["oom_killed"]) for entry in entries}


async def create(edge: Edge, **changes: object) -> str:
    args = DSecContainerRunArgs(container_image="base", **changes)
    return (await edge.sandboxes.create("p", args, None)).id


@pytest.fixture
async def commands(edge: Edge, node: Node) -> Commands:
    node.held = True
    return Commands(edge, node, await create(edge))


class TestAttribution:
    async def test_a_command_that_is_killed_for_memory_is_told_once(self, commands: Commands) -> None:
        await commands.begin("hog")
        commands.kill_for_memory()
        assert await commands.end("hog", killed=True)
        await commands.begin("other")
        assert not await commands.end("other", killed=True)
        assert await commands.events() == [(ITS_OWN, "hog")]
        assert await commands.history() == {"hog": (137, True), "other": (137, False)}

    @pytest.mark.parametrize(("count", "message"), [(1, "1 process"), (2, "2 processes")])
    async def test_a_kill_that_the_leader_survives_is_an_event(self, commands: Commands, count: int, message: str) -> None:
        await commands.begin("survivor")
        commands.kill_for_memory(count)
        assert not await commands.end("survivor")
        assert await commands.events() == [(f"the kernel killed {message} for memory", "survivor")]

    async def test_a_kill_from_before_a_command_began_is_not_its_own(self, commands: Commands) -> None:
        commands.kill_for_memory()
        await commands.begin("other")
        assert await commands.events() == [("the kernel killed 1 process for memory", None)]
        assert not await commands.end("other", killed=True)
        assert len(await commands.events()) == 1

    async def test_a_timeout_is_no_memory_kill(self, commands: Commands) -> None:
        await commands.begin("slow")
        commands.kill_for_memory()
        assert not await commands.end("slow", killed=True, timed_out=True)
        assert await commands.events() == [("the kernel killed 1 process for memory", "slow")]

    async def test_a_leader_and_its_child_are_one_event(self, commands: Commands) -> None:
        await commands.begin("hog")
        commands.kill_for_memory(2)
        assert await commands.end("hog", killed=True)
        assert await commands.events() == [("the kernel killed it and 1 process more for memory", "hog")]

    async def test_two_commands_that_are_killed_are_both_told(self, commands: Commands) -> None:
        await commands.begin("a")
        await commands.begin("b")
        commands.kill_for_memory(2)
        assert await commands.end("a", killed=True)
        assert await commands.end("b", killed=True)
        assert len(await commands.events()) == 1

    async def test_a_kill_that_was_seen_at_the_end_of_another_command_is_claimed_without_a_second_event(self, commands: Commands) -> None:
        await commands.begin("hog")
        await commands.begin("other")
        commands.kill_for_memory()
        assert not await commands.end("other")
        assert await commands.end("hog", killed=True)
        assert await commands.events() == [("the kernel killed 1 process for memory", "other")]

    async def test_a_kill_that_was_seen_at_the_start_of_another_command_is_that_of_the_one_that_ran(self, commands: Commands) -> None:
        await commands.begin("hog")
        commands.kill_for_memory()
        await commands.begin("other")
        assert not await commands.end("other", killed=True)
        assert await commands.end("hog", killed=True)

    async def test_a_command_that_began_between_two_kills_leaves_the_first_to_the_one_before(self, commands: Commands) -> None:
        await commands.begin("first")
        commands.kill_for_memory()
        await commands.begin("second")
        commands.kill_for_memory()
        assert await commands.end("second", killed=True)
        assert await commands.end("first", killed=True)

    async def test_a_call_that_is_repeated_while_its_command_runs_claims_its_kill(self, commands: Commands, edge: Edge) -> None:
        await commands.begin("hog")
        commands.kill_for_memory()
        again = asyncio.ensure_future(
            Client(edge)("POST", f"/v1/sandboxes/{commands.sandbox}/exec", {"command": "x", "exec_id": "hog", "mode": "start"})
        )
        assert (await again).status == 200
        assert await commands.end("hog", killed=True)
        waited = await Client(edge)("GET", f"/v1/sandboxes/{commands.sandbox}/exec/hog/wait")
        assert waited.json()["oom_killed"]
        assert await commands.history() == {"hog": (137, True)}

    async def test_a_started_command_is_told_by_its_wait(self, commands: Commands, edge: Edge) -> None:
        path = f"/v1/sandboxes/{commands.sandbox}/exec"
        await Client(edge)("POST", path, {"command": "x", "exec_id": "hog", "mode": "start"})
        commands.kill_for_memory()
        commands.agent.end("hog", Exit(exec_id="hog", exit_code=137, signal=9))
        assert [(await Client(edge)("GET", f"{path}/hog/wait")).json()["oom_killed"] for _ in range(2)] == [True, True]
        assert await commands.events() == [(ITS_OWN, "hog")]

    async def test_a_failure_tells_of_the_kills_that_no_event_told_of(self, commands: Commands, edge: Edge, node: Node) -> None:
        await commands.begin("survivor")
        commands.kill_for_memory(2)
        await commands.end("survivor")
        commands.kill_for_memory()
        node.kill_agent(commands.sandbox)
        await eventually(lambda: not edge.sandboxes.counts())
        record = await edge.sandboxes.find("p", commands.sandbox)
        assert "killed 1 of its processes for memory" in str(record.info("e1", 0).reason)

    async def test_of_very_many_kills_the_newest_can_be_claimed(self, node: Node) -> None:
        sandbox = Sandbox(Record(id="sb", project="p", state="running", created_at=0.0), 0.0)
        sandbox.kill_counter = node.kill_counter("sb")
        node.oom["sb"] = 3 * COMMANDS_MAX
        assert (sandbox.see_oom_kills(), sandbox.see_oom_kills()) == (3 * COMMANDS_MAX, 0)
        assert len(sandbox.oom_unclaimed) == COMMANDS_MAX
        entry = CommandEntry(exec_id="x", command="x", started_at=0.0)
        assert not sandbox.claim_oom_kill(Command(entry, 3 * COMMANDS_MAX))
        assert sandbox.claim_oom_kill(Command(entry, 3 * COMMANDS_MAX - 1))
        assert not sandbox.claim_oom_kill(Command(entry, 3 * COMMANDS_MAX - 1))


class TestCounterOfASandbox:
    async def test_it_is_opened_once_with_the_first_command_and_closed_by_a_stop(self, commands: Commands, edge: Edge, node: Node) -> None:
        assert node.kill_counters == []
        await commands.begin("a")
        await commands.begin("b")
        assert len(node.kill_counters) == 1
        sandbox = edge.sandboxes.live(commands.sandbox)
        assert sandbox is not None
        await edge.sandboxes.stop(sandbox, "stopped by request")
        assert node.kill_counters == []

    @pytest.mark.parametrize("keep", [False, True])
    async def test_a_failure_closes_it(self, edge: Edge, node: Node, keep: bool) -> None:
        name = await create(edge, keep_on_failure=keep)
        await Client(edge)("POST", f"/v1/sandboxes/{name}/exec", {"command": "x"})
        assert len(node.kill_counters) == 1
        node.kill_agent(name)
        await eventually(lambda: not node.kill_counters)

    async def test_the_end_of_the_edge_closes_it(self, node: Node, tmp_path: Path) -> None:
        async with open_edge(node, tmp_path) as edge:
            name = await create(edge)
            await Client(edge)("POST", f"/v1/sandboxes/{name}/exec", {"command": "x"})
            assert len(node.kill_counters) == 1
        assert node.kill_counters == []

    async def test_a_channel_that_breaks_and_is_made_again_opens_no_second_one(self, commands: Commands, edge: Edge, node: Node) -> None:
        await commands.begin("a")
        sandbox, channel = edge.sandboxes.live(commands.sandbox), commands.agent.channel
        assert sandbox is not None and channel is not None
        channel.lose("the connection was reset")
        await eventually(lambda: commands.agent.channel is not channel and sandbox.settling is None)
        await commands.begin("b")
        assert len(node.kill_counters) == 1

    async def test_a_command_that_is_found_when_the_sandbox_is_ending_opens_none(self, commands: Commands, edge: Edge, node: Node) -> None:
        sandbox = edge.sandboxes.live(commands.sandbox)
        assert sandbox is not None and sandbox.channel is not None
        agents, channel = edge.sandboxes.agents, sandbox.channel
        await Client(edge)("POST", f"/v1/sandboxes/{sandbox.id}/exec", {"command": "x", "exec_id": "job", "mode": "start"})
        entries = await channel.list()

        async def list_as_it_ends() -> object:
            sandbox.close_channel()
            return entries

        channel.list = list_as_it_ends
        await agents.follow_running(sandbox)
        assert node.kill_counters == []


class TestRestart:
    async def test_a_command_that_runs_over_a_restart_ends_in_the_history(self, node: Node, tmp_path: Path) -> None:
        node.held = True
        async with open_edge(node, tmp_path) as edge:
            name = await create(edge)
            node.oom[name] = 3
            for exec_id in ("ends", "hog"):
                await Client(edge)("POST", f"/v1/sandboxes/{name}/exec", {"command": "x", "exec_id": exec_id, "mode": "start"})
        async with open_edge(node, tmp_path) as edge:
            commands = Commands(edge, node, name)
            assert await commands.history() == {"ends": (None, False), "hog": (None, False)}
            commands.agent.end("ends", Exit(exec_id="ends", exit_code=5))
            sandbox = edge.sandboxes.live(name)
            assert sandbox is not None and sandbox.commands is not None
            ends, hog = (sandbox.commands[exec_id].entry for exec_id in ("ends", "hog"))
            await eventually(lambda: ends.duration_s is not None)
            commands.kill_for_memory()
            commands.agent.end("hog", Exit(exec_id="hog", exit_code=137, signal=9))
            await eventually(lambda: hog.duration_s is not None)
            assert await commands.history() == {"ends": (5, False), "hog": (137, True)}
            # What was killed before the restart is nobody's here.
            assert await commands.events() == [(ITS_OWN, "hog")]

    async def test_a_command_that_runs_over_a_broken_channel_keeps_its_entry(self, commands: Commands, edge: Edge) -> None:
        body = {"command": "as it was given", "exec_id": "job", "mode": "start"}
        await Client(edge)("POST", f"/v1/sandboxes/{commands.sandbox}/exec", body)
        sandbox, channel = edge.sandboxes.live(commands.sandbox), commands.agent.channel
        assert sandbox is not None and sandbox.commands is not None and channel is not None
        entry = sandbox.commands["job"].entry
        channel.lose("the connection was reset")
        await eventually(lambda: commands.agent.channel is not channel and sandbox.settling is None)
        commands.agent.end("job", Exit(exec_id="job", exit_code=5))
        await eventually(lambda: entry.exit_code == 5)
        (shown,) = (await Client(edge)("GET", f"/v1/sandboxes/{commands.sandbox}/commands")).json()
        assert (shown["command"], shown["exit_code"]) == ("as it was given", 5)

    async def test_a_failed_sandbox_that_is_kept_has_its_events(self, node: Node, tmp_path: Path) -> None:
        async with open_edge(node, tmp_path) as edge:
            name = await create(edge, keep_on_failure=True)
            node.kill_agent(name)
            sandbox = edge.sandboxes.live(name)
            assert sandbox is not None
            await eventually(lambda: (name, True) in node.kills and sandbox.settling is None)
            before = (await Client(edge)("GET", f"/v1/sandboxes/{name}/events")).lines()
        assert [event["message"].partition(":")[0] for event in before] == ["running", "failed"]
        async with open_edge(node, tmp_path) as edge:
            assert (await Client(edge)("GET", f"/v1/sandboxes/{name}/events")).lines() == before

    async def test_a_failed_sandbox_whose_removal_was_cut_off_keeps_its_events(self, node: Node, tmp_path: Path) -> None:
        edge = make_edge(node, tmp_path)
        await edge.open()
        name = await create(edge)
        node.kill_gate = asyncio.Event()
        node.kill_agent(name)
        sandbox = edge.sandboxes.live(name)
        assert sandbox is not None
        await eventually(lambda: bool(sandbox.record.events))
        await edge.close()
        node.kill_gate = None
        async with open_edge(node, tmp_path) as edge:
            messages = [event["message"] for event in (await Client(edge)("GET", f"/v1/sandboxes/{name}/events")).lines()]
        assert messages[:1] == ["running"] and "killed by signal 9" in messages[-1]


V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
V2 = "low 0\nhigh 0\nmax 7\noom 5\noom_kill {}\noom_group_kill 9\n"


class TestKillCounter:
    @pytest.fixture(params=[("cgroup rw,memory", "memory.oom_control", V1), ("cgroup2 rw", "memory.events", V2)])
    def group(self, request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Cgroups, Path, str]:
        """Cgroups with one sandbox ``sb``, its file and what the file says."""
        kind, name, content = request.param
        mounts = tmp_path / "mounts"
        mounts.write_text(f"none {tmp_path} {kind} 0 0\n")
        file = tmp_path / "dsec" / "sb" / name
        file.parent.mkdir(parents=True)
        file.write_text(content.format(1))
        return Cgroups("dsec", mounts), file, content

    def test_it_counts_through_the_file_that_it_opened_first(self, group: tuple[Cgroups, Path, str]) -> None:
        cgroups, file, content = group
        counter = cgroups.kill_counter("sb")
        assert (counter.read(), cgroups.oom_kills("sb")) == (1, 1)
        file.write_text(content.format(12))
        before = descriptors()
        assert (counter.read(), cgroups.oom_kills("sb")) == (12, 12)
        assert descriptors() == before
        counter.close()

    def test_a_close_frees_its_descriptor(self, group: tuple[Cgroups, Path, str]) -> None:
        before = descriptors()
        counter = group[0].kill_counter("sb")
        assert len(descriptors()) == len(before) + 1
        counter.close()
        counter.close()
        assert descriptors() == before
        assert counter.read() == 0

    def test_a_group_that_is_gone_has_no_kills(self, group: tuple[Cgroups, Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
        before = descriptors()
        gone = group[0].kill_counter("other")
        assert gone.read() == group[0].oom_kills("other") == 0
        gone.close()
        counter = group[0].kill_counter("sb")

        def pread(descriptor: int, size: int, offset: int) -> bytes:
            raise OSError(errno.ENODEV, "No such device")

        monkeypatch.setattr(os, "pread", pread)
        assert counter.read() == group[0].oom_kills("sb") == 0
        counter.close()
        assert descriptors() == before


def descriptors() -> set[str]:
    """Of this process, those of regular files."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("/") and Path(f"/proc/self/fd/{name}").is_file():
                found.add(name)
        except FileNotFoundError:
            continue
    return found


async def test_descriptors_are_closed_whatever_way_sandboxes_end(node: Node, tmp_path: Path) -> None:
    """As many of the cgroup's file are open as sandboxes run commands, and none in the end."""
    cgroup = tmp_path / "cgroup" / "memory.events"
    cgroup.parent.mkdir()
    cgroup.write_text(V2.format(0))

    def opened() -> int:
        return sum(os.readlink(f"/proc/self/fd/{name}") == str(cgroup) for name in descriptors())

    node.kill_counter = lambda sandbox: KillCounter(str(cgroup))
    async with open_edge(node, tmp_path) as edge:
        names = [await create(edge, keep_on_failure=kept) for kept in (False, False, True, False)]
        for name in names:
            await Client(edge)("POST", f"/v1/sandboxes/{name}/exec", {"command": "x"})
        assert opened() == len(names)
        stopped, failed, kept, lives = names
        sandbox = edge.sandboxes.live(stopped)
        assert sandbox is not None
        await edge.sandboxes.stop(sandbox, "stopped by request")
        node.kill_agent(failed)
        node.kill_agent(kept)
        await eventually(lambda: opened() == 1)
        assert edge.sandboxes.live(lives) is not None
    assert opened() == 0
