"""Base of the policy-gradient kernels: importance ratio, advantages, and their metrics."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from rlflow.algorithms.base import (
    Anchor,
    Kernel,
    anchor_logprobs,
    kl_estimate,
    log_ratio,
)
from rlflow.types import Batch, LossResult, PolicyOutput


class RatioKernel(Kernel):
    """Minus K(r, A), r = exp(log-prob - old log-prob). Metrics: ratio; clip_fraction (the share of
    tokens whose gradient a clip changed); old_kl (k3 estimate of KL(old || policy), nats);
    policy_loss."""

    vanishes_at_zero_advantage = True
    clips = True
    name: str
    anchor: Anchor

    @abstractmethod
    def objective(
        self, log_of_ratio: Tensor, logprobs: Tensor, advantages: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """(B, T) K, which is maximised, and (B, T) bool: where a clip changed its gradient. All
        three inputs are (B, T) and 0 off the loss mask."""

    def kernel(self, output: PolicyOutput, batch: Batch) -> LossResult:
        old = anchor_logprobs(batch, self.anchor, f"loss {self.name}")
        log_of_ratio = log_ratio(output.logprobs, old, batch.loss_mask)
        logprobs = output.logprobs.masked_fill(~batch.loss_mask, 0.0)
        advantages = batch.advantages.masked_fill(~batch.loss_mask, 0.0)
        objective, clipped = self.objective(log_of_ratio, logprobs, advantages, batch)
        ratio = log_of_ratio.detach().exp()
        return -objective, {
            "ratio": ratio,
            "clip_fraction": clipped.detach().float(),
            "old_kl": kl_estimate("k3", log_of_ratio.detach()),
            "policy_loss": -objective.detach(),
        }


def row_mean(values: Tensor, batch: Batch) -> Tensor:
    """(B, 1) mean of (B, T) values over each row's trained tokens; 0 for a row without any. Values
    are 0 off the loss mask."""
    return values.sum(dim=1, keepdim=True) / batch.loss_mask.sum(dim=1, keepdim=True).clamp(min=1)
