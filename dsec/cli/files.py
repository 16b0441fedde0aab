"""``dsec cp``: files and directories into a sandbox and out of it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli.input import read_chunks
from dsec.cli.output import working, write_all
from dsec.cli.run import CliError, fail, with_client

if TYPE_CHECKING:
    from libdsec import DSecClient, Sandbox

PIPE = "-"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(cp)


def cp(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A path, SANDBOX:/path, or - (standard input).")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A path, SANDBOX:/path, or - (standard output).")],
) -> None:
    """Copy a file or a directory into a sandbox, or out of one.

    As with cp -r: into a directory that exists it goes under its own name, otherwise TARGET becomes its name.

    Example: dsec cp ./project sb-e1-...:/work
    """
    from_sandbox, to_sandbox = _split(source), _split(target)
    if (from_sandbox is None) == (to_sandbox is None):
        fail("one of the two is a path in a sandbox: SANDBOX:/path", code=2)

    async def run(client: DSecClient) -> None:
        if to_sandbox is not None:
            await _upload(await client.attach(to_sandbox[0]), source, to_sandbox[1])
        elif from_sandbox is not None:
            await _download(await client.attach(from_sandbox[0]), from_sandbox[1], target)

    with_client(run)


def _split(word: str) -> tuple[str, str] | None:
    """``SANDBOX:/path`` as its two parts; None for a path on this machine."""
    sandbox_id, colon, path = word.partition(":")
    return (sandbox_id, path or "/") if colon and sandbox_id.startswith("sb-") else None


async def _upload(sandbox: Sandbox, source: str, target: str) -> None:
    local = Path(source)
    if source != PIPE:
        if not await asyncio.to_thread(local.exists):
            raise CliError(f"{source}: no such file or directory")
        if await _is_directory(sandbox, target):
            target = f"{target.rstrip('/')}/{_own_name(source)}"
    with working(f"{source} -> {target}"):
        if source == PIPE:
            await sandbox.files.write_stream(target, read_chunks(sys.stdin.fileno()))
        else:
            await sandbox.files.upload(local, target)


def _own_name(source: str) -> str:
    """What a path is called, also if it is ``.`` or ends in a slash."""
    return os.path.basename(os.path.abspath(source))


async def _download(sandbox: Sandbox, source: str, target: str) -> None:
    if target == PIPE:
        async for chunk in sandbox.files.read_stream(source):
            await asyncio.to_thread(write_all, sys.stdout.fileno(), chunk)
        return
    local = Path(target)
    if await asyncio.to_thread(local.is_dir):
        local = local / (Path(source).name or sandbox.id)
    with working(f"{source} -> {local}"):
        await sandbox.files.download(source, local)


async def _is_directory(sandbox: Sandbox, path: str) -> bool:
    from libdsec.errors import FileNotFound

    try:
        return (await sandbox.files.stat(path, follow=True)).type == "directory"
    except FileNotFound:
        return False
