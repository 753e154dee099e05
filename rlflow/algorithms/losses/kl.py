"""KL of the policy to a reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rlflow.algorithms.base import log_ratio
from rlflow.errors import ConfigError
from rlflow.types import Batch, Loss, LossResult, PolicyOutput
from rlflow.values import NonNegativeFloat, PositiveFloat


@dataclass(frozen=True)
class KLLoss(Loss):
    """coefficient * KL(policy || reference) per token, against `Batch.reference_logprobs`.

    With x = reference log-prob - log-prob (clamped to +-20): k1 = -x, k2 = x^2 / 2, k3 = e^x - x - 1, the value
    clamped to +-clamp (joschu.net/blog/kl-approx.html; k3 is "low_var_kl"). Differentiated as a loss, k2 has the
    gradient of the reverse KL, k3 a forward-KL-like one, k1 none in expectation. Metrics: kl, the unscaled value in
    nats.
    """

    needs = frozenset({"reference"})

    coefficient: NonNegativeFloat
    estimator: Literal["k1", "k2", "k3"] = "k3"
    clamp: PositiveFloat = 10.0

    def __post_init__(self) -> None:
        if self.estimator not in ("k1", "k2", "k3"):
            raise ConfigError(f"loss kl: estimator must be k1, k2 or k3, found '{self.estimator}'")

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        reference = batch.require("reference_logprobs", "loss kl")
        x = -log_ratio(output.logprobs, reference, batch.loss_mask)
        values: dict[str, Callable[[], Tensor]] = {
            "k1": lambda: -x,
            "k2": lambda: x.square() / 2,
            "k3": lambda: x.exp() - x - 1,
        }
        kl = values[self.estimator]().clamp(-self.clamp, self.clamp)
        return self.coefficient * kl, {"kl": kl.detach()}
