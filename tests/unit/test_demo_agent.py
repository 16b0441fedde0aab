"""The demo's scripted agent repairs the demo's repository, whatever order it tries its edits in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsec.demo import environment, rollout

FAILURE = "FAILED tests/test_slots.py::test_a_gap_exactly_as_long_as_asked_counts - assert [(660, 720)] == []\n"
ATTEMPTS = rollout.ATTEMPTS


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    directory = tmp_path / "repository"
    directory.mkdir()
    environment.make_repository(directory)
    return directory


def run_tests(repository: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=repository, env=environment, capture_output=True, text=True)


def agent(repository: Path, memory: Path, output: str, seed: int) -> subprocess.CompletedProcess[str]:
    script = environment.HERE / "toolkit" / "agent.py"
    command = [sys.executable, str(script), "--seed", str(seed), "--memory", str(memory)]
    return subprocess.run(command, cwd=repository, input=output, capture_output=True, text=True)


def test_the_repository_has_one_failing_test_at_first(repository: Path) -> None:
    result = run_tests(repository)
    assert result.returncode == 1
    assert "1 failed" in result.stdout


@pytest.mark.parametrize("seed", range(4))
def test_the_agent_repairs_it_within_the_attempts_of_a_rollout(repository: Path, tmp_path: Path, seed: int) -> None:
    tested = run_tests(repository)
    for _ in range(ATTEMPTS):
        if tested.returncode == 0:
            break
        assert agent(repository, tmp_path / "memory", tested.stdout, seed).returncode == 0
        tested = run_tests(repository)
    diff = subprocess.run(["git", "diff"], cwd=repository, capture_output=True, text=True, check=True).stdout
    assert tested.returncode == 0
    assert rollout.EXPECTED_EDIT in diff.splitlines()


def test_the_agent_says_when_it_has_no_idea_left(repository: Path, tmp_path: Path) -> None:
    results = [agent(repository, tmp_path / "memory", FAILURE, 0) for _ in range(ATTEMPTS)]
    assert results[-1].returncode == 1
    assert "no idea left" in results[-1].stderr


def test_the_repository_is_the_same_whoever_makes_it(repository: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    environment.make_repository(other)
    heads = [subprocess.run(["git", "rev-parse", "HEAD"], cwd=path, capture_output=True, check=True).stdout for path in (repository, other)]
    assert heads[0] == heads[1]
