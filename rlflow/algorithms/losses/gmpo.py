"""The geometric mean of a sequence's ratios, each of them clipped."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.algorithms.base import Anchor
from rlflow.algorithms.losses.ratio_kernel import RatioKernel, row_mean
from rlflow.types import Batch
from rlflow.values import NonNegativeFloat


@dataclass(frozen=True)
class GMPOLoss(RatioKernel):
    """Minus exp(mean over the row's tokens of clipped log r) A on every token.

    GMPO, arXiv 2507.20673: log r is clipped from above by clip_high where A > 0 and from below by
    -clip_low elsewhere, in nats, so ratios may go from e^-0.4 to e^0.4. Aggregate it with
    `sequence_mean`. The sequence is the row: of a trajectory with several segments, each has a mean
    of its own."""

    name = "gmpo"
    level = "sequence"

    clip_low: NonNegativeFloat = 0.4
    clip_high: NonNegativeFloat = 0.4
    anchor: Anchor = "rollout"

    def objective(
        self, log_of_ratio: Tensor, logprobs: Tensor, advantages: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        above = log_of_ratio.clamp(max=self.clip_high)
        below = log_of_ratio.clamp(min=-self.clip_low)
        clipped = torch.where(advantages > 0, above, below)
        return row_mean(clipped, batch).exp() * advantages, clipped != log_of_ratio
