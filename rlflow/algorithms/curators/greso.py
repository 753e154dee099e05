"""Tasks whose groups keep scoring all alike come less and less often."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from rlflow.algorithms.curators.screened import Screened
from rlflow.algorithms.filters.dynamic_sampling import scores_alike
from rlflow.types import Group, Task
from rlflow.values import PositiveFloat, Share

Kind = Literal["easy", "hard"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LOW, HIGH = 0.01, 0.99  # of the base probabilities


@dataclass
class Greso(Screened):
    """Samples a task with probability max(p ** z, floor), z its present streak of groups without
    variance, p that of the streak's kind: easy where the mean return exceeds 0.5, else hard; 1
    where there is no streak (GRESO, arXiv 2506.02177; the floors are those of AstraFlow, arXiv
    2605.15565).

    A streak whose kind changes begins again at 1; a group with variance ends it. Whenever the
    weights have changed, once the first pass is over: p of a kind falls by `adjust` if the share of
    such groups since the last change has reached its target (easy 0.083, hard 0.167), else it
    rises, within 0.01 to 0.99."""

    remembers = ("bases", "streaks", "window", "version", "draws")

    easy_target: Share = 0.083
    hard_target: Share = 0.167
    easy_floor: Share = 0.10
    hard_floor: Share = 0.40
    adjust: PositiveFloat = 0.01
    _version = 0
    _draws = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._targets = {"easy": self.easy_target, "hard": self.hard_target}
        self._floors = {"easy": self.easy_floor, "hard": self.hard_floor}
        self._bases = dict.fromkeys(KINDS, 0.5)
        self._streaks: dict[str, tuple[Kind, int]] = {}  # by task
        # Groups since the weights changed
        self._window = dict.fromkeys((*KINDS, "all"), 0)

    def probability(self, task_id: str) -> float:
        """With which the task is sampled when its turn comes."""
        kind, streak = self._streaks.get(task_id, ("easy", 0))
        return max(self._bases[kind] ** streak, self._floors[kind])

    def wanted(self, task: Task) -> bool:
        self._draws += 1
        draw = random.Random(f"{self.seed}/greso/{self._draws}")
        return draw.random() < self.probability(task.id)

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks; where a whole pass is left to chance in vain, they come in the
        order as it is."""
        taken = super().take(count)
        return [*taken, *self._order.take(count - len(taken))]

    def observe(self, groups: Sequence[Group]) -> None:
        """Continues or ends the streaks of the groups' tasks; groups without a usable attempt say
        nothing."""
        for group in groups:
            if not group.usable:
                continue
            segments = (segment for one in group.usable for segment in one.segments)
            versions = (int(segment.versions.max()) for segment in segments)
            version = max(versions, default=self._version)
            if version > self._version:
                self._version = version
                self._adjust_bases()
            self._count_group(group)

    def report(self) -> dict[str, float]:
        """Tasks that were passed over, and the base probabilities."""
        return {
            **super().report(),
            "greso_p_easy": self._bases["easy"],
            "greso_p_hard": self._bases["hard"],
        }

    def _count_group(self, group: Group) -> None:
        self._window["all"] += 1
        if not scores_alike(group):
            self._streaks.pop(group.task.id, None)
            return
        mean = sum(one.reward for one in group.usable) / len(group.usable)
        kind: Kind = "easy" if mean > 0.5 else "hard"
        self._window[kind] += 1
        before, streak = self._streaks.get(group.task.id, (kind, 0))
        self._streaks[group.task.id] = kind, streak + 1 if before == kind else 1

    def _adjust_bases(self) -> None:
        if self.epoch >= 1 and self._window["all"]:
            for kind in KINDS:
                too_many = self._window[kind] / self._window["all"] >= self._targets[kind]
                moved = self._bases[kind] + (-self.adjust if too_many else self.adjust)
                self._bases[kind] = min(HIGH, max(LOW, moved))
        self._window = dict.fromkeys(self._window, 0)
