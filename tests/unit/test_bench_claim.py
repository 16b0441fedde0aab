"""What a benchmark's result says, from figures alone."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from bench import memory, peer, report
from bench.claim import Claim, Outcome, Setting, WrongAnswer, judge, missed_floors, percentile


async def _unused(setting: Setting) -> Outcome:
    raise AssertionError("not measured here")


CLAIM = Claim("example", "an example", {"rate_per_s": (">=", 220), "growth_mb": ("<=", 50), "leftovers": ("==", 0)}, _unused)
GOOD = {"rate_per_s": 220.0, "growth_mb": 50.0, "leftovers": 0.0}


def setting(quick: bool = False) -> Setting:
    return Setting(root_tar=Path("/unused"), quick=quick, parent=Path("/unused"))


def test_a_figure_at_its_floor_is_ok() -> None:
    assert judge(CLAIM, Outcome(dict(GOOD)), setting()).ok


@pytest.mark.parametrize("name,value", [("rate_per_s", 219.9), ("growth_mb", 50.1), ("leftovers", 1.0)])
def test_each_missed_floor_is_named(name: str, value: float) -> None:
    result = judge(CLAIM, Outcome({**GOOD, name: value}), setting())
    assert not result.ok
    assert [name in complaint for complaint in missed_floors(CLAIM.floors, {**GOOD, name: value})] == [True]


def test_a_figure_that_was_not_measured_is_missed() -> None:
    assert missed_floors(CLAIM.floors, {"growth_mb": 0, "leftovers": 0}) == ["rate_per_s is missing, must be >= 220"]


def test_a_strange_peer_makes_good_figures_worthless() -> None:
    assert not judge(CLAIM, Outcome(dict(GOOD), strange=peer.strange("docker run", 500.0, peer.RUN_MS)), setting()).ok


@pytest.mark.parametrize("measured,is_strange", [(103.5, False), (414.0, False), (103.0, True), (415.0, True)])
def test_a_peer_counts_between_half_and_twice_its_known_figure(measured: float, is_strange: bool) -> None:
    assert bool(peer.strange("docker run", measured, peer.RUN_MS)) is is_strange


def test_a_quick_run_says_so_among_its_figures() -> None:
    assert judge(CLAIM, Outcome(dict(GOOD)), setting(quick=True)).figures["quick"] is True


def test_the_line_is_json_with_the_fields_of_the_contract() -> None:
    line = msgspec.json.decode(msgspec.json.encode(judge(CLAIM, Outcome(dict(GOOD), detail={"ours": {}, "peer": {}}), setting())))
    assert set(line) == {"bench", "figures", "floors", "ok", "detail", "machine"}
    assert line["floors"]["rate_per_s"] == [">=", 220]
    assert set(line["machine"]) == {"kernel", "cores", "memory_gb"}


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(number) for number in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1), percentile([7.0], 0.99)) == (50, 99, 100, 7)


def test_the_report_shows_missed_figures_and_writes_its_plot(tmp_path: Path) -> None:
    result = judge(CLAIM, Outcome({**GOOD, "growth_mb": 100.0}), setting())
    report.write(tmp_path / "report.md", [result], {"example": CLAIM})
    assert "| example | growth_mb | 100 | <= 50 | **missed** |" in (tmp_path / "report.md").read_text()
    assert "example growth_mb" in (tmp_path / "report.svg").read_text()


async def test_memory_is_touched_before_a_measurement_but_not_in_a_smoke_run(monkeypatch: pytest.MonkeyPatch) -> None:
    await memory.warm(setting(), 8)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    await memory.warm(setting(quick=True), 8)
    with pytest.raises(WrongAnswer):
        await memory.warm(setting(), 8)
