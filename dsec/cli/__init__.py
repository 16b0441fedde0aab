"""The ``dsec`` command: a thin layer over the SDK for everything that the service does, and the starting and stopping of the service
itself.

Modules are imported when their command runs, so that ``dsec --help`` answers at once: at the top of these files stand only the standard
library and typer.
"""

from __future__ import annotations

import typer

from dsec.cli import commands, debug, doctor, files, images, keys, nodes, sandboxes, shell, top, up

app = typer.Typer(
    name="dsec",
    help="Sandboxes for training agents. Start with: sudo dsec up",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (up, doctor, sandboxes, commands, shell, files, top, debug):
    module.register(app)
app.add_typer(images.app, name="image")
app.add_typer(keys.app, name="key")
app.add_typer(nodes.app, name="node")


def main() -> None:
    """The entry point of the ``dsec`` program."""
    app()
