"""The table of states."""

from __future__ import annotations

from typing import get_args

import pytest

from dsec.edge.states import CALLS, TRANSITIONS, IllegalTransition, Step, check_transition, takes
from libdsec.schema import State

STATES: tuple[State, ...] = get_args(State)


def test_every_state_has_a_row_in_both_tables() -> None:
    assert set(TRANSITIONS) == set(CALLS) == set(STATES)


@pytest.mark.parametrize("state", STATES)
def test_stop_is_taken_in_every_state(state: State) -> None:
    assert takes(state, "stop")


@pytest.mark.parametrize("state", [state for state in STATES if state not in ("stopped", "stopping")])
def test_stop_leads_from_every_state_to_stopped(state: State) -> None:
    check_transition("sb", state, "stopping", "stop")
    check_transition("sb", "stopping", "stopped", "stop")


def test_nothing_follows_stopped() -> None:
    assert TRANSITIONS["stopped"] == {}


@pytest.mark.parametrize("state", [state for state in STATES if state != "running"])
def test_commands_are_taken_only_by_a_running_sandbox(state: State) -> None:
    assert takes("running", "use")
    assert not takes(state, "use")


def test_a_failed_sandbox_can_still_be_inspected() -> None:
    assert takes("failed", "inspect")
    assert takes("failed", "info")


def test_an_illegal_transition_tells_the_history() -> None:
    history = [Step(1.0, "creating", "running", "create"), Step(2.0, "running", "stopping", "stop")]
    story = r"stop may not turn stopping into running; history: creating->running\(create\) running->stopping\(stop\)"
    with pytest.raises(IllegalTransition, match=story):
        check_transition("sb-x", "stopping", "running", "stop", history)


def test_who_may_not_write_a_state_is_refused_though_the_transition_exists() -> None:
    check_transition("sb", "running", "failed", "watch")
    with pytest.raises(IllegalTransition):
        check_transition("sb", "running", "failed", "stop")
