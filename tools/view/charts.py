"""Charts of runs on matplotlib, as PNG and SVG: learning over time, runs compared."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.report.lines import Records, values_of
from rlflow.report.metrics import (
    METRICS,
    PHASES,
    Metric,
    Metrics,
    label,
    load_registered,
    training_name,
)
from rlflow.report.sinks import read_metrics
from rlflow.run.directory import RunDirectory
from rlflow.storage.files import replacing
from rlflow.texts import printable

from .curves import Measurement, curve, drawn_score, headline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_BARS = 60
LEAST_SHARE = 0.005  # of the time: what would stand there as 0% is not drawn
INK, QUIET = "#1f2933", "#7b8794"  # the second on dark pages too
CURVE_COLORS = {"reward": "#d9730d", "trained": QUIET, "evaluated": "#1f6fb2"}
PHASE_COLORS = {
    "rollout": "#3f8f7f",
    "score": "#a7d0c6",
    "update": "#8a63a6",
    "sync": "#c9b26b",
    "evaluate": "#9aa84f",
    "checkpoint": "#b86a7b",
}
"""Of every chart; no phase has the color of a curve."""
WIDE, NARROW = 8.6, 3.9
"""Inches of charts on pages: 3.9 are 350 pixels, of a telephone's 390, in which text stays legible."""
CHARTED = 1.3  # inches of a metric's own axes
SHORT_NAME = 18  # characters of which two names stand beside each other there
DASH = 8.0
"""Length of a dash and its gap. Later runs have shorter dashes: each shows where all coincide."""


@contextmanager
def figure(width: float, height: float, size: float) -> Iterator[Figure]:
    """An empty figure in inches; its text has `size` points. Its style holds inside the block."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style = Path(__file__).parent / "templates" / "chart.mplstyle"
    with matplotlib.rc_context({"font.size": size}, fname=style):
        made = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(made)
        yield made


def svg(made: Figure) -> str:
    """The figure as SVG text on a transparent ground. Call it inside the block of `figure`."""
    text = io.StringIO()
    made.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return text.getvalue()


# ---------------------------------------------------------------- one run


class Picture:
    """A sink that draws a run's progress.png after each evaluation, and at the end."""

    def __init__(self, directory: str | Path, run_name: str = "run") -> None:
        self._run = RunDirectory(directory)
        self._title = run_name

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Draws anew where the values are of an evaluation."""
        if any(name.startswith("eval/") for name in values):
            self._draw()

    def report_files(self) -> dict[str, Path]:
        """Draws anew; {} where there was nothing to draw."""
        return {"picture": self._run.picture} if self._draw() else {}

    def close(self) -> None: ...

    def _draw(self) -> bool:
        records = read_metrics(self._run.metrics)
        registered = load_registered(self._run.environment_metrics)
        return run_png(records, self._run.picture, self._title, registered)


def has_curves(records: Records, registered: Metrics) -> bool:
    """Whether a run has measured anything that `run_svg` would draw."""
    score = drawn_score(records, registered)
    names = ("train/reward", f"train/{score}", f"eval/{score}")
    return any(values_of(records, name) for name in names)


def run_png(records: Records, path: str | Path, title: str, registered: Metrics) -> bool:
    """Writes what a run learned and where its time went; returns whether there was anything."""
    if not has_curves(records, registered):
        return False
    charted = charted_metrics(records, registered)
    with figure(10, 6.4 + CHARTED * len(charted), size=11) as made:
        made.suptitle(printable(title), x=0.01, ha="left", size=17, weight="bold", color=INK)
        draw_run(made, records, drawn_score(records, registered), charted)
        told = printable(headline(records, registered))
        made.axes[0].set_title(told, loc="left", size=11)
        with replacing(path, durable=False) as aside:
            made.savefig(aside, format="png", dpi=160, facecolor="white")
    return True


def run_svg(records: Records, registered: Metrics, narrow: bool = False) -> str:
    """The same chart for a page, without a title; `narrow`: for a telephone's."""
    charted = charted_metrics(records, registered)
    width, height = (NARROW, 5.4) if narrow else (WIDE, 5.0)
    with figure(width, height + CHARTED * len(charted), size=9) as made:
        draw_run(made, records, drawn_score(records, registered), charted)
        return svg(made)


def charted_metrics(records: Records, registered: Metrics) -> dict[str, Metric]:
    """The measured metrics that have axes of their own, by the names that they are logged under."""
    known = dict(METRICS)
    for name, metric in registered.items():
        known[name if "/" in name else training_name(name, registered)] = metric
    return {
        name: metric
        for name, metric in known.items()
        if metric.chart and any(name in record for record in records)
    }


def draw_run(
    made: Figure, records: Records, score: str, charted: Mapping[str, Metric] | None = None
) -> None:
    """Draws learning, below it the charted metrics, and seconds where some were measured."""
    charted = charted or {}
    timed = [record for record in records if "time/step_s" in record]
    heights = [2.4] + [1.0] * len(charted) + [1.0] * bool(timed)
    made.subplots(len(heights), sharex=True, height_ratios=heights)
    learning, *below = made.axes
    _draw_learning(learning, records, score)
    for axes, (name, metric) in zip(below, charted.items(), strict=False):
        _draw_trained(axes, curve(records, name), name, CURVE_COLORS["trained"])
        axes.set_ylabel(metric.unit)
    made.axes[-1].set_xlabel("step")
    if timed:
        _draw_time(made.axes[-1], timed)
    for axes in made.axes:
        _name(axes)
    learning.tick_params(labelbottom=True)
    made.align_ylabels()


def _draw_learning(axes: Any, records: Records, score: str) -> None:
    rewards, trained = curve(records, "train/reward"), curve(records, f"train/{score}")
    evaluated = curve(records, f"eval/{score}")
    _limit(axes, [*rewards, *trained, *evaluated], [0.0, 1.0], records[-1]["step"])
    _draw_trained(axes, rewards, "reward", CURVE_COLORS["reward"])
    # A reward that is the score is one curve, not two over each other
    if trained != rewards:
        _draw_trained(axes, trained, score, CURVE_COLORS["trained"])
    if evaluated:
        told = f"{label(score)} (validation) {evaluated[-1].value:.2f},\nbars: 95% interval"
        _draw_evaluated(axes, evaluated, color=CURVE_COLORS["evaluated"], label=told)
    axes.set_ylabel("share of tasks / reward" if rewards or not trained else label(score))


def _draw_trained(axes: Any, points: Sequence[Measurement], name: str, color: str) -> None:
    """Values of steps, pale, and their trailing mean."""
    if points:
        steps, values = [one.step for one in points], [one.value for one in points]
        smooth = trailing_mean(values)
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
        told = f"{label(name)} (training) {smooth[-1]:.2f}"
        axes.plot(steps, smooth, color=color, linewidth=2, label=told)


def trailing_mean(values: Sequence[float]) -> list[float]:
    """The mean of each value and those before it, over about a tenth of the run."""
    width = max(1, round(len(values) / 10))
    windows = [values[max(0, end - width) : end] for end in range(1, len(values) + 1)]
    return [math.fsum(window) / len(window) for window in windows]


def _draw_evaluated(axes: Any, points: Sequence[Measurement], color: str, **look: Any) -> None:
    """Evaluations joined by a line, each with its interval where it was measured, none between."""
    bottom, top = axes.get_ylim()
    bars = [
        (point.step, max(point.low, bottom), min(point.high, top))
        for point in points
        if point.low is not None and point.high is not None
    ]
    if bars:
        axes.vlines(*zip(*bars, strict=True), color=color, alpha=0.4, linewidth=2.2, zorder=2)
    mark = {
        "marker": "o",
        "markersize": 5,
        "markeredgecolor": "white",
        "clip_on": False,
    }
    values = [point.value for point in points]
    steps = [point.step for point in points]
    axes.plot(steps, values, color=color, linewidth=1.6, zorder=3, **mark, **look)


def _draw_time(axes: Any, timed: Records) -> None:
    """Seconds per phase on top of each other; bars are means where there are many steps."""
    size = math.ceil(len(timed) / MOST_BARS)
    chunks = [timed[start : start + size] for start in range(0, len(timed), size)]
    edges = [*(chunk[0]["step"] - 0.5 for chunk in chunks), timed[-1]["step"] + 0.5]
    base = [0.0] * len(chunks)
    for phase, share in phase_shares(timed).items():
        means = [_seconds(chunk, phase) / len(chunk) for chunk in chunks]
        tops = [low + mean for low, mean in zip(base, means, strict=True)]
        look = {"color": PHASE_COLORS[phase], "label": f"{phase} {share:.0%}"}
        axes.stairs(tops, edges, baseline=base, fill=True, **look)
        base = tops
    axes.set_ylabel("seconds per step")
    axes.set_xlabel("step" + (f" (bars: means of {size} steps)" if size > 1 else ""))
    # Nearly all bars whole, however long one evaluation took
    typical = sorted(base)[int(0.8 * (len(base) - 1))]
    axes.set_ylim(0, 1.08 * min(max(base), 3 * typical) or 1.0)


def phase_shares(timed: Records) -> dict[str, float]:
    """{phase: its share of the time} where it is worth it."""
    totals = {phase: _seconds(timed, phase) for phase in PHASES}
    steps = math.fsum(values_of(timed, "time/step_s"))
    # Evaluations are no part of the steps
    spent = max(steps + totals["evaluate"], math.fsum(totals.values())) or 1.0
    shares = {phase: total / spent for phase, total in totals.items()}
    return {phase: share for phase, share in shares.items() if share >= LEAST_SHARE}


def _seconds(records: Records, phase: str) -> float:
    return math.fsum(values_of(records, f"time/{phase}_s"))


def _limit(
    axes: Any, points: Sequence[Measurement], shown: Sequence[float], last_step: float
) -> None:
    """Ends of the axes with a little room; steps are marked at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    values = [*shown, *(point.value for point in points)]
    low, high = min(values), max(values)
    room = 0.03 * (high - low)
    axes.set_ylim(low - (room if low < 0 else 0), high + room)
    axes.set_xlim(0, max(last_step, 1) * 1.008 + 0.5)  # the last bar whole
    marks = MaxNLocator(8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
    axes.xaxis.set_major_locator(marks)


def _name(axes: Any) -> None:
    """The legend, in the order in which the curves lie above each other."""
    handles, names = axes.get_legend_handles_labels()
    if handles:
        told = [printable(name) for name in names[::-1]]
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
        if axes.figure.get_figwidth() <= NARROW:  # above the curves: beside them is no room
            place = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.01)}
            place["ncols"] = 2 if max(map(len, told)) < SHORT_NAME else 1
        axes.legend(handles[::-1], told, handlelength=1.2, borderaxespad=0.0, **place)


# ---------------------------------------------------------------- several runs


def comparison_svg(curves: Mapping[str, Sequence[Measurement]], narrow: bool = False) -> str:
    """Scores of runs over steps; `narrow`: for a telephone's page."""
    drawn = {name: points for name, points in curves.items() if points}
    everything = [point for points in drawn.values() for point in points]
    with figure(*((NARROW, 3.4) if narrow else (WIDE, 3.2)), size=9) as made:
        axes = made.subplots()
        _limit(axes, everything, [0.0], max(point.step for point in everything))
        for place, (name, points) in enumerate(drawn.items()):
            dash = DASH * (len(drawn) - place) / len(drawn)
            look: dict[str, Any] = {"dashes": (dash, DASH - dash)} if place else {}
            look["color"] = f"C{place}"
            # What begins with _ has no place in matplotlib's legends
            told = f"{name[-40:]} {points[-1].value:.3f}"
            look["label"] = f" {told}" if told.startswith("_") else told
            if points[0].low is not None:
                _draw_evaluated(axes, points, **look)
            else:
                steps, values = [one.step for one in points], [one.value for one in points]
                axes.plot(steps, values, **look)
        axes.set_xlabel("step")
        _name(axes)
        return svg(made)
