"""Groups whose attempts all score the same teach nothing: fresh ones take their place."""

from __future__ import annotations

import math

from rlflow.algorithms.base import Filter
from rlflow.types import Group
from rlflow.values import PositiveInt


class DynamicSampling(Filter):
    """Keeps groups whose attempts differ in score, 0 < accuracy < 1 where that is 0 or 1, and has
    the others replaced (DAPO, arXiv 2503.14476 section 3.2).

    max_rounds: of sampling per step, the first included; what is still missing then makes the step
    smaller. metric: compare this metric of the episodes in place of their returns, which a length
    penalty tells apart where accuracy does not."""

    compares_attempts = True

    def __init__(self, max_rounds: PositiveInt = 10, metric: str | None = None) -> None:
        self.max_rounds = max_rounds
        self._metric = metric
        self._rounds = self._left_out = 0

    def __call__(self, groups: list[Group]) -> list[Group]:
        kept = [group for group in groups if not scores_alike(group, self._metric)]
        self._rounds += 1
        self._left_out += len(groups) - len(kept)
        return kept

    def report(self) -> dict[str, float]:
        """Rounds of the step, and groups that were left out in all of them."""
        counted = {
            "sampling_rounds": float(self._rounds),
            "groups_replaced": float(self._left_out),
        }
        self._rounds = self._left_out = 0
        return counted


def scores_alike(group: Group, metric: str | None = None) -> bool:
    """Whether all usable attempts have the same return (or metric, 0 where one lacks it) up to
    rounding; so do one and none."""
    scores = [
        one.reward if metric is None else one.metrics.get(metric, 0.0)
        for one in group.usable
    ]
    return not scores or math.isclose(
        min(scores), max(scores), rel_tol=1e-9, abs_tol=1e-12
    )
