"""kill -9 of each part while it works: what was told to a caller lives on, the rest is swept."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from dsec.edge import EdgeConfig
from dsec.edge.endings import ORPHANED
from libdsec import DSecClient, DSecContainerRunArgs, DSecError, Sandbox, SandboxFailed, SandboxGone, Unavailable
from tests.conftest import Instance, load_base, own_instance, require_root, start_instance, stop_instance

IMAGE = "debian:chaos"
PARTS = ["dsec.serve", "dsec-spawner"]


@pytest.fixture(scope="module")
def shaken(base_tar: Path) -> Iterator[Instance]:
    """An instance of this module's own: its parts get killed."""
    with own_instance(base_tar, IMAGE) as running:
        yield running


@pytest.fixture
async def shaken_client(shaken: Instance) -> AsyncIterator[DSecClient]:
    async with DSecClient(shaken.url, shaken.api_key) as client:
        yield client
        async for info in client.list():
            if info.state not in ("stopped", "lost"):
                await (await client.attach(info.id)).stop()
        await shaken.wait_clean()


def small(**more: object) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=256, disk_limit_mb=256, **more)  # type: ignore[arg-type]


def kill(instance: Instance, name: str) -> None:
    """kill -9 of the one process of that name, and only that."""
    pids = [pid for pid in instance.pids(name) if _is_a_part(pid)]
    assert pids, f"no process named {name}"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def _is_a_part(pid: int) -> bool:
    """Neither the supervisor nor a sandbox's first process, which bears the spawner's command line until it executes chronus."""
    try:
        return len(_pids_of(pid)) == 1 and b"supervise" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _pids_of(pid: int) -> list[str]:
    """The process's id in each of its pid namespaces, the host's first (proc_pid_status(5)). Raises OSError."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]


def kill_first_process(instance: Instance, sandbox: str) -> bool:
    """kill -9 of the sandbox's chronus. Tells whether there was one."""
    killed = False
    for pid in instance.chronus_pids(sandbox):
        with suppress(OSError):
            if _pids_of(pid)[1:] == ["1"]:
                os.kill(pid, signal.SIGKILL)
                killed = True
    return killed


def client_process(url: str, api_key: str, body: str) -> subprocess.Popen[bytes]:
    """A client that is there to be killed: runs ``body``, a coroutine's in which ``client`` is open."""
    opened = f"async def main():\n    async with DSecClient({url!r}, {api_key!r}) as client:\n"
    program = "import asyncio\nfrom libdsec import *\n" + opened + textwrap.indent(textwrap.dedent(body), " " * 8) + "\nasyncio.run(main())"
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)


async def line_of(child: subprocess.Popen[bytes]) -> str:
    """The next line that it prints."""
    assert child.stdout
    return (await asyncio.to_thread(child.stdout.readline)).decode().strip()


def kill_client(child: subprocess.Popen[bytes]) -> None:
    """kill -9."""
    child.kill()
    child.wait()


async def serving(client: DSecClient) -> None:
    """Waits until the instance answers again."""
    end = time.monotonic() + 30
    while True:
        try:
            [info async for info in client.list(page_size=1)]
            return
        except DSecError:
            assert time.monotonic() < end, "the instance did not come back within 30 s"
            await asyncio.sleep(0.05)


async def owned_equals_listed(instance: Instance, client: DSecClient) -> None:
    """Waits until the kernel holds exactly the sandboxes that a client can find."""
    end = time.monotonic() + 30
    while True:
        listed = {info.id async for info in client.list() if info.state in ("running", "creating", "failed")}
        held = {path.name for path in instance.cgroup_dirs()}
        if listed == held:
            return
        assert time.monotonic() < end, f"listed only: {listed - held}; held only: {held - listed}"
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("part", PARTS)
async def test_a_killed_part_finds_its_sandboxes_again_and_loses_no_output(shaken: Instance, shaken_client: DSecClient, part: str) -> None:
    sandbox = await shaken_client.run_container(small())
    await sandbox.run_shell("x=kept")
    process = await sandbox.start("i=0; while [ $i -lt 60 ]; do echo line $i; i=$((i+1)); sleep 0.05; done")
    captured = asyncio.create_task(sandbox.exec("i=0; while [ $i -lt 60 ]; do echo captured $i; i=$((i+1)); sleep 0.05; done; exit 3"))
    output = bytearray(await anext(aiter(process.stdout)))
    kill(shaken, part)
    async for chunk in process.stdout(from_offset=len(output)):
        output += chunk
    assert bytes(output) == b"".join(b"line %d\n" % number for number in range(60))
    result = await captured
    assert result.exit_code == 3 and result.stdout == "".join(f"captured {number}\n" for number in range(60))
    assert (await sandbox.run_shell("echo $x")).stdout == "kept\n"


async def test_a_killed_spawner_leaves_sandboxes_running_and_creation_working(shaken: Instance, shaken_client: DSecClient) -> None:
    before = await shaken_client.run_container(small())
    kill(shaken, "dsec-spawner")
    assert (await before.exec(["echo", "here"])).stdout == "here\n"
    after = await shaken_client.run_container(small(), timeout=30)
    assert (await after.exec(["echo", "new"])).stdout == "new\n"
    await before.stop()
    await owned_equals_listed(shaken, shaken_client)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05, 0.1, 0.2])
async def test_a_kill_in_the_midst_of_creating_leaves_what_was_told(
    shaken: Instance, shaken_client: DSecClient, part: str, delay_s: float
) -> None:
    told: list[Sandbox] = []

    async def create() -> None:
        async for item in shaken_client.run_many(small(labels={"batch": part}), count=24):
            if item.sandbox:
                told.append(item.sandbox)

    work = asyncio.create_task(create())
    await asyncio.sleep(delay_s)
    kill(shaken, part)
    await asyncio.gather(work, return_exceptions=True)
    await serving(shaken_client)
    for sandbox in told:
        assert (await sandbox.exec(["echo", "told"])).stdout == "told\n"
    await owned_equals_listed(shaken, shaken_client)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("delay_s", [0.0, 0.03, 0.08])
async def test_a_kill_in_the_midst_of_deleting_leaves_nothing(
    shaken: Instance, shaken_client: DSecClient, part: str, delay_s: float
) -> None:
    made = [item.sandbox async for item in shaken_client.run_many(small(), count=24)]
    stops = asyncio.gather(*(box.stop() for box in made if box), return_exceptions=True)
    await asyncio.sleep(delay_s)
    kill(shaken, part)
    await stops
    await serving(shaken_client)
    for box in made:
        assert box
        await box.stop()
    await shaken.wait_clean()


async def test_a_client_killed_during_a_batch_leaves_only_what_its_key_finds(shaken: Instance, shaken_client: DSecClient) -> None:
    key = uuid.uuid4().hex
    body = f"""
        args = DSecContainerRunArgs(container_image={IMAGE!r}, memory_limit_mb=256, disk_limit_mb=256, idempotency_key={key!r})
        async for item in client.run_many(args, count=32):
            print(item.sandbox.id, flush=True)
    """
    child = client_process(shaken.url, shaken.api_key, body)
    first = await line_of(child)
    kill_client(child)
    found = {item.index: item.sandbox async for item in shaken_client.run_many(small(idempotency_key=key), count=32)}
    assert len(found) == 32 and first in {box.id for box in found.values() if box}
    await owned_equals_listed(shaken, shaken_client)


class Relay:
    """Stands between a client and a service, and reads on when the client is dead: what it has then is all that the service handed over."""

    def __init__(self, url: str) -> None:
        self._address = url.removeprefix("http://").split(":")
        self._ended: list[asyncio.Event] = []
        self._more = asyncio.Event()
        self.requests = bytearray()
        self.answers = bytearray()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Listens within the block, at the address that it yields."""
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def asked(self, what: bytes) -> None:
        """Returns when ``what`` has come from the client."""
        while what not in self.requests:
            self._more.clear()
            await self._more.wait()

    async def ended(self) -> None:
        """Returns when the service has closed every connection."""
        for ended in self._ended:
            await ended.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended = asyncio.Event()
        self._ended.append(ended)
        up_reader, up_writer = await asyncio.open_connection(*self._address)
        asking = asyncio.create_task(self._ask(reader, up_writer))
        while data := await up_reader.read(1 << 16):
            self.answers += data
            writer.write(data)
        await asking
        up_writer.close()
        writer.close()
        ended.set()

    async def _ask(self, reader: asyncio.StreamReader, up_writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                self.requests += data
                self._more.set()
                up_writer.write(data)
        up_writer.write_eof()


@pytest.mark.parametrize("delay_s", [0.0, 0.01])
async def test_a_chronus_killed_while_its_sandbox_is_made_fails_it_and_no_other(
    shaken: Instance, shaken_client: DSecClient, delay_s: float
) -> None:
    done = threading.Event()

    def kill_each() -> set[str]:
        """The first process of half of the sandboxes, so long after their group was first seen."""
        seen: dict[str, float] = {}
        spared: set[str] = set()
        killed: set[str] = set()
        while not done.is_set():
            for name in {path.name for path in shaken.cgroup_dirs()} - spared - killed:
                if name not in seen and len(seen) % 2:
                    spared.add(name)
                due = seen.setdefault(name, time.monotonic()) + delay_s
                with suppress(OSError):
                    if name not in spared and time.monotonic() >= due and kill_first_process(shaken, name):
                        killed.add(name)
        return killed

    killing = asyncio.create_task(asyncio.to_thread(kill_each))
    try:
        items = [item async for item in shaken_client.run_many(small(), count=24)]
    finally:
        done.set()
        killed = await killing
    told = [item.sandbox for item in items if item.sandbox]
    assert killed and len(told) + len(killed) >= 24, [item.error for item in items]
    # Before the spawner has answered, or behind that.
    strange = [item.error for item in items if item.error and not isinstance(item.error, (Unavailable, SandboxFailed))]
    assert not strange
    for sandbox in told:
        if sandbox.id in killed:
            assert "signal 9" in await reason_of_failure(sandbox)
        else:
            assert (await sandbox.exec(["echo", "spared"])).stdout == "spared\n"
        await sandbox.stop()
    await shaken.wait_clean()


async def reason_of_failure(sandbox: Sandbox) -> str:
    """Waits until the sandbox has failed."""
    for _ in range(400):
        info = await sandbox.info()
        if info.state == "failed":
            return info.reason or ""
        await asyncio.sleep(0.05)
    raise AssertionError(f"{sandbox.id} did not fail within 20 s")


async def test_a_chronus_killed_during_commands_fails_them_with_the_reason(shaken: Instance, shaken_client: DSecClient) -> None:
    sandbox = await shaken_client.run_container(small())
    started = await sandbox.start("echo here; sleep 1000")
    output = aiter(started.stdout)
    assert await anext(output) == b"here\n"
    calls = [sandbox.exec("touch /one; sleep 1000"), sandbox.run_shell("touch /two; sleep 1000"), started.wait(), anext(output)]
    waiting = [asyncio.ensure_future(call) for call in calls]
    assert (await sandbox.exec("until [ -e /one ] && [ -e /two ]; do sleep 0.02; done", timeout=20)).exit_code == 0
    assert kill_first_process(shaken, sandbox.id)
    for outcome in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 20):
        assert isinstance(outcome, SandboxFailed) and "signal 9" in (outcome.reason or ""), repr(outcome)
    info = await sandbox.info()
    assert info.state == "failed" and "signal 9" in (info.reason or "")
    await shaken.wait_clean()
    await sandbox.stop()


async def test_a_chronus_killed_while_its_sandbox_is_deleted_leaves_nothing(shaken: Instance, shaken_client: DSecClient) -> None:
    made = [item.sandbox async for item in shaken_client.run_many(small(), count=24)]
    stops = asyncio.gather(*(box.stop() for box in made if box))
    killed = 0
    for box in made:
        assert box
        await asyncio.sleep(0)
        with suppress(OSError):
            killed += kill_first_process(shaken, box.id)
    # One that was killed before its call came had failed, which is how it stays.
    assert killed and {info.state for info in await stops} <= {"stopped", "failed"}
    await shaken.wait_clean()


async def test_what_a_killed_client_ran_is_found_by_another_with_all_its_output(shaken: Instance, shaken_client: DSecClient) -> None:
    sandbox = await shaken_client.run_container(small())
    numbers_on_go = "until [ -e /go ]; do sleep 0.02; done; seq 100000"
    command = f"echo run >> /runs; touch /captured; {numbers_on_go}; exit 7"
    second = f"until [ -e /captured ]; do sleep 0.02; done; echo first; {numbers_on_go}; exit 5"
    body = f"""
        sandbox = await client.attach({sandbox.id!r})
        captured = asyncio.create_task(sandbox.exec({command!r}, exec_id="ex-captured"))
        process = await sandbox.start({second!r})
        await anext(aiter(process.stdout))
        print(process.exec_id, flush=True)
        await captured
    """
    child = client_process(shaken.url, shaken.api_key, body)
    exec_id = await line_of(child)
    kill_client(child)
    numbers = b"".join(b"%d\n" % number for number in range(1, 100_001))
    process = await sandbox.process(exec_id)
    assert (await process.info()).running
    await sandbox.files.write("/go", b"")
    assert await process.stdout.read() == b"first\n" + numbers
    assert (await process.wait()).exit_code == 5
    again = await sandbox.exec(command, exec_id="ex-captured")
    assert (again.exit_code, again.stdout_bytes) == (7, numbers)
    assert await sandbox.files.read_text("/runs") == "run\n"


async def test_what_a_killed_client_asked_to_stop_is_stopped_and_the_rest_lives(shaken: Instance, shaken_client: DSecClient) -> None:
    made = {item.sandbox.id async for item in shaken_client.run_many(small(), count=24) if item.sandbox}
    relay = Relay(shaken.url)
    async with relay.open() as url:
        body = f"""
            boxes = [await client.attach(name) for name in {sorted(made)!r}]
            await asyncio.gather(*(box.stop() for box in boxes))
        """
        child = client_process(url, shaken.api_key, body)
        async with asyncio.timeout(30):
            await relay.asked(b"DELETE ")
            kill_client(child)
            await relay.ended()
    asked = {match.decode() for match in re.findall(rb"DELETE /v1/sandboxes/(sb-\S+) HTTP", relay.requests)}
    assert asked
    deadline = time.monotonic() + 30
    while still := asked & {path.name for path in shaken.cgroup_dirs()}:
        assert time.monotonic() < deadline, f"asked to stop, and there: {still}"
        await asyncio.sleep(0.05)
    for name in asked:
        with pytest.raises(SandboxGone):
            await shaken_client.attach(name)
    for name in made - asked:
        assert (await (await shaken_client.attach(name)).exec(["echo", "lives"])).stdout == "lives\n"


@pytest.mark.timeout(EdgeConfig.orphan_grace_s + 180)
async def test_what_a_killed_client_was_not_told_of_goes_after_the_grace_and_the_rest_stays(
    shaken: Instance, shaken_client: DSecClient
) -> None:
    async def running() -> set[str]:
        return {info.id async for info in shaken_client.list(labels={"batch": "orphans"}) if info.state in ("creating", "running")}

    relay = Relay(shaken.url)
    async with relay.open() as url:
        body = f"""
            small = dict(memory_limit_mb=256, disk_limit_mb=256, labels={{"batch": "orphans"}})
            # A key by which its next life could ask: with one that only the dead process had, all would be taken at once.
            args = DSecContainerRunArgs(container_image={IMAGE!r}, idempotency_key="orphans", **small)
            async for item in client.run_many(args, count=128):
                print(item.sandbox.id, flush=True)
        """
        child = client_process(url, shaken.api_key, body)
        first = await line_of(child)
        kill_client(child)
        async with asyncio.timeout(30):
            await relay.ended()
    told = {match.decode() for match in re.findall(rb'"id":"(sb-[^"]+)"', relay.answers)}
    assert first in told
    untold = await running() - told
    assert untold, "the kill came too late to leave anything untold"
    end = time.monotonic() + EdgeConfig.orphan_grace_s + 60
    while (left := await running()) != told:
        assert time.monotonic() < end, f"untold and left: {left - told}; told and taken: {told - left}"
        await asyncio.sleep(1)
    with pytest.raises(SandboxGone, match=ORPHANED):
        await shaken_client.get(untold.pop())
    assert (await (await shaken_client.attach(first)).exec(["echo", "told"])).stdout == "told\n"
    await owned_equals_listed(shaken, shaken_client)


async def test_an_instance_stopped_softly_keeps_its_sandboxes_for_the_next_start(base_tar: Path) -> None:
    require_root()
    with tempfile.TemporaryDirectory(prefix="dsec-soft-", ignore_cleanup_errors=True) as home:
        os.chmod(home, 0o755)
        first = await asyncio.to_thread(start_instance, Path(home), scratch_mb=2048)
        await load_base(first, base_tar, IMAGE)
        async with DSecClient(first.url, first.api_key) as client:
            sandbox = await client.run_container(small())
            await sandbox.files.write("/kept", "still here")
        first.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(first.process.wait, 30)
        assert first.cgroup_dirs(), "SIGTERM must leave sandboxes running"
        second = await asyncio.to_thread(start_instance, Path(home), scratch_mb=2048)
        try:
            async with DSecClient(second.url, second.api_key) as client:
                again = await client.attach(sandbox.id)
                assert await again.files.read_text("/kept") == "still here"
        finally:
            left = await asyncio.to_thread(stop_instance, second)
        assert not left, left
