"""KPop: tokens on which engine and trainer disagree, by KL in place of the ratio."""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.algorithms.base import Transform, anchor_logprobs
from rlflow.algorithms.transforms.divergence import binary_kl
from rlflow.algorithms.transforms.importance import multiplied
from rlflow.types import Batch
from rlflow.values import PositiveFloat


@dataclass(frozen=True)
class KPop(Transform):
    """Times 0 where the binary KL of rollout to proximal policy, or of proximal to rollout policy,
    is above the threshold (nats).

    Guo et al. 2026, ringtech.notion.site/kpop (0.1). A filter alone: its authors weigh the tokens
    that it keeps by the ratio, which is `decoupled` beside it (with `cap: null`)."""

    needs = frozenset({"proximal", "rollout"})
    level = "token"

    threshold: PositiveFloat = 0.1

    def __call__(self, batch: Batch) -> Batch:
        rollout = anchor_logprobs(batch, "rollout", "transform kpop")
        proximal = batch.require("proximal_logprobs", "transform kpop")
        keep = (binary_kl(rollout, proximal, batch) <= self.threshold) & (
            binary_kl(proximal, rollout, batch) <= self.threshold
        )
        return multiplied(batch, keep)
