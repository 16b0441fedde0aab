"""A spawner, agents and images without a kernel behind them, for tests of the edge: the same interfaces, in memory.

:class:`Node` stands for the machine: it outlives an edge, as the real kernel does, and its sandboxes can be killed from outside.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import msgspec
from prometheus_client import CollectorRegistry

from dsec.edge import Edge, EdgeConfig
from dsec.edge.cgroups import Usage
from dsec.edge.channel import MODE_CAPTURE, MODE_STREAM, ChannelError, ChannelLost, ExecEntry, Exit, Shell, Start
from dsec.edge.deadlines import Clock
from dsec.edge.spawner import KernelSandbox, KillFigures, Listener, NodeFacts, SandboxSpec, Spawned, SpawnerError, SpawnerLost, Taken
from dsec.images import Environment
from dsec.images.pulling import LayerState
from libdsec.errors import ImageNotFound
from libdsec.schema import DiffEntry, ImageConfig, LayerInfo

GB = 1 << 30


class FakeClock:
    """A clock that goes only when told to."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def clock(self) -> Clock:
        return Clock(monotonic=lambda: self.now, wall=lambda: 1_800_000_000.0 + self.now)


class Agent:
    """A chronus: commands are coroutines that a test ends by hand, or end at once."""

    def __init__(self) -> None:
        self.alive = True
        self.commands: dict[str, asyncio.Future[Exit]] = {}
        self.started: list[Start] = []
        self.shells: list[Shell] = []
        self.files: dict[bytes, bytes] = {}
        self.directories: set[bytes] = set()
        self.channel: FakeChannel | None = None
        self.outputs: dict[str, list[bytes]] = {}
        self.inputs: dict[str, bytearray] = {}
        self.broken_listings = 0
        """So many of the next listings break the channel."""
        self.reading: asyncio.Event | None = None
        """No command takes input before it is set."""
        self.held = False
        """Commands don't end by themselves."""
        self.exit_of: Callable[[Start], Exit] = lambda start: Exit(exec_id=start.exec_id, exit_code=0, stdout=b"ok\n", stdout_total=3)

    def run(self, start: Start) -> asyncio.Future[Exit]:
        known = self.commands.get(start.exec_id)
        if known is not None:
            return known
        self.started.append(start)
        ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        if start.builtin is not None:
            ended.set_result(self._builtin(start))
            return ended
        self.commands[start.exec_id] = ended
        if not self.held:
            ended.set_result(self.exit_of(start))
        return ended

    def end(self, exec_id: str, exit: Exit | None = None) -> None:
        self.commands[exec_id].set_result(exit or Exit(exec_id=exec_id))

    def running(self) -> int:
        return sum(not ended.done() for ended in self.commands.values())

    def die(self) -> None:
        """As by kill -9."""
        self.alive = False
        if self.channel is not None:
            self.channel.lose("the connection was reset")

    def _builtin(self, start: Start) -> Exit:
        path = (start.args or {}).get("path", b"")
        assert isinstance(path, bytes)
        if start.builtin == "write":
            self.files[path] = start.stdin_data
        elif start.builtin == "mkdir":
            if path in self.directories:
                return _complaint(errno.EEXIST, "File exists")
            self.directories.add(path)
        elif start.builtin == "stat":
            if path not in self.files and path not in self.directories:
                return _complaint(errno.ENOENT, "No such file or directory")
            size = len(self.files.get(path, b""))
            found = {"path": path, "type": "file", "size": size, "mode": 0o644, "uid": 0, "gid": 0, "mtime": 1.5, "nlink": 1}
            return Exit(stdout=msgspec.msgpack.encode(found))
        elif start.builtin == "remove" and self.files.pop(path, None) is None:
            return _complaint(errno.ENOENT, "No such file or directory")
        return Exit()


def _complaint(number: int, message: str) -> Exit:
    return Exit(exit_code=1, stderr=msgspec.msgpack.encode({"errno": number, "message": message}))


class FakeStream:
    def __init__(self, agent: Agent, channel: FakeChannel, start: Start, ended: asyncio.Future[Exit], attached: bool) -> None:
        self.attached = attached
        self.exec_id = start.exec_id
        self.pid = 7
        self.stdout_from = 0
        self.stderr_from = 0
        self.detached = False
        self.signals: list[int] = []
        self._agent = agent
        self._channel = channel
        self._ended = ended
        self._start = start
        self._pieces: list[tuple[int, int, bytes]] | None = None

    async def read(self) -> tuple[int, int, bytes] | None:
        if self._pieces is None:
            self._pieces = await self._output()
        return self._pieces.pop(0) if self._pieces else None

    async def write(self, data: bytes) -> None:
        if self._agent.reading is not None:
            await self._agent.reading.wait()
        self._agent.inputs.setdefault(self.exec_id, bytearray()).extend(data)

    async def write_eof(self) -> None:
        if self._start.builtin == "write":
            path = (self._start.args or {})["path"]
            assert isinstance(path, bytes)
            self._agent.files[path] = bytes(self._agent.inputs.get(self.exec_id, b""))

    async def wait(self) -> Exit:
        return await self._channel.until(self._ended)

    async def signal(self, number: int, tree: bool = False) -> None:
        self.signals.append(number)

    async def resize(self, rows: int, cols: int) -> None: ...

    def detach(self) -> None:
        self.detached = True

    async def _output(self) -> list[tuple[int, int, bytes]]:
        if self._start.builtin == "read":
            path = (self._start.args or {})["path"]
            assert isinstance(path, bytes)
            content = self._agent.files.get(path)
            if content is None:
                self._ended = asyncio.get_running_loop().create_future()
                failed = _complaint(errno.ENOENT, "No such file or directory")
                self._ended.set_result(failed)
                return [(2, 0, failed.stderr)]
            return [(1, begin, content[begin : begin + 4]) for begin in range(0, len(content), 4)]
        if self._start.builtin == "watch":
            await asyncio.Event().wait()
        if self._start.builtin is None and self._start.mode == MODE_CAPTURE:
            exit = await self.wait()
            return [(source, 0, data) for source, data in ((1, exit.stdout), (2, exit.stderr)) if data]
        pieces = self._agent.outputs.get(self.exec_id, [])
        return [(1, index, piece) for index, piece in enumerate(pieces)]


class FakeChannel:
    def __init__(self, agent: Agent, on_lost: Callable[[ChannelLost], None]) -> None:
        self._agent = agent
        self._on_lost = on_lost
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.streams: list[FakeStream] = []
        agent.channel = self

    @property
    def running(self) -> int:
        return self._agent.running()

    async def until(self, ended: asyncio.Future[Exit]) -> Exit:
        await asyncio.wait((ended, self._lost), return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            raise ChannelLost("the connection was reset")
        return ended.result()

    async def run(self, start: Start) -> Exit:
        self._check()
        exit = await self.until(self._agent.run(start))
        exit.exec_id = exit.exec_id or start.exec_id
        return exit

    async def shell(self, shell: Shell) -> Exit:
        self._check()
        self._agent.shells.append(shell)
        return Exit(exec_id=shell.exec_id)

    async def close_session(self, session: str) -> None: ...

    async def start(self, start: Start, *, follow: bool = False) -> FakeStream:
        self._check()
        attached = start.exec_id in self._agent.commands
        return self._stream(start, self._agent.run(start), attached)

    async def attach(
        self, exec_id: str, *, stdout_from: int | None = None, stderr_from: int | None = None, stdin: bool = False
    ) -> FakeStream:
        self._check()
        ended = self._agent.commands.get(exec_id)
        if ended is None:
            raise ChannelError("process_not_found", f"no command {exec_id}")
        return self._stream(Start(exec_id=exec_id, mode=MODE_STREAM), ended, True)

    async def open_port(self, port: int, host: bytes = b"") -> FakeStream:
        raise ChannelError("connection_refused", "Connection refused", errno.ECONNREFUSED)

    async def list(self) -> list[ExecEntry]:
        if self._agent.broken_listings:
            self._agent.broken_listings -= 1
            self.lose("the connection was reset")
            await asyncio.sleep(0)
            raise ChannelLost("the connection was reset")
        return [ExecEntry(exec_id=name, argv=[b"x"], pid=7, running=not ended.done()) for name, ended in self._agent.commands.items()]

    async def signal(self, exec_id: str, number: int, *, tree: bool = False) -> None: ...

    async def resize(self, exec_id: str, rows: int, cols: int) -> None: ...

    def lose(self, why: str) -> None:
        if not self._lost.done():
            self._lost.set_result(None)
            asyncio.get_running_loop().call_soon(self._on_lost, ChannelLost(why))

    def close(self) -> None:
        if not self._lost.done():
            self._lost.set_result(None)

    def _check(self) -> None:
        if self._lost.done():
            raise ChannelLost("closed")

    def _stream(self, start: Start, ended: asyncio.Future[Exit], attached: bool) -> FakeStream:
        stream = FakeStream(self._agent, self, start, ended, attached)
        self.streams.append(stream)
        return stream


class Node:
    """The machine: sandboxes, layers, and a spawner that can be made slow, failing or dead."""

    def __init__(self) -> None:
        self.agents: dict[str, Agent] = {}
        self.kernel: dict[str, KernelSandbox] = {}
        self.specs: dict[str, SandboxSpec] = {}
        self.mounted: dict[str, str | None] = {}
        self.mounts = 0
        self.lazy: set[str] = set()
        self.kills: list[tuple[str, bool]] = []
        self.gate: asyncio.Event | None = None
        """Creations wait for it."""
        self.kill_gate: asyncio.Event | None = None
        """Kills wait for it."""
        self.connect_gate: asyncio.Event | None = None
        """Connections to agents wait for it."""
        self.connecting = 0
        """Connections to agents that were begun."""
        self.creating = asyncio.Event()
        """A creation has reached the spawner."""
        self.fail_mount: list[SpawnerError] = []
        self.fail_unmount: list[SpawnerError] = []
        self.fail_create: list[SpawnerError] = []
        self.fail_snapshot: list[SpawnerError] = []
        self.snapshots: list[str] = []
        self.quotas: Literal["simple", "full"] = "simple"
        self.files: dict[bytes, bytes] = {}
        """What a new sandbox has."""
        self.fail_kill: list[SpawnerError] = []
        self.directories: set[bytes] = set()
        self.oom: dict[str, int] = {}
        """Memory kills by sandbox, as its cgroup counts them."""
        self.kill_counters: list[FakeKillCounter] = []
        """Those that are open."""
        self.held = False
        self.scratch_used = GB
        self.diff = [DiffEntry(path_bytes=b"x\xff", kind="written", size=1)]
        """Of every sandbox."""
        self.diff_page = 100
        """Entries in one answer of the spawner."""
        self._slots = itertools.count()
        self.on_exited: Callable[[str, int], None] = lambda sandbox, status: None
        self.on_reconnected: Callable[[], None] = lambda: None

    async def connect_spawner(self, listener: Listener, on_reconnected: Callable[[], None]) -> FakeSpawner:
        self.on_exited, self.on_reconnected = listener.on_exited, on_reconnected
        return FakeSpawner(self)

    async def connect_channel(self, path: str, on_lost: Callable[[ChannelLost], None], timeout_s: float) -> FakeChannel:
        self.connecting += 1
        if self.connect_gate is not None:
            await self.connect_gate.wait()
        agent = self.agents.get(path)
        if agent is None or not agent.alive:
            raise ChannelLost("connection refused")
        if agent.channel is not None:
            agent.channel.lose("replaced")
        return FakeChannel(agent, on_lost)

    def agent(self, sandbox: str) -> Agent:
        return self.agents[self.kernel[sandbox].socket]

    def kill_agent(self, sandbox: str, status: int = 9) -> None:
        """kill -9 of a chronus: the channel breaks and the spawner tells."""
        self.kernel[sandbox].alive = False
        self.agent(sandbox).die()
        asyncio.get_running_loop().call_soon(self.on_exited, sandbox, status)

    def make(self, sandbox: str) -> KernelSandbox:
        slot = next(self._slots)
        found = KernelSandbox(sandbox=sandbox, slot=slot, pid=100 + slot, alive=True, socket=f"/c/{slot}", scratch=True)
        self.kernel[sandbox] = found
        agent = self.agents[found.socket] = Agent()
        agent.directories |= self.directories
        agent.held = self.held
        return found

    # cgroups
    def oom_kills(self, sandbox: str) -> int:
        return self.oom.get(sandbox, 0)

    def kill_counter(self, sandbox: str) -> FakeKillCounter:
        return FakeKillCounter(self, sandbox)

    def usage(self, sandbox: str) -> Usage:
        return Usage(cpu_s=1.5, memory=10, memory_peak=20, pids=3, oom_kills=self.oom_kills(sandbox))


class FakeKillCounter:
    def __init__(self, node: Node, sandbox: str) -> None:
        self._node = node
        self._sandbox = sandbox
        node.kill_counters.append(self)

    def read(self) -> int:
        assert self in self._node.kill_counters, "it is closed"
        return self._node.oom_kills(self._sandbox)

    def close(self) -> None:
        self._node.kill_counters.remove(self)


class FakeSpawner:
    def __init__(self, node: Node) -> None:
        self._node = node

    async def hello(self) -> NodeFacts:
        used, quotas = self._node.scratch_used, self._node.quotas
        return NodeFacts(
            version="0", kernel="6.18", cores=2, memory=24 * GB, cgroup="hybrid", scratch=64 * GB, scratch_used=used, quotas=quotas
        )

    async def layer_mount(self, meta: str, blob: str | None, *, lazy: bool = False) -> None:
        self._node.mounts += 1
        if self._node.fail_mount:
            raise self._node.fail_mount.pop(0)
        self._node.mounted[meta] = blob
        if lazy:
            self._node.lazy.add(meta)

    async def layer_unmount(self, meta: str) -> None:
        if self._node.fail_unmount:
            raise self._node.fail_unmount.pop(0)
        del self._node.mounted[meta]

    async def layers(self) -> dict[str, bool]:
        return {meta: meta in self._node.lazy for meta in self._node.mounted}

    async def snapshots(self) -> list[str]:
        return list(self._node.snapshots)

    async def snapshot(self, sandbox: str, snapshot: str) -> Taken:
        if self._node.fail_snapshot:
            raise self._node.fail_snapshot.pop(0)
        self._node.snapshots.append(snapshot)
        return Taken(sync_us=1, freeze_us=2_000)

    async def snapshot_remove(self, snapshot: str) -> None:
        if snapshot in self._node.snapshots:
            self._node.snapshots.remove(snapshot)

    async def create(self, spec: SandboxSpec) -> Spawned:
        node = self._node
        node.creating.set()
        if node.fail_create:
            error = node.fail_create.pop(0)
            if isinstance(error, SpawnerLost):
                node.make(spec.sandbox)
            raise error
        if node.gate is not None:
            await node.gate.wait()
        for layer in spec.layers:
            if layer not in node.mounted:
                raise SpawnerError("not_found", f"layer {layer} is not mounted")
        made = node.make(spec.sandbox)
        node.specs[spec.sandbox] = spec
        node.agents[made.socket].files |= node.files
        return Spawned(pid=made.pid, slot=made.slot, socket=made.socket)

    async def kill(self, sandbox: str, *, keep_scratch: bool = False) -> KillFigures:
        node = self._node
        if node.fail_kill:
            raise node.fail_kill.pop(0)
        if node.kill_gate is not None:
            await node.kill_gate.wait()
        node.kills.append((sandbox, keep_scratch))
        found = node.kernel.get(sandbox)
        if found is not None:
            found.alive = False
            node.agents[found.socket].alive = False
            if keep_scratch:
                found.pid, found.socket = 0, found.socket
            else:
                del node.kernel[sandbox]
        return KillFigures(cpu_us=2_000_000, memory_peak=5, oom_kills=0, disk=6)

    async def usage(self, sandboxes: Sequence[str]) -> dict[str, int]:
        return {sandbox: 4096 for sandbox in sandboxes if sandbox in self._node.kernel}

    async def list(self) -> list[KernelSandbox]:
        return [msgspec.structs.replace(found) for found in self._node.kernel.values()]

    async def diff(self, sandbox: str, limit: int, after: bytes = b"") -> tuple[list[DiffEntry], bool]:
        found = [entry for entry in self._node.diff if entry.path_bytes > after]
        count = min(limit, self._node.diff_page)
        return found[:count], len(found) > count

    def close(self) -> None: ...


class Images:
    """Two images: ``base`` and ``configured`` (Env, User and WorkingDir set)."""

    def __init__(self) -> None:
        layer = LayerInfo(digest="sha256:" + "a" * 64, blob="sha256:" + "b" * 64, meta_bytes=1, blob_bytes=1, extra_ids=(70_000,))
        top = LayerInfo(digest="sha256:" + "c" * 64, blob=None, meta_bytes=1, blob_bytes=0)
        self.known = {
            "base": Environment(layers=(layer,), config=ImageConfig(), image="base@1", workspace=None, toolkits=()),
            "configured": Environment(
                layers=(top, layer),
                config=ImageConfig(env={"A": "image", "B": "image"}, user="1000", workdir="/work"),
                image="configured@2",
                workspace=None,
                toolkits=(),
            ),
        }

    async def locate(self, image: str, workspace: str | None, toolkits: Sequence[str]) -> None: ...

    def resolve(self, image: str, workspace: str | None, toolkits: Sequence[str]) -> Environment:
        name = image.partition("@")[0]
        if name not in self.known:
            raise ImageNotFound(f"there is no image {image!r}")
        return self.known[name]

    async def settle(self, environment: Environment) -> Environment:
        return environment

    async def ensure(self, environment: Environment) -> list[LayerState]:
        """All of it is whole on the node."""
        return [LayerState(layer, None) for layer in environment.layers]

    async def hold(self, environment: Environment) -> None: ...

    def note_start(self, environment: Environment) -> None: ...


def make_edge(node: Node, state_dir: Path, clock: FakeClock | None = None, **config: object) -> Edge:
    """An edge on ``node``; not opened."""
    return Edge(
        EdgeConfig(state_dir=state_dir, run_dir=state_dir, **config),
        Images(),
        connect_spawner=node.connect_spawner,
        connect_channel=node.connect_channel,
        clock=None if clock is None else clock.clock(),
        cgroups=node,
        registry=CollectorRegistry(),
    )


@asynccontextmanager
async def open_edge(node: Node, state_dir: Path, clock: FakeClock | None = None, **config: object):
    """An edge on ``node``, open within the block."""
    edge = make_edge(node, state_dir, clock, **config)
    await edge.open()
    try:
        yield edge
    finally:
        await edge.close()


class Client:
    """Calls the edge's app without a socket."""

    def __init__(self, edge: Edge, project: str = "p") -> None:
        self._app = edge.app
        self._project = project
        self.answer = Answer()
        """Of the request made last."""

    async def __call__(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        raw: bytes | None = None,
        headers: dict[str, str] | None = None,
        gone: asyncio.Event | None = None,
        reading: asyncio.Event | None = None,
        leaves: bool = False,
    ) -> Answer:
        """``gone``: the client disconnects when it is set, on purpose if it ``leaves``. ``reading``: until it is set the client reads
        nothing."""
        data = raw if raw is not None else b"" if body is None else msgspec.json.encode(body)
        path, _, query = path.partition("?")
        head = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode("ascii"),
            "headers": [(b"content-length", str(len(data)).encode()), *head],
            "dsec.project": self._project,
            "dsec.connected": lambda: gone is None or not gone.is_set(),
            "dsec.left": lambda: leaves and gone is not None and gone.is_set(),
        }
        answer = self.answer = Answer()
        sent = False

        async def receive() -> dict[str, object]:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": data, "more_body": False}
            await (gone or answer.ended).wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, object]) -> None:
            if reading is not None and message["type"] == "http.response.body":
                answer.waits.set()
                await reading.wait()
            if gone is None or not gone.is_set():
                answer.take(message)

        try:
            await self._app(scope, receive, send)
        finally:
            answer.ended.set()
        return answer


class Answer:
    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.whole = False
        self.ended = asyncio.Event()
        self.waits = asyncio.Event()
        """Something is being sent to a client that reads nothing."""

    def take(self, message: dict) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")
            self.whole = not message.get("more_body", False)

    def json(self) -> dict:
        return msgspec.json.decode(self.body)

    def lines(self) -> list[dict]:
        return [msgspec.json.decode(line) for line in self.body.splitlines()]

    def error(self) -> str:
        return f"{self.status} {self.json()['error']['code']}"


async def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    """Waits, in turns of the event loop, until ``condition`` holds."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110  (what is waited for has no event)
            await asyncio.sleep(0.001)
