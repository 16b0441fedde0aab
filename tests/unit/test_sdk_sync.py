"""The sync twin: it is what the generator makes of the async SDK, and does the same without an event loop of the caller's."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sdk_server import FakeServer

import libdsec
import libdsec.sync as sync
from libdsec import CommandFailed, CommandResult, DSecContainerRunArgs, ImageNotFound, InvalidArgument, SandboxGone
from libdsec._generate_sync import TWINS, generate

ARGS = DSecContainerRunArgs(container_image="x")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """The fake in a thread and a loop of its own, as a server of another process would be."""
    fake, loop = FakeServer(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(fake.start(), loop).result()
    monkeypatch.setenv("DSEC_URL", fake.url)
    monkeypatch.setenv("DSEC_API_KEY", "dsec_k")
    yield fake
    asyncio.run_coroutine_threadsafe(fake.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def client(server: FakeServer) -> Iterator[sync.DSecClient]:
    with sync.DSecClient() as opened:
        yield opened


def test_generating_again_gives_the_same_file() -> None:
    assert generate() == Path(sync.__file__).read_text(encoding="utf-8")


def test_every_name_is_there_and_nothing_needs_await() -> None:
    assert set(libdsec.__all__) - set(sync.__all__) == {"SandboxCreation"}
    for name in TWINS:
        original, twin = getattr(libdsec, name), getattr(sync, name)
        public = {member for member in vars(original) if not member.startswith("_")} - {"transport"}
        assert public <= set(vars(twin)) | set(getattr(twin, "__dataclass_fields__", ())), name
        assert not any(inspect.iscoroutinefunction(member) for member in vars(twin).values())


def test_a_forked_child_is_told_to_make_its_own_client_and_disturbs_nobody(server: FakeServer, client: sync.DSecClient) -> None:
    sandbox = client.run(ARGS)
    assert sandbox.exec(["true"]).exit_code == 0
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with client:
                sandbox.exec(["true"])
        except InvalidArgument as refusal:
            os.write(writer, refusal.message.encode())
        except BaseException as error:
            os.write(writer, repr(error).encode())
        client.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert b"before fork()" in os.read(reader, 1000)
    os.close(reader)
    os.close(writer)
    assert sandbox.exec(["true"]).exit_code == 0


def test_one_sandbox_from_creation_to_its_end(server: FakeServer, client: sync.DSecClient, tmp_path: Path) -> None:
    sandbox = client.run_container(ARGS, timeout=30)
    server.result = CommandResult(exit_code=1, stdout_bytes=b"hi")
    assert sandbox.run_shell("echo hi").stdout == "hi"
    with pytest.raises(CommandFailed):
        sandbox.exec(["false"], check=True)
    sandbox.files.write("/f", "text")
    assert sandbox.files.read_text("/f") == "text"
    assert b"".join(sandbox.files.read_stream("/f")) == b"text"
    sandbox.files.write_stream("/g", iter([b"a", b"b"]))
    assert sandbox.files.read("/g") == b"ab"
    sandbox.files.download("/g", tmp_path / "g")
    assert [event.path for event in sandbox.files.watch("/w")] == ["/w/\udcff"]
    sandbox.stop()
    with pytest.raises(SandboxGone):
        sandbox.exec(["true"])


def test_a_batch_is_an_iterator(server: FakeServer, client: sync.DSecClient) -> None:
    server.refuse_images["bad"] = [ImageNotFound("bad")]
    items = {item.index: item for item in client.run_many([ARGS, DSecContainerRunArgs(container_image="bad")])}
    assert isinstance(items[0].sandbox, sync.Sandbox) and isinstance(items[1].error, ImageNotFound)
    assert items[0].sandbox.exec(["true"]).exit_code == 0
    assert [info.id for info in client.list()] == [items[0].sandbox.id]


def test_a_process_is_followed_and_fed(server: FakeServer, client: sync.DSecClient) -> None:
    server.output = bytes(range(256)) * 1000
    server.cut_output_every = 100_000
    sandbox = client.run(ARGS)
    process = sandbox.start(["cat"])
    assert b"".join(process.stdout) == server.output
    assert next(iter(process.stdout(from_offset=255_999))) == b"\xff"
    process.write_stdin(iter([b"a", b"b"]))
    process.close_stdin()
    assert process.wait().exec_id == process.exec_id
    assert server.stdin[process.exec_id] == b"ab"


def test_a_connection_is_a_blocking_pair(client: sync.DSecClient) -> None:
    reader, writer = client.run(ARGS).connect(8000)
    writer.write(b"one\ntwo")
    assert reader.readline() == b"one\n" and reader.readexactly(3) == b"two"
    writer.close()
    assert reader.read() == b"" and reader.at_eof()


def test_the_short_form_is_a_context_manager(server: FakeServer) -> None:
    with sync.Sandbox.create("python:3.11", memory_limit_mb=256) as sandbox:
        assert server.sandboxes[sandbox.id].state == "running"
    assert server.sandboxes[sandbox.id].state == "stopped"


def test_many_threads_share_one_client(server: FakeServer, client: sync.DSecClient) -> None:
    sandbox = client.run(ARGS)
    with ThreadPoolExecutor(16) as threads:
        results = list(threads.map(lambda number: sandbox.exec(["echo", str(number)]), range(100)))
    assert len({result.exec_id for result in results}) == 100


async def test_it_works_within_a_running_event_loop(server: FakeServer) -> None:
    with sync.DSecClient() as client:
        assert client.run(ARGS).exec(["true"]).exit_code == 0


def test_a_process_that_leaves_everything_open_ends(server: FakeServer) -> None:
    server.output = b"x" * 1000
    program = (
        "from libdsec.sync import DSecClient, DSecContainerRunArgs\n"
        "client = DSecClient()\n"
        "sandbox = client.run(DSecContainerRunArgs(container_image='x'))\n"
        "chunks = iter(sandbox.start(['yes']).stdout)\n"
        "next(chunks)\n"
        "print('done')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert ended.stdout == "done\n" and ended.returncode == 0
