"""Durations that callers give."""

from __future__ import annotations

from libdsec.errors import InvalidArgument


def check_timeout(timeout: float | None) -> None:
    """Raises InvalidArgument for what is no number of seconds. NaN above all: it would put the event loop's timers out of order."""
    if timeout is not None and (not isinstance(timeout, int | float) or timeout != timeout):
        raise InvalidArgument(f"{timeout!r} is no number of seconds", field="timeout")
