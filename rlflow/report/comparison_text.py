"""A comparison for the terminal: 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rlflow.report.comparison import Comparison, Measurement
from rlflow.report.lines import clock, sparkline
from rlflow.report.metrics import label

WIDTH = 80
VALUE_WIDTH = 22


def comparison_text(comparison: Comparison) -> str:
    """The comparison in lines of at most 80 characters, but for names that are longer themselves."""
    parts = [
        *_faults(comparison),
        *_scores(comparison),
        *_reached(comparison),
        *_duels(comparison),
        *_configuration(comparison),
    ]
    return "\n".join(parts)


def value_text(point: Measurement) -> str:
    """A value with its interval, where there is one."""
    band = f" [{point.low:.3f}, {point.high:.3f}]" if point.low is not None and point.high is not None else ""
    return f"{point.value:.3f}{band}"


def count_text(number: float) -> str:
    """A large count in thousands or millions."""
    return f"{number / 1e6:.1f}M" if number >= 1e6 else f"{number / 1e3:.0f}k" if number >= 1e3 else f"{number:.0f}"


def _scores(comparison: Comparison) -> list[str]:
    wide = _width(comparison.names)
    lines = [f"{label(comparison.score)}, evaluated: first -> last [95% interval]"]
    for name in comparison.names:
        points = comparison.evaluated[name]
        if points:
            spark = sparkline([point.value for point in points], width=12) if len(points) > 2 else ""
            lines.append(
                f"  {_cut(name, wide):<{wide}}  {points[0].value:.3f} {spark} {value_text(points[-1])} at {points[-1].step}"
            )
        else:
            lines.append(f"  {_cut(name, wide):<{wide}}  no evaluation in metrics.jsonl")
    if any(len(points) > 1 for points in comparison.trained.values()):
        lines.append(f"{label(comparison.score)}, in training: first -> last step")
        for name in comparison.names:
            points = comparison.trained[name]
            if points:
                spark = sparkline([point.value for point in points], width=24)
                ends = f"{points[0].value:.3f} {spark} {points[-1].value:.3f}"
                lines.append(f"  {_cut(name, wide):<{wide}}  {ends} at {points[-1].step}, {clock(points[-1].seconds)}")
    return lines


def _reached(comparison: Comparison) -> list[str]:
    if not comparison.reached or comparison.target is None:
        return []
    wide = _width(comparison.names)
    lines = ["", f"to {label(comparison.score)} {comparison.target:.3f}: steps, seconds in steps, trained tokens"]
    for reached in comparison.reached:
        point = reached.point
        told = (
            f"step {point.step}, {clock(point.seconds)}, {count_text(point.tokens)} tokens" if point else "not reached"
        )
        lines.append(f"  {_cut(reached.run, wide):<{wide}}  {told}")
    return lines


def _duels(comparison: Comparison) -> list[str]:
    lines = []
    for one in comparison.duels:
        lines += ["", f"questions of the last evaluation, {one.other} against {one.base}"]
        lines += textwrap.wrap(one.verdict, WIDTH, initial_indent="  ", subsequent_indent="  ")
        if one.differing:
            lines.append(f"  ! {one.differing} of them have the same id and another text")
        for word, examples in (("won", one.won_examples), ("lost", one.lost_examples)):
            lines += [_cut(f"  {word:<5}{' '.join(example.split())}", WIDTH) for example in examples]
    return lines


def _configuration(comparison: Comparison) -> list[str]:
    if not comparison.configuration:
        return ["", "the configurations are the same"]
    lines = ["", f"configuration keys that differ: {', '.join(comparison.names)}"]
    room = (WIDTH - 2) // len(comparison.names)
    for key, values in comparison.configuration:
        told = "  |  ".join(_cut(value, max(VALUE_WIDTH, room)) for value in values)
        line = f"  {key:<34} {told}"
        lines += (
            [line] if len(line) <= WIDTH else [f"  {key}", *(f"      {_cut(value, WIDTH - 6)}" for value in values)]
        )
    return lines


def _faults(comparison: Comparison) -> list[str]:
    lines = []
    for name, found in comparison.faults.items():
        for finding in found:
            told = f"! {name}: {finding.title}. {finding.text}"
            lines += textwrap.wrap(told, WIDTH, subsequent_indent="  ")
    return [*lines, ""] if lines else []


def _width(names: Sequence[str]) -> int:
    return min(24, max(map(len, names)))


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
