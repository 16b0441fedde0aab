"""What the demo shows: a line a step, live progress of the rollouts, the table at the end, the proof that nothing is left."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dsec.demo.footprint import Footprint
from dsec.demo.rollout import Rollout, Stage

MB = 1 << 20
STYLES = {
    Stage.WAITING: "dim",
    Stage.READY: "cyan",
    Stage.TESTING: "yellow",
    Stage.EDITING: "magenta",
    Stage.PASSED: "green",
    Stage.FAILED: "bold red",
}


@dataclass(frozen=True)
class Measured:
    """What was measured beside the rollouts themselves."""

    create_s: float
    """From the request for all sandboxes to the last one told."""
    memory: int
    """Bytes of MemAvailable that all of them took, each having answered one command."""
    rollouts_s: float
    """From the first test to the last diff."""


def progress(rollouts: Sequence[Rollout]) -> Group:
    """The live view: a square for each rollout, and how many stand where."""
    squares = Text("  ")
    for rollout in rollouts:
        squares.append("■", STYLES[rollout.stage])
    counts = Counter(rollout.stage for rollout in rollouts)
    legend = Text("  ")
    for stage in Stage:
        legend.append(f"{stage.value} {counts[stage]}   ", STYLES[stage])
    ended = counts[Stage.PASSED] + counts[Stage.FAILED]
    return Group(ProgressBar(total=len(rollouts), completed=ended, width=len(rollouts) + 2), Text(), squares, legend)


def results(rollouts: Sequence[Rollout], measured: Measured) -> Table:
    """The table of the figures."""
    creates = [rollout.created_after_s for rollout in rollouts]
    trues = [took for rollout in rollouts for took in rollout.trues_s]
    overheads = [took for rollout in rollouts for took in rollout.overheads_s]
    commands = sum(rollout.commands for rollout in rollouts)
    passed = sum(rollout.stage is Stage.PASSED for rollout in rollouts)
    table = Table(title=f"{len(rollouts)} rollouts in {len(rollouts)} sandboxes, all at once", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_row("sandboxes created per second", f"{len(rollouts) / measured.create_s:.0f}")
    table.add_row("create, request to ready, all in one request: p50 / p99", _milliseconds(creates))
    table.add_row("first command (true), all at once: p50 / p99", _milliseconds(trues))
    table.add_row(f"round trip beyond the own time of {commands} commands: p50 / p99", _milliseconds(overheads))
    table.add_row("memory per idle sandbox", f"{measured.memory / len(rollouts) / MB:.2f} MB")
    table.add_row("rollouts, first test to last diff", f"{measured.rollouts_s:.1f} s")
    table.add_row("edits that the agents tried", f"{sum(rollout.attempts for rollout in rollouts)}")
    table.add_row("rollouts passed", f"[bold {'green' if passed == len(rollouts) else 'red'}]{passed} of {len(rollouts)}[/]")
    return table


def troubles(rollouts: Sequence[Rollout]) -> list[str]:
    """What went wrong, a line for each rollout that failed."""
    return [f"rollout {rollout.index}: {rollout.trouble}" for rollout in rollouts if rollout.stage is not Stage.PASSED]


def proof(before: Footprint, during: Footprint, after: Footprint) -> Table:
    """The instance's kernel objects before, during and after, counted from outside."""
    table = Table(title="what this instance holds in the kernel, counted from outside", title_justify="left")
    for column in ("", "before", "during", "after"):
        table.add_column(column, justify="right" if column else "left")
    for kind in ("processes", "mounts", "cgroups", "subvolumes", "loop_devices"):
        left = getattr(after, kind)
        table.add_row(
            kind.replace("_", " "), str(getattr(before, kind)), str(getattr(during, kind)), f"[{'red' if left else 'green'}]{left}[/]"
        )
    return table


def console() -> Console:
    return Console(highlight=False)


def _milliseconds(times_s: Sequence[float]) -> str:
    ordered = sorted(times_s)
    p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    return f"{statistics.median(ordered) * 1e3:.1f} / {p99 * 1e3:.1f} ms"
