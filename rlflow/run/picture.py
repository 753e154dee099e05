"""The picture of a run: what it learned and where the time went, as a PNG that can be shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlflow.errors import MissingPackageError
from rlflow.metrics.names import PHASES, Metrics, label, scores
from rlflow.metrics.sinks import read_metrics
from rlflow.storage.files import replacing

_INK, _QUIET, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
_BLUE, _ORANGE, _BAND = "#1f6fb2", "#d9730d", "#1f6fb2"
_PHASE_COLORS = {  # muted, so that the curves above keep the eye
    "rollout": "#5b8db8", "score": "#9fc1dc", "update": "#e39a5b", "sync": "#c9b26b",
    "evaluate": "#8fb08c", "checkpoint": "#b8a2c4",
}  # fmt: skip
_LABEL_GAP = 0.068  # of the axis height: two labels closer than this would touch


def render_picture(
    metrics_jsonl: str | Path, path: str | Path, title: str = "Training run", registered: Metrics | None = None
) -> bool:
    """Draws reward and first registered score (training; evaluation with its 95% band) over seconds per step and phase.

    Without a score the evaluated reward is drawn. Returns whether there was anything to draw.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    records = read_metrics(metrics_jsonl)
    evaluated = _evaluated(records, registered or {})
    if not any(name in record for record in records for name in ("train/reward", f"eval/{evaluated}")):
        return False
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingPackageError(
            "metrics.picture: the package 'matplotlib' is not installed: pip install matplotlib."
        ) from None
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


def _series(records: Sequence[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    pairs = [(record["step"], record[name]) for record in records if name in record]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _evaluated(records: Sequence[dict[str, float]], registered: Metrics) -> str:
    """The name of the metric to draw: the first score that was ever measured, else the reward."""
    measured = {name for record in records for name in record}
    return next((name for name in scores(registered) if measured & {f"train/{name}", f"eval/{name}"}), "reward")


def _subtitle(records: Sequence[dict[str, float]], evaluated: str) -> str:
    """What happened, in one line: the evaluated metric from -> to, steps, minutes, tokens per second."""
    parts = []
    _, values = _series(records, f"eval/{evaluated}")
    if len(values) > 1:
        parts.append(f"validation {label(evaluated)} {values[0]:.2f} → {values[-1]:.2f}")
    steps = int(records[-1]["step"])
    seconds = math.fsum(_series(records, "time/step_s")[1])
    took = f" in {seconds / 60:.1f} minutes" if seconds >= 60 else f" in {seconds:.0f} s" if seconds else ""
    parts.append(f"{steps} step{'s' if steps != 1 else ''}{took}")
    _, speeds = _series(records, "speed/tokens_per_s")
    if speeds:
        parts.append(f"{math.fsum(speeds) / len(speeds):,.0f} tokens/s")
    return "   ·   ".join(parts)


def _draw_learning(axes: Any, records: Sequence[dict[str, float]], evaluated: str) -> None:
    labels: list[tuple[float, str, str]] = []
    for name, color in (("reward", _ORANGE), (evaluated, _QUIET)):
        steps, values = _series(records, f"train/{name}")
        if not values or (color == _QUIET and values == _series(records, "train/reward")[1]):
            continue  # a reward that is the score is one curve, not two on top of each other
        smooth = _smooth(values)
        axes.plot(steps, values, color=color, alpha=0.22, linewidth=1)
        axes.plot(steps, smooth, color=color, linewidth=2)
        labels.append((smooth[-1], f"{label(name)} (training)", color))
    steps, values = _series(records, f"eval/{evaluated}")
    if values:
        low, high = (_series(records, f"eval/{evaluated}_{end}") for end in ("low", "high"))
        if low[0] == steps and high[0] == steps:
            axes.fill_between(steps, low[1], high[1], color=_BAND, alpha=0.13, linewidth=0)
        axes.plot(
            steps,
            values,
            color=_BLUE,
            linewidth=2.4,
            marker="o",
            markersize=5.5,
            markeredgecolor="white",
            zorder=3,
            clip_on=False,
        )
        labels.append(
            (values[-1], f"{label(evaluated)} (validation)\n{values[-1]:.2f}, band: 95% interval", _BLUE)
        )
    _set_limits(axes, records, evaluated)
    axes.set_ylabel("share of tasks  /  reward")
    axes.tick_params(labelbottom=True)
    _label_ends(axes, labels)


def _set_limits(axes: Any, records: Sequence[dict[str, float]], evaluated: str) -> None:
    """0 to 1 where everything lies there, else what the data need; x from 0 to the last step."""
    names = ("train/reward", f"train/{evaluated}", f"eval/{evaluated}")
    shown = [value for name in names for value in _series(records, name)[1]]
    low, high = min(0.0, *shown), max(1.0, *shown)
    room = 0.03 * (high - low)
    axes.set_ylim(low - (room if low < 0 else 0), high + room)
    axes.set_xlim(0, max(records[-1]["step"], 1) * 1.008 + 0.45)  # the last bar whole


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
    timed = [record for record in records if "time/step_s" in record]
    size = max(1, math.ceil(len(timed) / 60))
    bins = [timed[start : start + size] for start in range(0, len(timed), size)]
    centers = [math.fsum(record["step"] for record in chunk) / len(chunk) for chunk in bins]
    base = [0.0] * len(bins)
    totals = {phase: math.fsum(record.get(f"time/{phase}_s", 0.0) for record in timed) for phase in PHASES}
    spent = max(math.fsum(record["time/step_s"] for record in timed), math.fsum(totals.values()))
    shown = [phase for phase in PHASES if totals[phase] > 0.002 * spent]
    for phase in shown:
        heights = [math.fsum(record.get(f"time/{phase}_s", 0.0) for record in chunk) / len(chunk) for chunk in bins]
        axes.bar(centers, heights, width=0.82 * size, bottom=base, color=_PHASE_COLORS[phase], linewidth=0)
        base = [low + height for low, height in zip(base, heights, strict=True)]
    axes.set_ylabel("seconds per step")
    axes.set_xlabel("step" + (f" (bars: means of {size} steps)" if size > 1 else ""))
    axes.set_ylim(0, _top_without_peaks(base))
    for row, phase in enumerate(reversed(shown)):
        y = 0.94 - 0.155 * row
        axes.annotate("■", (1.015, y), xycoords="axes fraction", color=_PHASE_COLORS[phase], va="center", fontsize=11)
        share = totals[phase] / spent if spent else 0.0
        axes.annotate(
            f"{phase}  {share:.0%}", (1.045, y), xycoords="axes fraction", color=_INK, va="center", fontsize=10.5
        )


def _top_without_peaks(heights: Sequence[float]) -> float:
    """An axis end that shows nearly all bars whole: one long evaluation must not flatten the rest."""
    typical = sorted(heights)[int(0.8 * (len(heights) - 1))]
    return 1.08 * min(max(heights), 3 * typical) or 1.0


def _smooth(values: Sequence[float]) -> list[float]:
    """Centred moving average over about a tenth of the run; at the ends over what there is of the window."""
    half = max(1, len(values) // 20)
    windows = [values[max(0, index - half) : index + half + 1] for index in range(len(values))]
    return [math.fsum(window) / len(window) for window in windows]
