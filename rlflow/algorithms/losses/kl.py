"""KL of the policy to a reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlflow.algorithms.base import Anchor, anchor_logprobs, kl_estimate, log_ratio
from rlflow.types import Batch, Loss, LossResult, PolicyOutput
from rlflow.values import NonNegativeFloat, PositiveFloat, PositiveInt, check_annotated


@dataclass(frozen=True)
class KLLoss(Loss):
    """coefficient * KL(policy || reference) per token, against `Batch.reference_logprobs`.

    With x = reference log-prob - log-prob (within +-20): k1 = -x, k2 = x^2 / 2, k3 = e^x - x - 1
    (joschu.net/blog/kl-approx.html; k3 is "low_var_kl"). Differentiated as a loss, k2 has the
    gradient of the reverse KL on-policy, k3 a forward-KL-like one, k1 none in expectation. wk1 and
    wk3 are k1 and k3 times the ratio w = policy / old policy, which is differentiated too: the
    gradient is that of the reverse KL, also where the tokens are old (DeepSeek-V3.2, arXiv
    2512.02556; wk3 is the default). Gradients by the log-prob: 1, -x, 1 - e^x; w (1 - x), -w x.

    clamp: the value is held to +-clamp, nats. Of the gradients only that of k3, which grows as e^x,
    is cut off with it: 0 where the value is above it. anchor: the old policy is the one that
    sampled (rollout) or the one before the step (proximal). refresh_steps: the reference becomes
    the policy after every so many steps; without it, it stays the starting policy. Metrics: kl, the
    value without coefficient and ratio."""

    coefficient: NonNegativeFloat
    estimator: Literal["k1", "k2", "k3", "wk1", "wk3"] = "wk3"
    clamp: PositiveFloat = 10.0
    anchor: Anchor = "rollout"
    refresh_steps: PositiveInt | None = None

    def __post_init__(self) -> None:
        check_annotated(self)

    @property
    def _weighted(self) -> bool:
        return self.estimator.startswith("w")

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"reference", self.anchor} if self._weighted else {"reference"})

    @property
    def refreshes(self) -> Mapping[str, int]:  # type: ignore[override]
        return {} if self.refresh_steps is None else {"reference": self.refresh_steps}

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        reference = batch.require("reference_logprobs", "loss kl")
        mask, logprobs = batch.loss_mask, output.logprobs.detach()
        x = log_ratio(reference, logprobs, mask)
        kl = kl_estimate(self.estimator.removeprefix("w"), x).clamp(-self.clamp, self.clamp)
        # Autograd through a clamped factor would leave only the ratio's share of the gradient,
        # which has the wrong sign; and in float32 the two shares of wk3 cancel.
        change = self._slope(x, kl) * log_ratio(output.logprobs, logprobs, mask)
        loss = self.coefficient * (kl + change)
        if self._weighted:
            loss = (
                loss
                * log_ratio(logprobs, anchor_logprobs(batch, self.anchor, "loss kl"), mask).exp()
            )
        return loss, {"kl": kl}

    def _slope(self, x: Tensor, kl: Tensor) -> Tensor:
        """(B, T) gradient of the term by the log-prob, without coefficient and ratio."""
        if self.estimator == "k3":
            return torch.where(kl < self.clamp, -torch.expm1(x), 0.0)
        if self.estimator in ("k1", "wk1"):
            return 1 - x if self._weighted else torch.ones_like(x)
        return -x
