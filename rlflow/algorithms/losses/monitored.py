"""A loss with the two health metrics of every run beside its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rlflow.types import Batch, Loss, LossResult, PolicyOutput, Reduction, as_loss


@dataclass(frozen=True)
class Monitored(Loss):
    """The loss unchanged, with the metrics logprob_gap = |log-prob - behaviour log-prob| where the
    latter is known, which before the first update of an on-policy step is the gap between engine
    and trainer, and entropy, in nats per trained token."""

    loss: Loss

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", as_loss(self.loss))

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return self.loss.needs | {"entropy"}

    @property
    def vanishes_at_zero_advantage(self) -> bool:  # type: ignore[override]
        return self.loss.vanishes_at_zero_advantage

    @property
    def terms(self) -> tuple[Loss, ...]:
        return self.loss.terms

    @property
    def reductions(self) -> Mapping[str, Reduction]:  # type: ignore[override]
        return self.loss.reductions

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        loss, metrics = self.loss(output, batch)
        gap = torch.where(batch.loss_mask, output.logprobs.detach() - batch.logprobs, 0.0).abs()
        if batch.logprobs_known is not None:
            # Of rows that came without log-probs, the 0 that stands in their place says nothing
            # about the engine.
            gap = gap * batch.logprobs_known[:, None]
        assert output.entropy is not None
        return loss, {"logprob_gap": gap, "entropy": output.entropy.detach(), **metrics}

    def split(self) -> tuple[Loss | None, Loss | None]:
        of_policy, of_critic = self.loss.split()
        return None if of_policy is None else Monitored(of_policy), of_critic
