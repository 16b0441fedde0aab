"""Layers whose data comes through blobfs: the real kernel over the real daemons, and a store that is slow, wrong, cut short or gone."""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import mmap
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from tests.conftest import require_root
from tests.node.blobfs_node import BIN, CHUNK, DEADLINE_S, Connection, Layer, Node, chunked, eventually, running_node

MB = 1 << 20


@pytest.fixture(autouse=True)
def _root() -> None:
    require_root()


@pytest.fixture
def node() -> Iterator[Node]:
    with running_node() as running:
        yield running


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture
def absence(node: Node) -> int:
    """Seconds that reads wait for the next spawner: not as many as people need. Asked for before ``parts``."""
    node.absence_s = 3
    return node.absence_s


@pytest.fixture
def parts(node: Node) -> tuple[Connection, Connection]:
    """A spawner and a blobfs, and a fetcher that does its work."""
    spawner = node.start_spawner()
    node.fetcher.start()
    return spawner, node.start_blobfs()


def mounted(node: Node, parts: tuple[Connection, Connection], files: dict[str, bytes]) -> Layer:
    layer = node.layer(files)
    node.mount(layer, *parts)
    return layer


def mapped(path: Path, offset: int, size: int) -> bytes:
    """Bytes of a mapping of the file. By way of ctypes, so that the interpreter goes on while a fault waits for the store (which is in this
    process too)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    length = offset + size
    with path.open("rb") as file:
        address = libc.mmap(None, ctypes.c_size_t(length), mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), ctypes.c_long(0))
    assert address != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    buffer = ctypes.create_string_buffer(size)
    libc.memcpy(buffer, ctypes.c_void_p(address + offset), ctypes.c_size_t(size))
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(length))
    return buffer.raw


def drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def in_thread(work: Callable[[], bytes]) -> Future[bytes]:
    """The result of ``work``, which may have to wait for the store."""
    result: Future[bytes] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def figures(blobfs: Connection, layer: Layer) -> dict[str, int]:
    found: dict[str, int] = blobfs.do("stats", blobs=[layer.blob.hex])["blobs"][layer.blob.hex]
    return found


# -- the right bytes


def test_files_are_right_by_reads_mappings_and_execution(node: Node, parts: tuple[Connection, Connection]) -> None:
    program = (BIN / "dsec-mklayer").read_bytes()
    files = {"noise": noise(3 * MB + 5), "zeros": bytes(MB), "text": b"abc\n" * 100_000, "program": program}
    layer = mounted(node, parts, files)
    for name, content in files.items():
        assert node.lazy(layer, name).read_bytes() == content, name
    drop_caches()
    assert mapped(node.lazy(layer, "noise"), 0, 3 * MB + 5) == files["noise"]
    done = subprocess.run([node.lazy(layer, "program"), "--help"], capture_output=True, check=False)
    direct = subprocess.run([BIN / "dsec-mklayer", "--help"], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (direct.returncode, direct.stdout, direct.stderr)


def test_only_what_is_read_is_fetched_and_counted(node: Node, parts: tuple[Connection, Connection]) -> None:
    layer = mounted(node, parts, {"noise": noise(8 * MB)})
    assert node.fetcher.requests == []
    with node.lazy(layer, "noise").open("rb", buffering=0) as file:
        assert os.pread(file.fileno(), 4096, 5 * MB) == layer.files["noise"][5 * MB : 5 * MB + 4096]
    found = figures(parts[1], layer)
    assert found["size"] == len(layer.blob.content)
    # The kernel reads up to 128 KiB around what is asked for.
    assert 4096 <= found["needed"] <= 128 << 10
    assert 0 < found["fetched"] <= MB
    assert not found["complete"]


def test_a_blob_is_seen_whole_and_read_only(node: Node, parts: tuple[Connection, Connection]) -> None:
    layer = mounted(node, parts, {"noise": noise(MB)})
    path = node.path("blobs", layer.blob.hex)
    assert path.stat().st_size == len(layer.blob.content)
    assert path.read_bytes() == layer.blob.content
    assert os.listdir(node.path("blobs")) == [layer.blob.hex]
    with pytest.raises(OSError) as raised:
        path.open("r+b")
    assert raised.value.errno == errno.EROFS


def test_many_readers_of_many_places_get_the_right_bytes(node: Node, parts: tuple[Connection, Connection]) -> None:
    layer = mounted(node, parts, {f"f{index}": noise(MB + index, index) for index in range(8)})

    def read(seed: int) -> None:
        chance = random.Random(seed)
        name = f"f{chance.randrange(8)}"
        with node.lazy(layer, name).open("rb", buffering=0) as file:
            for _ in range(20):
                offset, size = chance.randrange(MB), chance.randrange(1, 200_000)
                assert os.pread(file.fileno(), size, offset) == layer.files[name][offset : offset + size]

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(read, range(64)))


def test_a_sandbox_lives_on_a_layer_that_comes_as_it_is_read(node: Node, parts: tuple[Connection, Connection]) -> None:
    spawner, _ = parts
    layer = mounted(node, parts, {"srv/noise": noise(4 * MB)})
    spec = {"sandbox": "sb-bf-00112233", "layers": [layer.meta], "hostname": "box", "memory": 64 * MB, "pids": 64, "disk": 64 * MB}
    made = spawner.do("create", **spec)
    inside = Path(f"/proc/{made['pid']}/root/srv/noise")
    with inside.open("rb", buffering=0) as file:
        assert os.pread(file.fileno(), 4096, MB) == layer.files["srv/noise"][MB : MB + 4096]
    node.fetcher.gate.clear()
    before = len(node.fetcher.requests)
    reader = in_thread(inside.read_bytes)
    eventually(lambda: len(node.fetcher.requests) > before, "a read under way")
    node.kill(node.blobfs_process)
    node.fetcher.gate.set()
    node.start_blobfs()
    assert reader.result(30) == layer.files["srv/noise"]
    spawner.do("kill", sandbox=spec["sandbox"])
    spawner.do("layer_unmount", meta=layer.meta)


# -- one flight a chunk


def test_500_threads_that_fault_one_chunk_cause_one_fetch(node: Node, parts: tuple[Connection, Connection]) -> None:
    layer = mounted(node, parts, {"noise": noise(MB)})
    node.fetcher.gate.clear()
    place = MB // 2
    barrier = threading.Barrier(500)
    wrong: list[int] = []

    def fault() -> None:
        barrier.wait()
        if mapped(node.lazy(layer, "noise"), place, 1)[0] != layer.files["noise"][place]:
            wrong.append(place)

    threads = [threading.Thread(target=fault) for _ in range(500)]
    for thread in threads:
        thread.start()
    eventually(lambda: node.fetcher.requests, "the first request")
    node.fetcher.gate.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(node.fetcher.requests) == len(set(node.fetcher.requests))


def test_readers_of_the_blob_itself_share_one_flight(node: Node, parts: tuple[Connection, Connection]) -> None:
    layer = mounted(node, parts, {"noise": noise(MB)})
    node.fetcher.gate.clear()
    path = node.path("blobs", layer.blob.hex)

    def read() -> bytes:
        # Past the page cache: each is a request of its own to blobfs.
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            buffer = mmap.mmap(-1, 4096)
            assert os.preadv(file, [buffer], 0) == 4096
            return buffer[:]
        finally:
            os.close(file)

    readers = [in_thread(read) for _ in range(64)]
    eventually(lambda: node.fetcher.requests, "the first request")
    time.sleep(0.2)
    node.fetcher.gate.set()
    assert {reader.result(30) for reader in readers} == {layer.blob.content[:4096]}
    assert node.fetcher.count(layer.blob, 0) == 1


# -- processes that die


def test_reads_wait_for_the_next_blobfs_when_one_is_killed(node: Node, parts: tuple[Connection, Connection]) -> None:
    files = {f"f{index}": noise(256 << 10, index) for index in range(16)}
    layer = mounted(node, parts, files)
    node.fetcher.gate.clear()
    readers = {name: in_thread(node.lazy(layer, name).read_bytes) for name in files}
    eventually(lambda: len(node.fetcher.requests) >= 8, "reads under way")
    node.kill(node.blobfs_process)
    time.sleep(0.3)
    assert not any(reader.done() for reader in readers.values())
    node.fetcher.gate.set()
    node.start_blobfs()
    for name, reader in readers.items():
        assert reader.result(30) == files[name]


def test_reads_survive_many_deaths_of_blobfs(node: Node, parts: tuple[Connection, Connection]) -> None:
    layer = mounted(node, parts, {"noise": noise(16 * MB)})
    node.fetcher.spoil = lambda blob, chunk, frame: (time.sleep(0.005), frame)[1]
    stop = threading.Event()

    def read() -> bytes:
        chance, reads = random.Random(threading.get_ident()), 0
        with node.lazy(layer, "noise").open("rb", buffering=0) as file:
            while not stop.is_set():
                offset = chance.randrange(16 * MB - 4096)
                assert os.pread(file.fileno(), 4096, offset) == layer.files["noise"][offset : offset + 4096]
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                reads += 1
        return str(reads).encode()

    readers = [in_thread(read) for _ in range(8)]
    for _ in range(5):
        time.sleep(0.2)
        node.kill(node.blobfs_process)
        node.start_blobfs()
    stop.set()
    assert all(int(reader.result(30)) > 0 for reader in readers)


def test_a_killed_spawner_gets_the_connection_back(node: Node, parts: tuple[Connection, Connection]) -> None:
    layer = mounted(node, parts, {"one": noise(MB), "two": noise(MB, 2)})
    node.fetcher.gate.clear()
    reader = in_thread(node.lazy(layer, "one").read_bytes)
    eventually(lambda: node.fetcher.requests, "a read under way")
    node.kill(node.spawner_process)
    spawner = node.start_spawner()
    node.fetcher.gate.set()
    assert reader.result(30) == layer.files["one"]
    # It has the connection: else the one that blobfs held would have been the last, and reads would fail.
    other = node.layer({"three": noise(MB, 3)})
    node.mount(other, spawner, parts[1])
    node.kill(node.blobfs_process)
    reader = in_thread(node.lazy(layer, "two").read_bytes)
    node.start_blobfs()
    assert reader.result(30) == layer.files["two"]
    assert node.lazy(other, "three").read_bytes() == other.files["three"]


def test_a_reader_that_is_killed_leaves_no_wrong_page_behind(node: Node, parts: tuple[Connection, Connection]) -> None:
    layer = mounted(node, parts, {"noise": noise(2 * MB)})
    with node.lazy(layer, "noise").open("rb", buffering=0) as file:
        assert os.pread(file.fileno(), 4096, 0) == layer.files["noise"][:4096]
        node.fetcher.gate.clear()
        child = os.fork()
        if child == 0:
            os.pread(file.fileno(), 2 * MB, 0)
            os._exit(0)
        eventually(lambda: len(node.fetcher.requests) > 1, "its reads")
        os.kill(child, signal.SIGKILL)
        time.sleep(0.2)
        node.fetcher.gate.set()
        os.waitpid(child, 0)
        assert os.pread(file.fileno(), 2 * MB, 0) == layer.files["noise"]


def test_without_blobfs_for_half_a_minute_readers_are_let_go(node: Node, parts: tuple[Connection, Connection]) -> None:
    spawner, _ = parts
    layer = mounted(node, parts, {"noise": noise(MB)})
    node.kill(node.blobfs_process)
    reader = in_thread(node.lazy(layer, "noise").read_bytes)
    spawner.event("blobs_aborted", deadline_s=45)
    with pytest.raises(OSError) as raised:
        reader.result(10)
    assert raised.value.errno == errno.EIO
    # Another one begins anew.
    blobfs = node.start_blobfs()
    node.mount(layer, spawner, blobfs)
    assert node.lazy(layer, "noise").read_bytes() == layer.files["noise"]


def test_reads_wait_for_the_next_ones_when_spawner_and_blobfs_die_together(node: Node, parts: tuple[Connection, Connection]) -> None:
    layer = mounted(node, parts, {"noise": noise(MB)})
    node.fetcher.gate.clear()
    reader = in_thread(node.lazy(layer, "noise").read_bytes)
    eventually(lambda: node.fetcher.requests, "a read under way")
    node.kill(node.spawner_process)
    node.kill(node.blobfs_process)
    time.sleep(0.5)
    assert not reader.done()
    node.fetcher.gate.set()
    node.start_spawner()
    node.start_blobfs()
    assert reader.result(30) == layer.files["noise"]


def test_readers_are_let_go_when_no_spawner_comes_back(node: Node, absence: int, parts: tuple[Connection, Connection]) -> None:
    layer = mounted(node, parts, {"noise": noise(MB)})
    node.fetcher.gate.clear()
    reader = in_thread(node.lazy(layer, "noise").read_bytes)
    eventually(lambda: node.fetcher.requests, "a read under way")
    node.kill(node.spawner_process)
    node.kill(node.blobfs_process)
    with pytest.raises(OSError) as raised:
        reader.result(absence + 30)
    assert raised.value.errno == errno.EIO
    # The next ones begin anew.
    node.fetcher.gate.set()
    node.mount(layer, node.start_spawner(), node.start_blobfs())
    assert node.lazy(layer, "noise").read_bytes() == layer.files["noise"]


def abort(node: Node) -> None:
    """Ends the kernel's connection to blobfs, whose filesystem stays mounted."""
    libc = ctypes.CDLL(None, use_errno=True)
    child = os.fork()
    if child == 0:
        with (node.run / "layers.ns").open() as namespace:
            entered = libc.setns(namespace.fileno(), 0)
        mnt_force = 1
        # Refused, for layers lie over it; but by then it is cut off.
        libc.umount2(b"/blobs", mnt_force)
        os._exit(0 if entered == 0 and ctypes.get_errno() == errno.EBUSY else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_dead_connection_is_not_handed_out_again(node: Node, parts: tuple[Connection, Connection]) -> None:
    spawner, _ = parts
    layer = mounted(node, parts, {"noise": noise(MB)})
    abort(node)
    assert node.blobfs_process is not None
    assert node.blobfs_process.wait(DEADLINE_S) == 1
    blobfs = node.start_blobfs()
    spawner.event("blobs_aborted")
    node.mount(layer, spawner, blobfs)
    assert node.lazy(layer, "noise").read_bytes() == layer.files["noise"]


def test_who_mounts_the_first_layer_is_let_go_too_when_nobody_serves(node: Node, parts: tuple[Connection, Connection]) -> None:
    spawner, blobfs = parts
    assert node.blobfs_process is not None and node.spawner_process is not None
    layer = node.layer({"noise": noise(MB)})
    blobfs.do("register", blob=layer.blob.hex, index=layer.blob.table)
    # It has the name and doesn't answer.
    node.blobfs_process.send_signal(signal.SIGSTOP)
    mount = functools.partial(spawner.ask, "layer_mount", 60, meta=layer.meta, blob=layer.blob.hex, lazy=True)
    mounting = in_thread(lambda: msgspec.msgpack.encode(mount()))
    tasks = Path(f"/proc/{node.spawner_process.pid}/task")
    (waiter,) = [task for task in tasks.iterdir() if (task / "comm").read_text().strip() == "lazy"]
    openat = "257 "
    eventually(lambda: (waiter / "syscall").read_text().startswith(openat), "the question of the name")
    node.kill(node.blobfs_process)
    assert "error" in msgspec.msgpack.decode(mounting.result(45))
    node.mount(layer, spawner, node.start_blobfs())
    assert node.lazy(layer, "noise").read_bytes() == layer.files["noise"]


def test_the_connection_is_given_to_one_and_taken_from_nobody_else(node: Node, parts: tuple[Connection, Connection]) -> None:
    spawner, _ = parts
    assert spawner.ask("fuse_take")["error"]["code"] == "conflict"
    assert spawner.ask("fuse_give")["error"]["code"] == "invalid_argument"
    with socket.socket(socket.AF_UNIX) as stranger, open("/dev/null", "rb") as null, open("/dev/fuse", "r+b", buffering=0) as other:
        stranger.connect(str(node.run / "spawner.sock"))
        for file in (null, other):
            body = msgspec.msgpack.encode({"id": 1, "verb": "fuse_give"})
            socket.send_fds(stranger, [len(body).to_bytes(4, "big") + body], [file.fileno()])
            size = int.from_bytes(stranger.recv(4, socket.MSG_WAITALL), "big")
            assert "error" in msgspec.msgpack.decode(stranger.recv(size, socket.MSG_WAITALL))


def test_nothing_is_mounted_where_no_blobfs_is(node: Node) -> None:
    spawner = node.start_spawner()
    layer = node.layer({"noise": noise(MB)})
    refused = spawner.ask("layer_mount", meta=layer.meta, blob=layer.blob.hex, lazy=True)
    assert refused["error"]["code"] == "unavailable"


# -- a store that fails


def test_reads_wait_while_the_fetcher_is_gone(node: Node, parts: tuple[Connection, Connection]) -> None:
    layer = mounted(node, parts, {"noise": noise(MB)})
    node.fetcher.stop()
    reader = in_thread(node.lazy(layer, "noise").read_bytes)
    time.sleep(1)
    assert not reader.done()
    assert parts[1].do("stats", blobs=None)["connected"] is False
    node.fetcher.start()
    assert reader.result(30) == layer.files["noise"]


def test_a_fetcher_that_is_cut_off_is_asked_again(node: Node, parts: tuple[Connection, Connection]) -> None:
    layer = mounted(node, parts, {"noise": noise(MB)})
    node.fetcher.gate.clear()
    reader = in_thread(node.lazy(layer, "noise").read_bytes)
    eventually(lambda: node.fetcher.requests, "a request")
    node.fetcher.stop()
    node.fetcher.start()
    assert reader.result(30) == layer.files["noise"]


@pytest.mark.parametrize("kind", ["gone", "silent", "later"])
def test_a_store_that_gives_nothing_for_too_long_is_eio_and_an_event(node: Node, kind: str) -> None:
    spawner = node.start_spawner()
    node.fetcher.start()
    blobfs = node.start_blobfs(wait_s=2)
    layer = mounted(node, (spawner, blobfs), {"noise": noise(MB)})
    if kind == "gone":
        node.fetcher.stop()
    answer: dict[str, object] | None = None if kind == "silent" else {"error": "slow down", "retry": True}
    node.fetcher.spoil = lambda blob, chunk, frame: answer
    begun = time.monotonic()
    with pytest.raises(OSError) as raised:
        node.lazy(layer, "noise").read_bytes()
    assert raised.value.errno == errno.EIO
    assert 1.5 < time.monotonic() - begun < 15
    assert blobfs.event("failed")["blob"] == layer.blob.hex
    # And it goes on by itself.
    node.fetcher.spoil = None
    if kind == "gone":
        node.fetcher.start()
    assert eventually(lambda: readable(node.lazy(layer, "noise")), "recovery") == layer.files["noise"]


def readable(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def test_a_store_that_refuses_is_eio_at_once(node: Node, parts: tuple[Connection, Connection]) -> None:
    layer = mounted(node, parts, {"noise": noise(MB)})
    node.fetcher.spoil = lambda blob, chunk, frame: {"error": "blobs/x.z: no such object", "retry": False}
    begun = time.monotonic()
    with pytest.raises(OSError):
        node.lazy(layer, "noise").read_bytes()
    assert time.monotonic() - begun < 5
    assert "no such object" in parts[1].event("failed")["reason"]


def flipped(frame: bytes) -> bytes:
    return frame[:-1] + bytes([frame[-1] ^ 1])


SPOILED: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit": flipped,
    "cut off": lambda frame: frame[: len(frame) // 2],
    "nothing": lambda frame: b"",
    "another chunk's": lambda frame: chunked(bytes([7]) * CHUNK).frames.ljust(len(frame), b"\0")[: len(frame)],
    "a bomb": lambda frame: chunked(b"x" * (64 * MB), 16 * MB).frames[: len(frame)],
    "noise": lambda frame: noise(len(frame), 9),
    "much too long": lambda frame: frame + bytes(8 * MB),
}


@pytest.mark.parametrize("kind", SPOILED)
@pytest.mark.parametrize("content", ["noise", "text"])
def test_a_wrong_frame_is_never_a_wrong_byte(node: Node, parts: tuple[Connection, Connection], kind: str, content: str) -> None:
    data = noise(MB) if content == "noise" else b"".join(b"line %d\n" % number for number in range(80_000))
    layer = mounted(node, parts, {"data": data})
    node.fetcher.spoil = lambda blob, chunk, frame: SPOILED[kind](frame)
    with pytest.raises(OSError) as raised:
        node.lazy(layer, "data").read_bytes()
    assert raised.value.errno == errno.EIO
    assert parts[1].event("failed")["blob"] == layer.blob.hex
    first = node.fetcher.requests[0]
    eventually(lambda: node.fetcher.requests.count(first) >= 3, "three attempts")
    node.fetcher.spoil = None
    assert node.lazy(layer, "data").read_bytes() == data


def test_a_frame_that_is_wrong_once_goes_unnoticed(node: Node, parts: tuple[Connection, Connection]) -> None:
    layer = mounted(node, parts, {"noise": noise(MB)})
    seen: set[int] = set()

    def once(_blob: str, chunk: int, frame: bytes) -> bytes:
        if chunk in seen:
            return frame
        seen.add(chunk)
        return flipped(frame)

    node.fetcher.spoil = once
    assert node.lazy(layer, "noise").read_bytes() == layer.files["noise"]
    assert parts[1].events == [] or parts[1].events[0]["event"] == "complete"


def test_a_fetcher_that_talks_nonsense_is_left(node: Node, parts: tuple[Connection, Connection]) -> None:
    layer = mounted(node, parts, {"noise": noise(MB)})
    nonsense = True

    def answer(_blob: str, _chunk: int, frame: bytes) -> bytes | dict[str, object]:
        nonlocal nonsense
        if nonsense:
            nonsense = False
            return {"dance": True}
        return frame

    node.fetcher.spoil = answer
    assert node.lazy(layer, "noise").read_bytes() == layer.files["noise"]


# -- the cache


def allocated(node: Node) -> int:
    return sum(path.stat().st_blocks * 512 for path in (node.state / "blobfs").iterdir() if len(path.name) == 64)


def test_the_cache_keeps_to_its_bound_and_evicted_chunks_are_read_right_again(node: Node) -> None:
    spawner = node.start_spawner()
    node.fetcher.start()
    blobfs = node.start_blobfs(cache_bytes=2 * MB)
    layer = mounted(node, (spawner, blobfs), {"noise": noise(8 * MB)})
    for _ in range(2):
        assert node.lazy(layer, "noise").read_bytes() == layer.files["noise"]
        drop_caches()
        assert blobfs.do("stats", blobs=None)["cache_used"] <= 2 * MB
        assert allocated(node) <= 2 * MB + (64 << 10)
    assert max(node.fetcher.count(layer.blob, chunk) for chunk in range(len(layer.blob.places))) > 1


def test_a_full_disk_costs_fetches_but_no_read(node: Node) -> None:
    spawner = node.start_spawner()
    node.fetcher.start()
    cache = node.state / "blobfs"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=777", "cache", cache], check=True)
    try:
        blobfs = node.start_blobfs()
        layer = mounted(node, (spawner, blobfs), {"noise": noise(4 * MB)})
        assert node.lazy(layer, "noise").read_bytes() == layer.files["noise"]
        drop_caches()
        assert node.lazy(layer, "noise").read_bytes() == layer.files["noise"]
        assert "No space left" in blobfs.event("uncached")["reason"]
        assert len([event for event in blobfs.events if event["event"] == "uncached"]) == 1
        spawner.do("layer_unmount", meta=layer.meta)
        node.kill(node.blobfs_process)
    finally:
        subprocess.run(["umount", cache], check=True)


def test_what_an_earlier_process_kept_is_used_but_not_trusted(node: Node, parts: tuple[Connection, Connection]) -> None:
    layer = mounted(node, parts, {"noise": noise(2 * MB)})
    assert node.lazy(layer, "noise").read_bytes() == layer.files["noise"]
    # Readers are answered before their chunks are kept.
    parts[1].event("complete")
    node.kill(node.blobfs_process)
    kept = node.state / "blobfs" / layer.blob.hex
    with kept.open("r+b") as file:
        file.seek(5 * CHUNK + 100)
        file.write(b"something else")
    drop_caches()
    node.fetcher.requests.clear()
    node.start_blobfs()
    assert node.lazy(layer, "noise").read_bytes() == layer.files["noise"]
    assert set(node.fetcher.requests) == {(layer.blob.hex, 5)}


def test_no_wrong_byte_while_chunks_come_and_go_under_many_readers(node: Node) -> None:
    spawner = node.start_spawner()
    node.fetcher.start()
    blobfs = node.start_blobfs(cache_bytes=MB)
    layer = mounted(node, (spawner, blobfs), {"noise": noise(4 * MB)})
    path, content = node.path("blobs", layer.blob.hex), layer.blob.content
    stop = threading.Event()

    def read(seed: int) -> bytes:
        chance, reads = random.Random(seed), 0
        # Past the page cache: each is a request of its own, often of two chunks or three.
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        buffer = mmap.mmap(-1, 160 << 10)
        while not stop.is_set():
            size = 4096 * chance.randrange(1, 40)
            offset = 4096 * chance.randrange((len(content) - size) // 4096)
            assert os.preadv(file, [memoryview(buffer)[:size]], offset) == size
            assert buffer[:size] == content[offset : offset + size], (offset, size)
            reads += 1
        os.close(file)
        return str(reads).encode()

    readers = [in_thread(functools.partial(read, seed)) for seed in range(12)]
    for _ in range(4):
        time.sleep(0.7)
        # What is kept has to be checked again, while it is pushed out by what is fetched.
        node.kill(node.blobfs_process)
        blobfs = node.start_blobfs(cache_bytes=MB)
    stop.set()
    assert all(int(reader.result(30)) > 10 for reader in readers)
    assert blobfs.do("stats", blobs=None)["cache_used"] <= MB
    assert allocated(node) <= MB + (64 << 10)


# -- what the service asks for


def test_a_prefetched_blob_is_complete_and_needs_no_store(node: Node, parts: tuple[Connection, Connection]) -> None:
    _, blobfs = parts
    layer = mounted(node, parts, {"noise": noise(2 * MB), "zeros": bytes(MB)})
    blobfs.do("prefetch", blob=layer.blob.hex, chunks=list(range(len(layer.blob.places))), priority="low")
    assert blobfs.event("complete") == {"event": "complete", "blob": layer.blob.hex}
    node.fetcher.stop()
    for name, content in layer.files.items():
        assert node.lazy(layer, name).read_bytes() == content
    found = figures(blobfs, layer)
    assert found["complete"] and found["from_cache"] >= 2 * MB
    blobfs.do("seal", blob=layer.blob.hex)
    assert (node.state / "blobfs" / layer.blob.hex).read_bytes() == layer.blob.content
    assert blobfs.do("stats", blobs=None)["cache_used"] == 0


def test_a_file_that_was_linked_as_a_whole_blob_is_never_punched(node: Node) -> None:
    spawner = node.start_spawner()
    node.fetcher.start()
    blobfs = node.start_blobfs(cache_bytes=2 * MB)
    layer = mounted(node, (spawner, blobfs), {"noise": noise(MB)})
    chunks = list(range(len(layer.blob.places)))
    blobfs.do("prefetch", blob=layer.blob.hex, chunks=chunks, priority="low")
    blobfs.event("complete")
    # Without `seal`: the second name alone must do.
    whole = node.state / "images" / "blobs" / layer.blob.hex
    os.link(node.state / "blobfs" / layer.blob.hex, whole)
    other = mounted(node, (spawner, blobfs), {"noise": noise(8 * MB, 2)})
    assert node.lazy(other, "noise").read_bytes() == other.files["noise"]
    assert whole.read_bytes() == layer.blob.content


def test_reads_overtake_prefetches(node: Node, parts: tuple[Connection, Connection]) -> None:
    layer = mounted(node, parts, {"noise": noise(8 * MB)})
    node.fetcher.gate.clear()
    count = len(layer.blob.places)
    parts[1].do("prefetch", blob=layer.blob.hex, chunks=list(range(count - 2)), priority="low")
    eventually(lambda: node.fetcher.requests, "the prefetch")
    reader = in_thread(lambda: node.path("blobs", layer.blob.hex).open("rb", buffering=0).read(4096))
    place = (count // 2) * CHUNK
    other = in_thread(lambda: os.pread(os.open(node.path("blobs", layer.blob.hex), os.O_RDONLY), 4096, place))
    eventually(lambda: (layer.blob.hex, count // 2) in node.fetcher.requests[: count // 2], "the read in front of the prefetches")
    node.fetcher.gate.set()
    assert reader.result(30) == layer.blob.content[:4096]
    assert other.result(30) == layer.blob.content[place : place + 4096]


def test_neighbours_are_fetched_together_and_a_bad_one_among_them_costs_no_other(node: Node, parts: tuple[Connection, Connection]) -> None:
    layer = mounted(node, parts, {"noise": noise(8 * MB)})
    count, bad = len(layer.blob.places), len(layer.blob.places) // 2
    node.fetcher.spoil = lambda blob, chunk, frame: {"error": "it is gone", "retry": False} if chunk == bad else frame
    parts[1].do("prefetch", blob=layer.blob.hex, chunks=list(range(count)), priority="low")
    blob = node.path("blobs", layer.blob.hex)
    eventually(lambda: allocated(node) >= (count - 2) * CHUNK, "all chunks but the bad one and the short one at the end")
    assert node.fetcher.ranges < count
    with pytest.raises(OSError):
        os.pread(os.open(blob, os.O_RDONLY), 4096, bad * CHUNK)
    node.fetcher.spoil = None
    assert blob.read_bytes() == layer.blob.content


def test_a_trace_tells_first_touches_in_their_order(node: Node, parts: tuple[Connection, Connection]) -> None:
    _, blobfs = parts
    layer = mounted(node, parts, {"noise": noise(4 * MB)})
    blobfs.do("trace_start", blob=layer.blob.hex)
    with open(node.path("blobs", layer.blob.hex), "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for chunk in (20, 3, 20, 40):
            os.pread(file.fileno(), 4096, chunk * CHUNK)
    chunks = blobfs.do("trace_take", blob=layer.blob.hex)["chunks"]
    assert [chunk for chunk, _ in chunks] == [20, 3, 40]
    assert all(earlier[1] <= later[1] for earlier, later in itertools.pairwise(chunks))
    assert blobfs.ask("trace_take", blob=layer.blob.hex)["error"]["code"] == "conflict"


def test_a_blob_in_use_is_not_forgotten(node: Node, parts: tuple[Connection, Connection]) -> None:
    spawner, blobfs = parts
    layer = mounted(node, parts, {"noise": noise(MB)})
    assert node.lazy(layer, "noise").read_bytes() == layer.files["noise"]
    for _ in range(2):
        assert blobfs.ask("forget", blob=layer.blob.hex)["error"]["code"] == "conflict"
        # Nor by the next process, which wasn't told of any use.
        node.kill(node.blobfs_process)
        blobfs = node.start_blobfs()
    drop_caches()
    assert node.lazy(layer, "noise").read_bytes() == layer.files["noise"]
    spawner.do("layer_unmount", meta=layer.meta)
    eventually(lambda: "error" not in blobfs.ask("forget", blob=layer.blob.hex), "its end")
    assert not node.path("blobs", layer.blob.hex).exists()
    assert sorted(path.name for path in (node.state / "blobfs").iterdir()) == ["lock"]
    # And it can come again.
    node.mount(layer, spawner, blobfs)
    assert node.lazy(layer, "noise").read_bytes() == layer.files["noise"]


def test_bad_requests_are_refused_with_the_reason(node: Node, parts: tuple[Connection, Connection]) -> None:
    _, blobfs = parts
    layer = mounted(node, parts, {"noise": noise(MB)})
    name = layer.blob.hex
    other = chunked(layer.blob.content, 2 * CHUNK).table

    def code(verb: str, **arguments: object) -> str:
        refused: str = blobfs.ask(verb, **arguments)["error"]["code"]
        return refused

    assert code("register", blob="../x", index=layer.blob.table) == "invalid_argument"
    assert code("register", blob=name, index=layer.blob.table[:-1]) == "invalid_argument"
    assert code("register", blob=name, index=other) == "conflict"
    assert code("prefetch", blob=name, chunks=[1 << 20], priority="low") == "invalid_argument"
    assert code("seal", blob=name) == "conflict"
    assert code("forget", blob="0" * 64) == "not_found"
    assert code("dance") == "invalid_argument"


def test_nobody_else_may_ask(node: Node, parts: tuple[Connection, Connection]) -> None:
    for path in (node.run / "blobfs.sock", node.run / "spawner.sock"):
        program = f"import socket; socket.socket(socket.AF_UNIX).connect({str(path)!r})"
        done = subprocess.run(
            ["/usr/bin/python3", "-c", program], user=12_345, group=12_345, extra_groups=[], capture_output=True, check=False
        )
        assert b"PermissionError" in done.stderr
