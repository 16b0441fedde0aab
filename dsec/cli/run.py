"""How a command runs: with a client where it needs one, its errors as one line that says what to do, its exit code as the shell expects
it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

import typer

from dsec.cli.interrupts import cancelled_by_signals
from dsec.cli.output import printable

if TYPE_CHECKING:
    from libdsec import DSecClient
    from libdsec.errors import DSecError

FAILED = 1
INTERRUPTED = 128 + signal.SIGINT


class CliError(Exception):
    """A command can't do what was asked; the message says why and what to do."""


def complain(message: str) -> None:
    """Say on stderr what went wrong. What a sandbox has put into the message doesn't reach the terminal as it is."""
    lines = [printable(line) for line in message.split("\n")]
    print("dsec:", "\n".join(lines), file=sys.stderr)


def fail(message: str, *, code: int = FAILED) -> NoReturn:
    """End the command with one line on stderr."""
    complain(message)
    raise typer.Exit(code)


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Turn what the body raises into one line and an exit code."""
    try:
        yield
    except CliError as error:
        fail(str(error))
    except BrokenPipeError:
        # Whoever read our output has gone (`dsec ls | head`); the interpreter must not try to flush into the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAILED) from None
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        # Not imported before something went wrong: the SDK takes half a second, which `dsec down` needn't spend.
        from libdsec.errors import DSecError

        if isinstance(error, DSecError):
            fail(_with_advice(error))
        raise


def with_client(action: Callable[[DSecClient], Awaitable[int | None]]) -> None:
    """Run ``action`` with an open client. What it returns is the exit code (None: 0)."""

    async def run() -> int | None:
        from libdsec import DSecClient

        # A terminal that goes away, or `kill`, is answered like Ctrl-C: whatever the action must undo, it undoes.
        with cancelled_by_signals():
            async with DSecClient() as client:
                return await action(client)

    with reported():
        raise typer.Exit(asyncio.run(run()) or 0)


def _with_advice(error: DSecError) -> str:
    from libdsec import errors

    advice = {
        errors.AuthenticationError: "set DSEC_API_KEY, or see `dsec key create`",
        errors.ImageNotFound: "`dsec image ls` shows what there is, `dsec image import` adds one",
        errors.SandboxNotFound: "`dsec ls` shows the sandboxes of this key's project",
        errors.ProcessNotFound: "`dsec logs SANDBOX` lists its commands",
        errors.Unavailable: "is the service running? `dsec up` starts it, DSEC_URL names another",
        errors.SandboxFailed: "`dsec debug SANDBOX` tells more",
    }
    # Not where the message already names a command that helps.
    hint = None if "`dsec " in error.message else next((text for kind, text in advice.items() if isinstance(error, kind)), None)
    if isinstance(error, errors.Unavailable) and error.reason != errors.UNREACHABLE:
        hint = None  # the service has answered: it is a registry or a store behind it
    wait = f" (try again in {error.retry_after:g} s)" if error.retry_after else ""
    return f"{error.message}{wait}" + (f"; {hint}" if hint else "")
