"""Tasks that the policy solves almost always are not sampled any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from rlflow.algorithms.curators.screened import Screened
from rlflow.types import Group, Task
from rlflow.values import Range, Share


@dataclass
class FilterSolved(Screened):
    """Leaves out a task whose running share of rewarded attempts has reached `solved` (AstraFlow's
    filter_solved, arXiv 2605.15565): p <- decay * p + (1 - decay) * share of returns above 0, from
    p = 0. The run ends where all are solved."""

    remembers = ("shares",)

    solved: Share = 0.95
    decay: Annotated[float, Range(0, below=1)] = 0.9
    _shares: dict[str, float] = field(default_factory=dict, init=False)  # running, by task

    def wanted(self, task: Task) -> bool:
        return self._shares.get(task.id, 0.0) < self.solved

    def observe(self, groups: Sequence[Group]) -> None:
        """Updates the running share of every group's task; aborted attempts say nothing."""
        for group in groups:
            if group.usable:
                share = sum(one.reward > 0 for one in group.usable) / len(group.usable)
                before = self._shares.get(group.task.id, 0.0)
                self._shares[group.task.id] = self.decay * before + (1 - self.decay) * share

    def report(self) -> dict[str, float]:
        """Tasks that were passed over, and that count as solved."""
        solved = sum(share >= self.solved for share in self._shares.values())
        return {**super().report(), "tasks_solved": float(solved)}
