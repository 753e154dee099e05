"""A loss with the two health metrics of every run beside its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlflow.types import Batch, PolicyOutput


@dataclass(frozen=True)
class Monitored:
    """The loss unchanged, with the metrics logprob_gap = |log-prob - behaviour log-prob| where the latter is known, which before
    the first update of an on-policy step is the gap between engine and trainer, and entropy, in nats per trained token."""

    loss: Any

    needs_entropy: ClassVar[bool] = True

    @property
    def needs_reference(self) -> bool:
        return bool(getattr(self.loss, "needs_reference", False))

    @property
    def vanishes_at_zero_advantage(self) -> bool:
        return bool(getattr(self.loss, "vanishes_at_zero_advantage", False))

    def __call__(self, output: PolicyOutput, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = self.loss(output, batch)
        gap = torch.where(batch.loss_mask, output.logprobs.detach() - batch.logprobs, 0.0).abs()
        known = batch.columns.get("logprobs_known")
        if known is not None:
            gap = gap * known[:, None]
        assert output.entropy is not None
        return loss, {"logprob_gap": gap, "entropy": output.entropy.detach(), **metrics}
