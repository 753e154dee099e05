"""What a loss term is, the sum of several, and the importance ratio that they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.errors import ConfigError, RLFlowError
from rlflow.types import Batch, PolicyOutput

LossResult = tuple[Tensor, dict[str, Tensor]]


MAX_LOG_RATIO = 20.0  # nats; exp(20) is 4.9e8, far beyond any clip and still finite when squared in float32


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
