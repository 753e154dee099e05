"""Generalized advantage estimation: a critic says what was expected."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.algorithms.advantages.token_lines import TokenLines, accumulate, whiten
from rlflow.algorithms.base import Advantage
from rlflow.algorithms.rewards import token_rewards
from rlflow.types import Batch
from rlflow.values import Share


@dataclass(frozen=True)
class GAE(Advantage):
    """(B, T) advantages A_t = sum_l (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t,
    and returns A_t + V_t.

    Schulman et al. 2016, arXiv 1506.02438, equation 16; float64, over the trained tokens of a
    trajectory: observations are skipped, segments follow one another. A turn's reward stands at its
    last token; reward terms such as kl_reward count where they stand. gamma, lam: per token.
    bootstrap: after an episode that was cut comes the critic's value, not 0. whiten: advantages of
    mean 0 and variance 1 over the step's trained tokens; returns are made before."""

    needs = frozenset({"values"})

    gamma: Share = 1.0
    lam: Share = 1.0
    bootstrap: bool = False
    whiten: bool = True

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        who = "advantage gae"
        lines = TokenLines.of(batch, who)
        values = lines.take(batch.require("values", who))
        rewards = lines.take(token_rewards(batch, who))
        following = lines.next_values(values, batch, self.bootstrap, who)
        deltas = torch.where(lines.real, rewards + self.gamma * following - values, 0.0)
        advantages = accumulate(deltas, self.gamma * self.lam)
        returns = lines.put(advantages + values)
        if self.whiten:
            advantages = whiten(advantages, lines.real)
        return lines.put(advantages), returns
