"""THE training loop: groups of attempts -> advantages -> loss -> optimizer -> weights to the engine
-> evaluation."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlflow.algorithms.algorithm import Algorithm
from rlflow.algorithms.statistics import first_rows
from rlflow.batching import (
    ROUTED,
    ROUTES,
    lengthened,
    make_batch,
    rows_with_advantage,
    split_minibatches,
)
from rlflow.config.schema import RunConfig
from rlflow.errors import RolloutError
from rlflow.report.reductions import update_metrics
from rlflow.report.timer import PhaseTimer
from rlflow.run.directory import run_path
from rlflow.run.open import open_run
from rlflow.run.resume import finished_summary
from rlflow.trainer.base import Trainer
from rlflow.trainer.routing import routing_metrics
from rlflow.types import SOURCES, Batch, Group

logger = logging.getLogger(__name__)

CURRENT = {"current": "logprobs", "current_entropy": "entropy"}
"""What is scored before each minibatch, by the need that asks for it."""


def train(config: RunConfig) -> dict[str, Any]:
    """Runs a configured training from its start, or from its last checkpoint with `run.resume`;
    returns the summary.

    Raises RLFlowError, in one line, for anything that the user can fix; before the first step
    whatever can be known by then."""
    finished = finished_summary(config.run) if config.run.resume else None
    if finished is not None:
        logger.warning(
            "%s: all %d steps are done, nothing is left to do; raise run.steps to go on",
            run_path(config.run),
            finished["steps"],
        )
        return finished
    with open_run(config) as run:
        if run.evaluation_due():
            run.evaluate()
        for groups in run.groups():
            metrics = training_step(
                run.step, groups, run.trainer, run.algorithm, run.timer, run.observe
            )
            run.sync_weights(version=run.step + 1)
            run.finish_step(metrics, groups)
            if run.checkpoint_due():
                # First: an evaluation may take long, and a kill in it must not cost a step
                run.save()
            if run.evaluation_due():
                run.evaluate()
        return run.finish()


def training_step(
    step: int,
    groups: Sequence[Group],
    trainer: Trainer,
    algorithm: Algorithm,
    timer: PhaseTimer,
    observe: Callable[[Batch, Sequence[Group]], object] | None = None,
) -> dict[str, float]:
    """Every update of one step on the groups; returns its metrics. The engine's weights are the
    caller's matter. observe: told of the batch, with advantages, before the first update."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    usable = [trajectory for trajectory in trajectories if trajectory.usable]
    if not usable:
        first = trajectories[0].error if trajectories else "there are none"
        raise RolloutError(
            f"step {step}: all {len(trajectories)} episodes were aborted; first: {first}"
        )
    batch = make_batch(usable)
    batch = batch.replace(trainer_version=torch.full_like(batch.lengths, step))
    with timer.phase("score"):
        tasks = [group.task for group in groups for _ in group.usable]
        if algorithm.early is not None:
            batch = algorithm.early.fill(batch, usable, tasks)
        batch = score_step(batch, trainer, algorithm.needs)
        if algorithm.teacher is not None and batch.teacher_logprobs is None:
            batch = algorithm.teacher.fill(batch, tasks)
        of_routers = routing_metrics(batch, trainer, step)
    batch = algorithm.credit(batch)
    if observe is not None:
        observe(batch, groups)
    updates = []
    for epoch in range(algorithm.epochs_per_step):
        shuffle = torch.Generator().manual_seed(shuffle_seed(algorithm.seed, step, epoch))
        for minibatch in split_minibatches(batch, algorithm.minibatches_per_step, shuffle):
            minibatch = minibatch.replace(weights=algorithm.aggregate(minibatch))
            reported: dict[str, float] = {}
            if algorithm.transforms or algorithm.needs & CURRENT.keys():
                with timer.phase("score"):
                    minibatch, reported = algorithm.transform(
                        score_minibatch(minibatch, trainer, algorithm.needs)
                    )
            with timer.phase("update"):
                if algorithm.loss.vanishes_at_zero_advantage:
                    minibatch = rows_with_advantage(minibatch)
                updates.append({**reported, **trainer.update(minibatch, algorithm.loss)})
                algorithm.observe(updates[-1])
    idle = sum("updates_skipped" in update for update in updates)
    if idle and not algorithm.told_of_idle_updates:
        algorithm.told_of_idle_updates = True
        logger.warning(
            "step %d: no gradient in %d of %d updates (all advantages are 0): the weights stayed "
            "as they were there. Said once; train/updates_skipped counts them",
            step,
            idle,
            len(updates),
        )
    return {**step_metrics(batch, updates, algorithm), **of_routers}


def shuffle_seed(seed: int, step: int, epoch: int) -> int:
    """63 bits from a digest, as the seeds of the rollout: `hash` gives -1 and -2 the same, and
    other numbers elsewhere."""
    text = f"{seed}/{step}/minibatches/{epoch}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def score_step(batch: Batch, trainer: Trainer, needs: frozenset[str]) -> Batch:
    """The batch with what some component needs of the models before the step's first update:
    log-probs of the policy and of frozen ones, values of the critic; with router_replay=recompute
    the experts that the policy chooses now, which the updates replay."""
    asked = batch.replace(wanted=batch.trained)
    records = trainer.routing is not None and trainer.routing.replay == "recompute"
    if "proximal" in needs or records:
        scores = trainer.score(asked, want=("logprobs", ROUTES) if records else ("logprobs",))
        if records:
            batch = batch.replace(extras={ROUTES: scores[ROUTES], ROUTED: batch.lengths})
        if "proximal" in needs:
            batch = batch.replace(proximal_logprobs=scores["logprobs"])
    if "reference" in needs and batch.reference_logprobs is None:
        batch = batch.replace(
            reference_logprobs=trainer.score(asked, model="reference")["logprobs"]
        )
    if "values" in needs:
        # One token more: the value of the end
        values = trainer.score(lengthened(batch), want=("values",))["values"]
        final = values.gather(1, batch.lengths[:, None]).squeeze(1)
        batch = batch.replace(
            values=values[:, :-1].masked_fill(~batch.loss_mask, 0.0), final_values=final
        )
    return batch


def score_minibatch(minibatch: Batch, trainer: Trainer, needs: frozenset[str]) -> Batch:
    """The minibatch with what some component needs of the policy just before its update."""
    want = [name for need, name in CURRENT.items() if need in needs]
    if not want:
        return minibatch
    scores = trainer.score(minibatch.replace(wanted=minibatch.trained), want=want)
    return minibatch.replace(
        current_logprobs=scores.get("logprobs"), current_entropy=scores.get("entropy")
    )


def step_metrics(
    batch: Batch, updates: Sequence[dict[str, float]], algorithm: Algorithm
) -> dict[str, float]:
    """`train/` metrics of one step; the log-prob gap is that of the first minibatch, before any
    update."""
    metrics = update_metrics(updates, algorithm.loss.reductions)
    metrics["train/lr"] = updates[-1]["lr"]
    known = batch.loss_mask & batch.require("logprobs_known", "loop")[:, None]
    if "logprob_gap" in updates[0]:  # not where the critic is warmed up alone
        metrics["train/logprob_gap"] = updates[0]["logprob_gap"]
    if not bool(known.any()):  # what nobody sampled says nothing of an engine
        metrics.pop("train/logprob_gap", None)
    if batch.teacher_logprobs is not None and bool(known.any()):
        metrics["train/teacher_gap"] = float(
            (batch.logprobs - batch.teacher_logprobs)[known].mean()
        )
    metrics["train/tokens"] = float(batch.loss_mask.sum())
    metrics["train/fed_tokens"] = float(batch.lengths.sum())
    if any(change.stage == "rewards" for change in algorithm.transforms):
        metrics["train/shaped_reward"] = float(
            batch.require("rewards", "step_metrics")[first_rows(batch)[0]].mean()
        )
    demonstrated = batch.require("source", "metrics") == SOURCES.index("demonstration")
    if not bool(demonstrated.all()):  # what is learned by likelihood needs no advantage
        owners = batch.require("trajectory", "metrics")
        taught = (batch.advantages * batch.loss_mask).ne(0).any(dim=1)
        metrics["train/advantage_zero"] = 1 - len(owners[taught].unique()) / len(owners.unique())
    if batch.values is not None and batch.returns is not None:
        metrics |= critic_metrics(
            batch.values[batch.loss_mask].double(), batch.returns[batch.loss_mask].double()
        )
    return metrics


def critic_metrics(values: Tensor, returns: Tensor) -> dict[str, float]:
    """How good the values (N,) of the trained tokens were before the step, against their returns
    (N,). Explained variance: 1 - var(returns - values) / var(returns), 1 at best, 0 for a constant;
    left out where all returns are equal."""
    metrics = {"train/value": float(values.mean()), "train/return": float(returns.mean())}
    spread = float(returns.var(correction=0))
    if spread > 0:
        metrics["train/value_explained_variance"] = (
            1 - float((returns - values).var(correction=0)) / spread
        )
    return metrics
