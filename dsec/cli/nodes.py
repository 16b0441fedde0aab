"""``dsec node``: the machines that carry sandboxes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from dsec.cli.output import AsJson, print_json, print_table, size
from dsec.cli.run import with_client

if TYPE_CHECKING:
    from libdsec import DSecClient

app = typer.Typer(help="Look at nodes.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `ls` a subcommand although it is the only one."""


@app.command("ls")
def ls(as_json: AsJson = False) -> None:
    """List the nodes, their room and their sandboxes.

    Example: dsec node ls
    """

    async def run(client: DSecClient) -> None:
        nodes = await client.nodes.list()
        if as_json:
            print_json(nodes)
            return
        rows = [
            (
                node.edge,
                node.kernel,
                str(node.cores),
                f"{size(node.memory_available)} of {size(node.memory)}",
                f"{size(node.scratch - node.scratch_used)} of {size(node.scratch)}",
                ", ".join(f"{count} {state}" for state, count in sorted(node.sandboxes.items())) or "none",
            )
            for node in nodes
        ]
        print_table(("edge", "kernel", "cores", "memory free", "scratch free", "sandboxes"), rows, empty="no nodes")

    with_client(run)
