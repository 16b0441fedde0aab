"""The states of a sandbox: which follow which, who writes them, and which calls each takes. Pure: values in, values out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from libdsec.schema import State

Writer = Literal["create", "stop", "pause", "resume", "watch", "adopt"]
"""Who writes a state: the create path, the stop path, pause, resume, the watch over agents (channel and spawner events), adoption after a
restart."""

Call = Literal["info", "change", "use", "inspect", "stop", "pause", "resume"]
"""What a request wants: ``info`` reads what the edge knows, ``change`` sets TTLs, labels and rules, ``use`` needs the agent inside
(commands, files, ports), ``inspect`` needs only what is left on disk (diff)."""

TRANSITIONS: dict[State, dict[State, frozenset[Writer]]] = {
    "creating": {
        "running": frozenset({"create", "adopt"}),
        "failed": frozenset({"create", "watch", "adopt"}),
        "lost": frozenset({"adopt"}),
        "stopping": frozenset({"stop"}),
    },
    "running": {
        "pausing": frozenset({"pause"}),
        "failed": frozenset({"watch", "adopt"}),
        "lost": frozenset({"watch", "adopt"}),
        "stopping": frozenset({"stop"}),
    },
    "pausing": {
        "paused": frozenset({"pause"}),
        "running": frozenset({"pause"}),
        "failed": frozenset({"watch", "adopt"}),
        "lost": frozenset({"watch", "adopt"}),
        "stopping": frozenset({"stop"}),
    },
    "paused": {
        "resuming": frozenset({"resume"}),
        "failed": frozenset({"watch", "adopt"}),
        "lost": frozenset({"watch", "adopt"}),
        "stopping": frozenset({"stop"}),
    },
    "resuming": {
        "running": frozenset({"resume"}),
        "paused": frozenset({"resume"}),
        "failed": frozenset({"watch", "adopt"}),
        "lost": frozenset({"watch", "adopt"}),
        "stopping": frozenset({"stop"}),
    },
    "stopping": {"stopped": frozenset({"stop"})},
    "failed": {"stopping": frozenset({"stop"})},
    "lost": {"stopping": frozenset({"stop"})},
    "stopped": {},
}

CALLS: dict[State, frozenset[Call]] = {
    "creating": frozenset({"info", "stop"}),
    "running": frozenset({"info", "change", "use", "inspect", "stop", "pause", "resume"}),
    "pausing": frozenset({"info", "change", "inspect", "stop", "pause", "resume"}),
    "paused": frozenset({"info", "change", "inspect", "stop", "pause", "resume"}),
    "resuming": frozenset({"info", "change", "inspect", "stop", "pause", "resume"}),
    "stopping": frozenset({"info", "stop"}),
    "stopped": frozenset({"stop"}),
    "failed": frozenset({"info", "inspect", "stop"}),
    "lost": frozenset({"info", "stop"}),
}

ENDED: frozenset[State] = frozenset({"stopped", "failed", "lost"})
"""States in which nothing runs any more."""


class Step(NamedTuple):
    """One transition that happened. ``at`` is in Unix seconds."""

    at: float
    old: State
    new: State
    writer: Writer


class IllegalTransition(Exception):
    """A state was about to be written that can't follow the present one, or by somebody who may not write it. Carries the history."""

    def __init__(self, sandbox: str, old: State, new: State, writer: Writer, history: Sequence[Step]) -> None:
        story = " ".join(f"{step.old}->{step.new}({step.writer})" for step in history) or "none"
        super().__init__(f"{sandbox}: {writer} may not turn {old} into {new}; history: {story}")
        self.sandbox = sandbox
        self.old = old
        self.new = new
        self.writer = writer
        self.history = tuple(history)


def check_transition(sandbox: str, old: State, new: State, writer: Writer, history: Sequence[Step] = ()) -> None:
    """Raises :class:`IllegalTransition` unless ``writer`` may turn ``old`` into ``new``."""
    if writer not in TRANSITIONS[old].get(new, ()):
        raise IllegalTransition(sandbox, old, new, writer, history)


def takes(state: State, call: Call) -> bool:
    """Whether a sandbox in ``state`` takes ``call``."""
    return call in CALLS[state]
