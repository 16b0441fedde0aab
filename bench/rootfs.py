"""The root filesystem that both sides run: a minimal Debian with Python, made once by mmdebstrap and kept."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from bench.claim import WrongAnswer

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "bench"
SUITE = "stable"
PACKAGES = "python3-minimal"


async def root_tar() -> Path:
    """The tar; made if it isn't there (about 20 s)."""
    tar = CACHE / "root.tar"
    if not tar.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        partial = CACHE / f"root.{os.getpid()}.tar"
        try:
            await _run("mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(partial))
            partial.rename(tar)
        finally:
            partial.unlink(missing_ok=True)
    return tar


async def _run(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, complaint = await process.communicate()
    if process.returncode != 0:
        raise WrongAnswer(f"{command[0]} failed: {complaint.decode('utf-8', 'replace')[-2_000:]}")
