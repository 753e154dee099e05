"""Evaluation: its schedule, attempts at each task, means with 95% intervals, failures apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.batching import make_batch
from rlflow.config.schema import EvaluationSection
from rlflow.errors import ConfigError
from rlflow.models.adapter import adapter_update, read_adapter
from rlflow.report.metrics import Metrics, scores
from rlflow.report.reductions import (
    episode_records,
    interval95,
    mean,
    named_reward_means,
    reduced,
)
from rlflow.rollout.engine_facts import engine_facts
from rlflow.rollout.rollout import Rollout
from rlflow.trainer.base import Trainer
from rlflow.trainer.options import LoraOptions
from rlflow.types import Group, Task, Trajectory
from rlflow.values import checked

MOST_REASONS, LONGEST_REASON = 5, 300

MOSTLY_SHARES = ("share", "reward", "score", "1")
"""Units of values that, where they lie between 0 and 1, are taken to end there; levels go on."""


@dataclass
class Evaluation:
    """metrics: `eval/<name>`, over the usable attempts. groups: of all attempts."""

    metrics: dict[str, float]
    groups: list[Group]


def adapter_options(folder: Path, engine: Mapping[str, Any]) -> LoraOptions:
    """What an engine is told of the adapter in a folder, which is to be evaluated over its base.
    Raises ConfigError for an engine that takes none."""
    if not engine_facts(engine).takes_adapters:
        raise ConfigError(
            f"--model {folder}: a LoRA adapter, and rollout.engine={engine['name']} takes none; "
            "merge it first: rlflow merge ADAPTER OUT."
        )
    adapter, config = read_adapter(folder)
    targets: Any = sorted({layer.rpartition(".")[2] for layer in adapter.factors})
    return LoraOptions(rank=config["r"], alpha=config["lora_alpha"], targets=targets)


def load_adapter(rollout: Rollout, folder: Path) -> None:
    """Gives the engines the adapter in a folder. vLLM, which cannot hash weights, says itself which
    adapter it has."""
    adapter, _ = read_adapter(folder)
    rollout.verify_weights = rollout.hashes_weights
    rollout.load_weights(adapter_update(adapter.scale, adapter.named_factors()), version=0)


def evaluate(
    rollout: Rollout,
    tasks: Sequence[Task],
    *,
    step: int = 0,
    samples_per_prompt: int = 1,
    temperature: float = 0.0,
) -> Evaluation:
    """Attempts every task; attempts lost to infrastructure count in `eval/failed` and in no mean,
    those that the policy made unscorable count as wrong.

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
    """`eval/<name>` by the registered reductions; of scores and reward also `_low` and `_high`.

    These are the ends of 95% intervals over tasks, each the mean of its attempts."""
    usable = [trajectory for trajectory in trajectories if trajectory.usable]
    own = zip(usable, episode_records(usable, registered), strict=True)
    unscorable = sum(trajectory.unscorable for trajectory in usable)
    records = [{"reward": trajectory.reward, **record} for trajectory, record in own]
    metrics = {
        "eval/questions": float(len({trajectory.group_id for trajectory in usable})),
        "eval/attempts": float(len(usable)),
        "eval/failed": float(len(trajectories) - len(usable)),
        "eval/asked": float(len(trajectories)),
        **({"eval/unscorable": float(unscorable)} if unscorable else {}),
        **named_reward_means(usable, "eval"),
    }
    with_interval = {"reward", *scores(registered)}
    for name, value in reduced(records, registered).items():
        metrics[f"eval/{name}"] = value
        if name in with_interval:
            by_task: dict[str, list[float]] = {}
            for trajectory, record in zip(usable, records, strict=True):
                by_task.setdefault(trajectory.group_id, []).append(record[name])
            unit = registered[name].unit if name in registered else "reward"
            means = [*map(mean, by_task.values())]
            low, high = interval95(means, unit in MOSTLY_SHARES)
            # The normal interval does not know that it ends there
            if unit == "share":
                low, high = max(low, 0.0), min(high, 1.0)
            metrics[f"eval/{name}_low"], metrics[f"eval/{name}_high"] = low, high
    return metrics


def recorded_loss(trainer: Trainer, groups: Sequence[Group], rows: int) -> dict[str, float]:
    """The loss of recorded trajectories, a mean over all their trained tokens, `rows` trajectories
    scored at a time."""
    trajectories = [trajectory for group in groups for trajectory in group.usable]
    total, tokens = 0.0, 0
    for start in range(0, len(trajectories), rows):
        batch = make_batch(trajectories[start : start + rows])
        scores = trainer.score(batch.replace(wanted=batch.loss_mask))["logprobs"]
        total -= float(scores[batch.loss_mask].double().sum())
        tokens += int(batch.loss_mask.sum())
    return {"eval/nll": total / tokens, "eval/tokens": float(tokens)}


@dataclass(frozen=True)
class Spread:
    """How attempts at the same tasks differ. pass_1: mean share of attempts that solved their task;
    pass_all: share of tasks that one of their attempts solved; differing: share of tasks whose
    attempts differ in reward, the only ones that an algorithm learns from which compares them."""

    pass_1: float
    pass_all: float
    differing: float


def spread(groups: Sequence[Group], registered: Metrics) -> Spread:
    """Of the usable attempts. Solved is what has a first score of 1, or without one a positive
    reward."""
    first = scores(registered)[:1]
    shares = []
    differing = []
    for group in (group.usable for group in groups if group.usable):
        worth = [one.metrics.get(first[0], 0.0) == 1 if first else one.reward > 0 for one in group]
        shares.append(mean(list(map(float, worth))))
        differing.append(float(len({one.reward for one in group}) > 1))
    return Spread(mean(shares), mean([float(share > 0) for share in shares]), mean(differing))


def metrics_by_set(groups: Sequence[Group], registered: Metrics) -> dict[str, dict[str, float]]:
    """{set: evaluation_metrics} by the tasks' `metadata["set"]`; empty for a single set."""
    by_set: dict[str, list[Trajectory]] = {}
    for group in groups:
        by_set.setdefault(str(group.task.metadata.get("set", "")), []).extend(group.trajectories)
    if len(by_set) < 2:
        return {}
    return {name: evaluation_metrics(found, registered) for name, found in by_set.items()}


def means_over_sets(
    by_set: Mapping[str, Mapping[str, float]], registered: Metrics
) -> dict[str, float]:
    """{first score: its unweighted mean over sets, which the field reports}, where a set has it."""
    values = {
        name: [one[f"eval/{name}"] for one in by_set.values() if f"eval/{name}" in one]
        for name in scores(registered)[:1]
    }
    return {name: mean(found) for name, found in values.items() if found}


def failure_reasons(groups: Sequence[Group]) -> dict[str, int]:
    """Why attempts were lost to infrastructure, the most frequent reasons first, with counts."""
    lost = [one for group in groups for one in group.trajectories if not one.usable]
    reasons = Counter(one.error[:LONGEST_REASON] for one in lost)
    return dict(reasons.most_common(MOST_REASONS))


class EvaluationSchedule:
    """The evaluations of a run.

    first, last: `eval/` metrics of the first and of the latest one, empty before; first_step,
    last_step: their steps, -1 before."""

    def __init__(self, tasks: Sequence[Task], section: EvaluationSection) -> None:
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self._tasks, self._section = tasks, section
        self.first_step = self.last_step = -1
        self._made = 0  # evaluations at that step
        self._asked = 0  # tasks of the latest one

    def due(self, step: int) -> bool:
        """Whether to evaluate after `step` steps; never twice at a step."""
        if step == self.last_step:
            return False
        if step == 0:
            return self._section.at_start
        every = self._section.every_steps
        return every > 0 and step % every == 0

    def final_due(self, step: int) -> bool:
        """Whether the end of the run needs one more: none at this step was over these tasks."""
        return step != self.last_step or len(self.tasks(final=True)) != self._asked

    def tasks_after(self, step: int, steps: int) -> int:
        """How many tasks the evaluations ask that are due from `step` on, in a run of `steps`."""
        every = self._section.every_steps
        scheduled = max(0, (steps - 1) // every - step // every) if every > 0 else 0
        if step < steps and self.due(step):
            scheduled += 1
        last = len(self.tasks(final=True)) if self.final_due(steps) else 0
        return scheduled * len(self.tasks()) + last

    def made(self, step: int) -> int:
        """Number of evaluations after `step` steps."""
        return self._made if step == self.last_step else 0

    def tasks(self, final: bool = False) -> list[Task]:
        """The tasks of a scheduled evaluation, or of the last one."""
        section = self._section
        return list(self._tasks[: section.final_questions if final else section.questions])

    def record(self, step: int, metrics: Mapping[str, float], final: bool = False) -> None:
        """Notes an evaluation of `tasks(final)`."""
        self._made, self._asked = self.made(step) + 1, len(self.tasks(final))
        self.last, self.last_step = dict(metrics), step
        if self.first_step < 0:
            self.first, self.first_step = self.last, step

    def state_dict(self) -> dict[str, Any]:
        """The state of a resumed run, which evaluates nothing twice."""
        counts = {"made": self._made, "asked": self._asked}
        steps = {"step": self.last_step, "first_step": self.first_step}
        return {**steps, **counts, "first": self.first, "last": self.last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        score = float | None  # null: it was not finite
        for metrics in (state["first"], state["last"]):
            for name, value in metrics.items():
                checked(score, value, name)
        self.first, self.last = dict(state["first"]), dict(state["last"])
        self.last_step, self.first_step = int(state["step"]), int(state["first_step"])
        self._made, self._asked = int(state["made"]), int(state["asked"])
