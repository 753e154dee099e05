"""What the pictures of a run draw, from its metrics: curves, intervals, seconds per phase, the headline. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlflow.report.metrics import PHASES, Metrics, label, scores

Records = Sequence[Mapping[str, float]]
MOST_BARS = 60
CURVE_COLORS = {"reward": "#d9730d", "trained": "#7b8794", "evaluated": "#1f6fb2"}
PHASE_COLORS = {
    "rollout": "#3f8f7f", "score": "#a7d0c6", "update": "#8a63a6", "sync": "#c9b26b",
    "evaluate": "#9aa84f", "checkpoint": "#b86a7b",
}  # fmt: skip
"""Of every picture; no phase has the colour of a curve."""
LEAST_SHARE = 0.005  # of the time: what would stand there as 0% is not drawn


@dataclass(frozen=True)
class Bar:
    """Mean seconds per step and phase of the steps from `first` to `last`."""

    first: int
    last: int
    seconds: dict[str, float]


def series(records: Records, name: str) -> tuple[list[float], list[float]]:
    """(steps, values) of a metric, where it was measured."""
    pairs = [(record["step"], record[name]) for record in records if name in record]
    return [step for step, _ in pairs], [value for _, value in pairs]


def drawn_score(records: Records, registered: Metrics) -> str:
    """The name of the metric to draw: the first score that was ever measured, else the reward."""
    measured = {name for record in records for name in record}
    return next((name for name in scores(registered) if measured & {f"train/{name}", f"eval/{name}"}), "reward")


def intervals(records: Records, name: str) -> list[tuple[float, float, float, float]]:
    """(step, value, low, high) of each evaluation; the ends are the value itself where no interval was measured."""
    found = []
    for record in records:
        value = record.get(f"eval/{name}")
        if value is not None:
            found.append(
                (record["step"], value, record.get(f"eval/{name}_low", value), record.get(f"eval/{name}_high", value))
            )
    return found


def trailing_mean(values: Sequence[float]) -> list[float]:
    """The mean of each value and those before it, over about a tenth of the run: it shows no step before it was made."""
    width = max(1, round(len(values) / 10))
    windows = [values[max(0, index + 1 - width) : index + 1] for index in range(len(values))]
    return [math.fsum(window) / len(window) for window in windows]


def bars(records: Records) -> tuple[list[Bar], dict[str, float]]:
    """(at most MOST_BARS bars of steps, {phase: its share of the whole time}) of the phases that are worth a row."""
    timed = [record for record in records if "time/step_s" in record]
    size = max(1, math.ceil(len(timed) / MOST_BARS))
    totals = {phase: math.fsum(record.get(f"time/{phase}_s", 0.0) for record in timed) for phase in PHASES}
    spent = max(math.fsum(record["time/step_s"] for record in timed), math.fsum(totals.values())) or 1.0
    shares = {phase: totals[phase] / spent for phase in PHASES if totals[phase] / spent >= LEAST_SHARE}
    found = []
    for start in range(0, len(timed), size):
        chunk = timed[start : start + size]
        means = {
            phase: math.fsum(record.get(f"time/{phase}_s", 0.0) for record in chunk) / len(chunk) for phase in shares
        }
        found.append(Bar(int(chunk[0]["step"]), int(chunk[-1]["step"]), means))
    return found, shares


def top_without_peaks(heights: Sequence[float]) -> float:
    """An axis end that shows nearly all bars whole: one long evaluation must not flatten the rest."""
    if not heights:
        return 1.0
    typical = sorted(heights)[int(0.8 * (len(heights) - 1))]
    return 1.08 * min(max(heights), 3 * typical) or 1.0


def run_seconds(records: Records) -> float:
    """How long the run took by its own clock; where none was written, the seconds of its steps and evaluations."""
    measured = [record["time/run_s"] for record in records if "time/run_s" in record]
    if measured:
        return max(measured)
    return math.fsum(record.get("time/step_s", 0.0) + record.get("time/evaluate_s", 0.0) for record in records)


def headline(records: Records, registered: Metrics) -> str:
    """What the run achieved, in words: `exact match 89%, was 35%`; of training where nothing was evaluated."""
    name = drawn_score(records, registered)
    share = name in registered and registered[name].unit == "share"
    for section in ("eval", "train"):
        _, values = series(records, f"{section}/{name}")
        if values:
            first, last = (f"{value:.0%}" if share else f"{value:.2f}" for value in (values[0], values[-1]))
            where = "" if section == "eval" else " in training"
            return f"{label(name)} {last}{where}" + (f", was {first}" if len(values) > 1 else "")
    return "nothing measured yet"
