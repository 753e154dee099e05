"""A proximal policy between the one that sampled and the one in training, without a pass of its
own."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlflow.algorithms.base import anchor_logprobs
from rlflow.types import Batch

Interpolation = Literal["loglinear", "linear"]


def interpolated_logprobs(batch: Batch, how: Interpolation, who: str) -> Tensor:
    """(B, T) log-probs of a policy alpha of the way from the rollout policy to the one just before
    this update, nats.

    With d = trainer's version - the token's, alpha = (d - 1) / d for d >= 1, else 0: the proximal
    policy is taken to be one version behind the trainer. loglinear mixes log-probs, linear
    probabilities. A-3PO, as AReaL has it (areal/trainer/ppo/actor.py), less the 1e-10 that it adds
    to the probability."""
    rollout = anchor_logprobs(batch, "rollout", who)
    current = batch.require("current_logprobs", who)
    versions = batch.require("versions", who)
    lag = (batch.require("trainer_version", who)[:, None] - versions).masked_fill(versions < 0, 0)
    alpha = ((lag - 1) / lag.clamp(min=1)).clamp(0, 1).to(current.dtype)
    if how == "loglinear":
        mixed = rollout + alpha * (current - rollout)
    else:
        mixed = torch.logaddexp(rollout + (1 - alpha).log(), current + alpha.log())
    return mixed.masked_fill(~batch.loss_mask, 0.0)
