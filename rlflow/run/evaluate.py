"""Evaluation: its schedule, one attempt or more at each task, means with 95% intervals, failures
reported apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.report.metrics import Metrics, scores
from rlflow.report.reductions import episode_records, interval95, mean, named_reward_means, reduced
from rlflow.rollout.rollout import Rollout
from rlflow.types import Group, Task, Trajectory


@dataclass
class Evaluation:
    """metrics: `eval/<name>`, over the usable attempts. groups: every attempt, for the jsonl of
    trajectories."""

    metrics: dict[str, float]
    groups: list[Group]


def evaluate(
    rollout: Rollout,
    tasks: Sequence[Task],
    *,
    step: int = 0,
    samples_per_prompt: int = 1,
    temperature: float = 0.0,
) -> Evaluation:
    """Attempts every task. An attempt that infrastructure failed counts in `eval/failed` and in no
    mean.

    Raises RolloutError only where not a single attempt was usable."""
    groups = rollout.collect(
        tasks,
        step=-1 - step,  # evaluation draws other seeds than any training step
        samples_per_prompt=samples_per_prompt,
        temperature=temperature,
        max_aborted_share=1 - 0.5 / max(1, len(tasks) * samples_per_prompt),
    )
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return Evaluation(evaluation_metrics(trajectories, rollout.environment.metrics), groups)


def evaluation_metrics(trajectories: Sequence[Trajectory], registered: Metrics) -> dict[str, float]:
    """`eval/<name>` by the registered reductions; scores and reward with the ends of their 95%
    intervals as `_low` and `_high`.

    The intervals are over tasks, each the mean of its attempts: several attempts at a task are no
    further tasks."""
    usable = [trajectory for trajectory in trajectories if trajectory.usable]
    own = episode_records(usable, registered)
    records = [
        {"reward": trajectory.reward, **record}
        for trajectory, record in zip(usable, own, strict=True)
    ]
    metrics = {
        "eval/questions": float(len({trajectory.group_id for trajectory in usable})),
        "eval/attempts": float(len(usable)),
        "eval/failed": float(len(trajectories) - len(usable)),
        **named_reward_means(usable, "eval"),
    }
    with_interval = {"reward", *scores(registered)}
    for name, value in reduced(records, registered).items():
        metrics[f"eval/{name}"] = value
        if name in with_interval:
            by_task: dict[str, list[float]] = {}
            for trajectory, record in zip(usable, records, strict=True):
                by_task.setdefault(trajectory.group_id, []).append(record[name])
            low, high = interval95([*map(mean, by_task.values())])
            # The normal interval does not know that it ends there
            if name in registered and registered[name].unit == "share":
                low, high = max(low, 0.0), min(high, 1.0)
            metrics[f"eval/{name}_low"], metrics[f"eval/{name}_high"] = low, high
    return metrics


def metrics_by_set(groups: Sequence[Group], registered: Metrics) -> dict[str, dict[str, float]]:
    """{set: evaluation_metrics} of the evaluation sets that the tasks name (`metadata["set"]`);
    empty for a single set."""
    by_set: dict[str, list[Trajectory]] = {}
    for group in groups:
        by_set.setdefault(str(group.task.metadata.get("set", "")), []).extend(group.trajectories)
    if len(by_set) < 2:
        return {}
    return {
        name: evaluation_metrics(trajectories, registered) for name, trajectories in by_set.items()
    }


def mean_over_sets(by_set: Mapping[str, Mapping[str, float]], name: str) -> float | None:
    """The unweighted mean over sets that the field reports; None where no set has the metric."""
    values = [metrics[f"eval/{name}"] for metrics in by_set.values() if f"eval/{name}" in metrics]
    return mean(values) if values else None


class EvaluationSchedule:
    """`first`, `last`: `eval/` metrics of the first and of the latest evaluation, empty before
    there is one; `first_step`, `last_step`: after how many steps they were made, -1 before there is
    one.

    every_steps: 0 for an evaluation at the end only. questions, final_questions: how many of the
    tasks the scheduled ones and the last one take, from the first on; None for all."""

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
        scheduled = (
            self._at_start if step == 0 else self._every_steps > 0 and step % self._every_steps == 0
        )
        return scheduled and step != self.last_step

    def final_due(self, step: int) -> bool:
        """Whether the end of the run needs one more: none was made at this step, or one over other
        tasks."""
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
        return {
            "step": self.last_step,
            "first_step": self.first_step,
            **counts,
            "first": self.first,
            "last": self.last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        self.last_step, self.first_step = (
            int(state["step"]),
            int(state.get("first_step", 0 if state["first"] else -1)),
        )
        self.first, self.last = dict(state["first"]), dict(state["last"])
        self._made, self._asked = (
            int(state.get("made", 1)),
            int(state.get("asked", len(self.tasks()))),
        )
