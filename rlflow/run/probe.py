"""The probe of a run's weight syncs, for engines that cannot hash their weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlflow.batching import token_batch
from rlflow.errors import ConfigError
from rlflow.rollout import Rollout, WeightProbe
from rlflow.trainer.base import Trainer
from rlflow.types import Task

PROMPTS = 4
TEMPERATURE = 0.7
"""Not 1 and not the run's, which is 1 in most: an engine that divides by no temperature, or by another one, would not show."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}
"""Nats, by model.dtype: a bfloat16 model's log-probs depend on the order in which engine and trainer add."""


def trainable(rollout: Rollout) -> Rollout:
    """The same. Raises ConfigError where an engine keeps the weights that it has: the policy would never be the trainer's."""
    fixed = next((engine for engine in rollout.engines if not engine.takes_weights), None)
    if fixed is not None:
        raise ConfigError(
            f"rollout.engine: {type(fixed).__name__} takes no weights: it serves evaluation, not training. For vllm_server name "
            "a folder that rlflow and the server see, in rollout.engine.weights_folder."
        )
    return rollout


def make_probe(rollout: Rollout, trainer: Trainer, tasks: Sequence[Task], dtype: str) -> WeightProbe | None:
    """A probe on the prompts of a few tasks, scored by the trainer; None where every engine hashes its weights."""
    if rollout.hashes_weights:
        return None

    def score(rows: Sequence[Sequence[int]]) -> list[list[float]]:
        batch = token_batch(rows)
        logprobs = trainer.score(batch.replace(temperatures=torch.full_like(batch.temperatures, TEMPERATURE)))["logprobs"]
        return [values[: len(row)].tolist() for row, values in zip(rows, logprobs, strict=True)]

    prompts = [rollout.prompt_tokens(task) for task in tasks[:PROMPTS]]
    return WeightProbe(prompts, score, TOLERANCE[dtype], temperature=TEMPERATURE)
