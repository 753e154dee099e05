"""The importance weight of decoupled PPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from rlflow.algorithms.base import Transform
from rlflow.algorithms.transforms.importance import mismatch, multiplied
from rlflow.algorithms.transforms.interpolation import interpolated_logprobs
from rlflow.types import Batch
from rlflow.values import PositiveFloat


@dataclass(frozen=True)
class Decoupled(Transform):
    """Times w = proximal / rollout policy of the token, for a kernel that clips the ratio to the
    proximal policy.

    AReaL, arXiv 2505.24298 (Hilton et al., arXiv 2110.00641): the clip range is centred on a recent
    policy, however old the samples are. Above cap a token is left out, or (over: clamp) keeps the
    cap; null: no cap. proximal: recompute takes the policy before the step's first update, by a
    pass over the step's batch; loglinear and linear put it between the rollout policy and that just
    before this update, by the versions of both (A-3PO), for the kernel and the transforms after
    this one. Metrics: capped (share of tokens)."""

    level = "token"
    weighs = True
    centres = True

    cap: PositiveFloat | None = 5.0
    over: Literal["mask", "clamp"] = "mask"
    proximal: Literal["recompute", "loglinear", "linear"] = "recompute"

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"proximal"} if self.proximal == "recompute" else {"current", "rollout"})

    @property
    def fills(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(() if self.proximal == "recompute" else {"proximal"})

    def __call__(self, batch: Batch) -> Batch:
        if self.proximal != "recompute":
            batch = batch.replace(
                proximal_logprobs=interpolated_logprobs(batch, self.proximal, "transform decoupled")
            )
        weight = mismatch(batch, "token", "transform decoupled")
        if self.cap is None:
            return multiplied(batch, weight)
        above = weight > self.cap
        return multiplied(
            batch,
            torch.where(above, 0.0 if self.over == "mask" else self.cap, weight),
            capped=above,
        )
