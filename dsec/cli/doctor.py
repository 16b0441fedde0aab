"""``dsec doctor``: what this machine has and lacks."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import instance as inst
from dsec.cli.output import AsJson, print_json, print_table
from dsec.cli.run import CliError, with_client

if TYPE_CHECKING:
    from libdsec import DSecClient
    from libdsec.schema import DoctorReport, Finding

LOCAL = "this machine"
_PROBE_TIMEOUT_S = 60.0


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(doctor)


def doctor(
    server: Annotated[bool, typer.Option("--server", help="Ask the service's node instead of looking at this machine.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show which kernel features and programs are there, what each lack costs, and what to do about it.

    The kernel is probed by trying; what needs root is unknown without. Exit code 1 if something is missing without which no sandbox starts.

    Example: sudo dsec doctor
    """
    if server:

        async def ask(client: DSecClient) -> int:
            return _show(await client.doctor(), as_json=as_json)

        with_client(ask)
    raise typer.Exit(_show(local_report(), as_json=as_json))


def local_report() -> DoctorReport:
    """The findings of this machine: the spawner's, which tries what the kernel can do, and those of user space."""
    from dsec.api import doctor as checks
    from libdsec.schema import DoctorReport

    return DoctorReport(edge=LOCAL, findings=checks.sort([*_kernel_findings(), *checks.user_space_findings(inst.DEFAULT_STATE_DIR)]))


def _kernel_findings() -> list[Finding]:
    import msgspec

    from libdsec.schema import Finding

    try:
        spawner = inst.binary("dsec-spawner")
        done = subprocess.run([spawner, "doctor"], stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=_PROBE_TIMEOUT_S)
        return msgspec.json.decode(done.stdout, type=list[Finding])
    except CliError as error:
        return [Finding(feature="dsec-spawner", state="missing", cost="no sandbox can start", todo=str(error))]
    except (msgspec.MsgspecError, subprocess.TimeoutExpired) as error:
        return [
            Finding(feature="kernel features", state="missing", cost=f"they can't be probed: {error}", todo="run `dsec-spawner doctor`")
        ]


def _show(report: DoctorReport, *, as_json: bool) -> int:
    if as_json:
        print_json(report)
    else:
        rows = [(finding.feature, finding.state, finding.detail, finding.cost, finding.todo) for finding in report.findings]
        print_table(("feature", "state", "found", "what its lack costs", "what to do"), rows, empty="nothing to report")
        unknown = sum(finding.state == "unknown" for finding in report.findings)
        if unknown:
            typer.echo(f"{unknown} could not be tried without root: `sudo dsec doctor` does.", err=True)
        if any(finding.state != "ok" and not finding.todo for finding in report.findings):
            typer.echo("`sudo dsec doctor` on the node tells what to do where nothing is said here.", err=True)
    return 1 if any(finding.state == "missing" for finding in report.findings) else 0
