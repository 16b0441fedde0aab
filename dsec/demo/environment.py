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

from dsec.images.debian import debian_root_tar
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


async def debian_tar(cache: Path, packages: Sequence[str]) -> Path:
    """The tar of a minimal Debian with these packages, made (20 to 60 s) unless ``cache`` has it. Needs root. Raises DebianRootError."""
    return await asyncio.to_thread(debian_root_tar, packages, cache=cache, suite=_suite())


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
