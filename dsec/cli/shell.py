"""``dsec shell``: a terminal in a sandbox, and the bridge between two terminals that ``dsec exec --tty`` shares."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
import sys
import termios
import tty
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import commands
from dsec.cli.run import CliError, with_client

if TYPE_CHECKING:
    from libdsec import DSecClient, Process, Sandbox
    from libdsec.schema import PtySize

KEYS_CHUNK = 64 * 1024
LOGIN_SHELL = ("/bin/sh", "-c", "command -v bash >/dev/null && exec bash -l; exec sh -l")
"""bash where the image has it."""


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(shell)


def shell(
    sandbox_id: Annotated[str, typer.Argument(metavar="[SANDBOX]", help="Not with --image.")] = "",
    image: commands.FreshImage = None,
    cwd: commands.Cwd = None,
    user: commands.User = None,
) -> None:
    """Open an interactive shell in a sandbox. `exit` or Ctrl-D leaves it.

    Example: dsec shell --image python:3.11
    """
    if bool(sandbox_id) == bool(image):
        raise typer.BadParameter("name a sandbox, or give --image: one of the two")

    async def run(client: DSecClient) -> int:
        async with commands.sandbox_for(client, sandbox_id, image) as sandbox:
            return await interact(client, sandbox, LOGIN_SHELL, cwd=cwd, env={}, user=user, timeout=None)

    with_client(run)


async def interact(
    client: DSecClient,
    sandbox: Sandbox,
    command: Sequence[str],
    *,
    cwd: str | None,
    env: Mapping[str, str],
    user: str | None,
    timeout: float | None,
) -> int:
    """Run ``command`` on a terminal of the sandbox that this terminal shows; returns its exit code. Raises CliError without a terminal."""
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        raise CliError("standard input and output must be a terminal; without one, `dsec exec -i` sends input")
    environment = {"TERM": os.environ.get("TERM", "xterm-256color"), **env}
    process = commands.named_process(client, sandbox, command)
    starting = sandbox.start(
        command, pty=_terminal_size(), stdin=True, cwd=cwd, env=environment, user=user, timeout=timeout, exec_id=process.exec_id
    )
    await commands.begun(process, starting)
    # If the terminal goes away (it was closed, or this program is being ended): a shell that nobody sees must not live on.
    async with commands.killed_unless_ended(process):
        with _raw_terminal(), _resizes_go_to(process), _keys() as keys:
            typing = asyncio.create_task(_type(process, keys))
            try:
                await commands.copy_out(process.stdout, sys.stdout.fileno())
                result = await process.wait()
            finally:
                typing.cancel()
    commands.tell_end(result)
    return result.exit_code


async def _type(process: Process, keys: asyncio.Queue[bytes]) -> None:
    """Send what is typed. Keys that come while a request is on its way go together in the next one."""
    from libdsec.errors import DSecError

    with contextlib.suppress(DSecError):
        while True:
            pressed = await keys.get()
            while not keys.empty():
                pressed += keys.get_nowait()
            if not pressed:
                await process.close_stdin()
                return
            await process.write_stdin(pressed)


@contextlib.contextmanager
def _keys() -> Iterator[asyncio.Queue[bytes]]:
    """What is typed, as it is typed; an empty element is the end."""
    keys: asyncio.Queue[bytes] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    descriptor = sys.stdin.fileno()

    def readable() -> None:
        pressed = os.read(descriptor, KEYS_CHUNK)
        keys.put_nowait(pressed)
        if not pressed:
            loop.remove_reader(descriptor)

    loop.add_reader(descriptor, readable)
    try:
        yield keys
    finally:
        loop.remove_reader(descriptor)


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    """Every key goes through unseen by this side's terminal driver; its settings are put back whatever happens."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setraw(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _resizes_go_to(process: Process) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    sending: set[asyncio.Task[None]] = set()

    async def send() -> None:
        from libdsec.errors import DSecError

        size = _terminal_size()
        with contextlib.suppress(DSecError):
            await process.resize(size.rows, size.cols)

    def resized() -> None:
        task = loop.create_task(send())
        sending.add(task)
        task.add_done_callback(sending.discard)

    loop.add_signal_handler(signal.SIGWINCH, resized)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)


def _terminal_size() -> PtySize:
    """Of the terminal on standard output (TIOCGWINSZ, see ioctl_tty(2))."""
    from libdsec.schema import PtySize

    rows, cols, _, _ = struct.unpack("HHHH", fcntl.ioctl(sys.stdout.fileno(), termios.TIOCGWINSZ, bytes(8)))
    return PtySize(rows or 24, cols or 80)
