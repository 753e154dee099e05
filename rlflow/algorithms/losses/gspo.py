"""One importance ratio for a whole sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlflow.algorithms.base import Anchor
from rlflow.algorithms.losses.ratio_kernel import RatioKernel, row_mean
from rlflow.types import Batch
from rlflow.values import NonNegativeFloat, Share


@dataclass(frozen=True)
class GSPOLoss(RatioKernel):
    """Minus min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) on every token, s = exp(mean over the
    row's tokens of log r).

    GSPO, arXiv 2507.18071 equations 5 and 7; aggregate it with `sequence_mean`. level token is its
    equation 13, GSPO-token: the same values, but a token's gradient goes through its own log-prob
    alone (s sg'd, times r / sg(r)), so that advantages, corrections and keep-masks may differ
    between the tokens of a row. The sequence is the row: of a trajectory with several segments,
    each has a ratio of its own."""

    name = "gspo"

    clip_low: Share = 3e-4
    clip_high: NonNegativeFloat = 4e-4
    level: Literal["sequence", "token"] = "sequence"
    anchor: Anchor = "rollout"

    def objective(
        self, log_of_ratio: Tensor, logprobs: Tensor, advantages: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        log_of_mean = row_mean(log_of_ratio, batch)
        if self.level == "token":
            log_of_mean = log_of_mean.detach() + (log_of_ratio - log_of_ratio.detach())
        ratio = log_of_mean.exp()
        free = ratio * advantages
        objective = torch.minimum(
            free, ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages
        )
        return objective, objective != free
