"""The last commands of a sandbox, for `dsec debug`: bounded in number and length."""

from __future__ import annotations

COMMANDS_MAX = 100
"""Commands kept of one sandbox."""
TEXT_MAX = 120
"""Characters kept of a command line."""


def shorten(text: str) -> str:
    """A command line as it is kept."""
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…"
