"""One rollout, as a trainer would drive it: test, let the agent edit, test again, collect the diff."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from dsec.demo.environment import BASE, TOOLKIT, TOOLKIT_AT, WORKSPACE, WORKSPACE_AT
from libdsec import CommandResult, DSecContainerRunArgs, Sandbox

TEST = ("python3", "-m", "pytest", "-q")
DIFF = ("git", "-c", f"safe.directory={WORKSPACE_AT}", "diff")
ATTEMPTS = 8
"""The agent knows fewer edits than that."""
COMMAND_TIMEOUT_S = 120.0
TRUE = ("true",)
Changed = Callable[[], None]
"""Called whenever a stage changes."""
EXPECTED_EDIT = "+        if start - cursor >= minimum:"
"""The line that a diff must add: a rollout counts as passed for the right change only."""


class Stage(Enum):
    """Where a rollout stands, in order."""

    WAITING = "waiting"
    READY = "ready"
    TESTING = "testing"
    EDITING = "agent edits"
    PASSED = "passed"
    FAILED = "failed"


@dataclass
class Rollout:
    """What is known of one rollout."""

    index: int
    stage: Stage = Stage.WAITING
    sandbox: Sandbox | None = None
    created_after_s: float = 0.0
    """From the batch's request to this sandbox being told."""
    commands: int = 0
    overheads_s: list[float] = field(default_factory=list)
    """Of each command: its round trip less the time that it ran."""
    trues_s: list[float] = field(default_factory=list)
    """Round trips of ``true``."""
    attempts: int = 0
    diff: str = ""
    trouble: str = ""
    """Why it failed."""


def args() -> DSecContainerRunArgs:
    """The environment of every rollout."""
    return DSecContainerRunArgs(
        container_image=BASE,
        workspace=WORKSPACE,
        toolkits=(TOOLKIT,),
        workdir=WORKSPACE_AT,
        env={"PYTHONDONTWRITEBYTECODE": "1"},
        memory_limit_mb=1_024,
        labels={"demo": "rollout"},
    )


async def first_command(rollout: Rollout) -> None:
    """``true``, timed."""
    started = time.perf_counter()
    await _command(rollout, TRUE)
    rollout.trues_s.append(time.perf_counter() - started)


async def run(rollout: Rollout, changed: Changed) -> None:
    """Drives a rollout to its end. What goes wrong inside is told by ``trouble``."""

    def enter(stage: Stage) -> None:
        rollout.stage = stage
        changed()

    enter(Stage.TESTING)
    tested = await _command(rollout, TEST)
    if tested.exit_code == 0:
        rollout.trouble = "the test that must fail at first passed"
    while tested.exit_code == 1 and rollout.attempts < ATTEMPTS:
        enter(Stage.EDITING)
        rollout.attempts += 1
        edited = await _command(rollout, ("python3", f"{TOOLKIT_AT}/agent.py", "--seed", str(rollout.index)), stdin=tested.stdout_bytes)
        if edited.exit_code != 0:
            rollout.trouble = f"the agent gave up: {edited.stderr.strip()[-200:]}"
            break
        enter(Stage.TESTING)
        tested = await _command(rollout, TEST)
    rollout.diff = (await _command(rollout, DIFF)).stdout
    if not rollout.trouble and tested.exit_code != 0:
        rollout.trouble = f"the tests end with {tested.exit_code}: {(tested.stdout + tested.stderr).strip()[-200:]}"
    if not rollout.trouble and EXPECTED_EDIT not in rollout.diff.splitlines():
        rollout.trouble = "the tests pass, but the diff isn't the expected one"
    enter(Stage.FAILED if rollout.trouble else Stage.PASSED)


async def _command(rollout: Rollout, argv: Sequence[str], stdin: bytes | None = None) -> CommandResult:
    assert rollout.sandbox is not None
    started = time.perf_counter()
    result = await rollout.sandbox.exec(argv, stdin=stdin, timeout=COMMAND_TIMEOUT_S)
    rollout.overheads_s.append(time.perf_counter() - started - result.duration_s)
    rollout.commands += 1
    return result
