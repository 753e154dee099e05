"""The curves of a run as SVG text, without a drawing library: learning with its intervals, seconds per step and phase."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from rlflow.report.curves import (
    CURVE_COLORS,
    PHASE_COLORS,
    Bar,
    Records,
    bars,
    intervals,
    series,
    top_without_peaks,
    trailing_mean,
)
from rlflow.report.metrics import label

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 860, 46, 16, 10, 26
LEARNING_HEIGHT, TIME_HEIGHT = 300, 130
MOST_POINTS = 400  # of a curve: more than a screen has pixels for
CHART_STYLE = """
svg{width:100%;height:auto;display:block;overflow:visible}svg text{font:12px system-ui,sans-serif}.grid{stroke:var(--line)}
.legend{list-style:none;margin:.2rem 0 .8rem;padding:0 0 0 2.6rem;display:flex;flex-wrap:wrap;gap:0 1.2rem;font-size:.85em}
.legend i{display:inline-block;width:.7em;height:.7em;border-radius:2px;margin-right:.4em}
@media(max-width:600px){svg text{font-size:24px}svg polyline{stroke-width:4}.legend{padding-left:0}}
"""
"""Of a page with charts: on a phone their letters are as large as on a wide screen."""
Legend = Sequence[tuple[str, str]]
"""(color, name) of what a chart shows."""


class Plane:
    """From steps and values to places in the drawing."""

    def __init__(self, last_step: float, low: float, high: float, height: int) -> None:
        self.last_step, self.low, self.high, self.height = (
            max(last_step, 1.0),
            low,
            high if high > low else low + 1.0,
            height,
        )

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / self.last_step

    def y(self, value: float) -> float:
        share = (min(value, self.high) - self.low) / (self.high - self.low)
        return self.height - BOTTOM - (self.height - TOP - BOTTOM) * share

    def axes(self, unit: str) -> str:
        """Grid lines with their values, and whole steps below."""
        lines = []
        for value in ticks(self.low, self.high, 5):
            y = self.y(value)
            lines.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            lines.append(
                f'<text class="axis" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}{unit}</text>'
            )
        for step in ticks(0, self.last_step, 8, whole=True):
            lines.append(
                f'<text class="axis" x="{self.x(step):.1f}" y="{self.height - 8}" text-anchor="middle">{step:.0f}</text>'
            )
        return "".join(lines)


def ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """At most `most` + 1 round numbers from low to high, 1, 2 or 5 times a power of ten apart."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    rough = span / most
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    size = max(size, 1.0) if whole else size
    first = math.ceil(low / size - 1e-9)
    return [number * size for number in range(first, math.floor(high / size + 1e-9) + 1)]


def learning_curves(records: Records, score: str) -> str:
    """Reward and score of training, the score of evaluations with its intervals, named below with their last values."""
    rewards, points = series(records, "train/reward"), intervals(records, score)
    trained = series(records, f"train/{score}")
    if trained == rewards:
        trained = ([], [])
    # An interval may be infinite: one task of an unbounded score. It is drawn to the edge.
    values = [*rewards[1], *trained[1], *(point[1] for point in points)]
    if not values:
        return ""
    last = max([*rewards[0], *(point[0] for point in points)], default=1)
    plane = Plane(last, min(0.0, *values), max(1.0, *values), LEARNING_HEIGHT)
    drawn, names = [plane.axes("")], []
    for (steps, found), kind, name in ((rewards, "reward", "reward"), (trained, "trained", label(score))):
        if found:
            smooth = trailing_mean(found)
            drawn += [line(plane, steps, found, f'class="{kind} faint"'), line(plane, steps, smooth, f'class="{kind}"')]
            names.append((CURVE_COLORS[kind], f"{name} (training) {smooth[-1]:.2f}"))
    if points:
        drawn.append(line(plane, [point[0] for point in points], [point[1] for point in points], 'class="evaluated"'))
        for step, value, low, high in points:
            x, top, bottom = plane.x(step), plane.y(min(high, plane.high)), plane.y(max(low, plane.low))
            told = f"step {step:.0f}: {label(score)} {value:.3f} [{low:.3f}, {high:.3f}]"
            drawn.append(
                f'<g><title>{markup(told)}</title><line class="interval" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>'
                f'<circle class="evaluated" cx="{x:.1f}" cy="{plane.y(value):.1f}" r="4"/></g>'
            )
        names.append((CURVE_COLORS["evaluated"], f"{label(score)} (validation) {points[-1][1]:.2f}"))
    return drawing(LEARNING_HEIGHT, "what the policy learned, by step", drawn, names)


def time_bars(records: Records) -> str:
    """Seconds per step, by phase."""
    drawn_bars, shares = bars(records)
    if not drawn_bars:
        return ""
    heights = [sum(bar.seconds.values()) for bar in drawn_bars]
    plane = Plane(drawn_bars[-1].last, 0.0, top_without_peaks(heights), TIME_HEIGHT)
    drawn = [plane.axes(" s"), *(_bar(plane, bar) for bar in drawn_bars)]
    names = [(PHASE_COLORS[phase], f"{phase} {share:.0%}") for phase, share in shares.items()]
    return drawing(TIME_HEIGHT, "seconds per step, by phase", drawn, names)


def _bar(plane: Plane, bar: Bar) -> str:
    left, right, base, parts = plane.x(bar.first - 0.9), plane.x(bar.last - 0.1), 0.0, []
    for phase, seconds in bar.seconds.items():
        low, high = plane.y(base), plane.y(base + seconds)
        parts.append(
            f'<rect x="{left:.1f}" y="{high:.1f}" width="{right - left:.1f}" height="{low - high:.1f}" fill="{PHASE_COLORS[phase]}"/>'
        )
        base += seconds
    steps = f"step {bar.first}" if bar.first == bar.last else f"steps {bar.first} to {bar.last}, mean"
    told = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in bar.seconds.items())
    return f"<g><title>{markup(f'{steps}: {told}')}</title>{''.join(parts)}</g>"


def line(plane: Plane, steps: Sequence[float], values: Sequence[float], look: str) -> str:
    """A curve. look: attributes of the element."""
    stride = max(1, math.ceil(len(steps) / MOST_POINTS))
    kept = [*range(0, len(steps), stride)]
    kept += [] if not steps or kept[-1] == len(steps) - 1 else [len(steps) - 1]
    points = " ".join(f"{plane.x(steps[at]):.1f},{plane.y(values[at]):.1f}" for at in kept)
    return f'<polyline {look} points="{points}"/>'


def drawing(height: int, what: str, parts: Sequence[str], legend: Legend) -> str:
    """The whole of it, and its legend below. what: in words, for those who do not see it."""
    names = "".join(f'<li><i style="background:{color}"></i>{markup(name)}</li>' for color, name in legend)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{markup(what)}">{"".join(parts)}</svg>'
        f'<ul class="legend">{names}</ul>'
    )


def markup(text: str) -> str:
    """The text escaped for HTML, quotes too; what is no text at all (control characters, halves of a cut emoji) becomes a
    replacement character."""
    clean = "".join(one if one in "\n\t" or (one.isprintable() and not 0xD800 <= ord(one) < 0xE000) else "\ufffd" for one in text)
    return escape(clean, quote=True)
