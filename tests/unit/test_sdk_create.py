"""Making, finding and ending sandboxes, with connections that break and servers that refuse."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from sdk_server import CAPACITY, FakeServer

import libdsec.client
from libdsec import (
    DeadlineExceeded,
    DSecClient,
    DSecContainerRunArgs,
    DSecError,
    DSecFullVMRunArgs,
    DSecMicroVMRunArgs,
    ImageNotFound,
    InvalidArgument,
    NoCapacity,
    NotFound,
    Sandbox,
    SandboxGone,
    SandboxNotFound,
    Unsupported,
)
from libdsec.transport import Retry

ARGS = DSecContainerRunArgs(container_image="python:3.11")


async def test_the_reports_first_listing_runs_as_written(server: FakeServer) -> None:
    client = DSecClient()
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
    await sandbox.run_shell("echo hello world")
    await sandbox.stop()
    assert server.shells[0].command == "echo hello world"
    assert sandbox.state == "stopped"
    await client.close()


async def test_an_answer_that_breaks_is_asked_for_again_with_the_same_keys_for_what_is_missing(
    server: FakeServer, client: DSecClient
) -> None:
    server.cut_create_after = [3, 0, 4]
    items = [item async for item in client.run_many(ARGS, count=10)]
    assert sorted(item.index for item in items) == list(range(10))
    assert len(server.sandboxes) == 10
    first, *later = server.asked
    assert [len(keys) for keys in later] == [7, 7, 3]
    assert all(set(keys) < set(first) for keys in later)


async def test_what_was_refused_is_not_asked_for_again(server: FakeServer, client: DSecClient) -> None:
    server.refuse_images["bad"] = [ImageNotFound("bad")]
    server.cut_create_after = [2]
    items = {item.index: item async for item in client.run_many([ARGS, ARGS, DSecContainerRunArgs(container_image="bad")])}
    assert isinstance(items[2].error, ImageNotFound) and items[2].sandbox is None
    assert items[0].sandbox is not None and items[1].sandbox is not None
    assert [len(keys) for keys in server.asked] == [3, 1]


async def test_a_clients_own_key_finds_the_same_sandboxes_again(server: FakeServer, client: DSecClient) -> None:
    args = DSecContainerRunArgs(container_image="x", idempotency_key="job-7")
    first = {item.index: item.sandbox.id async for item in client.run_many(args, count=4) if item.sandbox}
    again = {item.index: item.sandbox.id async for item in client.run_many(args, count=4) if item.sandbox}
    assert first == again and len(set(first.values())) == 4
    assert server.asked[0] == ["job-7/0", "job-7/1", "job-7/2", "job-7/3"]


async def test_each_single_create_has_a_key_of_its_own_and_args_stay_as_they_were(server: FakeServer, client: DSecClient) -> None:
    first, second = await client.run(ARGS), await client.run(ARGS)
    assert first.id != second.id and ARGS.idempotency_key is None


async def test_want_of_capacity_is_waited_for_while_there_is_time(server: FakeServer, client: DSecClient) -> None:
    server.refuse_images["python:3.11"] = [CAPACITY, CAPACITY]
    assert (await client.run(ARGS, timeout=30)).state == "running"
    assert len({key for keys in server.asked for key in keys}) == 1


async def test_a_full_queue_is_waited_for_while_there_is_time(server: FakeServer, client: DSecClient) -> None:
    server.fail_next = [CAPACITY]
    assert (await client.run(ARGS, timeout=30)).state == "running"


async def test_want_of_capacity_is_raised_at_once_without_a_deadline(server: FakeServer, client: DSecClient) -> None:
    server.refuse_images["python:3.11"] = [CAPACITY]
    with pytest.raises(NoCapacity) as caught:
        await client.run(ARGS)
    assert caught.value.reason == "memory" and caught.value.retry_after == CAPACITY.retry_after


async def test_a_silent_server_is_left_at_the_deadline(server: FakeServer, client: DSecClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libdsec.client, "DEADLINE_GRACE_S", 0.05)
    server.create_silent.clear()
    with pytest.raises(DeadlineExceeded):
        await client.run(ARGS, timeout=0.05)


async def test_the_deadline_does_not_run_while_the_caller_is_busy(
    server: FakeServer, client: DSecClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libdsec.client, "DEADLINE_GRACE_S", 0.1)
    seen = 0
    async for item in client.run_many(ARGS, count=3, timeout=0.05):
        assert item.sandbox is not None
        seen += 1
        time.sleep(0.1)  # noqa: ASYNC251  # a caller that hogs the loop beyond the deadline, with the answer waiting in the socket
        await asyncio.sleep(0)
    assert seen == 3


@pytest.mark.parametrize("count", [0, -1, 32_001])
async def test_a_batch_of_the_wrong_size_is_refused_here(server: FakeServer, client: DSecClient, count: int) -> None:
    with pytest.raises(InvalidArgument):
        [item async for item in client.run_many(ARGS, count=count)]
    assert not server.requests


async def test_two_of_a_sequence_with_the_same_key_are_refused_here(server: FakeServer, client: DSecClient) -> None:
    keyed = [DSecContainerRunArgs(container_image="base", idempotency_key=key) for key in ("A", "B", None, "A")]
    with pytest.raises(InvalidArgument, match="same idempotency_key") as caught:
        [item async for item in client.run_many(keyed)]
    assert caught.value.field == "items[3].idempotency_key"
    assert not server.requests


async def test_the_backend_of_the_args_must_be_the_calls(client: DSecClient) -> None:
    with pytest.raises(InvalidArgument):
        await client.run_container(DSecMicroVMRunArgs(container_image="x"))  # type: ignore[arg-type]


async def test_full_vms_are_unsupported_whatever_way_they_are_asked_for(server: FakeServer, client: DSecClient) -> None:
    args = DSecFullVMRunArgs("windows-11.qcow2", profile="windows")
    with pytest.raises(Unsupported):
        await client.run_full_vm(args)
    with pytest.raises(Unsupported):
        await client.run(args)
    with pytest.raises(Unsupported):
        [item async for item in client.run_many([ARGS, args])]
    with pytest.raises(Unsupported):
        Sandbox.create("x", backend="fullvm")
    assert not server.requests


async def test_the_image_may_be_given_without_its_name(server: FakeServer, client: DSecClient) -> None:
    assert DSecContainerRunArgs("python:3.11") == ARGS
    make: Callable[..., DSecContainerRunArgs] = DSecContainerRunArgs
    with pytest.raises(TypeError):
        make("python:3.11", "workspace")


async def test_a_fork_with_its_memory_is_unsupported(client: DSecClient) -> None:
    with pytest.raises(Unsupported):
        await (await client.run(ARGS)).fork(2, memory=True)


async def test_a_deadline_that_passes_between_attempts_is_an_item_of_each(
    server: FakeServer, client: DSecClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.run(ARGS)
    server.cut_create_after = [1]

    def late(self: Retry, error: DSecError, *, attempt_started: float, now: float) -> float:
        """As if the pause had taken longer than it should."""
        return 0.06

    monkeypatch.setattr(Retry, "delay", late)
    items = [item async for item in client.run_many(ARGS, count=3, timeout=0.05)]
    assert [type(item.error) for item in items] == [type(None), DeadlineExceeded, DeadlineExceeded]
    assert len(server.asked) == 2


async def test_list_pages_and_filters(server: FakeServer, client: DSecClient) -> None:
    async for _ in client.run_many(DSecContainerRunArgs(container_image="x", labels={"run": "a b&c"}), count=5):
        pass
    await client.run(ARGS)
    server.requests.clear()
    assert len({info.id async for info in client.list(labels={"run": "a b&c"}, page_size=2)}) == 5
    assert len(server.requests) == 3
    assert len([info async for info in client.list()]) == 6


async def test_stop_is_repeated_after_a_lost_answer(server: FakeServer, client: DSecClient) -> None:
    sandbox = await client.run(ARGS)
    server.cut_after_act = 1
    assert (await sandbox.stop()).state == "stopped"


async def test_attaching_says_so_and_looking_only_looks(server: FakeServer, client: DSecClient) -> None:
    sandbox = await client.run(ARGS)
    server.requests.clear()
    assert (await client.get(sandbox.id)).id == sandbox.id
    assert (await client.attach(sandbox.id)).id == sandbox.id
    assert server.requests == [("GET", f"/v1/sandboxes/{sandbox.id}"), ("POST", f"/v1/sandboxes/{sandbox.id}/attach")]


async def test_attach_to_nothing_is_not_found(client: DSecClient) -> None:
    with pytest.raises(SandboxNotFound):
        await client.attach("sb-nope")


@pytest.mark.parametrize("sandbox_id", ["", "../keys", "sb/1", "?"])
async def test_what_no_id_can_be_is_not_found(server: FakeServer, client: DSecClient, sandbox_id: str) -> None:
    for call in (client.get, client.attach):
        with pytest.raises(SandboxNotFound):
            await call(sandbox_id)
    with pytest.raises(ImageNotFound):
        await client.images.get("../keys")
    with pytest.raises(NotFound):
        await client.keys.revoke("")
    assert not server.requests


async def test_labels_and_lifetimes_can_be_changed(client: DSecClient) -> None:
    sandbox = await client.run(ARGS)
    assert (await sandbox.set_labels({"a": "b"})).labels == {"a": "b"}
    assert (await sandbox.set_ttl(ttl_total=60)).ttl_total == 60


class TestShortForm:
    async def test_entered_it_stops_the_sandbox_and_closes_its_client(self, server: FakeServer) -> None:
        async with Sandbox.create("python:3.11", memory_limit_mb=512, toolkits=["a", "b"]) as sandbox:
            await sandbox.exec(["true"])
            assert server.sandboxes[sandbox.id].state == "running"
        assert server.sandboxes[sandbox.id].state == "stopped"
        with pytest.raises(SandboxGone):
            await sandbox.exec(["true"])
        assert (await sandbox.info()).state == "stopped"
        assert (await sandbox.stop()).state == "stopped"

    async def test_awaited_it_is_stopped_by_hand(self, server: FakeServer) -> None:
        sandbox = await Sandbox.create("python:3.11", backend="container")
        assert sandbox.state == "running"
        await sandbox.stop()

    async def test_it_takes_a_client_and_leaves_it_open(self, client: DSecClient) -> None:
        async with Sandbox.create("python:3.11", client=client) as sandbox:
            pass
        with pytest.raises(SandboxGone):
            await client.get(sandbox.id)
        assert (await sandbox.stop()).state == "stopped"

    def test_wrong_arguments_are_named(self) -> None:
        with pytest.raises(InvalidArgument, match="memory_limit_mb"):
            Sandbox.create("x", memory_limit_mb="much")  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="backend"):
            Sandbox.create("x", backend="cloud")  # type: ignore[arg-type]
