"""A run's metrics over its steps: curves, headlines, sparklines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlflow.report.lines import Records, interval_text, other_tasks, values_of
from rlflow.report.metrics import Metrics, label, leading_score

SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Measurement:
    """A value at a step, after seconds of steps and trained tokens. low, high: 95% interval."""

    step: int
    seconds: float
    tokens: float
    value: float
    low: float | None = None
    high: float | None = None

    @property
    def text(self) -> str:
        """The value with its interval, where there is one."""
        return f"{self.value:.3f}{interval_text(self.low, self.high)}"


def curve(records: Records, name: str) -> list[Measurement]:
    """The metric over the run. Seconds are those of finished steps, evaluations left out."""
    points, seconds, tokens = [], 0.0, 0.0
    for record in records:
        seconds += record.get("time/step_s", 0.0)
        tokens += record.get("train/tokens", 0.0)
        if name in record:
            ends = record.get(f"{name}_low"), record.get(f"{name}_high")
            points.append(Measurement(int(record["step"]), seconds, tokens, record[name], *ends))
    return points


def drawn_score(records: Records, registered: Metrics) -> str:
    """The name of the metric to draw: the first score that was ever measured, else the reward."""
    return leading_score(registered, set().union(*records), "train", "eval")


def run_seconds(records: Records) -> float:
    """How long the run took by its own clock; without one, the seconds of steps and evaluations."""
    steps = values_of(records, "time/step_s") + values_of(records, "time/evaluate_s")
    return max(values_of(records, "time/run_s"), default=math.fsum(steps))


def headline(records: Records, registered: Metrics) -> str:
    """The run's result: `exact match 89%, was 35%`; of training where none was evaluated."""
    name = drawn_score(records, registered)
    form = ".0%" if name in registered and registered[name].unit == "share" else ".2f"
    evaluated = [one for one in records if f"eval/{name}" in one]
    others = " of other tasks" if evaluated and other_tasks(evaluated[0], evaluated[-1]) else ""
    for section, where in (("eval", ""), ("train", " in training")):
        if values := values_of(records, f"{section}/{name}"):
            before = f", was {values[0]:{form}}{others}" if len(values) > 1 else ""
            return f"{label(name)} {values[-1]:{form}}{where}{before}"
    return "nothing measured yet"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The values as block characters, scaled to their range, averaged to at most `width`."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    count = min(width, len(finite))
    edges = [round(index * len(finite) / count) for index in range(count + 1)]
    means = [sum(finite[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in means)
