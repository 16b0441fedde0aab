"""What is left of the node's memory and descriptors, read from /proc."""

from __future__ import annotations

import os
import resource


def memory_available() -> int:
    """MemAvailable, bytes."""
    with open("/proc/meminfo", "rb") as file:
        for line in file:
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0


def memory_pressure() -> float | None:
    """PSI memory ``some avg10``, percent; None where the kernel has no PSI."""
    try:
        with open("/proc/pressure/memory", "rb") as file:
            line = file.readline()
    except OSError:
        return None
    for word in line.split():
        if word.startswith(b"avg10="):
            return float(word[6:])
    return None


def descriptors_free() -> int:
    """How many more file descriptors this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft - len(os.listdir("/proc/self/fd"))
