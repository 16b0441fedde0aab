"""What a sandbox's cgroups say about it, read from outside. Knows v1, hybrid and v2; needs no privilege."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


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
        if "memory" in self._v1:
            return _field(f"{self._v1['memory']}/{sandbox}/memory.oom_control", b"oom_kill")
        return _field(f"{self._v2}/{sandbox}/memory.events", b"oom_kill")

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

    def _cpu_s(self, sandbox: str) -> float:
        # The v2 tree counts time without any controller, on hybrid hosts too.
        return _field(f"{self._v2}/{sandbox}/cpu.stat", b"usage_usec") / 1e6


def _content(path: str) -> bytes:
    # A sandbox may end between any two reads: its files are then gone (ENOENT) or answer ENODEV.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _number(path: str) -> int:
    text = _content(path).strip()
    return int(text) if text.isdigit() else 0


def _field(path: str, name: bytes) -> int:
    for line in _content(path).splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name:
            return int(words[1])
    return 0
