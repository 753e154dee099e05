"""Groups whose attempts all score the same are left out of the step, and nothing takes their
place."""

from __future__ import annotations

from rlflow.algorithms.base import Filter
from rlflow.algorithms.filters.dynamic_sampling import scores_alike
from rlflow.types import Group


class ZeroAdvantage(Filter):
    """Leaves out the groups whose attempts score alike: AstraFlow's filter_zero_adv (arXiv
    2605.15565), ASearcher's dynamic filtering (arXiv 2508.07976). Where all are such, the first one
    with a usable attempt stays, for the step to have a batch: its advantages are 0."""

    whole_step = True
    compares_attempts = True
    counters = ("groups_left_out",)

    def __call__(self, groups: list[Group]) -> list[Group]:
        kept = [group for group in groups if not scores_alike(group)]
        kept = kept or [group for group in groups if group.usable][:1] or groups[:1]
        self.counted["groups_left_out"] += len(groups) - len(kept)
        return kept
