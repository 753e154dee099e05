"""Charts of runs on matplotlib, as PNG and SVG: learning over time, runs compared."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.report.metrics import PHASES, Metrics, label, scores
from rlflow.report.sinks import read_metrics
from rlflow.storage.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Records = Sequence[Mapping[str, float]]
MOST_BARS = 60
MOST_POINTS = 400  # of a curve: more than a screen has pixels for
LEAST_SHARE = 0.005  # of the time: what would stand there as 0% is not drawn
INK, QUIET, FRAME = "#1f2933", "#7b8794", "#7b879440"  # the last two on dark pages too
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
RUN_COLORS = ("#1f6fb2", "#d9730d", "#1c7c54", "#8e44ad", "#b3261e", "#6b7785", "#9a6700")
DASH = 8.0
"""Length of a dash and its gap. Later runs have shorter dashes: each shows where all coincide."""
WIDE, NARROW = 8.6, 3.9  # inches: legends beside the axes; below them, for a phone


# ---------------------------------------------------------------- from records to what is drawn


def series(records: Records, name: str) -> tuple[list[float], list[float]]:
    """(steps, values) of a metric, where it was measured."""
    measured = [record for record in records if name in record]
    return [record["step"] for record in measured], [record[name] for record in measured]


def drawn_score(records: Records, registered: Metrics) -> str:
    """The name of the metric to draw: the first score that was ever measured, else the reward."""
    measured = {name for record in records for name in record}
    found = (name for name in scores(registered) if measured & {f"train/{name}", f"eval/{name}"})
    return next(found, "reward")


def intervals(records: Records, name: str) -> list[tuple[float, float, float, float]]:
    """(step, value, low, high) of each evaluation; the ends are the value where none was
    measured."""
    key = f"eval/{name}"
    return [
        (one["step"], one[key], one.get(f"{key}_low", one[key]), one.get(f"{key}_high", one[key]))
        for one in records
        if key in one
    ]


def trailing_mean(values: Sequence[float]) -> list[float]:
    """The mean of each value and those before it, over about a tenth of the run."""
    width = max(1, round(len(values) / 10))
    ends = range(1, len(values) + 1)
    windows = [values[max(0, end - width) : end] for end in ends]
    return [math.fsum(window) / len(window) for window in windows]


def bars(records: Records) -> tuple[list[list[Mapping[str, float]]], dict[str, float]]:
    """(steps in at most MOST_BARS chunks, {phase: its share of the time} where it is worth it)."""
    timed = [record for record in records if "time/step_s" in record]
    size = max(1, math.ceil(len(timed) / MOST_BARS))
    chunks = [timed[start : start + size] for start in range(0, len(timed), size)]
    totals = {phase: phase_seconds(timed, phase) for phase in PHASES}
    steps = math.fsum(record["time/step_s"] for record in timed)
    spent = max(steps, math.fsum(totals.values())) or 1.0
    shares = {phase: total / spent for phase, total in totals.items()}
    return chunks, {phase: share for phase, share in shares.items() if share >= LEAST_SHARE}


def phase_seconds(records: Records, phase: str) -> float:
    """Seconds of a phase in all these records."""
    return math.fsum(record.get(f"time/{phase}_s", 0.0) for record in records)


def top_without_peaks(heights: Sequence[float]) -> float:
    """An axis end that shows nearly all bars whole, however long one evaluation took."""
    typical = sorted(heights)[int(0.8 * (len(heights) - 1))]
    return 1.08 * min(max(heights), 3 * typical) or 1.0


# ---------------------------------------------------------------- figures


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


def has_curves(records: Records, registered: Metrics) -> bool:
    """Whether a run has measured anything that `run_svg` would draw."""
    names = {"train/reward", f"eval/{drawn_score(records, registered)}"}
    return any(names & record.keys() for record in records)


def run_png(
    metrics_jsonl: str | Path, path: str | Path, title: str, registered: Metrics | None = None
) -> bool:
    """Writes what a run learned and where its time went; returns whether there was anything."""
    records, known = read_metrics(metrics_jsonl), registered or {}
    if not has_curves(records, known):
        return False
    with figure(10, 6.4, size=11) as made:
        made.suptitle(printable(title), x=0.01, ha="left", size=17, weight="bold", color=INK)
        learning = _draw_run(made, records, drawn_score(records, known), beside=True)
        learning.set_title(_subtitle(records, drawn_score(records, known)), loc="left", size=11)
        with replacing(path, durable=False) as aside:
            made.savefig(aside, format="png", dpi=160, facecolor="white")
    return True


def run_svg(records: Records, registered: Metrics, width: float = WIDE) -> str:
    """The same chart for a page, without a title."""
    height = 5.0 if width == WIDE else 5.6
    with figure(width, height, size=9) as made:
        _draw_run(made, records, drawn_score(records, registered), beside=width == WIDE)
        return svg(made)


def _draw_run(made: Figure, records: Records, score: str, beside: bool) -> Any:
    timed = any("time/step_s" in record for record in records)
    if timed:
        learning, time = made.subplots(2, sharex=True, height_ratios=(2.4, 1))
        _draw_time(time, records)
        _name(time, beside)
    else:
        learning = made.subplots()
        learning.set_xlabel("step")
    _draw_learning(learning, records, score)
    learning.tick_params(labelbottom=True)
    made.align_ylabels()
    _name(learning, beside)
    return learning


def _draw_learning(axes: Any, records: Records, score: str) -> None:
    rewards, trained = series(records, "train/reward"), series(records, f"train/{score}")
    points = intervals(records, score)
    values = [0.0, 1.0, *rewards[1], *trained[1], *(value for _, value, _, _ in points)]
    _limit(axes, min(values), max(values), records[-1]["step"])
    curves = [("reward", "reward", rewards)]
    if trained != rewards:  # a reward that is the score is one curve, not two over each other
        curves.append((score, "trained", trained))
    for name, kind, (steps, found) in curves:
        if found:
            smooth, color = trailing_mean(found), CURVE_COLORS[kind]
            kept = _thinned(len(found))
            at = [steps[place] for place in kept]
            axes.plot(at, [found[place] for place in kept], color=color, alpha=0.25, linewidth=1)
            told = f"{label(name)} (training) {smooth[-1]:.2f}"
            axes.plot(at, [smooth[place] for place in kept], color=color, linewidth=2, label=told)
    if points:
        told = f"{label(score)} (validation) {points[-1][1]:.2f},\nbars: 95% interval"
        _draw_measured(axes, points, CURVE_COLORS["evaluated"], told)
    axes.set_ylabel("share of tasks / reward")


def _draw_measured(axes: Any, points: Sequence[Any], color: str, name: str, **look: Any) -> None:
    """Evaluations joined by a line, each with its interval where it was measured, none between."""
    bottom, top = axes.get_ylim()
    steps, values, lows, highs = zip(*points, strict=True)
    ends = [[min(max(end, bottom), top) for end in side] for side in (lows, highs)]
    axes.vlines(steps, *ends, color=color, alpha=0.4, linewidth=2.2, zorder=2)
    mark = {"marker": "o", "markersize": 5, "markeredgecolor": "white", "clip_on": False}
    axes.plot(steps, values, color=color, linewidth=1.6, label=name, zorder=3, **mark, **look)


def _draw_time(axes: Any, records: Records) -> None:
    """Seconds per phase on top of each other; bars are means where there are many steps."""
    chunks, shares = bars(records)
    size = max(len(chunk) for chunk in chunks)
    edges = [*(chunk[0]["step"] - 0.5 for chunk in chunks), chunks[-1][-1]["step"] + 0.5]
    base = [0.0] * len(chunks)
    for phase, share in shares.items():
        means = [phase_seconds(chunk, phase) / len(chunk) for chunk in chunks]
        tops = [low + mean for low, mean in zip(base, means, strict=True)]
        look = {"fill": True, "color": PHASE_COLORS[phase], "label": f"{phase} {share:.0%}"}
        axes.stairs(tops, edges, baseline=base, **look)
        base = tops
    axes.set_ylabel("seconds per step")
    axes.set_xlabel("step" + (f" (bars: means of {size} steps)" if size > 1 else ""))
    axes.set_ylim(0, top_without_peaks(base))


def _limit(axes: Any, low: float, high: float, last_step: float) -> None:
    """Ends of the axes with a little room; steps are marked at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    room = 0.03 * (high - low)
    axes.set_ylim(low - (room if low < 0 else 0), high + room)
    axes.set_xlim(0, max(last_step, 1) * 1.008 + 0.5)  # the last bar whole
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def _name(axes: Any, beside: bool) -> None:
    """The legend, in the order in which the curves lie above each other."""
    handles, names = axes.get_legend_handles_labels()
    place, pad = ((1.01, 1.0), 0.0) if beside else ((0.0, 0.0), 3.2)
    look = {"loc": "upper left", "bbox_to_anchor": place, "borderaxespad": pad, "handlelength": 1.2}
    if handles:
        names = [printable(name) for name in names[::-1]]
        axes.legend(handles[::-1], names, ncols=1 if beside or len(names) < 4 else 2, **look)


def _thinned(count: int) -> list[int]:
    """At most MOST_POINTS places of so many, the last among them."""
    stride = max(1, math.ceil(count / MOST_POINTS))
    return sorted({*range(0, count, stride), count - 1})


def _subtitle(records: Records, score: str) -> str:
    """What happened: the evaluated metric from and to, steps, minutes, tokens per second."""
    parts = []
    _, values = series(records, f"eval/{score}")
    if len(values) > 1:
        parts.append(f"validation {label(score)} {values[0]:.2f} → {values[-1]:.2f}")
    steps, seconds = int(records[-1]["step"]), run_seconds(records)
    minutes = f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} s"
    took = f" in {minutes}" if seconds else ""
    parts.append(f"{steps} step{'s' if steps != 1 else ''}{took}")
    _, speeds = series(records, "speed/tokens_per_s")
    if speeds:
        parts.append(f"{math.fsum(speeds) / len(speeds):,.0f} tokens/s")
    return printable("   ·   ".join(parts))


def run_seconds(records: Records) -> float:
    """How long the run took by its own clock; without one, the seconds of steps and evaluations."""
    _, measured = series(records, "time/run_s")
    if measured:
        return max(measured)
    steps = math.fsum(record.get("time/step_s", 0.0) for record in records)
    return steps + phase_seconds(records, "evaluate")


def printable(text: str) -> str:
    """The text without control characters and halves of emoji, which no document may hold."""
    return "".join(
        letter if letter in "\n\t" or letter.isprintable() else "\ufffd" for letter in text
    )


# ---------------------------------------------------------------- several runs


def comparison_svg(curves: Mapping[str, Sequence[Any]], width: float = WIDE) -> str:
    """Scores of runs over steps. curves: of each run points with step, value, low and high."""
    drawn = {name: points for name, points in curves.items() if points}
    values = [0.0, *(point.value for points in drawn.values() for point in points)]
    last = max(points[-1].step for points in drawn.values())
    beside = width == WIDE
    with figure(width, 3.2 if beside else 3.2 + 0.25 * len(drawn), size=9) as made:
        axes = made.subplots()
        _limit(axes, min(values), max(values), last)
        for place, (name, points) in enumerate(drawn.items()):
            color = RUN_COLORS[place % len(RUN_COLORS)]
            dash = DASH * (len(drawn) - place) / len(drawn)
            look: Any = {"dashes": (dash, DASH - dash)} if place else {}
            told = f"{name[-40:]} {points[-1].value:.3f}"
            if points[0].low is not None:
                ends = [(point.step, point.value, point.low, point.high) for point in points]
                _draw_measured(axes, ends, color, told, **look)
            else:
                kept = [points[place] for place in _thinned(len(points))]
                steps = [point.step for point in kept]
                axes.plot(steps, [point.value for point in kept], color=color, label=told, **look)
        axes.set_xlabel("step")
        _name(axes, beside)
        return svg(made)
