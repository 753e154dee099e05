"""Loss terms: (PolicyOutput, Batch) -> per-token loss (B, T) to minimize, and detached metrics (B, T).

A term never sums or normalizes: `Batch.weights` does. Masked positions are set to 0 before any exp, so that what
stands there can neither reach the loss nor the gradient (inf * 0 is nan). A term that is 0 wherever the advantage is,
in value and gradient, says so (`vanishes_at_zero_advantage`): rows without any advantage are then left out of updates.
Each term is a frozen dataclass: picklable and comparable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlflow.errors import ConfigError, RLFlowError
from rlflow.types import Batch, PolicyOutput

LossResult = tuple[Tensor, dict[str, Tensor]]
MAX_LOG_RATIO = 20.0  # nats; exp(20) is 4.9e8, far beyond any clip and still finite when squared in float32


@dataclass(frozen=True)
class PPOClipLoss:
    """Minus min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(log-prob - old log-prob).

    PPO, arXiv 1707.06347 equation 7; clip_high > clip_low is DAPO's clip-higher (arXiv 2503.14476); dual_clip c
    bounds the loss of negative advantages by -c A (arXiv 1912.09729). The old log-probs are
    columns["proximal_logprobs"] where the trainer has recomputed them, else the engine's. Metrics: ratio;
    clip_fraction (the share of tokens whose gradient a clip has cut off); old_kl (k3 estimate of KL(old || policy),
    nats); policy_loss.
    """

    needs_entropy: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False
    vanishes_at_zero_advantage: ClassVar[bool] = True

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0:
            raise ConfigError(
                f"loss ppo_clip: expected 0 <= clip_low <= 1 <= 1 + clip_high, found {self.clip_low}, {self.clip_high}"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigError(f"loss ppo_clip: dual_clip must be above 1 (3 is usual) or null, found {self.dual_clip}")

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        log_ratio = _log_ratio(output.logprobs, _old_logprobs(batch), batch.loss_mask)
        ratio = log_ratio.exp()
        advantages = batch.advantages.masked_fill(~batch.loss_mask, 0.0)
        free = ratio * advantages
        objective = torch.minimum(free, ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages)
        if self.dual_clip is not None:
            bounded = torch.maximum(objective, self.dual_clip * advantages)
            objective = torch.where(advantages < 0, bounded, objective)
        return -objective, {
            "ratio": ratio.detach(),
            "clip_fraction": (objective != free).detach().float(),
            "old_kl": (ratio - 1 - log_ratio).detach(),
            "policy_loss": -objective.detach(),
        }


@dataclass(frozen=True)
class KLLoss:
    """coefficient * KL(policy || reference) per token, against columns["reference_logprobs"].

    With x = reference log-prob - log-prob (clamped to +-20): k1 = -x, k2 = x^2 / 2, k3 = e^x - x - 1, the value
    clamped to +-clamp (joschu.net/blog/kl-approx.html; k3 is "low_var_kl"). Differentiated as a loss, k2 has the
    gradient of the reverse KL, k3 a forward-KL-like one, k1 none in expectation. Metrics: kl, the unscaled value in
    nats.
    """

    needs_entropy: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = True

    coefficient: float
    estimator: Literal["k1", "k2", "k3"] = "k3"
    clamp: float = 10.0

    def __post_init__(self) -> None:
        if self.estimator not in ("k1", "k2", "k3"):
            raise ConfigError(f"loss kl: estimator must be k1, k2 or k3, found '{self.estimator}'")

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        if "reference_logprobs" not in batch.columns:
            raise RLFlowError(
                "loss kl: the batch has no column reference_logprobs: call trainer.snapshot('reference') early "
                "and fill it with trainer.score(batch, model='reference')['logprobs']"
            )
        x = -_log_ratio(output.logprobs, batch.columns["reference_logprobs"], batch.loss_mask)
        values: dict[str, Callable[[], Tensor]] = {
            "k1": lambda: -x,
            "k2": lambda: x.square() / 2,
            "k3": lambda: x.exp() - x - 1,
        }
        kl = values[self.estimator]().clamp(-self.clamp, self.clamp)
        return self.coefficient * kl, {"kl": kl.detach()}


@dataclass(frozen=True)
class EntropyLoss:
    """Minus coefficient * entropy of the distribution that each token was drawn from. Metrics: entropy (nats)."""

    needs_entropy: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = False

    coefficient: float

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        if output.entropy is None:
            raise RLFlowError("loss entropy: the trainer gave no entropy; it must honour `needs_entropy` of the loss")
        entropy = torch.where(batch.loss_mask, output.entropy, 0.0)
        return -self.coefficient * entropy, {"entropy": entropy.detach()}


@dataclass(frozen=True)
class SFTLoss:
    """Minus the log-prob of every trained token: supervised fine-tuning. Metrics: nll (nats per token)."""

    needs_entropy: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        nll = torch.where(batch.loss_mask, -output.logprobs, 0.0)
        return nll, {"nll": nll.detach()}


LossTerm = Callable[[PolicyOutput, Batch], LossResult]


@dataclass(frozen=True)
class SumLoss:
    """The sum of several terms. Metrics of all of them; of two terms with the same metric, the first keeps the name."""

    losses: tuple[LossTerm, ...]

    @property
    def needs_entropy(self) -> bool:
        return any(getattr(loss, "needs_entropy", False) for loss in self.losses)

    @property
    def needs_reference(self) -> bool:
        return any(getattr(loss, "needs_reference", False) for loss in self.losses)

    @property
    def vanishes_at_zero_advantage(self) -> bool:
        return all(getattr(loss, "vanishes_at_zero_advantage", False) for loss in self.losses)

    def __post_init__(self) -> None:
        object.__setattr__(self, "losses", tuple(self.losses))
        if not self.losses:
            raise ConfigError("algorithm.losses: expected at least one loss, found none")

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        total, metrics = self.losses[0](output, batch)
        for loss in self.losses[1:]:
            term, more = loss(output, batch)
            total, metrics = total + term, {**more, **metrics}
        return total, metrics


def _log_ratio(logprobs: Tensor, base: Tensor, mask: Tensor) -> Tensor:
    """(B, T) logprobs - base on the mask, 0 off it, clamped to +-20 nats."""
    return torch.where(mask, logprobs - base, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _old_logprobs(batch: Batch) -> Tensor:
    proximal = batch.columns.get("proximal_logprobs")
    if proximal is not None:
        return proximal
    known = batch.columns.get("logprobs_known")
    if known is not None and bool((batch.loss_mask & ~known[:, None]).any()):
        raise RLFlowError(
            "loss ppo_clip: some rows come without the log-probs of the policy that sampled them: set "
            "algorithm.old_logprobs: recompute, or fill columns['proximal_logprobs'] from trainer.score(batch)"
        )
    return batch.logprobs
