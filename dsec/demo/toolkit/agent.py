#!/usr/bin/env python3
"""A scripted agent: reads what a failing test run printed, makes one small edit, and says what it did.

Usage: ``agent.py --seed N < OUTPUT_OF_PYTEST``, in the repository. From the failures it finds the functions that the failing tests reach;
in those it tries, one a call, the edits that programmers get wrong most often (a comparison that leaves out its border, a sign). The seed
shuffles their order. An edit that didn't help is taken back by the next call. Exit status 1 if it has no idea left.

It needs nothing but Python and git, because it lives in a toolkit layer above whatever image a task brings.
"""

import argparse
import ast
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FAILED_TEST = re.compile(r"^FAILED (?P<file>\S+?)::(?P<test>\w+)", re.MULTILINE)
"""A line of pytest's short summary."""
SWAPS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
}
"""Operator node to its text and the text to try instead."""


@dataclass(frozen=True)
class Edit:
    """Replace ``old``, found on ``line`` (from 1) between two columns, by ``new``."""

    file: Path
    line: int
    begin: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.begin}: {self.old} -> {self.new}"

    def apply(self) -> None:
        lines = self.file.read_text().splitlines(keepends=True)
        text = lines[self.line - 1]
        lines[self.line - 1] = text[: self.begin] + text[self.begin : self.end].replace(self.old, self.new, 1) + text[self.end :]
        self.file.write_text("".join(lines))


def called_names(tree: ast.AST) -> set[str]:
    """Names of the functions that are called anywhere below a node."""
    return {call.func.id for call in ast.walk(tree) if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)}


def functions(files: list[Path]) -> dict[str, tuple[Path, ast.FunctionDef]]:
    """Every function of the given files by name."""
    trees = ((file, ast.parse(file.read_text())) for file in files)
    return {node.name: (file, node) for file, tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def reached(failures: list[tuple[Path, str]], known: dict[str, tuple[Path, ast.FunctionDef]]) -> list[tuple[Path, ast.FunctionDef]]:
    """The project's functions that the failing tests call, directly or through each other."""
    open_names = {name for file, test in failures for name in called_names(functions([file])[test][1])}
    found: dict[str, tuple[Path, ast.FunctionDef]] = {}
    while open_names:
        name = open_names.pop()
        if name in known and name not in found:
            found[name] = known[name]
            open_names |= called_names(known[name][1])
    return list(found.values())


def edits(file: Path, function: ast.FunctionDef) -> Iterator[Edit]:
    """Every edit that may be tried in a function."""
    operator: ast.AST
    for node in ast.walk(function):
        if isinstance(node, ast.Compare):
            left, operator, right = node.left, node.ops[0], node.comparators[0]
        elif isinstance(node, ast.BinOp):
            left, operator, right = node.left, node.op, node.right
        else:
            continue
        if type(operator) in SWAPS and left.end_lineno == right.lineno and left.end_col_offset is not None:
            old, new = SWAPS[type(operator)]
            yield Edit(file, right.lineno, left.end_col_offset, right.col_offset, old, new)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", type=Path, default=Path("/tmp/agent.json"), help="where it notes which edits it has tried")
    options = parser.parse_args()
    failures = [(Path(match["file"]), match["test"]) for match in FAILED_TEST.finditer(sys.stdin.read())]
    tried: list[str] = json.loads(options.memory.read_text()) if options.memory.exists() else []
    subprocess.run(["git", "checkout", "--quiet", "--", "."], check=True)
    sources = [path for path in sorted(Path().glob("*/*.py")) if path.parts[0] != "tests"]
    candidates = [edit for file, function in reached(failures, functions(sources)) for edit in edits(file, function)]
    random.Random(options.seed).shuffle(candidates)
    for edit in candidates:
        if str(edit) not in tried:
            edit.apply()
            options.memory.write_text(json.dumps([*tried, str(edit)]))
            print(edit)
            return 0
    print("no idea left", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
