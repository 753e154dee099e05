"""REINFORCE weighted by an importance ratio with an upper bound."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlflow.algorithms.base import Anchor
from rlflow.algorithms.losses.ratio_kernel import RatioKernel
from rlflow.types import Batch
from rlflow.values import PositiveFloat


@dataclass(frozen=True)
class AIPOLoss(RatioKernel):
    """Minus sg(min(r, max_ratio)) A log-prob.

    AIPO, LlamaRL, arXiv 2505.24034, against the rollout policy; max_ratio 2 to 10 there. With
    max_ratio 20 it is the kernel that DPPO (arXiv 2602.04879) has on the tokens that the transform
    `dppo` keeps."""

    name = "aipo"

    max_ratio: PositiveFloat = 2.0
    anchor: Anchor = "rollout"

    def objective(
        self, log_of_ratio: Tensor, logprobs: Tensor, advantages: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        ratio = log_of_ratio.detach().exp()
        weight = ratio.clamp(max=self.max_ratio)
        return weight * advantages * logprobs, weight != ratio
