"""Several named rewards, each normalised on its own before they are added."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.algorithms.base import compares_attempts
from rlflow.algorithms.statistics import (
    Std,
    first_rows,
    named_moments,
    named_rewards,
    standardized,
    whitened,
)
from rlflow.errors import ConfigError, RLFlowError, did_you_mean
from rlflow.types import Batch
from rlflow.values import NonNegativeFloat


@compares_attempts
def gdpo(
    batch: Batch,
    weights: dict[str, float] | None = None,
    std: Std = "sample",
    eps: NonNegativeFloat = 1e-6,
    whiten: bool = True,
) -> Tensor:
    """(B,) float32: sum over names of weight * (reward - group mean) / (group std + eps), then
    normalised over the batch's trajectories (mean 0, population std 1).

    GDPO, arXiv 2601.05242: normalised together, rewards of different scale drown each other. The
    rewards are those that the environment gives by name (`Step.rewards`); weights: of all of them
    1, or those named here. A group in which a reward does not differ gets nothing from it. whiten
    false leaves the last step out. Raises RLFlowError where the environment names none, ConfigError
    for a weight of a reward that it never gave."""
    rewards = named_rewards(batch)
    if not rewards:
        raise RLFlowError(
            "advantage gdpo: the environment gave no named rewards; expected Step.rewards = {name: "
            "value}"
        )
    weights = dict.fromkeys(rewards, 1.0) if weights is None else weights
    for name in weights:
        if name not in rewards:
            known = sorted(rewards)
            raise ConfigError(
                f"algorithm.advantage.weights: the environment gave no reward '{name}' in this "
                f"step, only {', '.join(known)}."
                f"{did_you_mean(name, known)}"
            )
    total = torch.zeros(len(batch), dtype=torch.float64)
    for name, weight in weights.items():
        total += weight * standardized(
            rewards[name], named_moments(batch, name, "advantage gdpo"), std, eps
        )
    if whiten:
        first, place = first_rows(batch)
        total = whitened(total[first], torch.ones(len(first)))[place]
    return total.float()
