"""A soft gate in place of a clip."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.algorithms.base import Anchor
from rlflow.algorithms.losses.ratio_kernel import RatioKernel
from rlflow.types import Batch
from rlflow.values import PositiveFloat


@dataclass(frozen=True)
class SoftAdaptiveLoss(RatioKernel):
    """Minus (4 / tau) sigmoid(tau (r - 1)) A, tau = tau_positive where A > 0 and tau_negative
    elsewhere.

    Soft Adaptive Policy Optimization, arXiv 2511.20347. Not the Swarm sAmpling Policy Optimization
    of arXiv 2509.08721, which is called SAPO as well: that one shares rollouts and has PPO's clip.
    clip_fraction stays 0."""

    name = "soft_adaptive"
    clips = False

    tau_positive: PositiveFloat = 1.0
    tau_negative: PositiveFloat = 1.05
    anchor: Anchor = "rollout"

    def objective(
        self, log_of_ratio: Tensor, logprobs: Tensor, advantages: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        positive = torch.full_like(advantages, self.tau_positive)
        tau = torch.where(advantages > 0, positive, self.tau_negative)
        gate = (tau * (log_of_ratio.exp() - 1)).sigmoid() * 4 / tau
        return gate * advantages, torch.zeros_like(batch.loss_mask)
