"""What becomes of sandboxes that a call had made when it was left, or when another one of them failed: nobody's sandbox lives on."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from edge_fakes import Node, eventually, open_edge
from sdk_server import FakeServer
from starlette.types import Receive, Scope, Send

import libdsec.transport
from dsec.api.listener import Listener, bind, origin
from dsec.edge import Edge
from libdsec import DSecClient, DSecContainerRunArgs, InvalidArgument, NoCapacity, Sandbox, Unavailable
from libdsec.idempotency import once_key
from libdsec.schema import CreateItem
from libdsec.transport import Lines

ARGS = DSecContainerRunArgs(container_image="base")


def running(server: FakeServer) -> set[str]:
    return {info.id for info in server.sandboxes.values() if info.state == "running"}


class TestFork:
    @pytest.fixture
    async def parent(self, client: DSecClient) -> Sandbox:
        return await client.run(ARGS)

    async def test_children_behind_one_that_failed_are_stopped_too(self, server: FakeServer, parent: Sandbox) -> None:
        server.fork_errors = [{1: InvalidArgument("no")}]
        with pytest.raises(InvalidArgument):
            await parent.fork(4)
        assert len(server.by_key) == 4
        assert running(server) == {parent.id}

    async def test_the_error_that_lasts_is_raised(self, server: FakeServer, parent: Sandbox) -> None:
        server.fork_errors = [{0: Unavailable("for now"), 2: NoCapacity("full", reason="memory")}]
        with pytest.raises(NoCapacity):
            await parent.fork(3)
        assert running(server) == {parent.id}

    async def test_a_child_that_cannot_be_made_for_now_is_asked_for_again(self, server: FakeServer, parent: Sandbox) -> None:
        server.fork_errors = [{1: Unavailable("for now", retry_after=0.0)}]
        children = await parent.fork(3)
        assert running(server) == {parent.id, *(child.id for child in children)}
        first, second = server.forks
        assert first.idempotency_key == second.idempotency_key

    async def test_cancelled_it_stops_what_was_written_and_not_read(
        self, server: FakeServer, parent: Sandbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.told.clear()
        server.hold_answers = True
        begun = asyncio.Event()

        class Noticed(Lines[CreateItem]):
            def __aiter__(self) -> Noticed:
                begun.set()
                return self

        monkeypatch.setattr(libdsec.transport, "Lines", Noticed)
        forking = asyncio.create_task(parent.fork(5))
        await begun.wait()
        await server.told.wait()
        forking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await forking
        assert len(server.by_key) == 6
        assert running(server) == {parent.id}


class TestCreate:
    async def test_leaving_a_batch_stops_what_was_not_given(self, server: FakeServer, client: DSecClient) -> None:
        server.hold_answers = True
        async with aclosing(client.run_many(ARGS, count=10)) as items:
            given = await anext(items)
            await server.told.wait()
        assert given.sandbox is not None
        assert len(server.sandboxes) == 10
        assert running(server) == {given.sandbox.id}

    async def test_what_its_caller_can_ask_for_again_lives_on(self, server: FakeServer, client: DSecClient) -> None:
        server.hold_answers = True
        keyed = DSecContainerRunArgs(container_image="base", idempotency_key="mine")
        async with aclosing(client.run_many([keyed, ARGS, ARGS])) as items:
            # The fake answers in reverse.
            assert (await anext(items)).index == 2
            await server.told.wait()
        assert running(server) == {server.by_key["mine"], server.by_key[str(server.asked[0][2])]}


@asynccontextmanager
async def listening(edge: Edge) -> AsyncIterator[str]:
    """The edge behind the real HTTP server."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await edge.app({**scope, "dsec.project": "p"}, receive, send)

    bound = bind("127.0.0.1", 0)
    listener = Listener(app, bound)
    serving = asyncio.create_task(listener.run_until_stopped())
    await listener.listening.wait()
    try:
        yield origin(bound)
    finally:
        listener.stop()
        await serving


async def test_the_real_server_counts_as_told_only_what_the_leaver_stops(tmp_path: Path) -> None:
    node = Node()
    async with open_edge(node, tmp_path, start_slots=4) as edge, listening(edge) as url, DSecClient(url, "dsec_k") as client:
        async with aclosing(client.run_many(ARGS, count=400)) as items:
            given = await anext(items)
            await eventually(lambda: len(node.kernel) > 40)
        assert given.sandbox is not None
        # A sandbox leaves the kernel before it leaves the journal.
        await eventually(lambda: [sandbox.id for sandbox in edge.sandboxes.inventory] == [given.sandbox.id])
        assert set(node.kernel) == {given.sandbox.id}


@pytest.mark.parametrize("how", ["break", "raise"])
async def test_a_loop_that_is_left_leaves_nothing_also_where_its_client_closes_at_once(tmp_path: Path, how: str) -> None:
    node = Node()

    async def leave(url: str) -> None:
        async with DSecClient(url, "dsec_k") as client:
            async for item in client.run_many(ARGS, count=200):
                assert item.sandbox is not None
                async with item.sandbox:
                    await eventually(lambda: len(node.kernel) > 20)
                    if how == "break":
                        break
                    raise ValueError("the caller's own")

    async with open_edge(node, tmp_path, start_slots=4) as edge, listening(edge) as url:
        if how == "break":
            await leave(url)
        else:
            with pytest.raises(ValueError, match="the caller's own"):
                await leave(url)
        await eventually(lambda: not list(edge.sandboxes.inventory))
        assert not node.kernel


@pytest.mark.parametrize("turns", range(4))
async def test_a_block_that_is_cancelled_while_it_is_left_stops_its_sandbox(server: FakeServer, client: DSecClient, turns: int) -> None:
    entered = asyncio.Event()

    async def use() -> None:
        async with Sandbox.create("base", client=client):
            entered.set()

    using = asyncio.create_task(use())
    await entered.wait()
    for _ in range(turns):
        await asyncio.sleep(0)
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using
    assert not running(server)


async def test_what_create_returns_makes_one_sandbox(server: FakeServer, client: DSecClient) -> None:
    creation = Sandbox.create("base", client=client)
    async with creation:
        with pytest.raises(InvalidArgument, match="again"):
            await creation.__aenter__()
        with pytest.raises(InvalidArgument, match="again"):
            await creation
        assert len(running(server)) == 1
    assert not running(server)


class TestStarting:
    """The client goes away while its sandboxes are being made by the real edge behind the real server."""

    async def test_a_batch_that_is_left_takes_back_what_was_being_made(self, tmp_path: Path) -> None:
        node = Node()
        async with open_edge(node, tmp_path, start_slots=4) as edge, listening(edge) as url, DSecClient(url, "dsec_k") as client:
            async with aclosing(client.run_many(ARGS, count=8)) as items:
                given = await anext(items)
                node.gate = asyncio.Event()
                node.creating.clear()
                await node.creating.wait()
            assert given.sandbox is not None
            node.gate.set()
            await eventually(lambda: set(node.kernel) == {given.sandbox.id} and edge.sandboxes.counts() == {"running": 1})

    @pytest.mark.parametrize("key", [None, "mine"])
    async def test_a_run_that_is_cancelled_takes_it_back_unless_the_caller_has_the_key(self, tmp_path: Path, key: str | None) -> None:
        node = Node()
        node.gate = asyncio.Event()
        args = DSecContainerRunArgs(container_image="base", idempotency_key=key)
        async with open_edge(node, tmp_path) as edge, listening(edge) as url, DSecClient(url, "dsec_k") as client:
            running = asyncio.create_task(client.run(args))
            await node.creating.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            node.gate.set()
            if key is None:
                await eventually(lambda: not node.kernel and not list(edge.sandboxes.inventory))
            else:
                (sandbox,) = edge.sandboxes.inventory
                await eventually(lambda: sandbox.orphan_until is not None)
                assert (await client.run(args)).id == sandbox.id

    async def test_a_fork_that_is_cancelled_takes_the_children_back(self, tmp_path: Path) -> None:
        node = Node()
        async with open_edge(node, tmp_path) as edge, listening(edge) as url, DSecClient(url, "dsec_k") as client:
            parent = await client.run(ARGS)
            node.gate = asyncio.Event()
            node.creating.clear()
            forking = asyncio.create_task(parent.fork(3))
            await node.creating.wait()
            forking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await forking
            node.gate.set()
            await eventually(lambda: [sandbox.id for sandbox in edge.sandboxes.inventory] == [parent.id])

    async def test_a_connection_that_is_reset_leaves_it_to_be_asked_for_again(self, tmp_path: Path) -> None:
        node = Node()
        node.gate = asyncio.Event()
        args = DSecContainerRunArgs(container_image="base", idempotency_key=once_key())
        body = msgspec.json.encode({"args": args})
        async with open_edge(node, tmp_path) as edge, listening(edge) as url, DSecClient(url, "dsec_k") as client:
            _, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
            writer.write(b"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            await node.creating.wait()
            (sandbox,) = edge.sandboxes.inventory
            # No linger: the close is a reset, as when the client's host has lost the connection.
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            node.gate.set()
            await eventually(lambda: sandbox.orphan_until is not None)
            assert (await client.run(args)).id == sandbox.id
