"""Intervals of minutes since midnight."""

from collections.abc import Iterable

Interval = tuple[int, int]
"""Start and end; the end isn't included."""


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The same minutes in as few intervals as possible, in order. Intervals that overlap or touch become one."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
