"""After a restart: what becomes of each sandbox, given what the journal says and what the kernel has. Pure."""

from __future__ import annotations

from typing import Literal

from dsec.edge.record import Record
from dsec.edge.spawner import KernelSandbox

Verdict = Literal["adopt", "finish_stop", "take_back", "fail", "lose", "keep", "release", "sweep"]
"""``adopt``: connect to its agent again. ``finish_stop``: the stop had begun. ``take_back``: its creation was cut off and nobody was told
of it. ``fail``: its agent died meanwhile. ``lose``: nothing of it is left. ``keep``: failed, its scratch is kept for inspection.
``release``: failed, and its scratch is gone. ``sweep``: the kernel has it, the journal doesn't know it."""


def judge(record: Record | None, kernel: KernelSandbox | None) -> Verdict:
    """What to do about one sandbox; at least one of the two sides knows it."""
    if record is None:
        return "sweep"
    if record.state == "stopping":
        return "finish_stop"
    if record.state in ("failed", "lost", "stopped"):
        return "keep" if kernel is not None and record.keep_on_failure else "release"
    if kernel is not None and kernel.alive and (record.state != "creating" or record.key is not None):
        # A creation that was cut off after its agent started is completed if it has a key: the caller who repeats the call finds it.
        return "adopt"
    if record.state == "creating":
        return "take_back"
    return "lose" if kernel is None else "fail"
