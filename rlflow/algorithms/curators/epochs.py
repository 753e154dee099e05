"""Passes over the training tasks: what a run does that has no better idea."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.algorithms.base import Curator
from rlflow.types import Task
from rlflow.values import NonNegativeInt, PositiveInt, checked

logger = logging.getLogger(__name__)


@dataclass
class Epochs(Curator):
    """Every task once per pass, pass after pass, without an end; with `shuffle` each pass is a
    permutation by seed and epoch."""

    tasks: Sequence[Task]
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        self._taken = 0  # tasks handed out since the start of the run
        # (epoch, its permutation), kept from step to step
        self._drawn: tuple[int, Sequence[int]] = (-1, ())

    @property
    def epoch(self) -> float:
        """Passes over the tasks so far; 1.5 is the middle of the second one."""
        return self._taken / len(self.tasks)

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks, into the next epoch where this one ends."""
        first, self._taken = self._taken, self._taken + count
        places = (divmod(place, len(self.tasks)) for place in range(first, self._taken))
        return [self.tasks[self._order(epoch)[index]] for epoch, index in places]

    def state_dict(self) -> dict[str, Any]:
        """The position, and the number of tasks that it counts in."""
        return {**super().state_dict(), "taken": self._taken, "tasks": len(self.tasks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`. Over another number of tasks the order is another one too: a new
        epoch begins."""
        super().load_state_dict(state)
        taken = checked(NonNegativeInt, state["taken"], "taken")
        total = checked(PositiveInt, state["tasks"], "tasks")
        if total != len(self.tasks):
            taken = math.ceil(taken / total) * len(self.tasks)
            logger.warning(
                "a new epoch begins: there are %d training tasks, %d at the checkpoint",
                len(self.tasks),
                total,
            )
        self._taken = taken

    def _order(self, epoch: int) -> Sequence[int]:
        if self._drawn[0] != epoch:
            order = list(range(len(self.tasks)))
            if self.shuffle:
                random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._drawn = epoch, order
        return self._drawn[1]
