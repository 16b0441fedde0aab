"""Creating, finding, ending: what a client is told, and what the kernel holds afterwards."""

from __future__ import annotations

import asyncio
import random
import time
import uuid

import aiohttp
import pytest

from libdsec import (
    AuthenticationError,
    DSecClient,
    DSecContainerRunArgs,
    ImageNotFound,
    InvalidArgument,
    PtySize,
    Sandbox,
    SandboxGone,
    SandboxNotFound,
)
from tests.conftest import Instance


def small(image: str, **more: object) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(container_image=image, memory_limit_mb=256, disk_limit_mb=256, **more)  # type: ignore[arg-type]


async def test_the_first_listing_of_the_report_runs_as_written(instance: Instance, client: DSecClient, base_tar: object) -> None:
    await client.images.import_(base_tar, name="registry.../sphinx-9658:official", kind="base")
    client = DSecClient(instance.url, instance.api_key)
    await client.open()
    args = DSecContainerRunArgs(
        container_image="registry.../sphinx-9658:official",
        memory_limit_mb=4096,
        cpu_cores_limit=4,
        ttl_running_stop=300,
        network_rules={"npm": False, "pypi": True},
        init_user="root",
    )
    sandbox = await client.run_container(args, timeout=120)
    result = await sandbox.run_shell("echo hello world")
    assert result.stdout == "hello world\n"
    info = await sandbox.info()
    assert info.network_rules == {"npm": False, "pypi": True}
    assert info.notices, "4 cores were asked for on a smaller machine: it must be said"
    await sandbox.stop()
    await client.close()


async def test_the_short_form_stops_when_left(instance: Instance, client: DSecClient, base_image: str) -> None:
    async with Sandbox.create(base_image, memory_limit_mb=256, client=client) as sandbox:
        assert (await sandbox.exec(["true"])).exit_code == 0
    with pytest.raises(SandboxGone):
        await sandbox.exec(["true"])
    await instance.wait_clean()


async def test_nothing_of_an_ended_sandbox_is_in_later_ones(client: DSecClient, base_image: str) -> None:
    """Writable layers of sandboxes that wrote little are used again."""

    async def seen(sandbox: Sandbox) -> tuple[list[tuple[str, str]], str, str]:
        written = [(entry.path, entry.kind) async for entry in sandbox.diff()]
        root = await sandbox.run_shell("stat -c '%a %u %g' / /tmp /root; ls -A / /tmp /root; find / -xdev -name '*left-behind*'")
        used = (await sandbox.metrics()).disk
        return written, root.stdout, "small" if used <= 64 << 10 else str(used)

    async with Sandbox.create(base_image, memory_limit_mb=256, client=client) as first:
        clean = await seen(first)
        dirtied = await first.run_shell(
            "set -e; echo secret > /root/left-behind; mkdir -p /left-behind/$(printf 'a\\377')/deep; rm -r /etc/apt; chmod 700 /root; "
            "chmod 1771 /; chown 5:6 /tmp; ln -s /root /tmp/left-behind; head -c 1000000 /dev/urandom > /var/left-behind; sync"
        )
        assert dirtied.exit_code == 0, dirtied.stderr
        assert await seen(first) != clean
    for _ in range(3):
        async with Sandbox.create(base_image, memory_limit_mb=256, client=client) as later:
            assert await seen(later) == clean


async def test_a_batch_streams_each_its_own_success_or_error(client: DSecClient, base_image: str) -> None:
    wanted = [small(base_image), small("no-such-image"), small(base_image, labels={"n": "2"})]
    items = {item.index: item async for item in client.run_many(wanted)}
    assert sorted(items) == [0, 1, 2]
    assert isinstance(items[1].error, ImageNotFound) and items[1].sandbox is None
    for index in (0, 2):
        made = items[index].sandbox
        assert made is not None and (await made.exec(["echo", "up"])).stdout == "up\n"


async def test_sixty_four_at_once_are_apart_from_each_other(client: DSecClient, base_image: str) -> None:
    made = [item.sandbox async for item in client.run_many(small(base_image), count=64)]
    assert all(made)
    await asyncio.gather(*(box.exec(f"echo {box.id} > /mine; hostname {box.id[-8:]} 2>/dev/null") for box in made if box))
    for box, result in zip(made, await asyncio.gather(*(box.exec(["cat", "/mine"]) for box in made if box)), strict=True):
        assert box and result.stdout.strip() == box.id


async def test_the_same_key_gives_the_same_sandbox(client: DSecClient, base_image: str) -> None:
    args = small(base_image, idempotency_key=uuid.uuid4().hex)
    first, second = await asyncio.gather(client.run_container(args), client.run_container(args))
    assert first.id == second.id
    assert (await client.run_container(args)).id == first.id


async def test_list_filters_by_label_and_state_and_pages(client: DSecClient, base_image: str) -> None:
    tag = uuid.uuid4().hex
    made = {item.sandbox.id async for item in client.run_many(small(base_image, labels={"run": tag}), count=5) if item.sandbox}
    other = await client.run_container(small(base_image))
    assert {info.id async for info in client.list(labels={"run": tag})} == made
    everything = [info.id async for info in client.list(state="running", page_size=2)]
    assert made | {other.id} <= set(everything) and len(everything) == len(set(everything))


async def test_stop_is_repeatable_and_the_record_says_when_and_why(instance: Instance, client: DSecClient, base_image: str) -> None:
    sandbox = await client.run_container(small(base_image))
    await sandbox.exec("head -c 5000000 /dev/urandom > /f; sync")
    record = await sandbox.stop()
    assert record.state == "stopped" and record.exit and record.exit.cpu_s > 0 and record.exit.memory_peak > 0
    assert await sandbox.stop() == record
    with pytest.raises(SandboxGone) as gone:
        await sandbox.exec(["true"])
    assert gone.value.reason and gone.value.at and abs(gone.value.at - time.time()) < 60
    await instance.wait_clean()


async def test_an_idle_sandbox_is_stopped_and_a_busy_one_is_not(client: DSecClient, base_image: str) -> None:
    idle = await client.run_container(small(base_image, ttl_running_stop=1.0))
    busy = await client.run_container(small(base_image, ttl_running_stop=1.0))
    command = asyncio.create_task(busy.exec(["sleep", "4"]))
    await _until_gone(idle, "idle")
    assert (await command).exit_code == 0
    await _until_gone(busy, "idle")


async def test_leftover_background_processes_do_not_keep_a_sandbox(client: DSecClient, base_image: str) -> None:
    sandbox = await client.run_container(small(base_image, ttl_running_stop=1.0))
    await sandbox.exec("sleep 1000 >/dev/null 2>&1 &", leftovers="keep")
    await _until_gone(sandbox, "idle")


async def test_the_absolute_lifetime_ends_even_a_busy_one(client: DSecClient, base_image: str) -> None:
    sandbox = await client.run_container(small(base_image, ttl_total=2.0))
    with pytest.raises(SandboxGone):
        await sandbox.exec(["sleep", "60"])
    await _until_gone(sandbox, "lifetime")


async def _until_gone(sandbox: Sandbox, reason: str) -> None:
    """Waits by `info`, which is not a use, until the sandbox has ended for that reason."""
    for _ in range(400):
        try:
            await sandbox.info()
        except SandboxGone as gone:
            assert reason in (gone.reason or ""), gone.reason
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{sandbox.id} did not end within 20 s: {await sandbox.info()}")


async def test_a_wrong_key_tells_nothing(instance: Instance, client: DSecClient, base_image: str) -> None:
    sandbox = await client.run_container(small(base_image))
    for key in ("nonsense", instance.api_key[:-1] + "x", ""):
        async with aiohttp.ClientSession() as session:
            headers = {"Authorization": f"Bearer {key}"}
            async with session.get(f"{instance.url}/v1/sandboxes/{sandbox.id}", headers=headers) as reply:
                assert reply.status == 401 and sandbox.id not in await reply.text()


async def test_an_expired_or_revoked_key_is_refused(instance: Instance, client: DSecClient) -> None:
    short = await client.keys.create(name="short", expires_in_s=0.05)
    await asyncio.sleep(0.1)
    async with DSecClient(instance.url, short.key) as late:
        with pytest.raises(AuthenticationError):
            [info async for info in late.list()]
    gone = await client.keys.create(name="gone")
    async with DSecClient(instance.url, gone.key) as other:
        [info async for info in other.list()]
        await client.keys.revoke(gone.info.id)
        with pytest.raises(AuthenticationError):
            [info async for info in other.list()]


async def test_another_projects_sandbox_does_not_exist(instance: Instance, client: DSecClient, base_image: str) -> None:
    sandbox = await client.run_container(small(base_image))
    stranger = await client.keys.create(name="stranger")
    async with DSecClient(instance.url, stranger.key) as other:
        with pytest.raises(SandboxNotFound):
            await other.attach(sandbox.id)
        assert [info async for info in other.list()] == []
    headers = {"Authorization": f"Bearer {stranger.key}"}
    url = f"{instance.url}/v1/sandboxes/{sandbox.id}"
    async with aiohttp.ClientSession() as session, session.delete(url, headers=headers) as reply:
        assert reply.status == 404
    assert (await sandbox.exec(["true"])).exit_code == 0


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{", None),
        (b'{"args": {"backend": "container"}}', "container_image"),
        (b'{"args": {"backend": "container", "container_image": "x", "memory_limit_mb": "much"}}', "memory_limit_mb"),
        (b'{"args": {"backend": "container", "container_image": "x", "colour": 1}}', "colour"),
        (b'{"args": {"backend": "container", "container_image": "x", "memory_limit_mb": -1}}', "memory_limit_mb"),
        (b'{"args": {"backend": "container", "container_image": "x"}, "count": 1000000}', "count"),
    ],
)
async def test_a_malformed_body_is_told_which_field(instance: Instance, client: DSecClient, body: bytes, field: str | None) -> None:
    headers = {"Authorization": f"Bearer {instance.api_key}", "Content-Type": "application/json"}
    async with aiohttp.ClientSession() as session, session.post(f"{instance.url}/v1/sandboxes", data=body, headers=headers) as reply:
        text = await reply.text()
        assert reply.status == 400, text
        error = (await reply.json())["error"]
        assert error["code"] == "invalid_argument"
        if field:
            assert field in (error.get("field") or "") + error["message"]


async def test_a_huge_argv_or_environment_is_refused_by_name(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await sandbox.exec(["echo", "x" * (100 << 20)])
    assert refused.value.field == "argv"
    with pytest.raises(InvalidArgument) as refused:
        await sandbox.exec(["true"], env={"BIG": "x" * (100 << 20)})
    assert refused.value.field == "env"


async def test_tcp_and_http_to_a_port_inside(sandbox: Sandbox) -> None:
    await sandbox.files.write("/srv/www/index.html", "hello from inside")
    server = await sandbox.start(["python3", "-u", "-m", "http.server", "8000", "--directory", "/srv/www"])
    assert b"Serving" in await anext(aiter(server.stdout))
    reader, writer = await sandbox.connect(8000)
    writer.write(b"GET /index.html HTTP/1.0\r\n\r\n")
    await writer.drain()
    assert (await reader.read()).endswith(b"hello from inside")
    writer.close()
    async with aiohttp.ClientSession() as session, session.get(sandbox.url(8000) + "index.html") as reply:
        assert reply.status == 200 and await reply.text() == "hello from inside"
    await server.kill()


async def test_all_kinds_of_calls_go_through_the_unix_socket(instance: Instance, base_image: str) -> None:
    url = f"unix://{instance.run_dir}/api.sock"
    async with DSecClient(url, "dsec_x_y") as stranger:
        with pytest.raises(AuthenticationError):
            await stranger.get("sb-e1-00")
    async with DSecClient(url, instance.api_key) as client, await client.run_container(small(base_image)) as sandbox:
        content = random.randbytes(3 << 20)
        await sandbox.files.write("/data", content)
        assert await sandbox.files.read("/data") == content
        process = await sandbox.start(["cat", "/data"])
        assert b"".join([chunk async for chunk in process.stdout]) == content
        terminal = await sandbox.start(["sh", "-c", "stty size; read line; stty size"], pty=PtySize(30, 100))
        output = aiter(terminal.stdout)
        assert b"30 100" in await anext(output)
        await terminal.resize(40, 120)
        await terminal.write_stdin(b"\n")
        assert b"40 120" in b"".join([chunk async for chunk in output])
        server = await sandbox.start(["python3", "-u", "-m", "http.server", "8000", "--directory", "/srv"])
        assert b"Serving" in await anext(aiter(server.stdout))
        reader, writer = await sandbox.connect(8000)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.0 200")
        writer.close()
        assert sandbox.id in [info.id async for info in client.list()]
    await instance.wait_clean()


async def test_metrics_and_processes_show_what_runs(sandbox: Sandbox) -> None:
    await sandbox.exec("head -c 20000000 /dev/urandom > /data; sync")
    sleeper = await sandbox.start(["sleep", "1003"])
    assert ["sleep", "1003"] in [entry.argv for entry in await sandbox.processes()]
    metrics = await sandbox.metrics()
    assert metrics.memory_limit == 512 << 20 and metrics.pids >= 1 and metrics.cpu_s > 0 and metrics.disk >= 20_000_000
    await sleeper.kill()
    assert (await sleeper.wait()).signal == 9


async def test_limits_are_what_the_sandbox_sees(client: DSecClient, base_image: str) -> None:
    box = await client.run_container(DSecContainerRunArgs(container_image=base_image, memory_limit_mb=300, cpu_cores_limit=1))
    assert (await box.exec(["nproc"])).stdout == "1\n"
    total = (await box.exec("awk '/MemTotal/ {print $2}' /proc/meminfo")).stdout
    assert int(total) == 300 * 1024
    assert (await box.exec("grep -c ^processor /proc/cpuinfo")).stdout == "1\n"
