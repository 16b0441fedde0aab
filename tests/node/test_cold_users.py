"""Commands whose user stands in a passwd file that is still to be fetched: they wait for it, and nothing else of their sandbox does."""

from __future__ import annotations

import asyncio
import errno
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from dsec.edge.channel import MODE_STREAM, STDIN_INLINE, STDIN_STREAM, Channel, ChannelLost, Shell, Start
from tests.conftest import require_root
from tests.node.blobfs_node import DEADLINE_S, Node, eventually, running_node

MB = 1 << 20
SANDBOX = "sb-cu-00112233"
PADDING = b"".join(b"user%d:x:%d:%d::/home:/bin/sh\n" % (number, number, number) for number in range(2_000, 2_500))
"""More than a page: what is smaller may stand in the metadata, which is here."""
PASSWD = b"root:x:0:0:root:/root:/bin/sh\nbob:x:1000:100:Bob:/home/bob:/bin/sh\n" + PADDING
GROUP = b"root:x:0:\nusers:x:100:\naudio:x:29:bob\n"


class Made(NamedTuple):
    """A sandbox's first process, and where it listens."""

    pid: int
    socket: str


class _File(msgspec.Struct):
    uid: int
    gid: int
    size: int


@pytest.fixture
def node() -> Iterator[Node]:
    require_root()
    with running_node() as running:
        yield running


@asynccontextmanager
async def cold_sandbox(node: Node) -> AsyncIterator[Made]:
    """A sandbox whose layer's data is with the store, which answers nothing yet."""
    spawner = node.start_spawner()
    node.fetcher.start()
    layer = node.layer({"etc/passwd": PASSWD, "etc/group": GROUP})
    node.mount(layer, spawner, node.start_blobfs())
    node.fetcher.gate.clear()
    made = spawner.do("create", sandbox=SANDBOX, layers=[layer.meta], hostname="box", memory=64 * MB, pids=64, disk=64 * MB)
    try:
        yield Made(made["pid"], made["socket"])
    finally:
        node.fetcher.gate.set()
        await asyncio.to_thread(spawner.do, "kill", sandbox=SANDBOX)
        spawner.do("layer_unmount", meta=layer.meta)


@asynccontextmanager
async def connected(made: Made) -> AsyncIterator[Channel]:
    channel = await Channel.connect(made.socket, on_lost=lambda lost: None)
    try:
        yield channel
    finally:
        channel.close()


async def asked(node: Node) -> None:
    """Returns when the store has been asked for something."""
    await asyncio.to_thread(eventually, lambda: node.fetcher.requests, "a request")


def missing(exec_id: str, *, timeout_ms: int = 0) -> Start:
    """A command that says that it is not there, once somebody looks."""
    return Start(exec_id=exec_id, argv=[b"/missing"], user="bob", timeout_ms=timeout_ms)


def writing(exec_id: str, path: bytes, data: bytes) -> Start:
    return Start(exec_id=exec_id, builtin="write", args={"path": path}, user="bob", stdin=STDIN_INLINE, stdin_data=data)


def streaming(path: bytes) -> Start:
    return Start(exec_id="", builtin="write", args={"path": path}, user="bob", stdin=STDIN_STREAM, mode=MODE_STREAM)


async def status(channel: Channel, path: bytes) -> _File:
    found = await channel.run(Start(exec_id="stat", builtin="stat", args={"path": path}, user="root"))
    return msgspec.msgpack.decode(found.stdout, type=_File)


async def test_while_the_first_look_up_waits_for_the_store_everything_else_goes_on(node: Node) -> None:
    async with asyncio.timeout(DEADLINE_S), cold_sandbox(node) as made, connected(made) as channel:
        starts = [missing("kept"), missing("killed"), missing("stopped"), missing("timed", timeout_ms=100)]
        kept, killed, stopped, timed = [asyncio.ensure_future(channel.run(start)) for start in starts]
        written = asyncio.ensure_future(channel.run(writing("", b"/dev/shm/bobs", b"hello")))
        called = asyncio.ensure_future(channel.shell(Shell(exec_id="called", session="s", command=b"true", base_user="bob")))
        await asked(node)

        listed = {entry.exec_id: (entry.running, entry.pid) for entry in await channel.list()}
        assert listed.keys() >= {"kept", "killed", "stopped", "called"}
        assert listed["kept"] == (True, 0)
        ended = await timed
        assert (ended.timed_out, ended.exit_code) == (True, 128 + signal.SIGKILL)
        await channel.signal("killed", signal.SIGKILL, tree=True)
        assert (await killed).signal == signal.SIGKILL
        for harmless in (signal.SIGWINCH, signal.SIGCHLD, signal.SIGTERM):
            await channel.signal("stopped", harmless)
        assert (await stopped).signal == signal.SIGTERM
        assert not any(waiting.done() for waiting in (kept, written, called))

        node.fetcher.gate.set()
        late = await asyncio.gather(kept, called)
        assert [exit.start_errno for exit in late] == [errno.ENOENT] * 2
        assert (await written).exit_code == 0
        assert await status(channel, b"/dev/shm/bobs") == _File(uid=1000, gid=100, size=5)
        assert not any(entry.running for entry in await channel.list())
        requests = len(node.fetcher.requests)
        assert (await channel.run(missing("again"))).start_errno == errno.ENOENT
        assert len(node.fetcher.requests) == requests


async def test_input_that_comes_before_the_start_is_the_commands(node: Node) -> None:
    async with asyncio.timeout(DEADLINE_S), cold_sandbox(node) as made, connected(made) as channel:
        starting = asyncio.ensure_future(channel.start(streaming(b"/dev/shm/in")))
        await asked(node)
        assert not starting.done()
        node.fetcher.gate.set()
        stream = await starting
        await stream.write(b"x" * (2 * MB))
        await stream.write_eof()
        assert (await stream.wait()).exit_code == 0
        assert (await status(channel, b"/dev/shm/in")).size == 2 * MB


async def test_what_waited_over_a_broken_connection_is_found_again_and_runs_once(node: Node) -> None:
    async with asyncio.timeout(DEADLINE_S), cold_sandbox(node) as made, connected(made) as channel:
        first = asyncio.ensure_future(channel.run(missing("once")))
        await asked(node)
        async with connected(made) as other:
            with pytest.raises(ChannelLost):
                await first
            again = asyncio.ensure_future(other.run(missing("once")))
            assert [entry.exec_id for entry in await other.list()] == ["once"]
            node.fetcher.gate.set()
            assert (await again).start_errno == errno.ENOENT


async def test_a_store_that_refuses_is_told_as_such(node: Node) -> None:
    async with asyncio.timeout(DEADLINE_S), cold_sandbox(node) as made, connected(made) as channel:
        node.fetcher.spoil = lambda blob, chunk, frame: {"error": "no such object", "retry": False}
        node.fetcher.gate.set()
        refused = await channel.run(missing("refused"))
        assert (refused.exit_code, refused.start_errno) == (126, errno.EIO)
        node.fetcher.spoil = None
        assert (await channel.run(missing("found"))).exit_code == 127


async def test_what_is_in_memory_is_looked_up_without_a_child(node: Node) -> None:
    async with asyncio.timeout(DEADLINE_S), cold_sandbox(node) as made, connected(made) as channel:
        node.fetcher.gate.set()
        for name in ("passwd", "group"):
            await asyncio.to_thread(Path(f"/proc/{made.pid}/root/etc/{name}").read_bytes)
        stream = await channel.start(streaming(b"/dev/shm/in"))
        assert stream.pid == 2, "the first process after chronus"
        await stream.write_eof()
        assert (await stream.wait()).exit_code == 0
