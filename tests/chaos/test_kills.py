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
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from dsec.edge import EdgeConfig
from dsec.edge.endings import ORPHANED
from libdsec import DSecClient, DSecContainerRunArgs, DSecError, Sandbox, SandboxGone
from tests.conftest import Instance, load_base, own_instance, require_root, start_instance, stop_instance

IMAGE = "debian:chaos"


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
        status = Path(f"/proc/{pid}/status").read_text()
        namespaces = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
        return len(namespaces) == 1 and b"supervise" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


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


async def test_a_killed_service_adopts_its_sandboxes_and_loses_no_output(shaken: Instance, shaken_client: DSecClient) -> None:
    sandbox = await shaken_client.run_container(small())
    await sandbox.run_shell("x=kept")
    process = await sandbox.start("i=0; while [ $i -lt 60 ]; do echo line $i; i=$((i+1)); sleep 0.05; done")
    captured = asyncio.create_task(sandbox.exec("i=0; while [ $i -lt 60 ]; do echo captured $i; i=$((i+1)); sleep 0.05; done; exit 3"))
    output = bytearray(await anext(aiter(process.stdout)))
    kill(shaken, "dsec.serve")
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


@pytest.mark.parametrize("part", ["dsec.serve", "dsec-spawner"])
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


@pytest.mark.parametrize("part", ["dsec.serve", "dsec-spawner"])
async def test_a_kill_in_the_midst_of_deleting_leaves_nothing(shaken: Instance, shaken_client: DSecClient, part: str) -> None:
    made = [item.sandbox async for item in shaken_client.run_many(small(), count=24)]
    stops = asyncio.gather(*(box.stop() for box in made if box), return_exceptions=True)
    await asyncio.sleep(0.03)
    kill(shaken, part)
    await stops
    await serving(shaken_client)
    for box in made:
        assert box
        await box.stop()
    await shaken.wait_clean()


async def test_a_client_killed_during_a_batch_leaves_only_what_its_key_finds(shaken: Instance, shaken_client: DSecClient) -> None:
    key = uuid.uuid4().hex
    program = textwrap.dedent(f"""
        import asyncio
        from libdsec import DSecClient, DSecContainerRunArgs
        async def main():
            async with DSecClient({shaken.url!r}, {shaken.api_key!r}) as client:
                args = DSecContainerRunArgs(container_image={IMAGE!r}, memory_limit_mb=256, disk_limit_mb=256, idempotency_key={key!r})
                async for item in client.run_many(args, count=32):
                    print(item.sandbox.id, flush=True)
        asyncio.run(main())
    """)
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert child.stdout
    first = (await asyncio.to_thread(child.stdout.readline)).decode().strip()
    child.kill()
    child.wait()
    found = {item.index: item.sandbox async for item in shaken_client.run_many(small(idempotency_key=key), count=32)}
    assert len(found) == 32 and first in {box.id for box in found.values() if box}
    await owned_equals_listed(shaken, shaken_client)


class Relay:
    """Stands between a client and a service, and reads on when the client is dead: what it has then is all that the service handed over."""

    def __init__(self, url: str) -> None:
        self._address = url.removeprefix("http://").split(":")
        self._ended: list[asyncio.Event] = []
        self.answers = bytearray()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Listens within the block, at the address that it yields."""
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

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
                up_writer.write(data)
        up_writer.write_eof()


@pytest.mark.timeout(EdgeConfig.orphan_grace_s + 180)
async def test_what_a_killed_client_was_not_told_of_goes_after_the_grace_and_the_rest_stays(
    shaken: Instance, shaken_client: DSecClient
) -> None:
    async def running() -> set[str]:
        return {info.id async for info in shaken_client.list(labels={"batch": "orphans"}) if info.state in ("creating", "running")}

    relay = Relay(shaken.url)
    async with relay.open() as url:
        program = textwrap.dedent(f"""
            import asyncio
            from libdsec import DSecClient, DSecContainerRunArgs
            async def main():
                async with DSecClient({url!r}, {shaken.api_key!r}) as client:
                    small = dict(memory_limit_mb=256, disk_limit_mb=256, labels={{"batch": "orphans"}})
                    args = DSecContainerRunArgs(container_image={IMAGE!r}, **small)
                    async for item in client.run_many(args, count=128):
                        print(item.sandbox.id, flush=True)
            asyncio.run(main())
        """)
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert child.stdout
        first = (await asyncio.to_thread(child.stdout.readline)).decode().strip()
        child.kill()
        child.wait()
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
