"""Metric names with units (one table), reductions, phase timers, and the sinks that a run writes to.

A name is `section/name`. An environment's own metrics appear as `rollout/<name>` and `eval/<name>`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.metrics.names import SCORES

# ---------------------------------------------------------------- reductions


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean; NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan


def mean_of(records: Sequence[Mapping[str, float]], weights: Sequence[float] | None = None) -> dict[str, float]:
    """Per key the weighted mean over the records that have it, e.g. over the minibatches of a step."""
    weights = weights if weights is not None else [1.0] * len(records)
    reduced = {}
    for key in dict.fromkeys(key for record in records for key in record):
        pairs = [(record[key], weight) for record, weight in zip(records, weights, strict=True) if key in record]
        total = math.fsum(weight for _, weight in pairs)
        reduced[key] = math.fsum(value * weight for value, weight in pairs) / total if total else math.nan
    return reduced


def interval95(values: Sequence[float]) -> tuple[float, float]:
    """(low, high) of a 95% confidence interval of the mean: Wilson's score interval for zeros and ones (E. B. Wilson 1927,
    eq. of Agresti & Coull 1998 sec. 1), else mean +- 1.96 standard errors with Bessel's correction."""
    count, center = len(values), mean(values)
    if count == 0:
        return math.nan, math.nan
    z = 1.959964
    if all(value in (0, 1) for value in values):
        scale = 1 + z * z / count
        middle = (center + z * z / (2 * count)) / scale
        half = z * math.sqrt(center * (1 - center) / count + z * z / (4 * count * count)) / scale
        return max(0.0, middle - half), min(1.0, middle + half)
    if count == 1:
        return -math.inf, math.inf
    deviation = math.sqrt(math.fsum((value - center) ** 2 for value in values) / (count - 1))
    half = z * deviation / math.sqrt(count)
    return center - half, center + half


def episode_records(trajectories: Sequence[Any]) -> list[dict[str, float]]:
    """Per usable trajectory its environment's metrics and `turns`. A score that another episode reports and this one lacks is
    0: leaving it out would average over the episodes that came to an answer only."""
    reported = [name for name in SCORES if any(name in trajectory.metrics for trajectory in trajectories)]
    missing = dict.fromkeys(reported, 0.0)
    return [{"turns": float(len(trajectory.turns)), **missing, **trajectory.metrics} for trajectory in trajectories]


def rollout_metrics(trajectories: Sequence[Any]) -> dict[str, float]:
    """`train/` and `rollout/` metrics of a step's trajectories (`rlflow.types.Trajectory`), aborted ones included in the list.

    Means are over usable trajectories, shares over all. A metric of the environment is `rollout/<name>`, but
    exact_match and f1 are `train/<name>`; one that only some episodes report is averaged over those, except that a score
    which an episode lacks is 0 there: it never came to an answer.
    """
    usable = [trajectory for trajectory in trajectories if trajectory.stop.value != "aborted"]

    def share(reason: str) -> float:
        return mean([float(trajectory.stop.value == reason) for trajectory in trajectories])

    own = mean_of(episode_records(usable))
    return {
        **({"train/reward": mean([trajectory.reward for trajectory in usable])} if usable else {}),
        **{f"{'train' if name in SCORES else 'rollout'}/{name}": value for name, value in own.items()},
        "rollout/episodes": float(len(trajectories)),
        "rollout/truncated_max_turns": share("max_turns"),
        "rollout/truncated_max_tokens": share("max_tokens"),
        "rollout/aborted": share("aborted"),
    }


# ---------------------------------------------------------------- sinks


