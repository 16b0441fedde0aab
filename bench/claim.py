"""What a benchmark promises and what it hands back."""

from __future__ import annotations

import math
import operator
import os
import platform
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from dsec.demo import footprint

Comparison = Literal[">=", "<=", "=="]
Floors = Mapping[str, tuple[Comparison, float]]
"""Figure name to the comparison that it must satisfy and the bound."""
Detail = Mapping[str, object]
"""Raw numbers by name, JSON-serializable."""

ROUNDS = 3
"""Figures are medians of this many rounds, ours and the peer's in turn."""
_OPERATORS: dict[Comparison, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le, "==": operator.eq}


class WrongAnswer(Exception):
    """A command, ours or the peer's, didn't do what was asked: there is nothing to measure."""


@dataclass(frozen=True)
class Setting:
    """What every benchmark is given."""

    root_tar: Path
    """The root filesystem that both sides run."""
    quick: bool
    """A smoke run: small counts, one round, figures that prove nothing."""
    parent: Path
    """Where instances and peers make their directories: on a real disk."""

    @property
    def rounds(self) -> int:
        return 1 if self.quick else ROUNDS


@dataclass
class Outcome:
    """What a benchmark measured."""

    figures: dict[str, float]
    detail: dict[str, object] = field(default_factory=dict)
    strange: list[str] = field(default_factory=list)
    """Why the run can't count, whatever the figures say: a peer far from its known speed, say."""


@dataclass(frozen=True)
class Claim:
    """A benchmark: its name, what it shows, and the floors of its figures."""

    name: str
    what: str
    floors: Floors
    measure: Callable[[Setting], Awaitable[Outcome]]


class Result(msgspec.Struct, kw_only=True):
    """The JSON line."""

    bench: str
    figures: dict[str, float | bool]
    floors: dict[str, tuple[Comparison, float]]
    ok: bool
    detail: dict[str, object]
    machine: dict[str, object]


def judge(claim: Claim, outcome: Outcome, setting: Setting) -> Result:
    """The result line: ``ok`` if every floor is reached and nothing was strange. Pure but for the facts about this machine."""
    missed = missed_floors(claim.floors, outcome.figures)
    figures: dict[str, float | bool] = {name: round(value, 4) for name, value in outcome.figures.items()}
    if setting.quick:
        figures["quick"] = True
    detail = {**outcome.detail, "runs": setting.rounds}
    if missed or outcome.strange:
        detail["not_ok"] = missed + outcome.strange
    return Result(
        bench=claim.name,
        figures=figures,
        floors=dict(claim.floors),
        ok=not missed and not outcome.strange,
        detail=detail,
        machine={"kernel": platform.release(), "cores": os.cpu_count(), "memory_gb": round(footprint.memory_total() / 2**30)},
    )


def missed_floors(floors: Floors, figures: Mapping[str, float]) -> list[str]:
    """The floors that aren't reached, in words."""
    return [
        f"{name} is {figures.get(name, 'missing')}, must be {comparison} {bound}"
        for name, (comparison, bound) in floors.items()
        if name not in figures or not _OPERATORS[comparison](figures[name], bound)
    ]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def percentile(values: Sequence[float], rank: float) -> float:
    """The smallest value that at least ``rank`` (0 to 1) of all don't exceed."""
    return sorted(values)[max(0, math.ceil(rank * len(values)) - 1)]


def rounded(values: Sequence[float], digits: int = 2) -> list[float]:
    return [round(value, digits) for value in values]
