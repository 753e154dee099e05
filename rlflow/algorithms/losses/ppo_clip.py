"""The clipped surrogate of PPO, with DAPO's wider upper clip and the dual clip."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from rlflow.algorithms.base import Anchor
from rlflow.algorithms.losses.ratio_kernel import RatioKernel
from rlflow.types import Batch
from rlflow.values import NonNegativeFloat, Range, Share


@dataclass(frozen=True)
class PPOClipLoss(RatioKernel):
    """Minus min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    PPO, arXiv 1707.06347 equation 7; clip_high > clip_low is DAPO's clip-higher (arXiv 2503.14476);
    null does not clip on that side, and on neither it is the plain importance-weighted r A.
    dual_clip c bounds the loss of negative advantages by -c A (arXiv 1912.09729). anchor: the old
    log-probs, of the engine (rollout) or of the trainer before the step's first update (proximal).
    A transform may set the clip range of each token (`Batch.ratio_low`, `ratio_high`) in place of
    these."""

    name = "ppo_clip"
    bounded = True

    clip_low: Share | None = 0.2
    clip_high: NonNegativeFloat | None = 0.2
    dual_clip: Annotated[float, Range(above=1)] | None = None
    anchor: Anchor = "rollout"

    def objective(
        self, log_of_ratio: Tensor, logprobs: Tensor, advantages: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        ratio = log_of_ratio.exp()
        free = ratio * advantages
        objective = torch.minimum(free, self._clipped(ratio, batch) * advantages)
        if self.dual_clip is not None:
            bounded = torch.maximum(objective, self.dual_clip * advantages)
            objective = torch.where(advantages < 0, bounded, objective)
        return objective, objective != free

    def _clipped(self, ratio: Tensor, batch: Batch) -> Tensor:
        if batch.ratio_low is not None:
            return ratio.clamp(batch.ratio_low, batch.ratio_high)
        low = 0.0 if self.clip_low is None else 1 - self.clip_low
        return ratio.clamp(low, math.inf if self.clip_high is None else 1 + self.clip_high)
