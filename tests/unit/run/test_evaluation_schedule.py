"""When a run evaluates, and on which tasks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlflow.config.schema import EvaluationSection
from rlflow.run.evaluate import EvaluationSchedule
from rlflow.types import Task

TASKS = [Task(str(index), "?", None) for index in range(6)]


def due_steps(schedule: EvaluationSchedule, steps: int = 9) -> list[int]:
    """The steps at which the schedule asks, each evaluated at once."""
    found = []
    for step in range(steps + 1):
        if schedule.due(step):
            schedule.record(step, {"eval/reward": float(step)})
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"every_steps": 4}, [0, 4, 8]),
        ({"every_steps": 4, "at_start": False}, [4, 8]),
        ({"every_steps": 0}, [0]),
        ({"every_steps": 0, "at_start": False}, []),
    ],
)
def test_it_is_due_at_the_start_and_every_so_many_steps(
    options: dict[str, Any], steps: list[int]
) -> None:
    assert due_steps(EvaluationSchedule(TASKS, EvaluationSection(**options))) == steps


def test_never_twice_at_a_step_a_resume_included() -> None:
    schedule = EvaluationSchedule(TASKS, EvaluationSection(every_steps=2))
    schedule.record(0, {"eval/reward": 0.1})
    schedule.record(2, {"eval/reward": 0.3})
    again = EvaluationSchedule(TASKS, EvaluationSection(every_steps=2))
    again.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    assert not schedule.due(2) and not again.due(2) and again.due(4)
    assert (again.first, again.last) == ({"eval/reward": 0.1}, {"eval/reward": 0.3})


@pytest.mark.parametrize(
    ("scheduled", "final", "again"),
    [(None, None, False), (4, 4, False), (4, None, True), (None, 99, False), (4, 2, True)],
)
def test_the_end_evaluates_again_only_over_other_tasks(
    scheduled: int | None, final: int | None, again: bool
) -> None:
    section = EvaluationSection(every_steps=1, questions=scheduled, final_questions=final)
    schedule = EvaluationSchedule(TASKS, section)
    assert schedule.final_due(3)
    schedule.record(3, {})
    assert schedule.final_due(3) is again and schedule.made(3) == 1
    schedule.record(3, {}, final=True)
    after_a_kill = EvaluationSchedule(TASKS, section)
    after_a_kill.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    assert not schedule.final_due(3) and not after_a_kill.final_due(3)
    assert (after_a_kill.made(3), after_a_kill.made(2)) == (2, 0)
    assert [task.id for task in schedule.tasks(final=True)] == [*"012345"][: final or 6]
