"""THE training loop: tasks -> rollouts -> advantages -> loss -> optimizer -> weights to the engine -> evaluation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from rlflow.algorithms import token_weights
from rlflow.batching import make_batch, rows_with_advantage, split_minibatches
from rlflow.config.schema import RunConfig
from rlflow.errors import RolloutError
from rlflow.metrics.reductions import mean, mean_of, rollout_metrics
from rlflow.metrics.timer import PhaseTimer
from rlflow.rollout import Rollout
from rlflow.run.algorithm import Algorithm
from rlflow.run.open import open_run
from rlflow.run.preflight import finished_summary, run_path
from rlflow.trainer.base import Trainer
from rlflow.types import Batch, Group, Task

logger = logging.getLogger(__name__)


def train(config: RunConfig) -> dict[str, Any]:
    """Runs a configured training from its start, or from its last checkpoint with `run.resume`; returns the summary.

    Raises RLFlowError, in one line, for anything that the user can mend; before the first step whatever can be known by then.
    """
    finished = finished_summary(config) if config.run.resume else None
    if finished is not None:
        logger.warning(
            "%s: all %d steps are done, nothing is left to do; raise run.steps to go on",
            run_path(config),
            finished["steps"],
        )
        return finished
    with open_run(config) as run:
        if run.evaluation_due():
            run.evaluate()
        while run.step < config.run.steps and not run.should_stop():
            tasks = run.source.take(config.rollout.prompts_per_step)
            metrics, groups = training_step(run.step, tasks, run.rollout, run.trainer, run.algorithm, run.timer)
            run.finish_step(metrics, groups)
            if run.evaluation_due():
                run.evaluate()
            if run.checkpoint_due():
                run.save()
        return run.finish()


def training_step(
    step: int, tasks: Sequence[Task], rollout: Rollout, trainer: Trainer, algorithm: Algorithm, timer: PhaseTimer
) -> tuple[dict[str, float], list[Group]]:
    """One step on the tasks, the engine's weights included; returns its metrics and what was collected."""
    with timer.phase("rollout"):
        groups = rollout.collect(tasks, step=step)
        report = rollout.report
    trajectories = [one for group in groups for one in group.trajectories]
    usable = [one for one in trajectories if one.usable]
    if not usable:
        raise RolloutError(
            f"step {step}: all {len(trajectories)} episodes were aborted; first: {trajectories[0].error}"
        )
    batch = make_batch(usable)
    with timer.phase("score"):
        batch = add_scores(batch, trainer, algorithm)
    advantages = algorithm.advantage(batch)
    batch = batch.replace(advantages=advantages[:, None] * batch.loss_mask if advantages.dim() == 1 else advantages)
    updates = []
    with timer.phase("update"):
        for epoch in range(algorithm.section.epochs_per_step):
            shuffle = torch.Generator().manual_seed(hash((algorithm.seed, step, epoch)) & 0x7FFFFFFF)
            for minibatch in split_minibatches(batch, algorithm.section.minibatches_per_step, shuffle):
                weights = token_weights(minibatch, algorithm.section.aggregate, constant=rollout.response_budget)
                minibatch = minibatch.replace(weights=weights)
                if algorithm.loss.vanishes_at_zero_advantage:
                    minibatch = rows_with_advantage(minibatch)
                updates.append(trainer.update(minibatch, algorithm.loss))
    with timer.phase("sync"):
        rollout.load_weights(trainer.weights(), version=step + 1)
    return {**step_metrics(trajectories, batch, updates), **report}, groups


def add_scores(batch: Batch, trainer: Trainer, algorithm: Algorithm) -> Batch:
    """The batch with the log-probs that the algorithm needs beside the behaviour policy's own."""
    columns = {}
    if algorithm.section.old_logprobs == "recompute":
        columns["proximal_logprobs"] = trainer.score(batch)["logprobs"]
    if algorithm.loss.needs_reference:
        columns["reference_logprobs"] = trainer.score(batch, model="reference")["logprobs"]
    return batch.replace(columns=columns)


def step_metrics(trajectories: Sequence[Any], batch: Batch, updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """`train/` and `rollout/` metrics of one step; the log-prob gap is that of the first minibatch, before any update."""
    metrics = {f"train/{name}": value for name, value in mean_of(updates).items()}
    metrics["train/lr"] = updates[-1]["lr"]
    metrics["train/logprob_gap"] = updates[0]["logprob_gap"]
    metrics["train/tokens"] = float(batch.loss_mask.sum())
    metrics["train/fed_tokens"] = float(batch.lengths.sum())
    spreads = [one.group_stats[2] for one in trajectories if one.group_stats is not None]
    metrics["train/advantage_zero"] = mean([float(spread == 0) for spread in spreads])
    return {**metrics, **rollout_metrics(trajectories)}
