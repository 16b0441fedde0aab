"""The dsec command: its help, its JSON, its errors and exit codes, against a service whose edge the tests play."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import typer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from typer.testing import CliRunner

from dsec.api import bodies
from dsec.api.app import ApiServer
from dsec.api.edges import Edges, LocalEdge
from dsec.api.keys import Keys
from dsec.api.listener import Listener, bind, origin
from dsec.cli import app
from dsec.cli.run import fail, reported
from dsec.cli.sandboxes import CREATE_LABEL, stop_labelled
from dsec.store import Store
from libdsec import DSecClient
from libdsec.errors import UNREACHABLE, ErrorBody, ErrorEnvelope, Unavailable
from libdsec.images import Images
from libdsec.schema import (
    CommandEntry,
    CommandResult,
    CreateItem,
    CreateRequest,
    DiffEntry,
    ExecRequest,
    ImageConfig,
    ImageInfo,
    KeyRequest,
    Metrics,
    NodeInfo,
    ProcessInfo,
    SandboxEvent,
    SandboxInfo,
    SandboxPage,
    SignalRequest,
    State,
)

GONE = "sb-e1-gone0000"


class FakeEdge:
    """Sandboxes that exist in a dictionary; every command in them prints its arguments and exits with 3."""

    def __init__(self) -> None:
        self.sandboxes: dict[str, SandboxInfo] = {}
        self.removed: set[str] = set()
        """Ids of those of which only the record is left."""
        self.typed = b""
        self.killed = False
        self.silent = False
        self.signals: list[str | int] = []
        self.ended = asyncio.Event()
        self.started = threading.Event()
        """A command has been started."""
        self.stopping = threading.Event()
        """Somebody stops a sandbox."""
        self.may_stop = threading.Event()
        """Until then sandboxes take their time to stop."""
        self.may_stop.set()
        self.app = Starlette(
            routes=[
                Route("/v1/sandboxes", self.create, methods=["POST"]),
                Route("/v1/sandboxes", self.list),
                Route("/v1/sandboxes/{id}", self.show),
                Route("/v1/sandboxes/{id}/attach", self.show, methods=["POST"]),
                Route("/v1/sandboxes/{id}", self.stop, methods=["DELETE"]),
                Route("/v1/sandboxes/{id}/exec", self.exec, methods=["POST"]),
                Route("/v1/sandboxes/{id}/exec", self.commands),
                Route("/v1/sandboxes/{id}/commands", self.last_commands),
                Route("/v1/sandboxes/{id}/exec/{exec_id}", self.command),
                Route("/v1/sandboxes/{id}/exec/{exec_id}/wait", self.wait),
                Route("/v1/sandboxes/{id}/exec/{exec_id}/stdout", self.stdout),
                Route("/v1/sandboxes/{id}/exec/{exec_id}/stderr", self.stderr),
                Route("/v1/sandboxes/{id}/exec/{exec_id}/stdin", self.stdin, methods=["PUT"]),
                Route("/v1/sandboxes/{id}/exec/{exec_id}/signal", self.signal, methods=["POST"]),
                Route("/v1/sandboxes/{id}/metrics", self.metrics),
                Route("/v1/sandboxes/{id}/events", self.events),
                Route("/v1/sandboxes/{id}/diff", self.diff),
            ]
        )

    def node_info(self) -> NodeInfo:
        return NodeInfo(
            edge="e1", kernel="6.18", cores=2, memory=1 << 34, memory_available=1 << 33, scratch=1 << 34, scratch_used=0,
            sandboxes={"running": len(self.sandboxes)}, features={"EROFS": "yes", "swap": "sandboxes never swap"},
        )  # fmt: skip

    async def create(self, request: Request) -> Response:
        wanted = await bodies.read(request, CreateRequest)
        args = wanted.items or ([wanted.args] * wanted.count if wanted.args else [])
        made = [self.make(each.container_image, each.labels) for each in args]
        return lines([CreateItem(index=index, sandbox=info) for index, info in enumerate(made)])

    def make(self, image: str, labels: dict[str, str]) -> SandboxInfo:
        number = len(self.sandboxes)
        info = SandboxInfo(
            id=f"sb-e1-{number:08x}", backend="container", state="running", image=image, labels=labels, created_at=1.0 + number
        )
        self.sandboxes[info.id] = info
        return info

    def end(self, info: SandboxInfo, state: State, *, kept: bool = False) -> None:
        """``kept``: it has failed, and its disk is left for inspection."""
        self.sandboxes[info.id] = msgspec.structs.replace(info, state=state, ended_at=2.0)
        if not kept:
            self.removed.add(info.id)

    async def list(self, request: Request) -> Response:
        """As an edge: those in one of the states asked for, or without any those that something is left of."""
        states = request.query_params.getlist("state")
        labels = dict(pair.split("=", 1) for pair in request.query_params.getlist("label"))
        asked = [info for info in self.sandboxes.values() if (info.state in states if states else info.id not in self.removed)]
        return answer(SandboxPage(sandboxes=[info for info in asked if labels.items() <= info.labels.items()]))

    async def show(self, request: Request) -> Response:
        info = self.sandboxes.get(request.path_params["id"])
        if info is None:
            return answer(ErrorEnvelope(ErrorBody("sandbox_not_found", "there is no such sandbox")), 404)
        return answer(info)

    async def stop(self, request: Request) -> Response:
        if request.path_params["id"] not in self.sandboxes:
            return await self.show(request)
        info = self.sandboxes[request.path_params["id"]]
        self.stopping.set()
        await asyncio.to_thread(self.may_stop.wait, 20)
        # Whoever asked may have gone, and another test may have begun.
        if self.sandboxes.get(info.id) is info:
            self.end(info, "stopped")
        return await self.show(request)

    async def exec(self, request: Request) -> Response:
        wanted = await bodies.read(request, ExecRequest)
        self.started.set()
        if wanted.mode == "capture" and self.silent:
            await self.ended.wait()
        if wanted.mode == "start":
            return answer(ProcessInfo(exec_id="ex-1", argv=wanted.argv or []))
        return answer(CommandResult(exit_code=3, stdout_bytes=" ".join(wanted.argv or []).encode() + b"\xff", exec_id="ex-1"))

    async def commands(self, request: Request) -> Response:
        return answer([ProcessInfo(exec_id="ex-1", argv=["echo", "\x1b[31mred"], running=False, exit_code=0)])

    async def last_commands(self, request: Request) -> Response:
        ended = CommandEntry(exec_id="ex-1", command="echo \x1b[31mred", started_at=1.0, exit_code=7, duration_s=2.5)
        return answer([ended, CommandEntry(exec_id="ex-2", command="sleep 9", started_at=2.0)])

    async def command(self, request: Request) -> Response:
        return answer(ProcessInfo(exec_id="ex-1", argv=["echo"], running=False, exit_code=3, stdout_total=4))

    async def wait(self, request: Request) -> Response:
        return answer(CommandResult(exit_code=3, exec_id="ex-1"))

    async def stdin(self, request: Request) -> Response:
        self.typed += await request.body()
        if b"exit\r" in self.typed or request.query_params["eof"] == "true":
            self.ended.set()
        return Response(status_code=204)

    async def signal(self, request: Request) -> Response:
        wanted = await bodies.read(request, SignalRequest)
        self.signals.append(wanted.signal)
        self.killed = True
        self.ended.set()
        return Response(status_code=204)

    async def stdout(self, request: Request) -> Response:
        if self.silent:
            return StreamingResponse(self.prompt(), headers={"X-DSec-Offset": "0"})
        return Response(b"out\xfe\n", headers={"X-DSec-Offset": "0"})

    async def prompt(self) -> AsyncIterator[bytes]:
        yield b"prompt$ "
        await self.ended.wait()

    async def stderr(self, request: Request) -> Response:
        return Response(b"err\n", headers={"X-DSec-Offset": "0"})

    async def metrics(self, request: Request) -> Response:
        return answer(
            Metrics(at=1, cpu_s=2, memory=3, memory_peak=4, memory_limit=5, pids=6, pids_limit=7, disk=8, disk_limit=9, oom_kills=0)
        )

    async def events(self, request: Request) -> Response:
        return lines([SandboxEvent(at=1.0, type="state", message="running")])

    async def diff(self, request: Request) -> Response:
        return lines([DiffEntry(path_bytes=b"/etc/\xff", kind="added", size=5)])


def answer(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def lines(values: list[CreateItem] | list[SandboxEvent] | list[DiffEntry]) -> Response:
    return Response(b"".join(msgspec.json.encode(value) + b"\n" for value in values), media_type="application/x-ndjson")


class Service:
    """The apiserver on a free port, served by a thread of its own."""

    def __init__(self, state_dir: Path) -> None:
        self.edge = FakeEdge()
        self._state_dir = state_dir
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._listener.stop)
        self._thread.join(10)

    async def _serve(self) -> None:
        store = await Store.open("sqlite+aiosqlite://")
        keys = Keys(store)
        self.key = (await keys.create(KeyRequest(name="test", admin=True))).key
        bound = bind("127.0.0.1", 0)
        self.url = origin(bound)
        server = ApiServer(keys, Edges([LocalEdge("e1", self.edge)]), [], state_dir=self._state_dir, metrics_public=True)
        self._listener = Listener(server, bound)
        self._loop = asyncio.get_running_loop()
        running = asyncio.create_task(self._listener.run_until_stopped())
        await self._listener.listening.wait()
        self._started.set()
        await running
        await store.close()


@pytest.fixture(scope="module")
def _service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("state"))
    service.start()
    yield service
    service.stop()


@pytest.fixture
def service(_service: Service, monkeypatch: pytest.MonkeyPatch) -> Service:
    monkeypatch.setenv("DSEC_URL", _service.url)
    monkeypatch.setenv("DSEC_API_KEY", _service.key)
    _service.edge.sandboxes.clear()
    _service.edge.removed.clear()
    return _service


class Ran:
    """What a run of the command gave."""

    def __init__(self, *words: str, stdin: bytes | None = None) -> None:
        result = CliRunner().invoke(app, list(words), input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        self.code, self.stdout, self.stderr = result.exit_code, result.stdout, result.stderr


def dsec(*words: str, stdin: int | None = None) -> subprocess.CompletedProcess[bytes]:
    """The command as a process of its own: for what goes straight to descriptors."""
    return subprocess.run([sys.executable, "-m", "dsec.cli", *words], stdin=stdin, capture_output=True, timeout=60, check=False)


def every_command() -> list[tuple[str, ...]]:
    def below(command: object, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield words
        for name, child in getattr(command, "commands", {}).items():
            yield from below(child, (*words, name))

    return list(below(typer.main.get_command(app), ()))


# -- help and start


@pytest.mark.parametrize("words", every_command(), ids=" ".join)
def test_every_command_explains_itself(words: tuple[str, ...]) -> None:
    ran = Ran(*words, "--help")
    assert ran.code == 0
    assert "Usage:" in ran.stdout
    leaf = words and not any(other[: len(words)] == words and other != words for other in every_command())
    assert "Example: " in ran.stdout or not leaf, "a command shows how it is used"


def test_the_command_starts_without_importing_what_only_some_commands_need() -> None:
    code = (
        "import sys, dsec.cli; print([name for name in ('aiohttp', 'rich', 'sqlalchemy', 'starlette', 'msgspec') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- data


@pytest.mark.parametrize(
    "words",
    [
        ("create", "debian", "--count", "3", "--label", "run=1", "--json"),
        ("ls", "--json"),
        ("stop", "--all", "--json"),
        ("logs", "sb-e1-00000000", "--json"),
        ("logs", "sb-e1-00000000", "ex-1", "--json"),
        ("debug", "sb-e1-00000000", "--json"),
        ("top", "--interval", "0.2", "--json"),
        ("key", "create", "trainer", "--days", "1", "--json"),
        ("key", "ls", "--json"),
        ("node", "ls", "--json"),
        ("doctor", "--server", "--json"),
    ],
    ids=" ".join,
)
def test_json_output_parses(service: Service, words: tuple[str, ...]) -> None:
    service.edge.make("debian", {})
    ran = Ran(*words)
    assert ran.stderr == ""
    assert json.loads(ran.stdout)


@pytest.mark.parametrize(
    "words", [("ls",), ("logs", "sb-e1-00000000"), ("debug", "sb-e1-00000000"), ("top", "--once"), ("key", "ls"), ("node", "ls")]
)
def test_tables_carry_no_control_characters_of_a_sandbox(service: Service, words: tuple[str, ...]) -> None:
    service.edge.make("deb\x1b[31mian", {"a": "\x07b"})
    ran = Ran(*words)
    assert (ran.code, ran.stderr) == (0, "")
    assert "\x1b" not in ran.stdout
    assert "\x07" not in ran.stdout


def test_errors_carry_no_control_characters_of_a_sandbox(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        fail("a link to l\x1b]0;title\x07:\nsecond line")
    assert capsys.readouterr().err == "dsec: a link to l\\x1b]0;title\\x07:\nsecond line\n"


@pytest.mark.parametrize(("reason", "advised"), [(UNREACHABLE, True), (None, False)])
def test_only_where_the_service_did_not_answer_it_is_asked_whether_it_runs(
    reason: str | None, advised: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit), reported():
        raise Unavailable("the store can't be reached", reason=reason)
    assert ("is the service running" in capsys.readouterr().err) == advised


def test_debug_shows_the_last_commands_and_how_they_ended(service: Service) -> None:
    sandbox = service.edge.make("debian", {})
    commands = {entry["exec_id"]: entry for entry in json.loads(Ran("debug", sandbox.id, "--json").stdout)["commands"]}
    assert commands["ex-1"]["exit_code"] == 7
    shown = Ran("debug", sandbox.id).stdout
    assert "exit 7 after 2.5 s" in shown and "red" in shown
    assert "running" in shown.partition("sleep 9")[0].splitlines()[-1]
    service.edge.sandboxes[sandbox.id] = msgspec.structs.replace(sandbox, state="failed")
    assert "no end seen" in Ran("debug", sandbox.id).stdout


def test_create_prints_an_id_a_line(service: Service) -> None:
    ran = Ran("create", "debian", "-n", "3")
    assert ran.code == 0
    assert sorted(ran.stdout.split()) == sorted(service.edge.sandboxes)


def test_ls_shows_no_label_of_the_commands_own(service: Service) -> None:
    Ran("create", "debian", "-l", "run=7")
    assert "run=7" in Ran("ls").stdout
    assert "dsec-cli" not in Ran("ls").stdout


@pytest.fixture
def mixed(service: Service) -> dict[str, str]:
    """Sandboxes in every kind of state, with one label: name to id."""
    made = {name: service.edge.make("debian", {"run": "1"}) for name in ("stopped", "running", "failed", "kept", "lost")}
    service.edge.end(made["stopped"], "stopped")
    service.edge.end(made["failed"], "failed")
    service.edge.end(made["kept"], "failed", kept=True)
    service.edge.end(made["lost"], "lost")
    return {name: info.id for name, info in made.items()}


def listed(*words: str) -> list[str]:
    return [info["id"] for info in json.loads(Ran("ls", "--json", *words).stdout)]


def test_ls_shows_what_is_left_of_sandboxes_and_with_all_also_what_has_ended(mixed: dict[str, str]) -> None:
    assert listed() == listed("--label", "run=1") == [mixed["running"], mixed["kept"]]
    assert listed("--all") == listed("--all", "--label", "run=1") == list(mixed.values()), "each once, oldest first"
    assert listed("--all", "--label", "run=2") == []
    assert listed("--state", "failed") == [mixed["failed"], mixed["kept"]]


def test_ls_leaves_out_what_is_just_being_removed(service: Service) -> None:
    for state in ("stopped", "lost"):
        service.edge.end(service.edge.make("debian", {}), state, kept=True)
    assert listed() == []
    assert len(listed("--all")) == 2


@pytest.mark.parametrize("words", [("--all",), ("--label", "run=1")], ids=" ".join)
def test_stop_ends_failed_sandboxes_that_are_kept(service: Service, mixed: dict[str, str], words: tuple[str, ...]) -> None:
    ran = Ran("stop", *words)
    assert sorted(ran.stdout.split()[::2]) == [mixed["running"], mixed["kept"]]
    assert service.edge.sandboxes[mixed["kept"]].state == "stopped"
    assert service.edge.sandboxes[mixed["failed"]].state == "failed", "its record stays as it is"


def test_create_with_rm_also_stops_what_failed_and_is_kept(service: Service) -> None:
    words = [sys.executable, "-m", "dsec.cli", "create", "debian", "--count", "2", "--keep-on-failure", "--rm"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        try:
            # It says so when it has begun to wait.
            while b"Ctrl-C stops them" not in process.stderr.readline():
                assert process.poll() is None
            failed = next(iter(service.edge.sandboxes.values()))
            service.edge.end(failed, "failed", kept=True)
            process.send_signal(signal.SIGINT)
            process.wait(20)
        finally:
            process.kill()
    assert [info.state for info in service.edge.sandboxes.values()] == ["stopped", "stopped"]


@pytest.fixture
def slow_to_stop(service: Service) -> Iterator[FakeEdge]:
    """Its sandboxes stop when ``may_stop`` is set."""
    service.edge.stopping.clear()
    service.edge.may_stop.clear()
    yield service.edge
    service.edge.may_stop.set()


@pytest.mark.parametrize(
    "words", [("create", "debian", "-n", "3", "--rm"), ("exec", "--image", "debian", "--", "true")], ids=["create", "exec"]
)
def test_further_signals_dont_keep_it_from_stopping_what_it_made(slow_to_stop: FakeEdge, words: tuple[str, ...]) -> None:
    with subprocess.Popen([sys.executable, "-m", "dsec.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        try:
            if words[0] == "create":
                while b"Ctrl-C stops them" not in process.stderr.readline():
                    assert process.poll() is None
                process.send_signal(signal.SIGINT)
            assert slow_to_stop.stopping.wait(20)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                process.send_signal(number)
            # By then it has had them.
            while b"stopping" not in process.stderr.readline():
                assert process.poll() is None
            slow_to_stop.may_stop.set()
            _, complaint = process.communicate(timeout=20)
        finally:
            process.kill()
    assert {info.state for info in slow_to_stop.sandboxes.values()} == {"stopped"}
    assert (process.returncode, complaint) == (130, b"")


def test_what_cannot_be_stopped_is_named_with_what_stops_it(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("libdsec.transport.FIRST_CONTACT_S", 0.0)

    async def without_a_service() -> None:
        async with DSecClient("http://127.0.0.1:1", "k") as client:
            await stop_labelled(client, "abc", ["sb-e1-1", "sb-e1-2"])

    asyncio.run(without_a_service())
    said = capsys.readouterr().err
    assert "sb-e1-1 sb-e1-2" in said and "dsec stop --label dsec-cli-create=abc" in said
    kept = service.edge.make("debian", {CREATE_LABEL: "abc"})
    assert Ran("stop", "--label", f"{CREATE_LABEL}=abc").stdout == f"{kept.id} stopped\n"


async def test_stopping_what_was_made_is_given_up_for_who_insists(
    slow_to_stop: FakeEdge, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dsec.cli.interrupts.UNHEARD_S", 0.0)
    made = [slow_to_stop.make("debian", {CREATE_LABEL: "abc"}).id for _ in range(2)]
    async with DSecClient() as client:
        stopping = asyncio.create_task(stop_labelled(client, "abc", made))
        assert await asyncio.to_thread(slow_to_stop.stopping.wait, 20)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
    assert f"{made[0]} {made[1]} (interrupted again)" in capsys.readouterr().err


def test_stop_by_label_leaves_the_others(service: Service) -> None:
    kept, ended = service.edge.make("debian", {"run": "1"}), service.edge.make("debian", {"run": "2"})
    assert Ran("stop", "--label", "run=2").code == 0
    assert service.edge.sandboxes[kept.id].state == "running"
    assert service.edge.sandboxes[ended.id].state == "stopped"


def test_stopping_twice_is_no_error(service: Service) -> None:
    sandbox = service.edge.make("debian", {})
    assert [Ran("stop", sandbox.id).stdout for _ in range(2)] == [f"{sandbox.id} stopped\n"] * 2
    gone = Ran("stop", GONE)
    assert (gone.code, gone.stderr) == (1, f"dsec: {GONE}: there is no such sandbox\n")


def test_doctor_of_the_server_says_where_to_ask_what_to_do(service: Service) -> None:
    findings = json.loads(Ran("doctor", "--server", "--json").stdout)["findings"]
    [swap] = [finding for finding in findings if finding["feature"] == "swap"]
    assert (swap["cost"], swap["todo"]) == ("sandboxes never swap", "")
    assert "dsec doctor` on the node" in Ran("doctor", "--server").stderr


# -- commands


def test_exec_passes_bytes_through_and_exits_as_the_command(service: Service) -> None:
    sandbox = service.edge.make("debian", {})
    done = dsec("exec", sandbox.id, "--", "echo", "--json")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"out\xfe\n", b"err\n")


@pytest.mark.parametrize("words", [("echo", "--", "-x"), ("--", "echo", "--", "-x")], ids=" ".join)
def test_exec_takes_the_command_as_it_stands(service: Service, words: tuple[str, ...]) -> None:
    sandbox = service.edge.make("debian", {})
    ran = Ran("exec", "--json", sandbox.id, *words)
    assert json.loads(ran.stdout)["stdout"] == "echo -- -x\ufffd"


def test_exec_as_json_has_the_output_as_text(service: Service) -> None:
    sandbox = service.edge.make("debian", {})
    ran = Ran("exec", "--json", sandbox.id, "echo", "-n")
    assert ran.code == 3
    assert json.loads(ran.stdout)["stdout"] == "echo -n\ufffd"


def test_exec_in_a_fresh_sandbox_leaves_none(service: Service) -> None:
    assert dsec("exec", "--image", "debian", "echo", "hello").returncode == 3
    assert [info.state for info in service.edge.sandboxes.values()] == ["stopped"]


@pytest.fixture
def reader(service: Service) -> Iterator[SandboxInfo]:
    """A sandbox whose commands end when their input does, or when they are killed."""
    edge = service.edge
    edge.silent, edge.killed, edge.typed, edge.ended, edge.signals = True, False, b"", asyncio.Event(), []
    edge.started.clear()
    yield edge.make("debian", {})
    edge.silent = False


@pytest.mark.parametrize("source", ["file", "empty file", "/dev/null", "pipe"])
def test_exec_sends_its_input_whatever_that_is(service: Service, reader: SandboxInfo, tmp_path: Path, source: str) -> None:
    content = b"" if source in ("empty file", "/dev/null") else b"line\n" * 1000
    if source == "pipe":
        descriptor, writing = os.pipe()
        os.write(writing, content)
        os.close(writing)
    else:
        path = tmp_path / "input"
        path.write_bytes(content)
        descriptor = os.open("/dev/null" if source == "/dev/null" else path, os.O_RDONLY)
    try:
        done = dsec("exec", "-i", reader.id, "--", "cat", stdin=descriptor)
        assert not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_NONBLOCK, "whoever shares it would see that"
    finally:
        os.close(descriptor)
    assert (done.returncode, done.stdout) == (3, b"prompt$ ")
    assert service.edge.typed == content
    assert not service.edge.killed


def test_exec_ends_with_its_command_though_its_input_goes_on(service: Service) -> None:
    sandbox = service.edge.make("debian", {})
    descriptor, writing = os.pipe()
    try:
        assert dsec("exec", "-i", sandbox.id, "--", "true", stdin=descriptor).returncode == 3
    finally:
        os.close(descriptor)
        os.close(writing)


def test_exec_fails_and_kills_its_command_if_its_input_cannot_be_read(service: Service, reader: SandboxInfo, tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "output", os.O_WRONLY | os.O_CREAT)
    try:
        done = dsec("exec", "-i", reader.id, "--", "cat", stdin=descriptor)
    finally:
        os.close(descriptor)
    assert done.returncode == 1
    assert b"Bad file descriptor" in done.stderr
    assert service.edge.killed


@pytest.mark.parametrize("mode", [(), ("--json",)], ids=["output", "json"])
@pytest.mark.parametrize(
    ("number", "passed_on"), [(signal.SIGINT, "INT"), (signal.SIGTERM, "KILL"), (signal.SIGHUP, "KILL")], ids=["INT", "TERM", "HUP"]
)
def test_exec_that_is_ended_from_outside_ends_its_command(
    service: Service, reader: SandboxInfo, mode: tuple[str, ...], number: signal.Signals, passed_on: str
) -> None:
    words = [sys.executable, "-m", "dsec.cli", "exec", *mode, reader.id, "--", "sleep", "30"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert service.edge.started.wait(20)
            process.send_signal(number)
            _, complaint = process.communicate(timeout=20)
        finally:
            process.kill()
    assert service.edge.signals == [passed_on]
    assert complaint == b"" or number == signal.SIGINT
    assert process.returncode == (3 if number == signal.SIGINT else 130), "interrupted, the command says itself how it ends"


def test_exec_whose_output_nobody_reads_ends_its_command(service: Service, reader: SandboxInfo) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-m", "dsec.cli", "exec", reader.id, "--", "yes"]
    try:
        done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) in {(1, b""), (1, b"err\n")}, "stderr is passed on as long as that goes"
    assert service.edge.signals == ["KILL"]


@pytest.mark.parametrize("ignored", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_is_ignored_from_the_start_stays_so(service: Service, reader: SandboxInfo, ignored: signal.Signals) -> None:
    words = [sys.executable, "-m", "dsec.cli", "exec", reader.id, "--", "sleep", "30"]
    previous = signal.signal(ignored, signal.SIG_IGN)
    try:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    finally:
        signal.signal(ignored, previous)
    with process:
        try:
            assert service.edge.started.wait(20)
            process.send_signal(ignored)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 130
        finally:
            process.kill()
    assert service.edge.signals == ["KILL"], "that of SIGTERM"


def test_logs_shows_both_streams_apart(service: Service) -> None:
    sandbox = service.edge.make("debian", {})
    done = dsec("logs", sandbox.id, "ex-1")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"out\xfe\n", b"err\n")


# -- images


def test_a_debian_image_is_asked_for_by_suite_and_packages(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    async def import_(_: Images, source: str, **more: object) -> ImageInfo:
        asked.update(source=source, **more)
        return ImageInfo(name="py", version=1, kind="base", digest="sha256:0", layers=[], config=ImageConfig(), created_at=0, size=5)

    monkeypatch.setattr(Images, "import_", import_)
    assert Ran("image", "debian", "py", "--package", "git", "-p", "python3", "--json").code == 0
    assert (asked["source"], asked["name"], asked["kind"]) == ("mmdebstrap:bookworm?include=git,python3", "py", "base")


def test_the_password_of_a_registry_never_stands_on_the_command_line(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    async def import_(_: Images, source: str, **more: object) -> ImageInfo:
        asked.update(source=source, **more)
        return ImageInfo(name="py", version=1, kind="base", digest="sha256:0", layers=[], config=ImageConfig(), created_at=0, size=5)

    monkeypatch.setattr(Images, "import_", import_)
    words = ("image", "import", "docker://registry.example/app:1", "--name", "py", "--insecure-registry")
    assert Ran(*words, "--username", "me", "--password-stdin", stdin=b"a pass:word \n").code == 0
    assert (asked["source"], asked["credentials"], asked["insecure"]) == ("docker://registry.example/app:1", ("me", "a pass:word "), True)
    assert Ran(*words).code == 0
    assert asked["credentials"] is None


# -- errors


def test_an_error_is_one_line_that_says_what_to_do(service: Service) -> None:
    ran = Ran("exec", GONE, "true")
    assert ran.code == 1
    assert ran.stderr == "dsec: there is no such sandbox; `dsec ls` shows the sandboxes of this key's project\n"


@pytest.mark.parametrize("words", [("exec", "", "true"), ("logs", ""), ("debug", ""), ("stop", "")], ids=lambda words: words[0])
def test_an_empty_id_is_no_sandbox(service: Service, words: tuple[str, ...]) -> None:
    ran = Ran(*words)
    assert ran.code == 1
    assert "there is no sandbox ''" in ran.stderr and ran.stderr.count("\n") == 1


def test_what_is_no_address_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_URL", "foo")
    ran = Ran("ls")
    assert ran.code == 1
    assert ran.stderr.startswith("dsec: 'foo' is not a server's address: that is http://HOST:PORT")


def test_a_wrong_key_says_how_to_give_one(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_API_KEY", "dsec_wrong")
    ran = Ran("ls")
    assert ran.code == 1
    assert ran.stderr.count("\n") == 1
    assert "DSEC_API_KEY" in ran.stderr


def test_without_a_service_it_says_how_to_start_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSEC_URL", raising=False)
    monkeypatch.setenv("DSEC_CONFIG", str(tmp_path / "none.json"))
    ran = Ran("ls")
    assert ran.code == 1
    assert "dsec up" in ran.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("stop",),
        ("stop", "sb-e1-1", "--all"),
        ("cp", "a", "b"),
        ("cp", "sb-e1-1:/a", "sb-e1-1:/b"),
        ("exec", "sb-e1-1"),
        ("shell",),
        ("nothing",),
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(service: Service, words: tuple[str, ...]) -> None:
    assert Ran(*words).code == 2


def test_a_malformed_pair_is_named(service: Service) -> None:
    ran = Ran("create", "debian", "--env", "novalue")
    assert ran.code == 1
    assert "novalue" in ran.stderr
    assert not service.edge.sandboxes


def test_shell_without_a_terminal_says_what_to_use_instead(service: Service) -> None:
    sandbox = service.edge.make("debian", {})
    ran = Ran("shell", sandbox.id)
    assert ran.code == 1
    assert "exec -i" in ran.stderr


class Terminal:
    """The command on a terminal of its own, which the test sees from the other side."""

    def __init__(self, *words: str) -> None:
        self._ours, self._theirs = os.openpty()
        self.before = termios.tcgetattr(self._theirs)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dsec.cli", *words], stdin=self._theirs, stdout=self._theirs, stderr=self._theirs, start_new_session=True
        )

    def expect(self, words: bytes, seen: bytes = b"") -> bytes:
        deadline = time.monotonic() + 20
        while words not in seen:
            assert select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))[0], seen
            seen += os.read(self._ours, 4096)
        return seen

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    @property
    def settings(self) -> list[object]:
        return termios.tcgetattr(self._theirs)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


@pytest.fixture
def terminal(service: Service) -> Iterator[Terminal]:
    service.edge.silent, service.edge.killed, service.edge.typed = True, False, b""
    service.edge.ended = asyncio.Event()
    opened = Terminal("shell", service.edge.make("debian", {}).id)
    yield opened
    opened.close()
    service.edge.silent = False


def test_a_shell_passes_every_key_and_puts_the_terminal_back(service: Service, terminal: Terminal) -> None:
    terminal.expect(b"prompt$ ")
    assert terminal.settings != terminal.before, "raw while it runs"
    terminal.type(b"\x03\x1a\x04exit\r")
    assert terminal.process.wait(20) == 3
    assert service.edge.typed == b"\x03\x1a\x04exit\r", "Ctrl-C, Ctrl-Z and Ctrl-D go to the other side"
    assert terminal.settings == terminal.before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_shell_that_is_ended_from_outside_ends_its_command_and_puts_the_terminal_back(
    service: Service, terminal: Terminal, number: signal.Signals
) -> None:
    terminal.expect(b"prompt$ ")
    terminal.process.send_signal(number)
    assert terminal.process.wait(20) == 130
    assert service.edge.killed
    assert terminal.settings == terminal.before


@pytest.mark.parametrize("command", ["up", "down"])
def test_starting_and_stopping_say_that_they_need_root(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    ran = Ran(command)
    assert ran.code == 1
    assert f"sudo dsec {command}" in ran.stderr
