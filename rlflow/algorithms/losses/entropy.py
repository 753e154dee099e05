"""Entropy bonus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlflow.algorithms.base import LossResult
from rlflow.errors import RLFlowError
from rlflow.types import Batch, PolicyOutput


@dataclass(frozen=True)
class EntropyLoss:
    """Minus coefficient * entropy of the distribution that each token was drawn from. Metrics: entropy (nats)."""

    needs_entropy: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = False

    coefficient: float

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        if output.entropy is None:
            raise RLFlowError("loss entropy: the trainer gave no entropy; it must honour `needs_entropy` of the loss")
        entropy = torch.where(batch.loss_mask, output.entropy, 0.0)
        return -self.coefficient * entropy, {"entropy": entropy.detach()}
