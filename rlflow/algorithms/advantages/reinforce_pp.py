"""REINFORCE++: returns normalised over the whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlflow.algorithms.base import Advantage
from rlflow.algorithms.rewards import token_rewards
from rlflow.algorithms.statistics import (
    first_rows,
    group_moments,
    returns_to_go,
    sampled_order,
    standardized,
    token_shares,
    whitened,
)
from rlflow.types import Batch
from rlflow.values import NonNegativeFloat, Share


@dataclass(frozen=True)
class ReinforcePP(Advantage):
    """float32, normalised over the step's batch with its mean and population std (arXiv
    2501.03262).

    baseline none: (B, T), each token's discounted return-to-go; the KL to the reference that the
    paper has in the reward is the reward term `kl`. baseline group, the paper's
    REINFORCE++-baseline: (B,) reward - group mean; its KL is the loss `kl` with estimator k2. over:
    whether trajectories count alike in mean and std, or tokens (as in OpenRLHF), where long ones
    count more. Where nothing differs the advantage is exactly 0."""

    baseline: Literal["none", "group"] = "none"
    gamma: Share = 1.0
    over: Literal["trajectories", "tokens"] = "trajectories"
    eps: NonNegativeFloat = 1e-8

    @property
    def compares_attempts(self) -> bool:  # type: ignore[override]
        return self.baseline == "group"

    def __call__(self, batch: Batch) -> Tensor:
        who = "advantage reinforce_pp"
        if self.baseline == "group":
            values = standardized(
                batch.require("rewards", who), group_moments(batch, who), "none", 0.0
            )
            if self.over == "trajectories":
                first, place = first_rows(batch)
                return whitened(values[first], torch.ones(len(first)), self.eps)[place].float()
            values = values[:, None].expand(batch.tokens.shape)
        else:
            row, position, owner = sampled_order(batch)
            values = torch.zeros(batch.tokens.shape, dtype=torch.float64)
            values[row, position] = returns_to_go(
                token_rewards(batch, who)[row, position], owner, self.gamma
            )
        return whitened(values, token_shares(batch, self.over), self.eps).float()
