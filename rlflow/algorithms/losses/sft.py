"""Supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlflow.types import Batch, Loss, LossResult, PolicyOutput


@dataclass(frozen=True)
class SFTLoss(Loss):
    """Minus the log-prob of every trained token: supervised fine-tuning. Metrics: nll (nats per token)."""

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        nll = torch.where(batch.loss_mask, -output.logprobs, 0.0)
        return nll, {"nll": nll.detach()}
