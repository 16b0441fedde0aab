"""What ends with the run that made it, also when that is killed: processes by a signal of the kernel's, directories by the next run."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def with_parent(number: str, *command: str | Path) -> tuple[str | Path, ...]:
    """The command that runs ``command`` (in the same process) and is sent the signal, by name, when the thread that started it dies."""
    return ("setpriv", "--pdeathsig", number, *command)


@contextmanager
def directory(kind: str, name: str, parent: Path | None, end: Callable[[Path], None]) -> Iterator[Path]:
    """A new directory below ``parent`` (the system's temporary directory), removed with its content when the block is left.

    Those of the same kind that killed runs have left there go first, each after ``end`` has ended what may still live in it.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    _remove_left(kind, parent, end)
    made = Path(tempfile.mkdtemp(prefix=f"dsec-{name}-", dir=parent))
    # Nobody looks at a directory without the mark, and the lock, which a death lets go of, is there before it.
    with _locked(made, fcntl.LOCK_EX):
        (made / _mark(kind)).touch()
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)


def _remove_left(kind: str, parent: Path, end: Callable[[Path], None]) -> None:
    for mark in parent.glob(f"dsec-*/{_mark(kind)}"):
        # In use, or just removed by its own run.
        with suppress(BlockingIOError, FileNotFoundError), _locked(mark.parent, fcntl.LOCK_EX | fcntl.LOCK_NB):
            if mark.stat().st_uid == os.geteuid():
                end(mark.parent)
                shutil.rmtree(mark.parent, ignore_errors=True)


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


def _mark(kind: str) -> str:
    return f"{kind}.ends-with-its-run"
