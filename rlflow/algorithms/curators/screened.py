"""Base of curators that pass tasks over: the order of `Epochs` and a screen for each task."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.algorithms.base import Curator
from rlflow.algorithms.curators.epochs import Epochs
from rlflow.types import Task


@dataclass
class Screened(Curator):
    """Passes over the tasks; `wanted` says of each whether it is handed out this time."""

    counters = ("tasks_passed_over",)

    tasks: Sequence[Task]
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        self._order = Epochs(self.tasks, self.seed, self.shuffle)

    @abstractmethod
    def wanted(self, task: Task) -> bool:
        """Whether the task is to be sampled now; asked once each time its turn comes."""

    @property
    def epoch(self) -> float:
        """Passes over the tasks so far, those that were passed over included."""
        return self._order.epoch

    def take(self, count: int) -> list[Task]:
        """The next `count` wanted tasks; fewer where a whole pass finds no other: a call looks at
        `count` passes at the most."""
        taken: list[Task] = []
        skipped = 0
        while len(taken) < count and skipped < len(self.tasks):
            (task,) = self._order.take(1)
            if self.wanted(task):
                taken.append(task)
                skipped = 0
            else:
                skipped += 1
                self.counted["tasks_passed_over"] += 1
        return taken

    def state_dict(self) -> dict[str, Any]:
        """The position in the order."""
        return {**super().state_dict(), "order": self._order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        super().load_state_dict(state)
        self._order.load_state_dict(state["order"])
