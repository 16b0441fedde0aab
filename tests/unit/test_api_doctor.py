"""What the service makes of the features that an edge tells: names and costs, and advice only where the name alone gives it."""

from __future__ import annotations

import re
from pathlib import Path

from dsec.api.doctor import NEWER_KERNEL, YES, kernel_findings

PROBES = Path(__file__).resolve().parents[2] / "native" / "spawner" / "src"


def test_a_newer_kernel_is_advised_only_for_what_comes_with_one() -> None:
    lacking = {name: f"no {name}" for name in (*NEWER_KERNEL, "swap", "KVM", "AppArmor", "inotify limits", "cgroup controllers")}
    findings = {finding.feature: finding for finding in kernel_findings(lacking)}
    assert {name for name, finding in findings.items() if "newer kernel" in finding.todo} == NEWER_KERNEL
    assert findings["swap"].todo == ""
    assert {finding.state for finding in findings.values()} == {"degraded"}
    assert findings["swap"].cost == "no swap"


def test_what_is_there_needs_nothing() -> None:
    [finding] = kernel_findings({"kernel": YES})
    assert (finding.state, finding.cost, finding.todo) == ("ok", "", "")


def test_the_spawner_advises_a_kernel_for_the_same_features() -> None:
    sources = [PROBES / "doctor.rs", *(PROBES / "doctor").glob("*.rs")]
    feature = re.compile(r'Feature = Feature \{\s*name: "([^"]+)",\s*cost: "[^"]*",\s*todo: "([^"]+)"')
    advice = {name: todo for path in sources for name, todo in feature.findall(path.read_text())}
    assert [name for name in NEWER_KERNEL if not re.fullmatch(r"a newer kernel|a kernel from [0-9.]+", advice[name])] == []
