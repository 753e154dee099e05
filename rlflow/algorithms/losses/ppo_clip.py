"""The clipped surrogate of PPO, with DAPO's wider upper clip and the dual clip."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlflow.algorithms.base import Anchor, Kernel, anchor_logprobs, check_anchor, log_ratio
from rlflow.errors import ConfigError
from rlflow.types import Batch, LossResult, PolicyOutput


@dataclass(frozen=True)
class PPOClipLoss(Kernel):
    """Minus min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(log-prob - old log-prob).

    PPO, arXiv 1707.06347 equation 7; clip_high > clip_low is DAPO's clip-higher (arXiv 2503.14476); dual_clip c
    bounds the loss of negative advantages by -c A (arXiv 1912.09729). anchor: whose the old log-probs are, the engine's
    (rollout) or the trainer's own before the step's first update (proximal). Metrics: ratio; clip_fraction (the share of
    tokens whose gradient a clip has cut off); old_kl (k3 estimate of KL(old || policy), nats); policy_loss.
    """

    vanishes_at_zero_advantage = True

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    anchor: Anchor = "rollout"

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"proximal"} if self.anchor == "proximal" else ())

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0:
            raise ConfigError(
                f"loss ppo_clip: expected 0 <= clip_low <= 1 <= 1 + clip_high, found {self.clip_low}, {self.clip_high}"
            )
        check_anchor(self.anchor, "loss ppo_clip")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigError(f"loss ppo_clip: dual_clip must be above 1 (3 is usual) or null, found {self.dual_clip}")

    def kernel(self, output: PolicyOutput, batch: Batch) -> LossResult:
        old = anchor_logprobs(batch, self.anchor, "loss ppo_clip")
        log_of_ratio = log_ratio(output.logprobs, old, batch.loss_mask)
        ratio = log_of_ratio.exp()
        advantages = batch.advantages.masked_fill(~batch.loss_mask, 0.0)
        free = ratio * advantages
        objective = torch.minimum(free, ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages)
        if self.dual_clip is not None:
            bounded = torch.maximum(objective, self.dual_clip * advantages)
            objective = torch.where(advantages < 0, bounded, objective)
        return -objective, {
            "ratio": ratio.detach(),
            "clip_fraction": (objective != free).detach().float(),
            "old_kl": (ratio - 1 - log_of_ratio).detach(),
            "policy_loss": -objective.detach(),
        }


