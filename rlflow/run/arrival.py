"""Whether engines apply the adapters that they have: what these change in log-probs must be in
theirs, too.

A hash proves that the right adapters are in an engine's memory, not that it computes with them, nor
that the trainer sent what it trains. An engine that samples from the base looks like one that lags
behind, and the run learns little and goes on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.errors import RolloutError
from rlflow.trainer.base import BASE, Trainer
from rlflow.types import Batch

TOKENS_COMPARED = 512
FEWEST_TOKENS = 64
EVERY_STEPS = 16
LEAST_EFFECT = 1e-3
"""Nats per token that adapters change in the mean: below it the base is as good as the policy."""
LOWEST, HIGHEST = 0.5, 1.5
"""Bounds of the share: below the first the engine is nearer to the base than to the policy, above
the second further from it than any rounding explains."""
LOWEST_OF_ROUNDED = 0.25
"""The lower bound where adapters change less than what rounding does: what the engine rounds is as
near to the base as to the policy then, and the share nearer to a half."""
STANDARD_ERRORS = 4.0
"""By how many the share must be outside of its bounds: noise alone ends no run."""


@dataclass(frozen=True)
class Effect:
    """share: of what adapters change in log-probs, how much the engine's have of it; 1 where it
    computes what the trainer does. error: its standard error. size: nats per token that adapters
    change in the mean. tokens: that were compared."""

    share: float
    error: float
    size: float
    tokens: int

    def check(self, spacing: float) -> None:
        """Raises RolloutError where the engine has too little or too much of the change. spacing:
        of log-probs (`probe_rule.spacing`)."""
        if self.tokens < FEWEST_TOKENS or self.size < LEAST_EFFECT:
            return
        margin = STANDARD_ERRORS * self.error
        lowest = LOWEST if self.size >= spacing else LOWEST_OF_ROUNDED
        if self.share + margin < lowest or self.share - margin > HIGHEST:
            raise RolloutError(
                f"weight sync: of what the adapters change in the log-probs of {self.tokens} tokens "
                f"({self.size:.2g} nats in the mean) the engine has {self.share:.0%} "
                f"(standard error {self.error:.1%}), expected 100%: it samples with other adapters "
                "than the trainer's, or with none. trainer.lora.sync=merged sends whole weights."
            )


def is_due(step: int) -> bool:
    """Whether the engines are looked at in a step: in each that is a power of two, when the
    adapters are young, and in every sixteenth."""
    return step > 0 and (step & (step - 1) == 0 or step % EVERY_STEPS == 0)


def measured(batch: Batch, trainer: Trainer, version: int) -> Effect | None:
    """The effect over some tokens of the batch that the weights of `version`, which are the
    trainer's now, sampled; None where there are none."""
    fresh = batch.loss_mask & (batch.require("versions", "arrival") == version)
    fresh &= batch.require("logprobs_known", "arrival")[:, None]
    counts = fresh.sum(1)
    rows = counts.nonzero().flatten()
    if not len(rows):
        return None
    enough = int((counts[rows].cumsum(0) < TOKENS_COMPARED).sum()) + 1
    compared = batch.select(rows[:enough])
    mask = fresh[rows[:enough], : compared.tokens.shape[1]]
    compared = compared.replace(wanted=mask)
    policy = trainer.score(compared)["logprobs"][mask]
    base = trainer.score(compared, model=BASE)["logprobs"][mask]
    return effect(compared.logprobs[mask], policy, base)


def effect(engine: Tensor, policy: Tensor, base: Tensor) -> Effect:
    """The effect by log-probs (N,) of the same tokens: the least-squares slope of engine - base
    over policy - base through 0, with White's standard error (1980; HC0), for which tokens may
    scatter each by its own amount."""
    change = (policy - base).double()
    found = (engine - base).double()
    total = change.square().sum()
    share = (found * change).sum() / total
    scatter = (found - share * change).square() * change.square()
    error = scatter.sum().sqrt() / total
    # Nothing changed: no share of it is known
    known = torch.isfinite(share)
    return Effect(
        share=float(share) if known else 1.0,
        error=float(error) if known else 0.0,
        size=float(change.abs().mean()),
        tokens=len(change),
    )
