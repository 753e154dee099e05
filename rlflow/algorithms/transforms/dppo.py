"""DPPO's trust region: by how much the policy has moved, not by which ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from rlflow.algorithms.base import Anchor, Transform, anchor_logprobs
from rlflow.algorithms.transforms.divergence import binary_kl, binary_tv
from rlflow.algorithms.transforms.importance import multiplied
from rlflow.types import Batch
from rlflow.values import PositiveFloat


@dataclass(frozen=True)
class DPPO(Transform):
    """Times 0 where the policy has moved too far already, in the direction that the advantage asks
    for.

    p is the token's probability just before this update, p_old that of the anchor. With A > 0 a
    token is left out if p > p_old and the divergence is above `high`, else if p < p_old and it is
    above `low`. divergence: tv is |p - p_old|, kl the binary KL(p_old || p) in nats. arXiv
    2602.04879 (0.15 and 0.05 there; tv 0.2 is common). Its kernel is `aipo` with max_ratio 20."""

    level = "token"
    trusts = True

    divergence: Literal["tv", "kl"] = "tv"
    low: PositiveFloat = 0.2
    high: PositiveFloat = 0.2
    anchor: Anchor = "rollout"

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"current", self.anchor})

    def __call__(self, batch: Batch) -> Batch:
        old = anchor_logprobs(batch, self.anchor, "transform dppo")
        current = batch.require("current_logprobs", "transform dppo")
        distance = (binary_kl if self.divergence == "kl" else binary_tv)(old, current, batch)
        positive = batch.advantages > 0
        away = torch.where(positive, current > old, current < old)
        limit = torch.where(positive, torch.full_like(distance, self.high), self.low)
        return multiplied(batch, ~(batch.loss_mask & away & (distance > limit)))
