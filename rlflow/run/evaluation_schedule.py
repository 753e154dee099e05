"""When a run evaluates, on which tasks, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.types import Task


class EvaluationSchedule:
    """`first`, `last`: `eval/` metrics of the first and of the latest evaluation, empty before there is one; `first_step`,
    `last_step`: after how many steps they were made, -1 before there is one.

    every_steps: 0 for an evaluation at the end only. questions, final_questions: how many of the tasks the scheduled ones
    and the last one take, from the first on; None for all."""

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        every_steps: int,
        at_start: bool = True,
        questions: int | None = None,
        final_questions: int | None = None,
    ) -> None:
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self._tasks = tasks
        self._every_steps = every_steps
        self._at_start = at_start
        self._questions = questions
        self._final_questions = final_questions
        self.first_step = self.last_step = -1
        self._made = 0  # evaluations at that step
        self._asked = 0  # tasks of the latest one

    def due(self, step: int) -> bool:
        """Whether to evaluate after `step` steps; never twice at a step."""
        scheduled = self._at_start if step == 0 else self._every_steps > 0 and step % self._every_steps == 0
        return scheduled and step != self.last_step

    def final_due(self, step: int) -> bool:
        """Whether the end of the run needs one more: none was made at this step, or one over other tasks."""
        return step != self.last_step or len(self.tasks(final=True)) != self._asked

    def made(self, step: int) -> int:
        """How many evaluations were made after `step` steps."""
        return self._made if step == self.last_step else 0

    def tasks(self, final: bool = False) -> list[Task]:
        """The tasks of a scheduled evaluation, or of the last one."""
        return list(self._tasks[: self._final_questions if final else self._questions])

    def record(self, step: int, metrics: Mapping[str, float], final: bool = False) -> None:
        """Notes that an evaluation was made, of the tasks that `tasks(final)` gives."""
        self._made, self._asked = self.made(step) + 1, len(self.tasks(final))
        self.last, self.last_step = dict(metrics), step
        if self.first_step < 0:
            self.first, self.first_step = self.last, step

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to evaluate nothing twice and to report where it began."""
        counts = {"made": self._made, "asked": self._asked}
        return {"step": self.last_step, "first_step": self.first_step, **counts, "first": self.first, "last": self.last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        self.last_step, self.first_step = int(state["step"]), int(state.get("first_step", 0 if state["first"] else -1))
        self.first, self.last = dict(state["first"]), dict(state["last"])
        self._made, self._asked = int(state.get("made", 1)), int(state.get("asked", len(self.tasks())))
