"""How the numbers of many minibatches and episodes become those of a step or an evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlflow.report.metrics import METRICS, Metric, Metrics, scores, training_name


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean; NaN of nothing, infinite where the sum is too large for a number."""
    return total(values) / len(values) if values else math.nan


def total(values: Sequence[float]) -> float:
    """The sum, rounded once; infinite where it is too large for a number."""
    try:
        return math.fsum(values)
    except OverflowError:  # of finite values
        return sum(values)


def reduced(records: Sequence[Mapping[str, float]], metrics: Metrics) -> dict[str, float]:
    """Per key one number from the records that have it, by the reduction of its metric; a mean where it has none."""
    values: dict[str, list[float]] = {}
    for record in records:
        for key, value in record.items():
            values.setdefault(key, []).append(value)
    reductions: dict[str, Callable[[Sequence[float]], float]] = {"mean": mean, "max": max, "min": min, "sum": total}
    return {
        key: reductions[metrics[key].reduction if key in metrics else "mean"](found) for key, found in values.items()
    }


def update_metrics(updates: Sequence[Mapping[str, float]], reductions: Mapping[str, str]) -> dict[str, float]:
    """`train/` metrics of a step from those of its minibatches. reductions: how the loss wants its own reduced."""
    metrics = {f"train/{name}": Metric("", "", how) for name, how in reductions.items()}
    records = [{f"train/{name}": value for name, value in update.items()} for update in updates]
    return reduced(records, {**METRICS, **metrics})


def step_shares(values: Mapping[str, float], registered: Metrics) -> dict[str, float]:
    """The registered shares of the step's time whose seconds are among the values."""
    return {
        name: values[metric.share_of] / values["time/step_s"]
        for name, metric in registered.items()
        if metric.share_of in values
    }


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
    distances = [value - center for value in values]
    deviation = math.sqrt(total([distance * distance for distance in distances]) / (count - 1))  # ** raises for 1e300
    half = z * deviation / math.sqrt(count)
    return center - half, center + half


def episode_records(trajectories: Sequence[Any], registered: Metrics) -> list[dict[str, float]]:
    """Per usable trajectory its environment's metrics and `turns`. A score that another episode reports and this one lacks is
    0: leaving it out would average over the episodes that came to an answer only."""
    reported = [name for name in scores(registered) if any(name in trajectory.metrics for trajectory in trajectories)]
    missing = dict.fromkeys(reported, 0.0)
    return [{"turns": float(len(trajectory.turns)), **missing, **trajectory.metrics} for trajectory in trajectories]


def named_reward_means(trajectories: Sequence[Any], section: str) -> dict[str, float]:
    """`<section>/reward/<name>`: the mean return of each named reward; 0 counts for a trajectory that never got it."""
    names = sorted({name for trajectory in trajectories for name in trajectory.rewards})
    return {f"{section}/reward/{name}": mean([one.rewards.get(name, 0.0) for one in trajectories]) for name in names}


def scores_by_set(groups: Sequence[Any], registered: Metrics, section: str) -> dict[str, float]:
    """`<section>/<score>/<set>`: the means over the usable attempts of the groups (`rlflow.types.Group`) whose tasks name a set
    (`metadata["set"]`), beside the means over all."""
    of_set = [(group.task.metadata.get("set"), one) for group in groups for one in group.usable]
    by_name: dict[str, list[float]] = {}
    for (name, _), record in zip(of_set, episode_records([one for _, one in of_set], registered), strict=True):
        for score in scores(registered) if name else ():
            if score in record:
                by_name.setdefault(f"{section}/{score}/{name}", []).append(record[score])
    return {name: mean(values) for name, values in sorted(by_name.items())}


def rollout_metrics(trajectories: Sequence[Any], registered: Metrics) -> dict[str, float]:
    """`train/` and `rollout/` metrics of a step's trajectories (`rlflow.types.Trajectory`), aborted ones included in the list.
    registered: those of their environment.

    Reductions are over usable trajectories, shares over all. A metric that only some episodes report is reduced over those,
    except that a score which an episode lacks is 0 there: it never came to an answer.
    """
    usable = [trajectory for trajectory in trajectories if trajectory.stop.value != "aborted"]

    def share(reason: str) -> float:
        return mean([float(trajectory.stop.value == reason) for trajectory in trajectories])

    own = reduced(episode_records(usable, registered), registered)
    return {
        **({"train/reward": mean([trajectory.reward for trajectory in usable])} if usable else {}),
        **named_reward_means(usable, "train"),
        **{training_name(name, registered): value for name, value in own.items()},
        "rollout/episodes": float(len(trajectories)),
        "rollout/truncated_max_turns": share("max_turns"),
        "rollout/truncated_max_tokens": share("max_tokens"),
        "rollout/aborted": share("aborted"),
    }
