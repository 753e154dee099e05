"""V-trace: a critic's targets and advantages from what an older policy sampled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.algorithms.advantages.token_lines import TokenLines, accumulate, whiten
from rlflow.algorithms.base import Advantage, anchor_logprobs, log_ratio
from rlflow.algorithms.rewards import token_rewards
from rlflow.errors import ConfigError
from rlflow.types import Batch
from rlflow.values import PositiveFloat, Share


@dataclass(frozen=True)
class VTrace(Advantage):
    """(B, T) advantages rho_t (r_t + gamma v_{t+1} - V_t), and returns v_t = V_t + delta_t + gamma
    c_t (v_{t+1} - V_{t+1}), delta_t = rho_t (r_t + gamma V_{t+1} - V_t).

    IMPALA, Espeholt et al. 2018, arXiv 1802.01561, section 4.1, remark 1 and section 4.2; rho_t =
    min(rho, pi / mu) and c_t = lam min(c, pi / mu), mu the policy that sampled the token (the
    engine's log-probs), pi the trained one before the step (the trainer's). On policy and with lam
    1, GAE with lam 1. Tokens, rewards, gamma, bootstrap and whiten as in gae. The advantages hold
    rho, so the kernel must not correct for mu again: anchor: proximal. Raises ConfigError where c >
    rho."""

    needs = frozenset({"values", "proximal", "rollout"})
    weighs = True

    gamma: Share = 1.0
    lam: Share = 1.0
    rho: PositiveFloat = 1.0
    c: PositiveFloat = 1.0
    bootstrap: bool = False
    whiten: bool = False

    def __post_init__(self) -> None:
        if self.c > self.rho:
            raise ConfigError(
                f"advantage vtrace: c: expected at most rho = {self.rho:g} (arXiv 1802.01561), "
                f"found {self.c:g}"
            )

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        who = "advantage vtrace"
        lines = TokenLines.of(batch, who)
        values = lines.take(batch.require("values", who))
        rewards = lines.take(token_rewards(batch, who))
        sampled = anchor_logprobs(batch, "rollout", who)
        ratio = lines.take(
            log_ratio(batch.require("proximal_logprobs", who), sampled, batch.loss_mask)
        ).exp()
        rho, trace = ratio.clamp(max=self.rho), self.lam * ratio.clamp(max=self.c)
        after = lines.next_values(values, batch, self.bootstrap, who)
        deltas = torch.where(lines.real, rho * (rewards + self.gamma * after - values), 0.0)
        corrections = accumulate(deltas, self.gamma * trace)  # v_t - V_t
        advantages = torch.where(
            lines.real, deltas + rho * self.gamma * lines.ahead(corrections), 0.0
        )
        returns = lines.put(corrections + values)
        if self.whiten:
            advantages = whiten(advantages, lines.real)
        return lines.put(advantages), returns
