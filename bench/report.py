"""A Markdown report of several results, with one plot: how far each figure is from its floor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from bench.claim import Claim, Comparison, Result

BAR_HEIGHT, ROW_HEIGHT, LABEL_WIDTH, PLOT_WIDTH = 14, 24, 260, 480
"""Pixels."""
SCALE_LIMIT = 8.0
"""The plot ends at this many times the floor; longer bars are cut there and carry their number."""


def write(file: Path, results: Sequence[Result], claims: Mapping[str, Claim]) -> None:
    """Writes ``file`` and, beside it, the plot ``<stem>.svg``."""
    plot = file.with_suffix(".svg")
    plot.write_text(_svg(results))
    file.write_text(_markdown(results, claims, plot.name))


def headroom(value: float, comparison: Comparison, bound: float) -> float:
    """How many times better than its floor a figure is: 1 is just reached, below 1 missed. Where nothing is allowed, nothing is 1."""
    if comparison == ">=":
        return value / bound
    if value <= 0:
        return math.inf if bound > 0 else 1.0
    return bound / value


def _markdown(results: Sequence[Result], claims: Mapping[str, Claim], plot: str) -> str:
    machine = results[0].machine
    lines = [
        "# Benchmarks",
        "",
        f"Linux {machine['kernel']}, {machine['cores']} cores, {machine['memory_gb']} GB. Medians; ours and the peer's were run in turn.",
        "",
        "| bench | figure | measured | floor | |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        for name, value in result.figures.items():
            if isinstance(value, bool):
                continue
            floor = result.floors.get(name)
            verdict = "" if floor is None else "reached" if headroom(value, *floor) >= 1 else "**missed**"
            bound = "" if floor is None else f"{floor[0]} {floor[1]:g}"
            lines.append(f"| {result.bench} | {name} | {value:g} | {bound} | {verdict} |")
    lines += ["", f"![how far each figure is from its floor]({plot})", ""]
    for result in results:
        lines += [
            f"## {result.bench}",
            "",
            claims[result.bench].what + ("" if result.ok else f" — **not ok**: {result.detail.get('not_ok')}"),
            "",
        ]
        lines += [f"- {side}: {values}" for side, values in result.detail.items() if side in ("ours", "peer") and values]
        lines.append("")
    return "\n".join(lines)


def _svg(results: Sequence[Result]) -> str:
    bars = [
        (f"{result.bench} {name}", headroom(float(result.figures[name]), *floor))
        for result in results
        for name, floor in result.floors.items()
        if name in result.figures
    ]
    width, height = LABEL_WIDTH + PLOT_WIDTH + 80, (len(bars) + 2) * ROW_HEIGHT
    unit = PLOT_WIDTH / SCALE_LIMIT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LABEL_WIDTH}" y="16">times better than the floor (line: the floor)</text>',
    ]
    for row, (label, times) in enumerate(bars, start=1):
        top = row * ROW_HEIGHT
        length = unit * min(times, SCALE_LIMIT)
        color = "#2a7" if times >= 1 else "#c33"
        shown = "none at all" if math.isinf(times) else f"{times:.2f}x"
        parts += [
            f'<text x="{LABEL_WIDTH - 8}" y="{top + 12}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{LABEL_WIDTH}" y="{top}" width="{length:.1f}" height="{BAR_HEIGHT}" fill="{color}"/>',
            f'<text x="{LABEL_WIDTH + length + 6:.1f}" y="{top + 12}">{shown}</text>',
        ]
    x = LABEL_WIDTH + unit
    parts.append(
        f'<line x1="{x:.1f}" y1="{ROW_HEIGHT - 4}" x2="{x:.1f}" y2="{height - ROW_HEIGHT}" stroke="black" stroke-dasharray="3,2"/>'
    )
    return "\n".join([*parts, "</svg>", ""])
