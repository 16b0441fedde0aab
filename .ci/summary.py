"""Counts what pytest's JUnit files say: a test that was skipped has not passed.

Usage: ``summary.py RESULTS ALLOWED SUITE...``. Exit status 1 if a suite left no result or has no test, or if a test failed or was skipped
without being named, with a reason, in the ALLOWED file.
"""

from __future__ import annotations

import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path


def outcome(case: ElementTree.Element) -> str:
    """One of passed, failed, skipped: the worst that the test case reports."""
    tags = {child.tag for child in case}
    if tags & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in tags else "passed"


def test_name(case: ElementTree.Element) -> str:
    """``tests/unit/test_x.py::test_y``, as pytest names it on its command line."""
    return f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name', '')}"


def main(results: Path, allowed_file: Path, suites: list[str]) -> int:
    allowed: dict[str, str] = tomllib.loads(allowed_file.read_text())
    total: Counter[str] = Counter()
    bad = False
    print(f"{'suite':<10} {'passed':>7} {'failed':>7} {'skipped':>8}")
    for suite in suites:
        file = results / f"{suite}.xml"
        cases = list(ElementTree.parse(file).iter("testcase")) if file.exists() else []
        counts = Counter(outcome(case) for case in cases)
        total += counts
        print(f"{suite:<10} {counts['passed']:>7} {counts['failed']:>7} {counts['skipped']:>8}")
        if not cases:
            print("  no result: the suite is empty or was cut off")
            bad = True
        for case in cases:
            name = test_name(case)
            if outcome(case) == "failed":
                print(f"  failed: {name}")
                bad = True
            elif outcome(case) == "skipped":
                reason = allowed.get(name)
                print(f"  skipped: {name}: {reason or 'NOT ALLOWED'}")
                bad = bad or reason is None
    print(f"{'all':<10} {total['passed']:>7} {total['failed']:>7} {total['skipped']:>8}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
