"""`dsec cp` against a real sandbox: files, directories and pipes, both ways."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from libdsec import Sandbox
from tests.conftest import ROOT, Instance

TIMEOUT_S = 60


async def cp(instance: Instance, source: str, target: str, *, stdin: bytes = b"") -> bytes:
    """What the command wrote; it must succeed."""
    command = [sys.executable, "-m", "dsec.cli", "cp", source, target]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=instance.environment, stdin=pipe, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(TIMEOUT_S):
        written, complaint = await process.communicate(stdin)
    assert process.returncode == 0, complaint.decode()
    return written


async def test_cp_carries_files_directories_and_pipes_both_ways(instance: Instance, sandbox: Sandbox, tmp_path: Path) -> None:
    data, box = os.urandom(1_000_001), sandbox.id
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep" / "data").write_bytes(data)
    script = tree / "run.sh"
    script.write_text("#!/bin/sh\necho ran\n")
    script.chmod(0o755)
    (tree / "link").symlink_to("run.sh")

    # Into a directory that exists a source goes under its own name, otherwise the target becomes its name.
    await asyncio.gather(
        cp(instance, str(script), f"{box}:/tmp"),
        cp(instance, str(tree), f"{box}:/srv/copy"),
        cp(instance, "-", f"{box}:/srv/piped", stdin=data),
    )
    for path in ("/tmp/run.sh", "/srv/copy/link"):
        assert (await sandbox.exec([path], check=True)).stdout == "ran\n"
    for path in ("/srv/copy/deep/data", "/srv/piped"):
        assert await sandbox.files.read(path) == data

    existing = tmp_path / "existing"
    existing.mkdir()
    *_, piped = await asyncio.gather(
        cp(instance, f"{box}:/tmp/run.sh", str(tmp_path / "renamed")),
        cp(instance, f"{box}:/srv/copy", str(existing)),
        cp(instance, f"{box}:/srv/piped", "-"),
    )
    assert piped == data
    assert (tmp_path / "renamed").read_text() == script.read_text()
    assert (tmp_path / "renamed").stat().st_mode & 0o777 == 0o755
    assert (existing / "copy" / "deep" / "data").read_bytes() == data
    assert os.readlink(existing / "copy" / "link") == "run.sh"
