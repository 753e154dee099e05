"""The loss of a critic."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlflow.errors import RLFlowError
from rlflow.types import Batch, Loss, LossResult, PolicyOutput
from rlflow.values import NonNegativeFloat, PositiveFloat, check_annotated


@dataclass(frozen=True)
class ValueLoss(Loss):
    """coefficient * 0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) per token, R =
    `Batch.returns`, V_old = `Batch.values`, the critic's before the step's first update.

    The clipped value loss of OpenAI's PPO (Andrychowicz et al. 2020, arXiv 2006.05990, section 3.2
    and appendix B.2; the original is in github.com/openai/baselines, ppo2/model.py). clip: in units
    of the return; null: the squared error alone. No importance correction multiplies it. Metrics:
    value_loss, the term without its coefficient; value_clip_fraction, the share of tokens whose
    gradient the clip has cut off."""

    needs = frozenset({"values"})

    clip: PositiveFloat | None = 0.5
    coefficient: NonNegativeFloat = 1.0

    def __post_init__(self) -> None:
        check_annotated(self)

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        who = "loss value"
        if output.values is None:
            raise RLFlowError(
                f"{who}: the trainer gave no values; set algorithm.critic, its values are what "
                "this loss trains"
            )
        old, returns = batch.require("values", who), batch.require("returns", who)
        error = torch.where(batch.loss_mask, output.values - returns, 0.0).square()
        worst = error
        if self.clip is not None:
            step = output.values - old
            # Within the clip exactly V, not old + (V - old): rounding must not look like clipping.
            near = torch.where(
                step.abs() <= self.clip,
                output.values,
                old + step.clamp(-self.clip, self.clip),
            )
            worst = torch.maximum(error, torch.where(batch.loss_mask, near - returns, 0.0).square())
        clipped = (worst != error).detach().float()
        return 0.5 * self.coefficient * worst, {
            "value_loss": 0.5 * worst.detach(),
            "value_clip_fraction": clipped,
        }
