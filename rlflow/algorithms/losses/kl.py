"""KL of the policy to a reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlflow.algorithms.base import Anchor, anchor_logprobs, check_anchor, kl_estimate, log_ratio
from rlflow.errors import ConfigError
from rlflow.types import Batch, Loss, LossResult, PolicyOutput
from rlflow.values import NonNegativeFloat, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class KLLoss(Loss):
    """coefficient * KL(policy || reference) per token, against `Batch.reference_logprobs`.

    With x = reference log-prob - log-prob (clamped to +-20): k1 = -x, k2 = x^2 / 2, k3 = e^x - x - 1, the value
    clamped to +-clamp (joschu.net/blog/kl-approx.html; k3 is "low_var_kl"). Differentiated as a loss, k2 has the
    gradient of the reverse KL on-policy, k3 a forward-KL-like one, k1 none in expectation. wk1 and wk3 are k1 and k3 times
    the ratio policy / old policy, which is differentiated too: the gradient is that of the reverse KL, also where the
    tokens are old (DeepSeek-V3.2, arXiv 2512.02556; the default). anchor: the old policy is the one that sampled (rollout)
    or the one before the step (proximal). refresh_steps: the reference becomes the policy after every so many steps;
    without it, it stays the starting policy. Metrics: kl, the value in nats without coefficient and ratio.
    """

    coefficient: NonNegativeFloat
    estimator: Literal["k1", "k2", "k3", "wk1", "wk3"] = "wk3"
    clamp: PositiveFloat = 10.0
    anchor: Anchor = "rollout"
    refresh_steps: PositiveInt | None = None

    def __post_init__(self) -> None:
        if self.estimator not in ("k1", "k2", "k3", "wk1", "wk3"):
            raise ConfigError(f"loss kl: estimator must be k1, k2, k3, wk1 or wk3, found '{self.estimator}'")
        check_anchor(self.anchor, "loss kl")

    @property
    def _weighted(self) -> bool:
        return self.estimator.startswith("w")

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"reference"} | ({"proximal"} if self._weighted and self.anchor == "proximal" else set()))

    @property
    def refreshes(self) -> Mapping[str, int]:  # type: ignore[override]
        return {} if self.refresh_steps is None else {"reference": self.refresh_steps}

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        reference = batch.require("reference_logprobs", "loss kl")
        kl = kl_estimate(self.estimator.removeprefix("w"), output.logprobs, reference, batch.loss_mask)
        kl = kl.clamp(-self.clamp, self.clamp)
        loss = self.coefficient * kl
        if self._weighted:
            old = anchor_logprobs(batch, self.anchor, "loss kl")
            loss = loss * log_ratio(output.logprobs, old, batch.loss_mask).exp()
        return loss, {"kl": kl.detach()}
