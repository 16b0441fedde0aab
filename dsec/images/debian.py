"""Debian root filesystems as tars, made by mmdebstrap and kept: for tests, benchmarks and demos."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from libdsec.images import DEBIAN, debian_command

DEFAULT_SUITE = "bookworm"
RECIPE = "1"
"""Part of the key. Change it when the same suite and packages should give another root than before."""


class DebianRootError(RuntimeError):
    """mmdebstrap is missing or failed; the message says what to do, or the end of what it printed."""


def debian_root_tar(packages: Sequence[str] = (), *, cache: Path, suite: str = DEFAULT_SUITE) -> Path:
    """The tar of a minimal Debian with ``packages``, made (20 s and more) unless ``cache`` has it. Uses the machine's own apt sources.

    Safe to call from several processes: one makes it, the others wait. Raises DebianRootError.
    """
    key = hashlib.sha256("\0".join([RECIPE, suite, *sorted(set(packages))]).encode()).hexdigest()[:16]
    path = cache / f"{suite}-{key}.tar"
    if path.exists():
        return path
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{suite}-{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _make(suite, packages, path)
    return path


def _make(suite: str, packages: Sequence[str], path: Path) -> None:
    if shutil.which("mmdebstrap") is None:
        raise DebianRootError("mmdebstrap is not installed: `apt-get install mmdebstrap`")
    partial = path.with_suffix(f".{os.getpid()}.part")
    include = f"?include={','.join(packages)}" if packages else ""
    command = debian_command(f"{DEBIAN}{suite}{include}")
    try:
        with partial.open("wb") as output:
            made = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, check=False)
        if made.returncode != 0:
            raise DebianRootError(f"mmdebstrap failed:\n{made.stderr[-2000:].decode(errors='replace')}")
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
