"""Groups whose attempts all score the same teach nothing: fresh ones take their place."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlflow.algorithms.base import Filter
from rlflow.types import Group
from rlflow.values import PositiveInt


@dataclass
class DynamicSampling(Filter):
    """Keeps groups whose attempts differ in score, 0 < accuracy < 1 where that is 0 or 1, and has
    the others replaced (DAPO, arXiv 2503.14476 section 3.2).

    max_rounds: of sampling per step, the first included; what is still missing then makes the step
    smaller. metric: compare this metric of the episodes in place of their returns, which a length
    penalty tells apart where accuracy does not."""

    compares_attempts = True
    counters = ("sampling_rounds", "groups_replaced")

    max_rounds: PositiveInt = 10
    metric: str | None = None

    def __call__(self, groups: list[Group]) -> list[Group]:
        kept = [group for group in groups if not scores_alike(group, self.metric)]
        self.counted["sampling_rounds"] += 1
        self.counted["groups_replaced"] += len(groups) - len(kept)
        return kept


def scores_alike(group: Group, metric: str | None = None) -> bool:
    """Whether all usable attempts have the same return (or metric, 0 where one lacks it) up to
    rounding; so do one and none."""
    scores = [
        one.reward if metric is None else one.metrics.get(metric, 0.0) for one in group.usable
    ]
    return not scores or math.isclose(min(scores), max(scores), rel_tol=1e-9, abs_tol=1e-12)
