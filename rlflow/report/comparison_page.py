"""A comparison as one HTML file: curves as inline SVG, tables, no script."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlflow.report.comparison import Comparison, Duel, Measurement
from rlflow.report.comparison_text import count_text, value_text
from rlflow.report.lines import clock
from rlflow.report.metrics import label
from rlflow.report.page import filled, template
from rlflow.report.svg import CHART_STYLE, LEARNING_HEIGHT, Plane, drawing, line
from rlflow.storage.files import write_text

COLORS = ("#1f6fb2", "#d9730d", "#1c7c54", "#8e44ad", "#b3261e", "#6b7785", "#9a6700", "#0e7c86")
"""Of the runs, in their order."""
DASH = 24.0
"""Pixels of a dash and its gap. Later curves have shorter dashes, so that each shows where all coincide."""


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
    values = {"TITLE": escaped(" | ".join(comparison.names)), "CHARTS": CHART_STYLE, "BODY": "\n".join(parts)}
    write_text(out, filled(template("compare.html"), values), durable=False)


def chart(curves: Mapping[str, Sequence[Measurement]]) -> str:
    """The curves over steps as SVG, with an interval at each point where one was measured, and nothing between them."""
    points = [point for curve in curves.values() for point in curve]
    ends = [end for point in points for end in (point.low, point.high) if end is not None and math.isfinite(end)]
    values = [0.0, *(point.value for point in points), *ends]
    plane = Plane(max(point.step for point in points), min(values), max(values), LEARNING_HEIGHT)
    drawn, names = [plane.axes("")], []
    colored = [
        (name, curve, COLORS[place % len(COLORS)]) for place, (name, curve) in enumerate(curves.items()) if curve
    ]
    for place, (name, curve, color) in enumerate(colored):
        for point in curve:
            if point.low is not None and point.high is not None:
                x, top, bottom = plane.x(point.step), plane.y(point.high), plane.y(max(point.low, plane.low))
                span = f'x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"'
                drawn.append(f'<line class="interval" {span} stroke="{color}" stroke-width="6" opacity=".25"/>')
                drawn.append(f'<circle cx="{x:.1f}" cy="{plane.y(point.value):.1f}" r="3" fill="{color}"/>')
        dash = DASH * (len(colored) - place) / len(colored)
        look = f'fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{dash:g} {DASH - dash:g}"'
        drawn.append(line(plane, [point.step for point in curve], [point.value for point in curve], look))
        names.append((color, f"{name} {curve[-1].value:.3f}"))
    return drawing(LEARNING_HEIGHT, "the scores of the runs, by step", drawn, names)


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
