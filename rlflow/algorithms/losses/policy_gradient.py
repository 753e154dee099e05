"""The plain policy gradient."""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.algorithms.base import Kernel
from rlflow.types import Batch, LossResult, PolicyOutput


@dataclass(frozen=True)
class ReinforceLoss(Kernel):
    """Minus A log-prob: REINFORCE (Williams 1992). No ratio: for samples of the policy itself, or
    under a correction such as `tis`. Metrics: policy_loss."""

    vanishes_at_zero_advantage = True

    def kernel(self, output: PolicyOutput, batch: Batch) -> LossResult:
        advantages = batch.advantages.masked_fill(~batch.loss_mask, 0.0)
        loss = -advantages * output.logprobs.masked_fill(~batch.loss_mask, 0.0)
        return loss, {"policy_loss": loss.detach()}
