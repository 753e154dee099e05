"""REINFORCE weighted by a clipped importance ratio: no token loses its gradient."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlflow.algorithms.base import Anchor
from rlflow.algorithms.losses.ratio_kernel import RatioKernel
from rlflow.types import Batch
from rlflow.values import NonNegativeFloat, Share


@dataclass(frozen=True)
class CISPOLoss(RatioKernel):
    """Minus sg(clip(r, 1 - clip_low, 1 + clip_high)) A log-prob.

    CISPO, MiniMax-M1, arXiv 2506.13585 equations 4 and 5; clip_low 1 does not clip from below.
    anchor: with `proximal`, the paper's, r stays 1 where a step is one update, however stale the
    samples are; with `rollout` the clip sees their staleness, as in ScaleRL (upper bound 5)."""

    name = "cispo"

    clip_low: Share = 1.0
    clip_high: NonNegativeFloat = 0.28
    anchor: Anchor = "rollout"

    def objective(
        self, log_of_ratio: Tensor, logprobs: Tensor, advantages: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        ratio = log_of_ratio.detach().exp()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return weight * advantages * logprobs, weight != ratio
