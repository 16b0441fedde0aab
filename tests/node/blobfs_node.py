"""A spawner, a blobfs and a fetcher that does what a test wants of it; and layers whose blobs lie in chunks."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import os
import signal
import socket
import struct
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zstandard

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(os.environ.get("DSEC_BIN") or ROOT / ".cache" / "native" / "bin")
SERVICE_UID = 64_913
UID_BASE = 1_600_000_000
DEADLINE_S = 30.0
CHUNK = 64 << 10

T = TypeVar("T")


def eventually(look: Callable[[], T | None], what: str, deadline_s: float = DEADLINE_S) -> T:
    """The first thing that ``look`` finds."""
    end = time.monotonic() + deadline_s
    while not (found := look()):
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.02)
    return found


# -- chunk tables


@dataclass
class Chunked:
    """A blob as the shared store has it."""

    content: bytes
    frames: bytes
    table: bytes
    places: list[tuple[int, int]]
    """(offset, length) of each chunk's frame; length 0 for zeros."""

    @property
    def hex(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def chunks_in(self, offset: int, length: int) -> list[int]:
        """The chunks whose frames fill this range."""
        end = offset + length
        found = [index for index, place in enumerate(self.places) if place[1] and offset <= place[0] and sum(place) <= end]
        assert sum(self.places[index][1] for index in found) == length, "a range that isn't made of whole frames"
        return found


def chunked(content: bytes, chunk_bytes: int = CHUNK) -> Chunked:
    """Cut as docs/wire.md says: zstd where it helps, stored where it doesn't, nothing for zeros."""
    frames, entries, places = bytearray(), bytearray(), []
    pieces = [content[start : start + chunk_bytes] for start in range(0, len(content), chunk_bytes)]
    for piece in pieces:
        packed = zstandard.ZstdCompressor(level=3).compress(piece)
        flags, frame = (2, b"") if not any(piece) else (0, packed) if len(packed) < len(piece) else (1, piece)
        places.append((len(frames), len(frame)))
        entries += struct.pack("<QII32s", len(frames), len(frame), flags, hashlib.sha256(piece).digest())
        frames += frame
    header = struct.pack("<8sIIQ", b"DSECIDX1", chunk_bytes, len(pieces), len(content))
    return Chunked(content, bytes(frames), header + bytes(entries), places)


# -- layers


@dataclass
class Layer:
    meta: str
    """sha256 of the metadata."""
    blob: Chunked
    files: dict[str, bytes]


def make_layer(images: Path, files: dict[str, bytes]) -> Layer:
    """Converts the files, puts the metadata where the spawner looks for it, and keeps the data away."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755
            archive.addfile(member, io.BytesIO(content))
    with tempfile.TemporaryDirectory() as place:
        source, meta, blob = (Path(place) / name for name in ("tar", "meta", "blob"))
        source.write_bytes(buffer.getvalue())
        done = subprocess.run(
            [BIN / "dsec-mklayer", "--meta", meta, "--blob", blob, "--at", "/", source], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        digest = hashlib.sha256(meta.read_bytes()).hexdigest()
        (images / digest).write_bytes(meta.read_bytes())
        os.chown(images / digest, SERVICE_UID, SERVICE_UID)
        return Layer(digest, chunked(blob.read_bytes()), files)


# -- sockets


class Connection:
    """Requests and answers of the control protocols, and what is told unasked."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._ids = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._broken = False
        threading.Thread(target=self._receive, daemon=True).start()

    def ask(self, verb: str, deadline_s: float = DEADLINE_S, **arguments: object) -> dict[str, Any]:
        """The answer, whether a result or an error."""
        number = next(self._ids)
        body = msgspec.msgpack.encode({"id": number, "verb": verb, **arguments})
        self._socket.sendall(len(body).to_bytes(4, "big") + body)
        with self._changed:
            assert self._changed.wait_for(lambda: number in self._answers or self._broken, deadline_s), f"no answer to {verb}"
            return self._answers.pop(number)

    def do(self, verb: str, **arguments: object) -> dict[str, Any]:
        """The result; fails on an error."""
        answer = self.ask(verb, **arguments)
        assert "error" not in answer, answer
        return answer

    def event(self, name: str, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """The first event of this name."""

        def find() -> dict[str, Any] | None:
            return next((event for event in self.events if event["event"] == name), None)

        with self._changed:
            assert self._changed.wait_for(lambda: find() is not None, deadline_s), f"no event {name}: {self.events}"
            found = find()
            assert found is not None
            return found

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive(self) -> None:
        with contextlib.suppress(OSError, EOFError), self._socket.makefile("rb") as stream:
            while len(prefix := stream.read(4)) == 4:
                frame = msgspec.msgpack.decode(stream.read(int.from_bytes(prefix, "big")))
                with self._changed:
                    if "event" in frame:
                        self.events.append(frame)
                    else:
                        self._answers[frame["id"]] = frame
                    self._changed.notify_all()
        with self._changed:
            self._broken = True
            self._changed.notify_all()


Spoil = Callable[[str, int, bytes], "bytes | dict[str, object] | None"]


@dataclass
class Fetcher:
    """Answers blobfs out of memory. What it does with an answer is the test's choice."""

    path: Path
    blobs: dict[str, Chunked] = field(default_factory=dict)
    requests: list[tuple[str, int]] = field(default_factory=list)
    """(blob, chunk) in the order of arrival."""
    ranges: int = 0
    """Requests, each for one chunk or for neighbours."""
    spoil: Spoil | None = None
    """What is sent in the place of a chunk's frame: other bytes, an error's fields, or nothing (None)."""
    gate: threading.Event = field(default_factory=threading.Event)
    """While it is not set, nothing is answered."""
    _listener: socket.socket | None = None
    _connections: list[socket.socket] = field(default_factory=list)

    def start(self) -> None:
        self.gate.set()
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        os.chown(self.path, SERVICE_UID, SERVICE_UID)
        self._listener.listen()
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def stop(self) -> None:
        """As if it were killed."""
        if self._listener is not None:
            # A close alone leaves a thread in accept.
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        self.path.unlink(missing_ok=True)
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._connections.clear()

    def count(self, blob: Chunked, chunk: int) -> int:
        return self.requests.count((blob.hex, chunk))

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = listener.accept()[0]
                self._connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        lock = threading.Lock()
        with contextlib.suppress(OSError), connection.makefile("rb") as stream:
            while len(prefix := stream.read(4)) == 4:
                request = msgspec.msgpack.decode(stream.read(int.from_bytes(prefix, "big")))
                blob = self.blobs[request["blob"]]
                self.ranges += 1
                self.requests += [(request["blob"], chunk) for chunk in blob.chunks_in(request["offset"], request["length"])]
                threading.Thread(target=self._answer, args=(connection, lock, blob, request), daemon=True).start()

    def _answer(self, connection: socket.socket, lock: threading.Lock, blob: Chunked, request: dict[str, Any]) -> None:
        self.gate.wait()
        answer: dict[str, object] = {"data": b""}
        for chunk in blob.chunks_in(request["offset"], request["length"]):
            start, length = blob.places[chunk]
            frame: bytes | dict[str, object] | None = blob.frames[start : start + length]
            if self.spoil is not None and isinstance(frame, bytes):
                frame = self.spoil(request["blob"], chunk, frame)
            if frame is None:
                return
            if not isinstance(frame, bytes):
                answer = frame
                break
            answer["data"] += frame
        body = msgspec.msgpack.encode({"id": request["id"], **answer})
        with contextlib.suppress(OSError), lock:
            connection.sendall(len(body).to_bytes(4, "big") + body)


# -- the node


class Node:
    """One instance. ``root`` is a path at which the pinned namespace can be seen."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.run, self.state = home / "run", home / "state"
        self.run.mkdir()
        # blobfs makes its socket here.
        self.run.chmod(0o1777)
        self.cgroup = f"dsec-bf-{os.getpid()}"
        self.fetcher = Fetcher(self.run / "fetch.sock")
        self.spawner_process: subprocess.Popen[bytes] | None = None
        self.blobfs_process: subprocess.Popen[bytes] | None = None
        self.absence_s = 600
        self._root = -1
        self._connections: list[Connection] = []

    def options(self) -> list[str | Path]:
        return ["--run-dir", self.run, "--state-dir", self.state, "--cgroup", self.cgroup, "--uid-base", str(UID_BASE)]

    def start_spawner(self) -> Connection:
        options = [*self.options(), "--service-uid", str(SERVICE_UID), "--scratch-mb", "256", "--chronus", BIN / "chronus"]
        options += ["--absence-s", str(self.absence_s)]
        with (self.home / "log").open("ab") as log:
            self.spawner_process = subprocess.Popen([BIN / "dsec-spawner", "serve", *options], stdout=log, stderr=log)
        pid = self.spawner_process.pid

        def connect() -> Connection | None:
            with contextlib.suppress(OSError):
                return self._connected(Connection(self.run / "spawner.sock"))
            assert self.spawner_process is not None and self.spawner_process.poll() is None, self.log()
            return None

        connection = eventually(connect, "the spawner")
        for task in Path(f"/proc/{pid}/task").iterdir():
            if (task / "comm").read_text().strip() == "layers":
                self._leave_root()
                self._root = os.open(task / "root", os.O_PATH)
                break
        return connection

    def start_blobfs(self, *, cache_bytes: int = 1 << 30, wait_s: int = 20) -> Connection:
        options = ["--run-dir", self.run, "--state-dir", self.state, "--cache-bytes", str(cache_bytes), "--wait-s", str(wait_s)]
        (self.run / "blobfs.sock").unlink(missing_ok=True)
        with (self.home / "log").open("ab") as log:
            self.blobfs_process = subprocess.Popen(
                [BIN / "dsec-blobfs", *options], stdout=log, stderr=log, user=SERVICE_UID, group=SERVICE_UID, extra_groups=[]
            )

        def connect() -> Connection | None:
            with contextlib.suppress(OSError):
                return self._connected(Connection(self.run / "blobfs.sock"))
            assert self.blobfs_process is not None and self.blobfs_process.poll() is None, self.log()
            return None

        return eventually(connect, "blobfs")

    def _connected(self, connection: Connection) -> Connection:
        self._connections.append(connection)
        return connection

    @staticmethod
    def kill(process: subprocess.Popen[bytes] | None) -> None:
        assert process is not None
        process.send_signal(signal.SIGKILL)
        process.wait()

    def path(self, *parts: str) -> Path:
        """Below the root of the pinned namespace."""
        return Path(f"/proc/{os.getpid()}/fd/{self._root}").joinpath(*parts)

    def lazy(self, layer: Layer, name: str) -> Path:
        """A file of a layer that is loaded on demand."""
        return self.path("lazy", layer.meta, name)

    def layer(self, files: dict[str, bytes]) -> Layer:
        """A new layer, in the store."""
        layer = make_layer(self.state / "images" / "blobs", files)
        self.fetcher.blobs[layer.blob.hex] = layer.blob
        return layer

    def mount(self, layer: Layer, spawner: Connection, blobfs: Connection) -> None:
        blobfs.do("register", blob=layer.blob.hex, index=layer.blob.table)
        spawner.do("layer_mount", meta=layer.meta, blob=layer.blob.hex, lazy=True)

    def log(self) -> str:
        return (self.home / "log").read_text()

    def _leave_root(self) -> None:
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def end(self) -> None:
        """Ends and sweeps everything."""
        self.fetcher.gate.set()
        self.fetcher.stop()
        self._leave_root()
        for connection in self._connections:
            connection.close()
        for process in (self.blobfs_process, self.spawner_process):
            if process is not None and process.poll() is None:
                self.kill(process)
        subprocess.run([BIN / "dsec-spawner", "sweep", *self.options()], check=True)

    def traces(self) -> list[str]:
        """What is left of it."""
        mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(self.home) in line]
        loops = subprocess.run(["losetup", "--all", "--noheadings"], capture_output=True, text=True, check=True).stdout.splitlines()
        files = [str(path) for path in self.run.iterdir() if path.name != "log"]
        return mounts + files + [line for line in loops if str(self.home) in line]


@contextlib.contextmanager
def running_node() -> Iterator[Node]:
    """A node without processes yet; afterwards nothing of it is there."""
    with tempfile.TemporaryDirectory(prefix="dsec-bf-") as home:
        os.chmod(home, 0o755)
        node = Node(Path(home))
        try:
            yield node
        finally:
            node.end()
        assert node.traces() == []
