"""What an instance holds in the kernel, counted from outside.

Nothing here asks the service: it reads /proc, /sys and the mount tables of every mount namespace, and takes as an instance's own whatever
bears its directory, its cgroup's name or its uids. Demo, benchmarks and tests prove with it that nothing is left.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BTRFS_SUBVOLUME_INODE = 256
"""Inode number of the root directory of every btrfs subvolume (BTRFS_FIRST_FREE_OBJECTID)."""
UIDS_OF_A_SANDBOX = 65_792
"""Each sandbox has a range of this many uids (docs/wire.md)."""
AGENT_UID_OFFSET = 65_791
"""Its agent runs under the last of them."""
KERNEL_MEMORY_FIELDS = ("Slab", "KernelStack", "PageTables", "SecPageTables", "Percpu")
"""The fields of /proc/meminfo that count what the kernel allocated for itself."""


@dataclass(frozen=True)
class Marks:
    """By what an instance's kernel objects are recognized."""

    directory: Path
    """Holds its state and run directories."""
    cgroup: str
    """Name of its root cgroup in every hierarchy."""
    uids: range
    """Its sandboxes' uids."""
    service_uid: int


@dataclass(frozen=True)
class Footprint:
    """Numbers of kernel objects."""

    processes: int = 0
    mounts: int = 0
    cgroups: int = 0
    subvolumes: int = 0
    loop_devices: int = 0

    @property
    def total(self) -> int:
        return self.processes + self.mounts + self.cgroups + self.subvolumes + self.loop_devices

    def beyond(self, other: Footprint) -> Footprint:
        """What is here and wasn't in ``other``, by kind; less than before counts as nothing."""
        return Footprint(
            processes=max(0, self.processes - other.processes),
            mounts=max(0, self.mounts - other.mounts),
            cgroups=max(0, self.cgroups - other.cgroups),
            subvolumes=max(0, self.subvolumes - other.subvolumes),
            loop_devices=max(0, self.loop_devices - other.loop_devices),
        )


def take(marks: Marks) -> Footprint:
    """Counts the objects of the instance with these marks. Takes about a second for 3,200 sandboxes."""
    pids = set(owned_processes(marks))
    return Footprint(
        processes=len(pids),
        mounts=_mounts(marks, pids),
        cgroups=sum(1 for _ in _cgroups(marks.cgroup)),
        subvolumes=_subvolumes(pids),
        loop_devices=_loop_devices(marks.directory),
    )


def owned_processes(marks: Marks) -> Iterator[int]:
    """Pids of the instance's processes: by uid, by a command line that names its directory, or by cgroup."""
    directory = os.fsencode(marks.directory)
    cgroup = f"/{marks.cgroup}".encode()
    for pid in _pids():
        try:
            uid = effective_uid(pid)
            by_uid = uid in marks.uids or uid == marks.service_uid
            if by_uid or directory in _read(f"/proc/{pid}/cmdline") or _in_cgroup(_read(f"/proc/{pid}/cgroup"), cgroup):
                yield pid
        except (FileNotFoundError, ProcessLookupError):
            continue


def uids_in_use() -> set[int]:
    """Effective uids of all processes of this host."""
    return set(_effective_uids())


def sandbox_agents(marks: Marks) -> int:
    """Live sandboxes, by their agents: processes under the one uid of each sandbox's range that no program inside can have."""
    own = (uid - marks.uids.start for uid in _effective_uids() if uid in marks.uids)
    return sum(offset % UIDS_OF_A_SANDBOX == AGENT_UID_OFFSET for offset in own)


def memory_available() -> int:
    """MemAvailable of this host, bytes."""
    return _meminfo()["MemAvailable"]


def memory_total() -> int:
    """MemTotal of this host, bytes."""
    return _meminfo()["MemTotal"]


def kernel_memory() -> int:
    """Bytes that the kernel uses for itself: slab, kernel stacks, page tables, per-CPU data."""
    fields = _meminfo()
    return sum(fields.get(name, 0) for name in KERNEL_MEMORY_FIELDS)


def resident(pid: int) -> int:
    """Resident bytes of a process."""
    return int(_status(pid).get(b"VmRSS", [b"0"])[0]) * 1024


def open_files(pid: int) -> int:
    """Descriptors that a process holds."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _status(pid: int) -> dict[bytes, list[bytes]]:
    lines = (line.partition(b":") for line in _read(f"/proc/{pid}/status").splitlines())
    return {name: value.split() for name, _, value in lines}


def effective_uid(pid: int) -> int:
    """The effective uid. (The owner of /proc/PID isn't it: that is root for a process which isn't dumpable.)"""
    return int(_status(pid)[b"Uid"][1])


def _effective_uids() -> Iterator[int]:
    for pid in _pids():
        try:
            yield effective_uid(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue


def _in_cgroup(table: bytes, cgroup: bytes) -> bool:
    paths = (line.split(b":", 2)[2] for line in table.splitlines())
    return any(path == cgroup or path.startswith(cgroup + b"/") for path in paths)


def _meminfo() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}


def _mounts(marks: Marks, owned: set[int]) -> int:
    """Mounts in any namespace that name the instance's directory, and all mounts of the namespaces that its sandboxes live in."""
    directory = str(marks.directory).encode()
    seen: set[int] = set()
    count = 0
    for pid in _pids():
        try:
            namespace = os.stat(f"/proc/{pid}/ns/mnt").st_ino
            if namespace in seen:
                continue
            table = _read(f"/proc/{pid}/mountinfo").splitlines()
            in_sandbox = pid in owned and effective_uid(pid) in marks.uids
        except OSError:
            continue
        seen.add(namespace)
        count += len(table) if in_sandbox else sum(directory in line for line in table)
    return count


def _cgroups(name: str) -> Iterator[str]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if right.startswith("cgroup"):
            for directory, _, _ in os.walk(os.path.join(left.split(" ")[4], name)):
                yield directory


def _loop_devices(directory: Path) -> int:
    """Loop devices whose backing file lies below the directory."""
    count = 0
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            count += backing.read_text().startswith(f"{directory}/")
        except OSError:
            continue
    return count


def _subvolumes(pids: set[int]) -> int:
    """Subvolumes at the top of the scratch filesystem. No path leads there: it is seen through a process's descriptor of its root."""
    for pid in pids:
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                root = f"/proc/{pid}/fd/{name}"
                status = os.stat(root)
                if stat.S_ISDIR(status.st_mode) and status.st_ino == BTRFS_SUBVOLUME_INODE:
                    with os.scandir(root) as entries:
                        return sum(1 for entry in entries if entry.stat(follow_symlinks=False).st_ino == BTRFS_SUBVOLUME_INODE)
        except OSError:
            continue
    return 0
