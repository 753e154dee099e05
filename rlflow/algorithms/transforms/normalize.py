"""Advantages of mean 0 and deviation 1 over the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlflow.algorithms.base import Transform
from rlflow.algorithms.statistics import token_shares, whitened
from rlflow.types import Batch


@dataclass(frozen=True)
class NormalizeAdvantages(Transform):
    """Every advantage minus the mean, divided by the population std, over the whole step before it
    is split into minibatches: the whitening of PPO (verl's masked_whiten, AReaL's batch
    normalisation). over: tokens count alike, or trajectories do."""

    stage = "advantages"

    over: Literal["tokens", "trajectories"] = "tokens"

    def __call__(self, batch: Batch) -> Batch:
        return batch.replace(
            advantages=whitened(batch.advantages, token_shares(batch, self.over)).float()
        )
