"""Tasks that the policy solves almost always are not sampled any more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from rlflow.algorithms.curators.screened import Screened
from rlflow.types import Group, Task
from rlflow.values import Range, Share


class FilterSolved(Screened):
    """Leaves out a task whose running share of rewarded attempts has reached `solved` (AstraFlow's
    filter_solved, arXiv 2605.15565): p <- decay * p + (1 - decay) * share of returns above 0, from
    p = 0. The run ends where all are solved."""

    remembers = ("shares",)

    def __init__(
        self,
        tasks: Sequence[Task],
        seed: int,
        shuffle: bool = True,
        solved: Share = 0.95,
        decay: Annotated[float, Range(0, below=1)] = 0.9,
    ) -> None:
        super().__init__(tasks, seed, shuffle)
        self._solved, self._decay = solved, decay
        self._shares: dict[str, float] = {}  # running, by task

    def wanted(self, task: Task) -> bool:
        return self._shares.get(task.id, 0.0) < self._solved

    def observe(self, groups: Sequence[Group]) -> None:
        """Updates the running share of every group's task; aborted attempts say nothing."""
        for group in groups:
            if group.usable:
                share = sum(one.reward > 0 for one in group.usable) / len(group.usable)
                before = self._shares.get(group.task.id, 0.0)
                self._shares[group.task.id] = (
                    self._decay * before + (1 - self._decay) * share
                )

    def report(self) -> dict[str, float]:
        """Tasks that were passed over, and that count as solved."""
        return {
            **super().report(),
            "tasks_solved": float(
                sum(share >= self._solved for share in self._shares.values())
            ),
        }
