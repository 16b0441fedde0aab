"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop

from bench import catalogue, churn, cold, density, exec, layers_vs_tar, pack, report, start, start_one, stream, update, warm_read
from bench.claim import Claim, Result, Setting, WrongAnswer, judge
from bench.rootfs import root_tar
from dsec.demo.instance import InstanceError
from dsec.images.debian import DebianRootError
from libdsec.errors import DSecError

CLAIMS = {
    claim.name: claim
    for claim in (
        *(start.CLAIM, start_one.CLAIM, exec.CLAIM, density.CLAIM, churn.CLAIM, stream.CLAIM),
        *(cold.BURST, cold.FIRST, cold.TRACE, warm_read.CLAIM, layers_vs_tar.CLAIM, update.CLAIM, pack.CLAIM, catalogue.CLAIM),
    )
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 if everything asked for is ok (with ``--quick``: ran correctly), else 1; 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="./run bench", description="Measures what OpenDSec claims, against the real peer, in one run.")
    parser.add_argument("name", nargs="?", choices=sorted(CLAIMS), help="which benchmark; without one they are listed")
    parser.add_argument("--quick", action="store_true", help="a smoke run: small counts, its figures prove nothing")
    parser.add_argument("--all", action="store_true", help="every benchmark, one after the other")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a Markdown table and plots (with --all or a NAME)")
    options = parser.parse_args(arguments)
    claims = list(CLAIMS.values()) if options.all else [CLAIMS[options.name]] if options.name else []
    if not claims:
        _list_claims()
        return 0
    if os.geteuid() != 0:
        parser.error("sandboxes and dockerd need root")
    results = []
    for claim in claims:
        result = _measured(claim, options.quick)
        results.append(result)
        print(msgspec.json.encode(result).decode(), flush=True)
        if options.report:
            report.write(options.report, results, CLAIMS)
    return 0 if options.quick or all(result.ok for result in results) else 1


def _measured(claim: Claim, quick: bool) -> Result:
    """Runs one benchmark in an event loop of its own. SIGINT and SIGTERM end it in order: everything it started is taken down."""

    async def measure() -> Result:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        print(f"{claim.name}: {claim.what}", file=sys.stderr, flush=True)
        setting = Setting(root_tar=await root_tar(), quick=quick, parent=Path(tempfile.gettempdir()))
        return judge(claim, await claim.measure(setting), setting)

    try:
        return uvloop.run(measure())
    except asyncio.CancelledError:
        sys.exit("interrupted; everything that was started is gone")
    except (WrongAnswer, DebianRootError, InstanceError, DSecError) as error:
        sys.exit("\n".join((f"{claim.name}: {type(error).__name__}: {error}", *getattr(error, "__notes__", ()))))


def _list_claims() -> None:
    width = max(map(len, CLAIMS))
    for claim in CLAIMS.values():
        floors = ", ".join(f"{name} {comparison} {bound:g}" for name, (comparison, bound) in claim.floors.items())
        print(f"{claim.name:<{width}}  {claim.what}\n{'':<{width}}  {floors}")


if __name__ == "__main__":
    sys.exit(main())
