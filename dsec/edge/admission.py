"""May a sandbox start now, and with which limits? Pure: the node's figures come in, a decision goes out."""

from __future__ import annotations

import msgspec

from libdsec.schema import MB, RunArgs


class AdmissionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Thresholds of admission. A sandbox's limits are not reservations: what counts is what the node has left."""

    memory_floor: float = 0.10
    """Share of the node's memory that stays available."""
    memory_per_start: int = 32 * MB
    """Bytes that a starting sandbox is expected to take soon and that MemAvailable doesn't show yet."""
    pressure_max: float = 20.0
    """PSI ``some avg10`` of memory, percent of time: above it the node is already reclaiming what is in use."""
    scratch_floor: float = 0.03
    """Share of the scratch filesystem that stays free: btrfs needs room to delete, too."""
    scratch_per_start: int = 4 * MB
    """Bytes that a starting sandbox takes of the scratch filesystem."""
    descriptors_kept: int = 1_024
    """File descriptors that stay free for requests; every sandbox holds two, one of them from its first command on."""


class NodeLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What the node has left. Sizes in bytes; ``pressure`` None where the kernel has no PSI."""

    memory: int
    memory_available: int
    pressure: float | None
    scratch: int
    scratch_used: int
    descriptors_free: int


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why no sandbox may start now. ``reason`` is one stable word, ``retry_after`` seconds."""

    reason: str
    message: str
    retry_after: float


def admit(load: NodeLoad, starting: int, policy: AdmissionPolicy) -> Refusal | None:
    """Whether one more sandbox may start beside ``starting`` others that are being started; None means yes."""
    expected = (starting + 1) * policy.memory_per_start
    floor = int(load.memory * policy.memory_floor)
    if load.memory_available - expected < floor:
        return Refusal(
            reason="memory",
            message=f"memory: {load.memory_available // MB} MB available, {expected // MB} MB expected by {starting + 1} starting ones, "
            f"{floor // MB} MB must stay free",
            retry_after=5.0,
        )
    if load.pressure is not None and load.pressure >= policy.pressure_max:
        return Refusal(
            reason="memory_pressure",
            message=f"memory pressure: some avg10 is {load.pressure:.1f}, below {policy.pressure_max:.0f} is needed",
            retry_after=10.0,
        )
    scratch_free = load.scratch - load.scratch_used
    scratch_needed = int(load.scratch * policy.scratch_floor) + (starting + 1) * policy.scratch_per_start
    if scratch_free < scratch_needed:
        return Refusal(
            reason="scratch",
            message=f"scratch disk: {scratch_free // MB} MB free of {load.scratch // MB} MB, {scratch_needed // MB} MB needed",
            retry_after=10.0,
        )
    if load.descriptors_free - 2 * starting <= policy.descriptors_kept:
        return Refusal(
            reason="descriptors", message="file descriptors: the edge holds as many sandboxes as RLIMIT_NOFILE allows", retry_after=10.0
        )
    return None


class NodeSize(msgspec.Struct, frozen=True, kw_only=True):
    """What one sandbox can have at most: the node itself. Sizes in bytes."""

    cores: int
    memory: int
    scratch: int


SCRATCH_SHARE = 0.75
"""Of the scratch filesystem, what one sandbox may fill: none takes it all from the others. Several can: limits are not reservations."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits that a sandbox gets, and what was changed of those asked for, in words."""

    memory_mb: int
    cpu_cores: float
    disk_mb: int
    pids: int
    notices: tuple[str, ...]


def clamp(args: RunArgs, node: NodeSize) -> Limits:
    """The limits of ``args``, cut to the size of the node; every cut is said in a notice."""
    notices: list[str] = []

    def cut(name: str, asked: float, most: float, unit: str, *, why: str = "the node has no more") -> float:
        if asked <= most:
            return asked
        notices.append(f"{name} cut from {asked:g} to {most:g} {unit}: {why}")
        return most

    disk = max(1, int(node.scratch * SCRATCH_SHARE) // MB)
    share = f"no sandbox may have more than {SCRATCH_SHARE:.0%} of the node's scratch disk"

    return Limits(
        memory_mb=int(cut("memory_limit_mb", args.memory_limit_mb, max(1, node.memory // MB), "MB")),
        cpu_cores=float(cut("cpu_cores_limit", args.cpu_cores_limit, float(node.cores), "cores")),
        disk_mb=int(cut("disk_limit_mb", args.disk_limit_mb, disk, "MB", why=share)),
        pids=args.pids_limit,
        notices=tuple(notices),
    )
