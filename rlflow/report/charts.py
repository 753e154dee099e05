"""The picture of a run: what it learned and where the time went, as a PNG that can be shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlflow.errors import needing
from rlflow.report.curves import (
    CURVE_COLORS,
    PHASE_COLORS,
    bars,
    drawn_score,
    intervals,
    run_seconds,
    series,
    top_without_peaks,
    trailing_mean,
)
from rlflow.report.metrics import Metrics, label
from rlflow.report.sinks import read_metrics
from rlflow.storage.files import replacing

_INK, _QUIET, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
_BLUE, _ORANGE = CURVE_COLORS["evaluated"], CURVE_COLORS["reward"]
_LABEL_GAP = 0.068  # of the axis height: two labels closer than this would touch


def render_picture(
    metrics_jsonl: str | Path, path: str | Path, title: str = "Training run", registered: Metrics | None = None
) -> bool:
    """Draws reward and first registered score (training; evaluation with its 95% intervals) over seconds per step and phase.

    Without a score the evaluated reward is drawn. Returns whether there was anything to draw.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    records = read_metrics(metrics_jsonl)
    evaluated = drawn_score(records, registered or {})
    if not any(name in record for record in records for name in ("train/reward", f"eval/{evaluated}")):
        return False
    with needing("metrics.picture", "pip install matplotlib"):
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    style: Any = {
        "font.family": "DejaVu Sans", "font.size": 11, "text.color": _INK, "axes.labelcolor": _QUIET, "xtick.color": _QUIET,
        "ytick.color": _QUIET, "axes.edgecolor": _GRID, "axes.spines.top": False, "axes.spines.right": False,
        "axes.spines.left": False, "axes.grid": True, "axes.grid.axis": "y", "grid.color": _GRID, "xtick.major.size": 0,
        "ytick.major.size": 0, "axes.axisbelow": True,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10, 6.4), dpi=160, facecolor="white")
        FigureCanvasAgg(figure)
        timed = any("time/step_s" in record for record in records)
        shape = {"nrows": 2, "height_ratios": (2.4, 1), "hspace": 0.34} if timed else {"nrows": 1}
        grid = figure.add_gridspec(ncols=1, left=0.075, right=0.80, top=0.845, bottom=0.085, **shape)
        learning = figure.add_subplot(grid[0])
        _draw_learning(learning, records, evaluated)
        if timed:
            _draw_time(figure.add_subplot(grid[1], sharex=learning), records)
        else:
            learning.set_xlabel("step")
        figure.align_ylabels()
        figure.text(0.035, 0.945, title, fontsize=17, fontweight="bold", va="center")
        figure.text(0.035, 0.9, _subtitle(records, evaluated), fontsize=11, color=_QUIET, va="center")
        with replacing(path, durable=False) as aside:
            figure.savefig(aside, format="png")
    return True


def _subtitle(records: Sequence[dict[str, float]], evaluated: str) -> str:
    """What happened, in one line: the evaluated metric from -> to, steps, minutes of the whole run, tokens per second."""
    parts = []
    _, values = series(records, f"eval/{evaluated}")
    if len(values) > 1:
        parts.append(f"validation {label(evaluated)} {values[0]:.2f} → {values[-1]:.2f}")
    steps, seconds = int(records[-1]["step"]), run_seconds(records)
    took = f" in {seconds / 60:.1f} minutes" if seconds >= 60 else f" in {seconds:.0f} s" if seconds else ""
    parts.append(f"{steps} step{'s' if steps != 1 else ''}{took}")
    _, speeds = series(records, "speed/tokens_per_s")
    if speeds:
        parts.append(f"{math.fsum(speeds) / len(speeds):,.0f} tokens/s")
    return "   ·   ".join(parts)


def _draw_learning(axes: Any, records: Sequence[dict[str, float]], evaluated: str) -> None:
    labels: list[tuple[float, str, str]] = []
    for name, color in (("reward", _ORANGE), (evaluated, _QUIET)):
        steps, values = series(records, f"train/{name}")
        if not values or (color == _QUIET and values == series(records, "train/reward")[1]):
            continue  # a reward that is the score is one curve, not two on top of each other
        smooth = trailing_mean(values)
        axes.plot(steps, values, color=color, alpha=0.22, linewidth=1)
        axes.plot(steps, smooth, color=color, linewidth=2)
        labels.append((smooth[-1], f"{label(name)} (training)", color))
    points = intervals(records, evaluated)
    if points:
        for step, _, low, high in points:  # where it was measured, and nowhere between
            axes.plot(
                [step, step], [low, high], color=_BLUE, alpha=0.45, linewidth=2.2, solid_capstyle="butt", zorder=2
            )
        look = {
            "linewidth": 1.6,
            "marker": "o",
            "markersize": 5.5,
            "markeredgecolor": "white",
            "zorder": 3,
            "clip_on": False,
        }
        axes.plot([point[0] for point in points], [point[1] for point in points], color=_BLUE, **look)
        last = points[-1][1]
        labels.append((last, f"{label(evaluated)} (validation)\n{last:.2f}, bars: 95% interval", _BLUE))
    _set_limits(axes, records, evaluated)
    axes.set_ylabel("share of tasks  /  reward")
    axes.tick_params(labelbottom=True)
    _label_ends(axes, labels)


def _set_limits(axes: Any, records: Sequence[dict[str, float]], evaluated: str) -> None:
    """0 to 1 where everything lies there, else what the data need; x from 0 to the last step, marked at whole steps."""
    from matplotlib.ticker import MaxNLocator

    names = ("train/reward", f"train/{evaluated}", f"eval/{evaluated}")
    shown = [value for name in names for value in series(records, name)[1]]
    low, high = min(0.0, *shown), max(1.0, *shown)
    room = 0.03 * (high - low)
    axes.set_ylim(low - (room if low < 0 else 0), high + room)
    axes.set_xlim(0, max(records[-1]["step"], 1) * 1.008 + 0.45)  # the last bar whole
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))


def _label_ends(axes: Any, labels: list[tuple[float, str, str]]) -> None:
    """Names each curve at its right end, pushed apart where they would overlap."""
    bottom, top = axes.get_ylim()
    ordered = sorted(labels)
    halves = [_LABEL_GAP * (top - bottom) * (text.count("\n") + 1) / 2 for _, text, _ in ordered]
    heights = [value for value, _, _ in ordered]
    for upper in range(1, len(ordered)):
        heights[upper] = max(heights[upper], heights[upper - 1] + halves[upper - 1] + halves[upper])
    ceiling = top
    for index in reversed(range(len(ordered))):
        heights[index] = min(heights[index], ceiling - halves[index])
        ceiling = heights[index] - halves[index]
    place = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False, "linespacing": 1.35}
    for height, (_, text, color) in zip(heights, ordered, strict=True):
        axes.annotate(text, (1.015, height), color=color, fontsize=10.5, **place)


def _draw_time(axes: Any, records: Sequence[dict[str, float]]) -> None:
    """Stacked bars of seconds per phase, steps binned so that a bar stays visible."""
    drawn, shares = bars(records)
    size = max((bar.last - bar.first + 1 for bar in drawn), default=1)
    centers, base = [(bar.first + bar.last) / 2 for bar in drawn], [0.0] * len(drawn)
    for phase in shares:
        heights = [bar.seconds[phase] for bar in drawn]
        axes.bar(centers, heights, width=0.82 * size, bottom=base, color=PHASE_COLORS[phase], linewidth=0)
        base = [low + height for low, height in zip(base, heights, strict=True)]
    axes.set_ylabel("seconds per step")
    axes.set_xlabel("step" + (f" (bars: means of {size} steps)" if size > 1 else ""))
    axes.set_ylim(0, top_without_peaks(base))
    for row, (phase, share) in enumerate(reversed(shares.items())):
        y = 0.94 - 0.155 * row
        place = {"xycoords": "axes fraction", "va": "center"}
        axes.annotate("■", (1.015, y), color=PHASE_COLORS[phase], fontsize=11, **place)
        axes.annotate(f"{phase}  {share:.0%}", (1.045, y), color=_INK, fontsize=10.5, **place)
