"""What a sandbox's cgroups say about it, read from outside. Knows v1, hybrid and v2; needs no privilege."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

FILE_MAX = 4096
"""Bytes read of a file: more than any of them has."""
KILLS = b"oom_kill"
"""The line in memory.events (v2) and in memory.oom_control (v1)."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one sandbox; what a kernel doesn't show is 0."""

    cpu_s: float
    memory: int
    memory_peak: int
    pids: int
    oom_kills: int


class Cgroups:
    """Finds the figures of sandboxes below the root cgroup ``root`` of this node."""

    def __init__(self, root: str, mounts: Path = Path("/proc/self/mounts")) -> None:
        self._v2: str | None = None
        self._v1: dict[str, str] = {}
        for line in mounts.read_text().splitlines():
            _, place, kind, options, *_ = line.split()
            if kind == "cgroup2":
                self._v2 = f"{place}/{root}"
            elif kind == "cgroup":
                for controller in {"memory", "pids"} & set(options.split(",")):
                    self._v1[controller] = f"{place}/{root}"

    def oom_kills(self, sandbox: str) -> int:
        """How many processes of the sandbox the kernel has killed for memory; 0 if its cgroup is gone."""
        return _value(_content(self._kills_path(sandbox)), KILLS)

    def kill_counter(self, sandbox: str) -> KillCounter:
        """The same figure for who looks at it with every command; to be closed."""
        return KillCounter(self._kills_path(sandbox))

    def usage(self, sandbox: str) -> Usage:
        """What the sandbox uses now."""
        if "memory" in self._v1:
            memory = f"{self._v1['memory']}/{sandbox}"
            pids = f"{self._v1.get('pids', memory)}/{sandbox}"
            return Usage(
                cpu_s=self._cpu_s(sandbox),
                memory=_number(f"{memory}/memory.usage_in_bytes"),
                memory_peak=_number(f"{memory}/memory.max_usage_in_bytes"),
                pids=_number(f"{pids}/pids.current"),
                oom_kills=self.oom_kills(sandbox),
            )
        group = f"{self._v2}/{sandbox}"
        return Usage(
            cpu_s=self._cpu_s(sandbox),
            memory=_number(f"{group}/memory.current"),
            memory_peak=_number(f"{group}/memory.peak"),
            pids=_number(f"{group}/pids.current"),
            oom_kills=self.oom_kills(sandbox),
        )

    def _kills_path(self, sandbox: str) -> str:
        if "memory" in self._v1:
            return f"{self._v1['memory']}/{sandbox}/memory.oom_control"
        return f"{self._v2}/{sandbox}/memory.events"

    def _cpu_s(self, sandbox: str) -> float:
        # The v2 tree counts time without any controller, on hybrid hosts too.
        return _value(_content(f"{self._v2}/{sandbox}/cpu.stat"), b"usage_usec") / 1e6


class KillCounter:
    """Counts the processes of one sandbox that the kernel killed for memory. Its file stays open: a look takes 2.5 us, else 14 us."""

    __slots__ = ("_descriptor",)

    def __init__(self, path: str) -> None:
        self._descriptor = _open(path)

    def read(self) -> int:
        """The count; 0 if the cgroup is gone, or this is closed."""
        return 0 if self._descriptor is None else _value(_read(self._descriptor), KILLS)

    def close(self) -> None:
        """Repeatable."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


# A sandbox may end between any two of these calls: its files are then gone (ENOENT) or answer ENODEV.


def _open(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _read(descriptor: int) -> bytes:
    try:
        return os.pread(descriptor, FILE_MAX, 0)
    except OSError:
        return b""


def _content(path: str) -> bytes:
    descriptor = _open(path)
    if descriptor is None:
        return b""
    try:
        return _read(descriptor)
    finally:
        os.close(descriptor)


def _number(path: str) -> int:
    text = _content(path).strip()
    return int(text) if text.isdigit() else 0


def _value(content: bytes, name: bytes) -> int:
    """The number in the line ``name number``; 0 if there is none."""
    _, _, rest = (b"\n" + content).partition(b"\n" + name + b" ")
    number = rest.partition(b"\n")[0]
    return int(number) if number.isdigit() else 0
