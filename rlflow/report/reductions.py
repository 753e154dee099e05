"""Reductions of many minibatches and episodes to the numbers of a step or an evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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


REDUCTIONS: dict[str, Any] = {"mean": mean, "max": max, "min": min, "sum": total}


def reduced(records: Sequence[Mapping[str, float]], metrics: Metrics) -> dict[str, float]:
    """Per key one number from the records that have it, by its metric's reduction, else a mean."""
    values: dict[str, list[float]] = {}
    for record in records:
        for key, value in record.items():
            values.setdefault(key, []).append(value)
    unknown = Metric("", "")
    return {
        key: REDUCTIONS[metrics.get(key, unknown).reduction](found) for key, found in values.items()
    }


def update_metrics(
    updates: Sequence[Mapping[str, float]], reductions: Mapping[str, str]
) -> dict[str, float]:
    """`train/` metrics of a step from its minibatches. reductions: of the loss's own metrics."""
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


def interval95(values: Sequence[float], share: bool = True) -> tuple[float, float]:
    """(low, high) of a 95% confidence interval of the mean.

    Wilson's score interval (E. B. Wilson 1927, eq. of Agresti & Coull 1998 sec. 1) for a share whose
    values are all 0 or 1, or all alike: their spread says nothing then, and no values between 0 and
    1 vary more than zeros and ones do. Else mean +- 1.96 standard errors with Bessel's correction;
    unbounded where these say nothing (a single value, or all alike)."""
    count, center = len(values), mean(values)
    if count == 0:
        return math.nan, math.nan
    z = 1.959964
    alike = all(value == values[0] for value in values)
    if share and (all(value in (0, 1) for value in values) or (alike and 0 <= center <= 1)):
        scale = 1 + z * z / count
        middle = (center + z * z / (2 * count)) / scale
        variance = center * (1 - center) / count + z * z / (4 * count * count)
        half = z * math.sqrt(variance) / scale
        return max(0.0, middle - half), min(1.0, middle + half)
    if alike:
        return -math.inf, math.inf
    distances = [value - center for value in values]
    # ** raises for 1e300
    squares = total([distance * distance for distance in distances])
    half = z * math.sqrt(squares / (count - 1)) / math.sqrt(count)
    return center - half, center + half


def episode_records(trajectories: Sequence[Any], registered: Metrics) -> list[dict[str, float]]:
    """Per usable trajectory its environment's metrics and `turns`.

    A score that others report and this one lacks is 0: a mean over answered episodes would lie."""
    measured = {name for trajectory in trajectories for name in trajectory.metrics}
    missing = dict.fromkeys((name for name in scores(registered) if name in measured), 0.0)
    return [{"turns": float(len(one.turns)), **missing, **one.metrics} for one in trajectories]


def named_reward_means(trajectories: Sequence[Any], section: str) -> dict[str, float]:
    """`<section>/reward/<name>`: mean return of each named reward, 0 where one never got it."""
    names = sorted({name for one in trajectories for name in one.rewards})
    records = [
        {f"{section}/reward/{name}": one.rewards.get(name, 0.0) for name in names}
        for one in trajectories
    ]
    return reduced(records, {})


def scores_by_set(groups: Sequence[Any], registered: Metrics, section: str) -> dict[str, float]:
    """`<section>/<score>/<set>`: means over the usable attempts at tasks of a set.

    groups: `rlflow.types.Group`; a task names its set in `metadata["set"]`."""
    attempts = [(group.task.metadata.get("set"), one) for group in groups for one in group.usable]
    records = episode_records([one for _, one in attempts], registered)
    named = [
        {
            f"{section}/{score}/{name}": record[score]
            for score in scores(registered)
            if score in record
        }
        for (name, _), record in zip(attempts, records, strict=True)
        if name
    ]
    return dict(sorted(reduced(named, {}).items()))


def rollout_metrics(trajectories: Sequence[Any], registered: Metrics) -> dict[str, float]:
    """`train/` and `rollout/` metrics of a step's trajectories (`rlflow.types.Trajectory`).

    Reductions are over usable trajectories, shares over all. A metric that only some episodes
    report is reduced over those, but a score that an episode lacks is 0."""
    usable = [one for one in trajectories if one.usable]

    def share(reason: str) -> float:
        return mean([float(one.stop.value == reason) for one in trajectories])

    rewards = [trajectory.reward for trajectory in usable]
    sampled = any(trajectory.source != "demonstration" for trajectory in usable)
    unscorable = mean([float(one.unscorable) for one in trajectories])
    own = reduced(episode_records(usable, registered), registered)
    return {
        **({"train/reward": mean(rewards)} if sampled else {}),
        **named_reward_means(usable, "train"),
        **{training_name(name, registered): value for name, value in own.items()},
        "rollout/episodes": float(len(trajectories)),
        "rollout/truncated_max_turns": share("max_turns"),
        "rollout/truncated_max_tokens": share("max_tokens"),
        "rollout/aborted": share("aborted"),
        **({"rollout/unscorable": unscorable} if unscorable else {}),
    }


def staleness_metrics(groups: Sequence[Any], version: int) -> dict[str, float]:
    """Versions that tokens of usable attempts lag behind the weights that train on them."""
    segments = [segment for group in groups for one in group.usable for segment in one.segments]
    lags = [version - one.versions[one.loss_mask & (one.versions >= 0)] for one in segments]
    lags = [one for one in lags if len(one)]
    tokens = sum(map(len, lags))
    if not tokens:
        return {}
    return {
        "rollout/staleness": sum(int(one.sum()) for one in lags) / tokens,
        "rollout/staleness_max": float(max(int(one.max()) for one in lags)),
        "rollout/on_policy": sum(int((one == 0).sum()) for one in lags) / tokens,
    }
