"""Loss terms: (PolicyOutput, Batch) -> per-token loss (B, T) to minimize, and detached metrics (B, T).

A term never sums or normalizes: `Batch.weights` does. Masked positions are set to 0 before any exp, so that what
stands there can neither reach the loss nor the gradient (inf * 0 is nan). A term that is 0 wherever the advantage is,
in value and gradient, says so (`vanishes_at_zero_advantage`): rows without any advantage are then left out of updates.
Each term is a frozen dataclass: picklable and comparable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlflow.algorithms.base import LossResult, _log_ratio, _old_logprobs
from rlflow.errors import ConfigError
from rlflow.types import Batch, PolicyOutput


@dataclass(frozen=True)
class PPOClipLoss:
    """Minus min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(log-prob - old log-prob).

    PPO, arXiv 1707.06347 equation 7; clip_high > clip_low is DAPO's clip-higher (arXiv 2503.14476); dual_clip c
    bounds the loss of negative advantages by -c A (arXiv 1912.09729). The old log-probs are
    columns["proximal_logprobs"] where the trainer has recomputed them, else the engine's. Metrics: ratio;
    clip_fraction (the share of tokens whose gradient a clip has cut off); old_kl (k3 estimate of KL(old || policy),
    nats); policy_loss.
    """

    needs_entropy: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False
    vanishes_at_zero_advantage: ClassVar[bool] = True

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0:
            raise ConfigError(
                f"loss ppo_clip: expected 0 <= clip_low <= 1 <= 1 + clip_high, found {self.clip_low}, {self.clip_high}"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigError(f"loss ppo_clip: dual_clip must be above 1 (3 is usual) or null, found {self.dual_clip}")

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        log_ratio = _log_ratio(output.logprobs, _old_logprobs(batch), batch.loss_mask)
        ratio = log_ratio.exp()
        advantages = batch.advantages.masked_fill(~batch.loss_mask, 0.0)
        free = ratio * advantages
        objective = torch.minimum(free, ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages)
        if self.dual_clip is not None:
            bounded = torch.maximum(objective, self.dual_clip * advantages)
            objective = torch.where(advantages < 0, bounded, objective)
        return -objective, {
            "ratio": ratio.detach(),
            "clip_fraction": (objective != free).detach().float(),
            "old_kl": (ratio - 1 - log_ratio).detach(),
            "policy_loss": -objective.detach(),
        }


