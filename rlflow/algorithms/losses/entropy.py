"""Entropy bonus, of a fixed size or of as much as a target needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlflow.errors import RLFlowError
from rlflow.types import Batch, Loss, LossResult, PolicyOutput
from rlflow.values import NonNegativeFloat, PositiveFloat, check_annotated


@dataclass(frozen=True)
class EntropyLoss(Loss):
    """Minus coefficient * entropy of the distribution that each token was drawn from. Metrics:
    entropy (nats)."""

    needs = frozenset({"entropy"})

    coefficient: float

    def __post_init__(self) -> None:
        check_annotated(self)

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        entropy = trained_entropy(output, batch, "loss entropy")
        return -self.coefficient * entropy, {"entropy": entropy.detach()}


@dataclass
class EntropyTargetLoss(Loss):
    """Minus coefficient * entropy, the coefficient following the entropy: after an update whose
    mean entropy was below the target it grows by `step`, after one above it shrinks by as much, and
    it counts only while the last entropy was at most the target.

    Skywork-OR1, arXiv 2505.22312 (adaptive entropy control; its text gives a step of .005 and a
    first coefficient of 0, its released scripts steps of 1e-4 and 1e-3). target: nats per token. most: its upper limit; the lower one is 0. Metrics: entropy (nats),
    entropy_coefficient."""

    needs = frozenset({"entropy"})

    target: NonNegativeFloat
    step: PositiveFloat = 0.005
    coefficient: NonNegativeFloat = 0.0
    most: PositiveFloat = 1.0
    active = True

    def __post_init__(self) -> None:
        check_annotated(self)

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        entropy = trained_entropy(output, batch, "loss entropy_target")
        used = self.coefficient if self.active else 0.0
        metrics = {
            "entropy": entropy.detach(),
            "entropy_coefficient": torch.full_like(entropy, used).detach(),
        }
        return -used * entropy, metrics

    def observe(self, metrics: Mapping[str, float]) -> None:
        if "entropy" not in metrics:  # of an update of the critic alone
            return
        entropy = metrics["entropy"]
        self.active = entropy <= self.target
        change = self.step * ((entropy < self.target) - (entropy > self.target))
        self.coefficient = min(self.most, max(0.0, self.coefficient + change))

    def state_dict(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient, "active": self.active}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.coefficient, self.active = state["coefficient"], state["active"]


def trained_entropy(output: PolicyOutput, batch: Batch, who: str) -> Tensor:
    """(B, T) the entropy on the loss mask, 0 off it. Raises RLFlowError where the trainer gave
    none."""
    if output.entropy is None:
        raise RLFlowError(f"{who}: the trainer gave no entropy; it must honour `needs` of the loss")
    return torch.where(batch.loss_mask, output.entropy, 0.0)
