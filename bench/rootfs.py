"""The root filesystem that both sides run: a minimal Debian with Python, made once and kept."""

from __future__ import annotations

from pathlib import Path

from dsec.demo.environment import debian_tar

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "roots"
PACKAGES = ("python3-minimal",)


async def root_tar() -> Path:
    """The tar; made if it isn't there (about 20 s). Raises DebianRootError."""
    return await debian_tar(CACHE, PACKAGES)
