"""Free slots of a day."""

from dayplan.intervals import Interval, merge
from dayplan.slots import free_slots

__all__ = ["Interval", "free_slots", "merge"]
