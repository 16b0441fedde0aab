"""What a node has and lacks, in words that a user can act on: kernel features as the spawner found them, and the limits that user space
sees."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from libdsec.schema import Finding

YES = "yes"
"""What the spawner says of a kernel feature that is there; of any other it says what its lack costs."""

DESCRIPTORS_PER_SANDBOX = 6
"""File descriptors that one live sandbox costs each process of the service, at most."""
DENSITY_GOAL = 3_200
"""Live sandboxes that one node is built for."""
PIDS_PER_SANDBOX = 8
"""Processes that an idle or lightly used sandbox has: chronus, a session and a few children."""
MIN_FREE_DISK = 10 << 30
"""Bytes below which images and writable layers soon fill the disk."""
MIN_PYTHON = (3, 11)

NEWER_KERNEL = frozenset({"kernel", "idmapped tmpfs", "overlay layers by descriptor", "btrfs simple quotas"})
"""Features, as native/spawner/src/doctor names them, that come with a kernel's version alone. What to do about any other only the node can
find out: `dsec doctor` there."""

_ORDER = {"missing": 0, "unknown": 1, "degraded": 2, "ok": 3}

_State = Literal["ok", "degraded", "missing"]


def kernel_findings(features: Mapping[str, str]) -> list[Finding]:
    """The features of a node as its edge tells them: a lacking one has a slower or weaker way, else the edge would not run. The edge
    doesn't tell what to do about it, so ``todo`` is empty but for what a newer kernel brings."""
    return [
        Finding(feature=name, state="ok") if said == YES else Finding(feature=name, state="degraded", cost=said, todo=_advice(name))
        for name, said in features.items()
    ]


def _advice(feature: str) -> str:
    return f"a newer kernel than {platform.release()}" if feature in NEWER_KERNEL else ""


def user_space_findings(state_dir: Path) -> list[Finding]:
    """Programs, limits and room, as this process sees them. ``state_dir`` need not exist yet."""
    return [_python(), *_programs(), _descriptors(), _pids(), _disk(state_dir)]


def sort(findings: list[Finding]) -> list[Finding]:
    """The worst first, otherwise as they came."""
    return sorted(findings, key=lambda finding: _ORDER[finding.state])


def _python() -> Finding:
    enough = sys.version_info >= MIN_PYTHON
    return Finding(
        feature="python",
        state="ok" if enough else "missing",
        detail=platform.python_version(),
        cost="" if enough else "nothing runs",
        todo="" if enough else f"install Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer",
    )


def _programs() -> Iterator[Finding]:
    yield _program("mkfs.btrfs", "btrfs-progs", "missing", "sandboxes have no writable layer: none can start")
    yield _program("mmdebstrap", "mmdebstrap", "degraded", "`dsec image import mmdebstrap:…` can't build a Debian base image")


def _program(name: str, package: str, without: _State, cost: str) -> Finding:
    # System programs live in /usr/sbin, which is not on everybody's path.
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if found:
        return Finding(feature=name, state="ok", detail=found)
    return Finding(feature=name, state=without, cost=cost, todo=f"apt-get install {package}")


def _descriptors() -> Finding:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    capacity = DENSITY_GOAL if hard == resource.RLIM_INFINITY else hard // DESCRIPTORS_PER_SANDBOX
    if capacity >= DENSITY_GOAL:
        return Finding(feature="file descriptors", state="ok", detail=f"hard limit {hard}")
    return Finding(
        feature="file descriptors",
        state="degraded",
        detail=f"hard limit {hard}",
        cost=f"about {capacity} sandboxes at once",
        todo=f"raise the hard limit to {DENSITY_GOAL * DESCRIPTORS_PER_SANDBOX} (LimitNOFILE= of the unit, or limits.conf)",
    )


def _pids() -> Finding:
    pid_max = int(Path("/proc/sys/kernel/pid_max").read_text())
    capacity = pid_max // PIDS_PER_SANDBOX
    if capacity >= DENSITY_GOAL:
        return Finding(feature="kernel.pid_max", state="ok", detail=str(pid_max))
    return Finding(
        feature="kernel.pid_max",
        state="degraded",
        detail=str(pid_max),
        cost=f"about {capacity} sandboxes with {PIDS_PER_SANDBOX} processes each",
        todo="sysctl -w kernel.pid_max=4194304",
    )


def _disk(state_dir: Path) -> Finding:
    existing = next(path for path in (state_dir, *state_dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    enough = free >= MIN_FREE_DISK
    return Finding(
        feature="free disk",
        state="ok" if enough else "degraded",
        detail=f"{free >> 30} GiB free for {state_dir}",
        cost="" if enough else "images and writable layers fill it; then sandboxes are refused",
        todo="" if enough else "free some, or choose another place with `dsec up --state-dir`",
    )
