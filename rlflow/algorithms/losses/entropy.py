"""Entropy bonus."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlflow.errors import RLFlowError
from rlflow.types import Batch, Loss, LossResult, PolicyOutput


@dataclass(frozen=True)
class EntropyLoss(Loss):
    """Minus coefficient * entropy of the distribution that each token was drawn from. Metrics: entropy (nats)."""

    needs = frozenset({"entropy"})

    coefficient: float

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        if output.entropy is None:
            raise RLFlowError("loss entropy: the trainer gave no entropy; it must honour `needs` of the loss")
        entropy = torch.where(batch.loss_mask, output.entropy, 0.0)
        return -self.coefficient * entropy, {"entropy": entropy.detach()}
