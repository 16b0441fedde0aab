"""The last commands of a sandbox, for `dsec debug`: bounded in number and length."""

from __future__ import annotations

import msgspec

COMMANDS_MAX = 100
"""Commands kept of one sandbox."""
TEXT_MAX = 120
"""Characters kept of a command line."""


class CommandEntry(msgspec.Struct, kw_only=True):
    """One line of ``GET …/commands``. ``exit_code`` and ``duration_s`` are None while it runs."""

    exec_id: str
    command: str
    started_at: float
    exit_code: int | None = None
    duration_s: float | None = None
    timed_out: bool = False
    oom_killed: bool = False


def shorten(text: str) -> str:
    """A command line as it is kept."""
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…"
