"""What commands print: JSON for programs, tables for people, progress for those who watch."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table

    from libdsec import ImportLine

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def print_json(value: object) -> None:
    """One JSON text (a struct, or a list of them; bytes as base64) on stdout."""
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """A table on stdout, or the words ``empty``. Cells are shown as they are: what a sandbox chose is never read as markup."""
    if not rows:
        print(empty)
        return
    console().print(build_table(columns, rows))


def build_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """The table as something that rich prints."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def console(*, stderr: bool = False) -> Console:
    """A rich console that doesn't cut lines where nobody looks at a terminal."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, markup=False, highlight=False, width=None if stream.isatty() else 200)


def progress() -> Progress:
    """A progress display on stderr; silent where stderr is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn

    return _display(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


def _display(*columns: ProgressColumn) -> Progress:
    """Words, and ``columns`` after them, on stderr as long as it is shown; silent where stderr is no terminal."""
    from rich.progress import Progress, SpinnerColumn, TextColumn

    shown = console(stderr=True)
    return Progress(
        *(SpinnerColumn(), TextColumn("{task.description}", markup=False), *columns),
        console=shown,
        transient=True,
        disable=not shown.is_terminal,
        # On a terminal what is printed meanwhile goes above the display, through it: to stderr. A pipe must get it itself.
        redirect_stdout=sys.stdout.isatty(),
    )


@contextlib.contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr, where it is a terminal, that something of unknown length is being done; what is yielded changes the words."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with _display() as shown:
        task = shown.add_task(printable(what), total=None)
        yield lambda words: shown.update(task, description=printable(words))


@contextlib.contextmanager
def transferring(what: str) -> Iterator[Callable[[ImportLine], None]]:
    """Show on stderr, where it is a terminal, what is being done, then the steps of it that are told: with a bar that fills where their
    size is known. Without a name, which may be so long that it leaves the bar no room."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.progress import BarColumn, TimeElapsedColumn

    with _display(BarColumn(), TimeElapsedColumn()) as shown:
        shown.add_task(printable(what), total=None)
        [task] = shown.tasks

        def tell(line: ImportLine) -> None:
            # Progress.update() can't take a total away again.
            task.description, task.completed, task.total = printable(_step(line)), line.done_bytes, line.total_bytes

        yield tell


def _step(line: ImportLine) -> str:
    step = line.step or ""
    if line.total_bytes is not None:
        return f"{step}: {size(line.done_bytes)} of {size(line.total_bytes)}"
    return f"{step}: {size(line.done_bytes)}" if line.done_bytes else step


def printable(text: str) -> str:
    """``text`` without control characters and undecodable bytes: output of a sandbox must not drive the terminal."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def size(count: float) -> str:
    """Bytes as a person reads them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def age(at: float | None) -> str:
    """How long ago a Unix time was."""
    return "" if at is None else duration(time.time() - at)


def duration(seconds: float) -> str:
    """Seconds as a person reads them."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def clock(at: float) -> str:
    """A Unix time in local time, to the millisecond."""
    return time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at % 1 * 1000):03d}"


def write_all(descriptor: int, data: bytes) -> None:
    """Write the whole of ``data``, as it is. Raises OSError (BrokenPipeError where the reader has gone)."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
