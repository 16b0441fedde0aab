"""A real chronus as a plain process: no namespaces, this user's rights, its commands in a cgroup of the test's where that can be had."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec

from dsec.edge.channel import Exit, Start, Stream

ROOT = Path(__file__).resolve().parents[2]
CGROUP_ROOTS = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
HISTORY = 8 << 20
MB = 1 << 20
DEADLINE_S = 20.0
ENV = {b"PATH": b"/usr/local/bin:/usr/bin:/bin"}
_PR_SET_CHILD_SUBREAPER = 36
_LISTENER, _CGROUP, _CONFIG = 3, 4, 5
_counter = iter(range(1 << 30))


def chronus_binary() -> Path:
    """The binary under test: ``DSEC_CHRONUS``, else the newest build below .cache."""
    given = os.environ.get("DSEC_CHRONUS")
    builds = [Path(given)] if given else sorted(ROOT.glob(".cache/target*/release/chronus"), key=lambda path: path.stat().st_mtime)
    if not builds:
        raise RuntimeError("no chronus: build it with ./run build, or name it in DSEC_CHRONUS")
    return builds[-1]


def make_cgroup() -> Path | None:
    """A cgroup of our own in the v2 tree; None without the right or the tree."""
    for root in CGROUP_ROOTS:
        if (root / "cgroup.procs").exists() and (root / "cgroup.controllers").exists():
            path = root / f"dsec-a-{os.getpid()}-{next(_counter)}"
            with contextlib.suppress(OSError):
                path.mkdir()
                return path
    return None


def descendants(pid: int) -> set[int]:
    """Processes below ``pid``, zombies too."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in found | {pid} and child not in found}:
        found |= more
    return found


class ChronusProcess:
    """Chronus with its three inherited descriptors."""

    def __init__(self, directory: Path, cgroup: Path | None, config: dict[str, object] | None = None) -> None:
        # Orphans of a chronus that is killed come to us, so that we see and end them.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.path = str(directory / "socket")
        self.cgroup = cgroup
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.path)
        listener.listen(8)
        reader, writer = os.pipe()
        os.write(writer, msgspec.msgpack.encode({"history": HISTORY, **(config or {})}))
        os.close(writer)
        group = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY) if cgroup else None
        moves = [(listener.fileno(), _LISTENER), (reader, _CONFIG)] + ([(group, _CGROUP)] if group is not None else [])

        def inherit() -> None:
            high = [(os.dup2(source, 100 + target), target) for source, target in moves]
            for source, target in high:
                os.dup2(source, target)
            os.closerange(_CONFIG + 1, 256)
            if group is None:
                with contextlib.suppress(OSError):
                    os.close(_CGROUP)

        self.process = subprocess.Popen([chronus_binary()], preexec_fn=inherit, close_fds=False, stdin=subprocess.DEVNULL)
        listener.close()
        os.close(reader)
        if group is not None:
            os.close(group)

    @property
    def pid(self) -> int:
        return self.process.pid

    def commands(self) -> set[int]:
        """What runs below chronus."""
        return descendants(self.pid)

    def cgroups(self) -> list[str]:
        return sorted(entry.name for entry in self.cgroup.iterdir() if entry.is_dir()) if self.cgroup else []

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def rss(self) -> int:
        """Resident bytes that are chronus's own."""
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()[1:])
        return int(fields["Rss"].split()[0]) * 1024

    def stop(self) -> None:
        """Ends it and all that it started, wherever it went."""
        orphans = self.commands()
        self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + 10
        while left := {pid for pid in orphans if Path(f"/proc/{pid}").exists()} | (descendants(os.getpid()) & orphans):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
            assert time.monotonic() < deadline, f"processes outlive everything: {left}"
        if self.cgroup:
            remove_cgroup(self.cgroup)


def remove_cgroup(path: Path) -> None:
    deadline = time.monotonic() + 10
    (path / "cgroup.kill").write_text("1")
    while True:
        try:
            for child in [entry for entry in path.iterdir() if entry.is_dir()]:
                child.rmdir()
            path.rmdir()
            return
        except OSError:
            assert time.monotonic() < deadline, f"{path} can't be removed"
            time.sleep(0.01)


@contextlib.contextmanager
def running_chronus(*, cgroup: bool = True, config: dict[str, object] | None = None) -> Iterator[ChronusProcess]:
    """A chronus for the time of the context."""
    with tempfile.TemporaryDirectory(prefix="dsec-a-") as directory:
        group = make_cgroup() if cgroup else None
        try:
            process = ChronusProcess(Path(directory), group, config)
        except BaseException:
            if group:
                group.rmdir()
            raise
        try:
            yield process
        finally:
            process.stop()


def sh(script: str, exec_id: str = "", **more: object) -> Start:
    """A START of `sh -c`."""
    return Start(exec_id=exec_id, argv=[b"sh", b"-c", script.encode()], env=ENV, **more)  # type: ignore[arg-type]


async def until(condition: Callable[[], bool], what: str) -> None:
    """Waits for something that only shows outside (a process, a file); fails after the deadline."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"not in time: {what}"
        await asyncio.sleep(0.005)


async def read_all(stream: Stream) -> tuple[bytes, bytes, Exit]:
    """Stdout, stderr and the exit of a followed command."""
    found: dict[int, list[bytes]] = {1: [], 2: []}
    async with asyncio.timeout(DEADLINE_S):
        while (piece := await stream.read()) is not None:
            found[piece[0]].append(piece[2])
        return b"".join(found[1]), b"".join(found[2]), await stream.wait()


async def in_time(awaitable: Awaitable[Exit]) -> Exit:
    async with asyncio.timeout(DEADLINE_S):
        return await awaitable
