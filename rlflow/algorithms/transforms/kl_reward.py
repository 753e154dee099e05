"""KL to a reference, in the reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rlflow.algorithms.base import (
    Anchor,
    RewardTerm,
    anchor_logprobs,
    kl_estimate,
    log_ratio,
)
from rlflow.types import Batch
from rlflow.values import NonNegativeFloat, PositiveInt


@dataclass(frozen=True)
class KLReward(RewardTerm):
    """(B, T) float64: minus coefficient * KL estimate of each token, of the policy that sampled it
    to `Batch.reference_logprobs`.

    In the reward k1 has the gradient of the reverse KL (InstructGPT, arXiv 2203.02155; REINFORCE++,
    arXiv 2501.03262); as a loss it has none. anchor: whose log-probs are compared with the
    reference's, the engine's (rollout) or the trainer's (proximal). refresh_steps: the reference
    becomes the policy after every so many steps; without it, it stays the starting policy."""

    coefficient: NonNegativeFloat
    estimator: Literal["k1", "k2", "k3"] = "k1"
    anchor: Anchor = "rollout"
    refresh_steps: PositiveInt | None = None

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"reference", self.anchor})

    @property
    def refreshes(self) -> Mapping[str, int]:  # type: ignore[override]
        return {} if self.refresh_steps is None else {"reference": self.refresh_steps}

    def term(self, batch: Batch) -> Tensor:
        reference = batch.require("reference_logprobs", "transform kl_reward")
        sampled = anchor_logprobs(batch, self.anchor, "transform kl_reward")
        x = log_ratio(reference, sampled, batch.loss_mask)
        return -self.coefficient * kl_estimate(self.estimator, x).double()
