"""``dsec top``: what the sandboxes use, live."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from dsec.cli import sandboxes
from dsec.cli.output import AsJson, age, build_table, console, print_json, size
from dsec.cli.run import with_client

if TYPE_CHECKING:
    from rich.table import Table

    from libdsec import DSecClient
    from libdsec.schema import Metrics, SandboxInfo

ASKED_AT_ONCE = 32
DEFAULT_ROWS = 40
COLUMNS = ("id", "image", "cpu", "memory", "peak", "pids", "disk", "oom", "age")


class Usage(NamedTuple):
    """A sandbox, and what it used of the CPU between two looks."""

    info: SandboxInfo
    metrics: Metrics
    cores: float
    """Mean number of CPU cores in use."""


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(top)


def top(
    label: sandboxes.Label = None,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    rows: Annotated[int, typer.Option(min=1, help="Show so many, the busiest first.")] = DEFAULT_ROWS,
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a live table of the running sandboxes by CPU use; Ctrl-C ends it.

    Example: dsec top --label run=1
    """

    async def run(client: DSecClient) -> None:
        before = await _sample(client, label)
        if once or as_json:
            await asyncio.sleep(interval)
            usage = _busiest(before, await _sample(client, label))[:rows]
            if as_json:
                print_json([{"id": entry.info.id, "cores": round(entry.cores, 3), "metrics": entry.metrics} for entry in usage])
            else:
                console().print(_table(usage))
            return
        from rich.live import Live

        with Live(_table([]), console=console(), auto_refresh=False, screen=console().is_terminal) as live:
            while True:
                await asyncio.sleep(interval)
                now = await _sample(client, label)
                live.update(_table(_busiest(before, now)[:rows]), refresh=True)
                before = now

    with_client(run)


async def _sample(client: DSecClient, label: list[str] | None) -> dict[str, tuple[SandboxInfo, Metrics]]:
    from libdsec import Sandbox
    from libdsec.errors import DSecError

    slots = asyncio.Semaphore(ASKED_AT_ONCE)
    found: dict[str, tuple[SandboxInfo, Metrics]] = {}

    async def look(info: SandboxInfo) -> None:
        async with slots:
            try:
                found[info.id] = (info, await Sandbox(client.transport, info).metrics())
            except DSecError:
                # Ended between the list and now: no longer a row.
                return

    await asyncio.gather(*[look(info) async for info in sandboxes.matching(client, label, "running")])
    return found


def _busiest(before: dict[str, tuple[SandboxInfo, Metrics]], now: dict[str, tuple[SandboxInfo, Metrics]]) -> list[Usage]:
    usage = []
    for sandbox_id, (info, metrics) in now.items():
        earlier = before.get(sandbox_id)
        seconds = metrics.at - earlier[1].at if earlier else 0.0
        cores = (metrics.cpu_s - earlier[1].cpu_s) / seconds if earlier and seconds > 0 else 0.0
        usage.append(Usage(info, metrics, max(0.0, cores)))
    return sorted(usage, key=lambda entry: (-entry.cores, -entry.metrics.memory, entry.info.id))


def _table(usage: list[Usage]) -> Table:
    rows = [
        (
            entry.info.id,
            entry.info.image,
            f"{entry.cores * 100:.0f}%",
            f"{size(entry.metrics.memory)} / {size(entry.metrics.memory_limit)}",
            size(entry.metrics.memory_peak),
            f"{entry.metrics.pids} / {entry.metrics.pids_limit}",
            f"{size(entry.metrics.disk)} / {size(entry.metrics.disk_limit)}",
            str(entry.metrics.oom_kills),
            age(entry.info.created_at),
        )
        for entry in usage
    ]
    return build_table(COLUMNS, rows)
