"""What is left of a day."""

from collections.abc import Iterable

from dayplan.intervals import Interval, merge


def free_slots(busy: Iterable[Interval], *, day: Interval, minimum: int) -> list[Interval]:
    """The gaps between busy intervals within the day that are at least ``minimum`` minutes long."""
    opening, closing = day
    cursor = opening
    slots: list[Interval] = []
    for start, end in merge(busy):
        if start - cursor > minimum:
            slots.append((cursor, start))
        cursor = max(cursor, end)
    if closing - cursor >= minimum:
        slots.append((cursor, closing))
    return slots
