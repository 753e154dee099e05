"""Supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlflow.algorithms.base import LossResult
from rlflow.types import Batch, PolicyOutput


@dataclass(frozen=True)
class SFTLoss:
    """Minus the log-prob of every trained token: supervised fine-tuning. Metrics: nll (nats per token)."""

    needs_entropy: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        nll = torch.where(batch.loss_mask, -output.logprobs, 0.0)
        return nll, {"nll": nll.detach()}
