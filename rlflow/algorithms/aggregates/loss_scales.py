"""Scales for trajectories that are trained turn by turn."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from rlflow.algorithms.statistics import totals
from rlflow.algorithms.turn_spans import turns_of
from rlflow.errors import ConfigError
from rlflow.types import Batch

Scale = Literal["group", "agent", "turn"]
ORDER: tuple[Scale, ...] = get_args(Scale)


def loss_scales(batch: Batch, scales: list[Scale] | None = None) -> Tensor:
    """(B, T) the mean over turns of each turn's mean over its tokens, times scales; all three are
    the default.

    RLinf's loss_scales (rlinf/algorithms/loss_scales.py), where every turn is a row. With N turns
    of B trajectories, T_i turns in trajectory i and o_t tokens in turn t: group multiplies by N /
    B, agent by 1 / T_i, turn by T_i * o_t / (sum of o over the trajectory). All three give every
    trajectory 1 / B, shared equally by its tokens: `trajectory_mean`. A trajectory has one agent
    here. How responses lie in segments makes no difference. Raises ConfigError for another order,
    or a scale named twice."""
    scales = list(ORDER) if scales is None else list(scales)
    if scales != [scale for scale in ORDER if scale in scales]:
        expected = f"{', '.join(ORDER)} in this order, each once at most"
        raise ConfigError(f"algorithm.aggregate.scales: expected {expected}, found {scales}")
    turns = turns_of(batch, "aggregate loss_scales")
    tokens = turns.total(torch.ones(batch.tokens.shape))
    _, owner, turns_per_owner = turns.owner.unique(return_inverse=True, return_counts=True)
    tokens_per_owner = totals(tokens, owner, len(turns_per_owner))
    share = 1 / (max(1, len(tokens)) * tokens)
    if "group" in scales:
        share = share * len(tokens) / max(1, len(turns_per_owner))
    if "agent" in scales:
        share = share / turns_per_owner[owner]
    if "turn" in scales:
        share = share * turns_per_owner[owner] * tokens / tokens_per_owner[owner]
    return turns.spread(share)
