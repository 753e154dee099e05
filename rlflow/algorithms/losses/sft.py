"""Supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlflow.types import Batch, Loss, LossResult, PolicyOutput
from rlflow.values import NonNegativeFloat


@dataclass(frozen=True)
class SFTLoss(Loss):
    """Minus coefficient * log-prob of every trained token: supervised fine-tuning, or a likelihood term beside others.
    Metrics: nll, the unscaled value (nats per token)."""

    coefficient: NonNegativeFloat = 1.0

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        nll = torch.where(batch.loss_mask, -output.logprobs, 0.0)
        return self.coefficient * nll, {"nll": nll.detach()}
