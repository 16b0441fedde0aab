"""The three layers that the rollouts run in: a Debian base, a repository with a failing test, a scripted agent."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from libdsec import DSecClient

HERE = Path(__file__).resolve().parent
BASE, WORKSPACE, TOOLKIT = "demo-debian", "demo-dayplan", "demo-agent"
"""Names in the image store."""
WORKSPACE_AT, TOOLKIT_AT = "/workspace", "/opt/agent"
"""Where workspace and toolkit appear in a sandbox."""
PACKAGES = ("python3", "git", "python3-pytest")
COMMIT_ENVIRONMENT = {
    "GIT_AUTHOR_NAME": "dayplan",
    "GIT_AUTHOR_EMAIL": "dayplan@example.invalid",
    "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "dayplan",
    "GIT_COMMITTER_EMAIL": "dayplan@example.invalid",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}


class BuildError(Exception):
    """A layer couldn't be made; the message holds the end of what the tool said."""


async def debian_tar(file: Path, packages: Sequence[str]) -> Path:
    """Makes a minimal Debian root with these packages as a tar; takes 20 to 60 s. A ``file`` that is there already is left alone.

    Needs root. Raises BuildError.
    """
    if await asyncio.to_thread(file.exists):
        return file
    os.makedirs(file.parent, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}.tar")
    command = ["mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", f"--include={','.join(packages)}", _suite(), str(partial)]
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        try:
            _, complaint = await process.communicate()
        except asyncio.CancelledError:
            process.terminate()
            await process.wait()
            raise
        if process.returncode != 0:
            raise BuildError(f"mmdebstrap: {complaint.decode('utf-8', 'replace')[-2_000:]}")
        partial.rename(file)
    finally:
        partial.unlink(missing_ok=True)
    return file


def _suite() -> str:
    """The host's own Debian release, whose mirror surely works; "stable" where the host is something else."""
    release = platform.freedesktop_os_release()
    return release.get("VERSION_CODENAME", "stable") if release.get("ID") == "debian" else "stable"


async def import_base(client: DSecClient, tar: Path) -> None:
    await client.images.import_(tar, name=BASE)


async def import_workspace(client: DSecClient) -> None:
    """The repository, made by ``git init`` and one commit."""
    with tempfile.TemporaryDirectory(prefix="dsec-workspace-") as directory:
        await asyncio.to_thread(make_repository, Path(directory))
        await client.images.import_(Path(directory), name=WORKSPACE, kind="workspace", at=WORKSPACE_AT)


async def import_toolkit(client: DSecClient) -> None:
    await client.images.import_(HERE / "toolkit", name=TOOLKIT, kind="toolkit", at=TOOLKIT_AT)


def make_repository(directory: Path) -> None:
    """Makes the workspace's repository in an empty directory: the same commit, byte for byte, whoever does it."""
    directory.chmod(0o755)
    shutil.copytree(HERE / "workspace", directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for command in (["init", "--quiet", "--initial-branch=main"], ["add", "."], ["commit", "--quiet", "--message=Free slots of a day"]):
        subprocess.run(["git", *command], cwd=directory, check=True, env={**os.environ, **COMMIT_ENVIRONMENT})
