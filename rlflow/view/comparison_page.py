"""A comparison as one HTML file: curves as inline SVG, tables, no script."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from rlflow.metrics.names import label
from rlflow.run.lines import clock
from rlflow.storage.files import write_text
from rlflow.view.comparing import Comparison, Duel, Measurement
from rlflow.view.comparison_text import count_text, value_text
from rlflow.view.page import filled, template

COLORS = ("#1f6fb2", "#d9730d", "#1c7c54", "#8e44ad", "#b3261e", "#6b7785", "#9a6700", "#0e7c86")
"""Of the runs, in their order; they are told apart by a label at the end of the line too."""
WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 44, 150, 14, 34


def write_comparison(comparison: Comparison, out: str | Path) -> None:
    """Writes the page."""
    escaped = html.escape
    score = label(comparison.score)
    parts = [f"<h1>{escaped(' against '.join(reversed(comparison.names)))}</h1>"]
    parts += [
        f'<p class="fault"><b>{escaped(name)}: {escaped(finding.title)}</b> {escaped(finding.text)}</p>'
        for name, found in comparison.faults.items()
        for finding in found
    ]
    for title, curves in ((f"{score}, evaluated", comparison.evaluated), (f"{score}, in training", comparison.trained)):
        if any(curves.values()):
            parts += [f"<h2>{escaped(title)}</h2>", chart(curves)]
    parts += _tables(comparison)
    values = {"TITLE": escaped(" | ".join(comparison.names)), "BODY": "\n".join(parts)}
    write_text(out, filled(template("compare.html"), values), durable=False)


def chart(curves: Mapping[str, Sequence[Measurement]]) -> str:
    """The curves over steps as SVG, with an interval at each point where one was measured, and nothing between them."""
    points = [point for curve in curves.values() for point in curve]
    ends = [end for point in points for end in (point.low, point.high) if end is not None and math.isfinite(end)]
    low, high = min([0.0, *(point.value for point in points), *ends]), max([*(point.value for point in points), *ends])
    high = high if high > low else low + 1
    first, last = min(point.step for point in points), max(point.step for point in points)

    def x(step: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / max(1, last - first), 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (min(max(value, low), high) - low) / (high - low), 1)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for tick in _ticks(low, high):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick)}" y2="{y(tick)}"/>')
        parts.append(f'<text class="axis" x="{LEFT - 6}" y="{y(tick) + 4}" text-anchor="end">{tick:g}</text>')
    for tick in _ticks(first, last, whole=True):
        place = f'x="{x(tick)}" y="{HEIGHT - BOTTOM + 16}"'
        parts.append(f'<text class="axis" {place} text-anchor="middle">{tick:g}</text>')
    parts.append(
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">step</text>'
    )
    drawn = [(name, curve, COLORS[place % len(COLORS)]) for place, (name, curve) in enumerate(curves.items()) if curve]
    for _, curve, color in drawn:
        for point in curve:
            if point.low is not None and point.high is not None:
                place = f'x1="{x(point.step)}" x2="{x(point.step)}" y1="{y(point.low)}" y2="{y(point.high)}"'
                parts.append(f'<line class="interval" {place} stroke="{color}" stroke-width="6" opacity=".25"/>')
                parts.append(f'<circle cx="{x(point.step)}" cy="{y(point.value)}" r="3" fill="{color}"/>')
        line = " ".join(f"{x(point.step)},{y(point.value)}" for point in curve)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
    heights = _apart([y(curve[-1].value) for _, curve, _ in drawn], 15)
    for (name, curve, color), height in zip(drawn, heights, strict=True):
        text = html.escape(f"{name[:18]} {curve[-1].value:.3f}")
        parts.append(f'<text x="{x(curve[-1].step) + 8}" y="{height + 4}" fill="{color}">{text}</text>')
    return "".join([*parts, "</svg>"])


def _tables(comparison: Comparison) -> list[str]:
    score, names = label(comparison.score), comparison.names
    parts = []
    if comparison.reached and comparison.target is not None:
        rows = [
            [one.run, *([str(one.point.step), clock(one.point.seconds), count_text(one.point.tokens), value_text(one.point)]
                        if one.point else ["not reached", "", "", ""])]
            for one in comparison.reached
        ]  # fmt: skip
        heads = ["run", "step", "time in steps", "trained tokens", score]
        parts += [f"<h2>To {html.escape(score)} {comparison.target:.3f}</h2>", _table(heads, rows)]
    for one in comparison.duels:
        parts.append(f"<h2>{html.escape(one.other)} against {html.escape(one.base)}, question by question</h2>")
        parts.append(f"<p>{html.escape(one.verdict)}.</p>{_examples(one)}")
    if comparison.configuration:
        rows = [[key, *values] for key, values in comparison.configuration]
        parts += ["<h2>Configuration keys that differ</h2>", _table(["key", *names], rows)]
    else:
        parts.append("<p>The configurations are the same.</p>")
    return parts


def _examples(one: Duel) -> str:
    rows = [["won", text] for text in one.won_examples] + [["lost", text] for text in one.lost_examples]
    note = f"<p>{one.differing} of the shared questions have the same id and another text.</p>" if one.differing else ""
    return note + (_table(["", "for example"], rows) if rows else "")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Some round numbers from low to high."""
    if high <= low:
        return [low]
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    step = max(1.0, math.ceil(step)) if whole else step
    return [round(tick * step, 10) for tick in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def _apart(heights: Sequence[float], least: float) -> list[float]:
    """The heights moved so that no two are closer than `least`, in their order from the top."""
    order = sorted(range(len(heights)), key=lambda place: heights[place])
    moved = list(heights)
    for above, place in pairwise(order):
        moved[place] = max(moved[place], moved[above] + least)
    return moved
