"""Weights of turns and trajectories. They multiply every term of the loss: what they correct is how
often something is in the batch, and that is the same for all terms."""

from __future__ import annotations

import math
from typing import Literal

import torch

from rlflow.algorithms.statistics import first_rows, totals
from rlflow.algorithms.turn_spans import turns_of
from rlflow.types import Batch
from rlflow.values import PositiveFloat


def duration_weight(
    batch: Batch, floor_s: PositiveFloat = 0.1, most: PositiveFloat | None = None
) -> Batch:
    """Every token's weight times the seconds of its turn / their mean over the minibatch's turns.

    Duration-aware gradients (arXiv 2509.01684): in a given time an asynchronous actor finishes n ~
    probability / duration turns of a kind, so that a sum over what has finished favours the quick
    ones; the durations take that back. Turns count in the mean once each, whatever their tokens.
    floor_s: the least duration; most: a cap on the factor (both not in the paper)."""
    who = "transform duration_weight"
    turns = turns_of(batch, who)
    tokens = turns.total(torch.ones(batch.tokens.shape))
    # Each token has its turn's
    seconds = (turns.total(batch.require("turn_durations_s", who)) / tokens).clamp(min=floor_s)
    factor = (seconds / seconds.mean()).clamp(max=math.inf if most is None else most)
    return batch.replace(weights=batch.weights * turns.spread(factor))


def size_weight(
    batch: Batch, of: Literal["turns", "tokens"] = "turns", power: float = -1.0
) -> Batch:
    """Every token's weight times (turns, or trained tokens, of its trajectory) ** power, the sum of
    all weights kept.

    power -1 of turns under token_mean is the 1 / steps of trajectory-aware relative policy
    optimisation (Mobile-Agent-v3, arXiv 2508.15144, whose text leaves the direction open; 1 is the
    other one). power 1 of tokens under trajectory_mean is the mean over tokens again."""
    first, place = first_rows(batch)
    if of == "tokens":
        size = totals(batch.loss_mask.sum(dim=1), place, len(first))
    else:
        size = torch.bincount(
            turns_of(batch, "transform size_weight").owner, minlength=len(first)
        ).double()
    weights = batch.weights.double()
    changed = weights * size.clamp(min=1)[place, None] ** power
    total = changed.sum()
    return batch.replace(weights=(changed * (weights.sum() / total if total != 0 else 1.0)).float())
