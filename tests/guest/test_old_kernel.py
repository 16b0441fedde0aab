"""The real service in a virtual machine: on a kernel below 6.12, with the pure cgroup v2 tree."""

from __future__ import annotations

import ast
import xml.etree.ElementTree as ElementTree

import pytest

from tests.conftest import require_root
from tests.guest import machine
from tests.guest.disks import INSIDE, code_disk, root_disk

# The first test waits for the disks (3 min, once) and for the guest.
pytestmark = pytest.mark.timeout(machine.LIFE_S + 420)


def inside_tests() -> list[str]:
    """Names of the tests that the guest is to run, as its source has them."""
    sources = (ast.parse(path.read_text()) for path in sorted(INSIDE.glob("test_*.py")))
    functions = (node for source in sources for node in source.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [function.name for function in functions if function.name.startswith("test_")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the guest left behind when it had run: what each file says."""
    require_root()
    home = tmp_path_factory.mktemp("guest")
    code_disk(home / "code.erofs")
    return machine.run(root_disk(), home / "code.erofs", home)


@pytest.fixture(scope="module")
def cases(results: dict[str, str]) -> dict[str, ElementTree.Element]:
    """The tests that ran in the guest, by name."""
    return {case.get("name", ""): case for case in ElementTree.fromstring(results["inside.xml"]).iter("testcase")}


def test_the_kernel_is_older_than_what_the_newer_ways_need(results: dict[str, str]) -> None:
    major, minor = (int(number) for number in results["kernel"].split(".")[:2])
    assert (major, minor) < (6, 7), "neither simple quotas (6.7) nor EROFS from files (6.12) nor overlays by descriptor (6.15)"


def test_the_only_control_groups_are_those_of_the_v2_tree(results: dict[str, str]) -> None:
    kinds = [line.split()[2] for line in results["mounts"].splitlines()]
    assert kinds.count("cgroup2") == 1 and "cgroup" not in kinds
    in_v1 = [line for line in results["cgroups"].splitlines() if not line.startswith("#") and line.split()[1] != "0"]
    assert not in_v1, "controllers bound to a hierarchy of v1"
    assert {"cpu", "memory", "pids"} <= set(results["controllers"].split())


def test_the_guest_ran_what_is_here_and_nothing_else(cases: dict[str, ElementTree.Element]) -> None:
    assert sorted(cases) == sorted(inside_tests())


@pytest.mark.parametrize("name", inside_tests())
def test_in_the_guest(cases: dict[str, ElementTree.Element], name: str) -> None:
    assert name in cases, "it didn't run"
    # A failure, an error or a reason for skipping.
    said = "\n".join(f"{child.tag}: {child.get('message')}\n{child.text or ''}" for child in cases[name] if child.tag != "system-out")
    assert not list(cases[name]), said
