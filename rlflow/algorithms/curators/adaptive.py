"""Tasks that the policy solves get fewer attempts, and no attempt gets more turns than a success
has needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from rlflow.algorithms.curators.epochs import Epochs
from rlflow.types import Group, Task
from rlflow.values import PositiveInt, Range


@dataclass
class Adaptive(Epochs):
    """Passes over the tasks, each with the attempts and turns that it needs (dynamic rollout
    numbers and lengths of DART, arXiv 2509.23866).

    attempts: of a task at the most; None: `samples`, which are the run's `samples_per_prompt`.
    Where its rate of success SR exceeds `above`, it gets round(attempts (1 - SR) / (1 - above)),
    but `least`; the paper does not say how they fall, this line is ours. SR is a running mean over
    its groups, SR <- decay SR + (1 - decay) share of returns from `success` on, from its first
    group's share. lengths: an attempt gets as many turns as the longest success of its task had;
    all of the run's before there is one.
    """

    remembers = ("rates", "longest")
    counters = ("attempts_spared",)

    attempts: PositiveInt | None = None
    least: PositiveInt = 2
    above: Annotated[float, Range(0, below=1)] = 0.6
    decay: Annotated[float, Range(0, below=1)] = 0.5
    success: float = 1.0
    lengths: bool = True
    samples: PositiveInt = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._most = self.attempts or self.samples
        self._rates: dict[str, float] = {}  # of success, by task
        self._longest: dict[str, int] = {}  # turns of a success, by task

    def attempts_of(self, task_id: str) -> int:
        """How many the task gets now."""
        rate = self._rates.get(task_id, 0.0)
        wanted = round(self._most * (1 - rate) / (1 - self.above))
        return min(self._most, max(self.least, wanted))

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks, with what they get."""
        taken = []
        for task in super().take(count):
            attempts = self.attempts_of(task.id)
            turns = self._longest.get(task.id) if self.lengths else None
            self.counted["attempts_spared"] += self._most - attempts
            taken.append(dataclasses.replace(task, most_attempts=attempts, most_turns=turns))
        return taken

    def observe(self, groups: Sequence[Group]) -> None:
        """Updates rate and length of every group's task; aborted attempts say nothing."""
        for group in groups:
            if not group.usable:
                continue
            name = group.task.id
            won = [len(one.turns) for one in group.usable if one.reward >= self.success]
            share = len(won) / len(group.usable)
            self._rates[name] = self.decay * self._rates.get(name, share) + (1 - self.decay) * share
            if won:
                self._longest[name] = max(self._longest.get(name, 0), *won)
