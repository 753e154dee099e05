"""Supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlflow.types import SOURCES, Batch, Loss, LossResult, PolicyOutput, Source
from rlflow.values import NonNegativeFloat, check_annotated


@dataclass(frozen=True)
class SFTLoss(Loss):
    """Minus coefficient * log-prob of every trained token: supervised fine-tuning, or a likelihood
    term beside others. source: of rows from there alone. Metrics: nll, the unscaled value (nats per
    token; 0 where it does not apply)."""

    coefficient: NonNegativeFloat = 1.0
    source: Source | None = None

    def __post_init__(self) -> None:
        check_annotated(self)

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        mask = batch.loss_mask
        if self.source is not None:
            rows = batch.require("source", "loss sft") == SOURCES.index(self.source)
            mask = mask & rows[:, None]
        nll = torch.where(mask, -output.logprobs, 0.0)
        return self.coefficient * nll, {"nll": nll.detach()}
