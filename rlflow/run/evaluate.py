"""Evaluation: one attempt or more at each question, means with 95% intervals, failures reported apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlflow.metrics.reductions import episode_records, interval95, mean
from rlflow.rollout import Rollout
from rlflow.types import Group, Task, Trajectory

WITH_INTERVAL = ("exact_match", "f1", "reward")


@dataclass
class Evaluation:
    """metrics: `eval/<name>`, means over the usable attempts. groups: every attempt, for the jsonl of trajectories."""

    metrics: dict[str, float]
    groups: list[Group]


def evaluate(
    rollout: Rollout, tasks: Sequence[Task], *, step: int = 0, samples_per_prompt: int = 1, temperature: float = 0.0
) -> Evaluation:
    """Attempts every task. An attempt that infrastructure failed counts in `eval/failed` and in no mean.

    Raises RolloutError only where not a single attempt was usable."""
    groups = rollout.collect(
        tasks,
        step=-1 - step,  # evaluation draws other seeds than any training step
        samples_per_prompt=samples_per_prompt,
        temperature=temperature,
        max_aborted_share=1 - 0.5 / max(1, len(tasks) * samples_per_prompt),
    )
    return Evaluation(evaluation_metrics([one for group in groups for one in group.trajectories]), groups)


def evaluation_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`eval/<name>` means; exact_match, f1 and reward with the ends of their 95% intervals as `_low` and `_high`.

    The intervals are over questions, each the mean of its attempts: several attempts at a question are no further questions."""
    usable = [one for one in trajectories if one.usable]
    records = [{"reward": one.reward, **record} for one, record in zip(usable, episode_records(usable), strict=True)]
    metrics = {
        "eval/questions": float(len({one.group_id for one in usable})),
        "eval/attempts": float(len(usable)),
        "eval/failed": float(len(trajectories) - len(usable)),
    }
    for name in dict.fromkeys(name for record in records for name in record):
        metrics[f"eval/{name}"] = mean([record[name] for record in records if name in record])
        if name in WITH_INTERVAL:
            by_question: dict[str, list[float]] = {}
            for one, record in zip(usable, records, strict=True):
                by_question.setdefault(one.group_id, []).append(record[name])
            metrics[f"eval/{name}_low"], metrics[f"eval/{name}_high"] = interval95([*map(mean, by_question.values())])
    return metrics


