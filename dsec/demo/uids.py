"""Host uids for an instance beside others: no two may share one."""

from __future__ import annotations

import secrets
from pathlib import Path

from dsec.demo import footprint

REGISTRY = Path("/run/dsec-instances")
"""Where supervisors keep what is each one's own (native/spawner/src/claims.rs)."""
OWN = range(0x4000_0000, 0x8000_0000)
"""For demo and benchmarks: above those of a plain `dsec up`, below 2**31."""
OF_TESTS = range(0x2000_0000, 0x4000_0000)


def unused(among: range, sandboxes: int) -> range | None:
    """Uids for so many sandboxes that no instance has now and no process runs under, or None if there are none. Chosen at random: who else
    looks at the same moment most likely gets others."""
    length = sandboxes * footprint.UIDS_OF_A_SANDBOX
    running, claimed = footprint.uids_in_use(), _claimed()
    ranges = [range(start, start + length) for start in range(among.start, among.stop - length + 1, 1 << (length - 1).bit_length())]
    free = [
        own
        for own in ranges
        if not any(uid in own for uid in running) and not any(other.start < own.stop and own.start < other.stop for other in claimed)
    ]
    return secrets.choice(free) if free else None


def _claimed() -> list[range]:
    """The uids of instances that live, or lived until something new looked."""
    found = []
    for path in REGISTRY.glob("*"):
        try:
            start, stop = path.read_bytes().split(b"\0")[-2:]
            found.append(range(int(start), int(stop)))
        except (OSError, ValueError):
            continue  # just made or gone
    return found
