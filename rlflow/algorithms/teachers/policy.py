"""The policy itself as the teacher, under a prompt that says more: self-distillation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlflow.algorithms.teachers.base import NAME, Teacher
from rlflow.algorithms.teachers.classroom import Classroom
from rlflow.errors import ConfigError
from rlflow.types import Batch
from rlflow.values import NonNegativeInt


@dataclass
class PolicyTeacher(Teacher):
    """The policy under a prompt with a demonstration (SDFT, arXiv 2601.19897) or the answer.

    refresh_steps: 1 is the live policy, as it is before the step's first update; n a copy that is
    taken every n steps; 0 the starting policy. The copy is part of the checkpoint."""

    frozen = False  # and it counts how often it is asked

    prompt: str
    refresh_steps: NonNegativeInt = 1
    top_k: NonNegativeInt = 0
    _steps = 0

    def __post_init__(self) -> None:
        super().__init__(self.top_k, self.prompt)
        if self.prompt == "{prompt}" and self.refresh_steps == 1:
            raise ConfigError(
                "algorithm.teacher: the live policy under its own prompt teaches nothing; change "
                "prompt."
            )

    def open(self, room: Classroom) -> None:
        super().open(room)
        if self.refresh_steps != 1:
            room.trainer.snapshot(NAME)  # a checkpoint that holds its own replaces it

    def score(self, batch: Batch) -> dict[str, Tensor]:
        every = self.refresh_steps
        if every > 1 and self._steps and self._steps % every == 0:
            self.room.trainer.snapshot(NAME)
        self._steps += 1
        model = "policy" if every == 1 else NAME
        return self.room.trainer.score(batch, model, top_k=self.top_k)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps = int(state["steps"])
