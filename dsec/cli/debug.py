"""``dsec debug``: everything that is known of one sandbox, also of a failed one that was kept."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from dsec.cli.output import AsJson, clock, duration, print_json, print_table, printable, size
from dsec.cli.run import with_client

if TYPE_CHECKING:
    from libdsec import DSecClient
    from libdsec.schema import CommandEntry, DiffEntry, Metrics, SandboxEvent, SandboxInfo, State

DIFF_SHOWN = 40
COMMANDS_SHOWN = 20

_T = TypeVar("_T")


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(debug)


def debug(
    sandbox_id: Annotated[str, typer.Argument(metavar="SANDBOX")],
    changes: Annotated[int, typer.Option("--diff", min=0, help="Show at most so many changed files.")] = DIFF_SHOWN,
    as_json: AsJson = False,
) -> None:
    """Show a sandbox's record, events, last commands, memory figures and changed files.

    Works for a failed sandbox too; its files are there if it was made with --keep-on-failure. What can't be had says why.

    Example: dsec debug sb-e1-...
    """

    async def run(client: DSecClient) -> None:
        from libdsec import Sandbox

        info = await client.get(sandbox_id)
        sandbox = Sandbox(client.transport, info)
        events = await _try(_all(sandbox.events(), None))
        commands = await _try(_last_commands(client, sandbox_id))
        metrics = await _try(sandbox.metrics())
        diff = await _try(_all(sandbox.diff(), changes + 1))
        if as_json:
            print_json({"info": info, "events": events, "commands": commands, "metrics": metrics, "diff": diff})
            return
        _show_info(info)
        _section("events", events, _show_events)
        _section("last commands", commands, lambda entries: _show_commands(entries, info.state))
        _section("memory and other use", metrics, _show_metrics)
        _section("changed files", diff, lambda entries: _show_diff(entries, changes))

    with_client(run)


async def _last_commands(client: DSecClient, sandbox_id: str) -> list[CommandEntry]:
    """As the edge remembers them: also those of shell sessions, and of a sandbox that can't be asked any more."""
    from libdsec.ids import sandbox_path
    from libdsec.schema import CommandEntry
    from libdsec.transport import Answer

    url = client.transport.at(f"{sandbox_path(sandbox_id)}/commands")
    return await client.transport.call("GET", url, Answer(list[CommandEntry]))


async def _try(asked: Awaitable[_T]) -> _T | str:
    """The answer, or in words why there is none."""
    from libdsec.errors import DSecError

    try:
        return await asked
    except DSecError as error:
        return error.message


async def _all(items: AsyncIterator[_T], limit: int | None) -> list[_T]:
    found: list[_T] = []
    async for item in items:
        found.append(item)
        if len(found) == limit:
            break
    return found


def _section(title: str, found: _T | str, show: Callable[[_T], None]) -> None:
    print(f"\n{title}")
    if isinstance(found, str):
        print(f"  not to be had: {found}")
    else:
        show(found)


def _show_info(info: SandboxInfo) -> None:
    ended = f", ended {clock(info.ended_at)}" if info.ended_at is not None else ""
    print(f"{info.id}: {info.state}" + (f" ({printable(info.reason)})" if info.reason else ""))
    print(f"  image {printable(' + '.join([info.image, *filter(None, [info.workspace]), *info.toolkits]))}, on {info.edge}")
    print(f"  created {clock(info.created_at)}{ended}, idle {duration(info.idle_s)}")
    print(f"  limits: {info.memory_limit_mb} MB, {info.cpu_cores_limit:g} cores, {info.disk_limit_mb} MB disk, {info.pids_limit} pids")
    for notice in info.notices:
        print(f"  notice: {printable(notice)}")
    if info.exit is not None:
        figures = info.exit
        print(f"  used: {figures.cpu_s:.1f} cpu s, {size(figures.memory_peak)} at most, {size(figures.disk_bytes)} on disk, ", end="")
        print(f"{figures.oom_kills} memory kills")


def _show_events(events: list[SandboxEvent]) -> None:
    rows = [(clock(event.at), event.type, event.exec_id or "", event.message) for event in events]
    print_table(("at", "event", "command", "what happened"), rows, empty="  none")


def _show_commands(commands: list[CommandEntry], state: State) -> None:
    rows = [
        (entry.exec_id, clock(entry.started_at), _end(entry, state), entry.command)
        for entry in sorted(commands, key=lambda entry: entry.started_at)[-COMMANDS_SHOWN:]
    ]
    print_table(("exec_id", "started", "state", "command"), rows, empty="  none")


def _end(entry: CommandEntry, state: State) -> str:
    if entry.exit_code is None:
        return "running" if state == "running" else "no end seen"
    why = "out of time" if entry.timed_out else "out of memory" if entry.oom_killed else f"exit {entry.exit_code}"
    return why if entry.duration_s is None else f"{why} after {entry.duration_s:.1f} s"


def _show_metrics(metrics: Metrics) -> None:
    rows = [
        (
            "memory",
            size(metrics.memory),
            size(metrics.memory_limit),
            f"at most {size(metrics.memory_peak)}; {metrics.oom_kills} memory kills",
        ),
        ("pids", str(metrics.pids), str(metrics.pids_limit), ""),
        ("disk", size(metrics.disk), size(metrics.disk_limit), ""),
        ("cpu", f"{metrics.cpu_s:.1f} s", "", ""),
    ]
    if (reads := metrics.reads) is not None:
        rows.append(("layers read", size(reads.needed), "", f"{size(reads.fetched)} fetched for it, {size(reads.from_cache)} found here"))
    print_table(("", "used", "limit", ""), rows, empty="")


def _show_diff(entries: list[DiffEntry], limit: int) -> None:
    rows = [(entry.kind, size(entry.size), entry.path) for entry in entries[:limit]]
    print_table(("change", "size", "path"), rows, empty="  none")
    if len(entries) > limit:
        print(f"  and more; --diff {limit * 4} shows more of them")
