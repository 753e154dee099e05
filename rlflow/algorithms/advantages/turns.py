"""Credit for single turns: the samples that are compared are turns, not attempts."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from rlflow.algorithms.base import compares_attempts
from rlflow.algorithms.rewards import token_rewards
from rlflow.algorithms.statistics import (
    Std,
    first_rows,
    moments,
    returns_to_go,
    standardized,
)
from rlflow.algorithms.turn_spans import turns_of
from rlflow.types import Batch
from rlflow.values import NonNegativeFloat, Share


@compares_attempts
def turn_returns(
    batch: Batch,
    gamma: Share = 1.0,
    std: Std = "sample",
    eps: NonNegativeFloat = 1e-6,
    compare: Literal["all", "same"] = "all",
) -> Tensor:
    """(B, T) float32: each turn's discounted return-to-go, minus its mean over turns, divided by
    their std + eps.

    The return-to-go of turn k is r_k + gamma * r_(k+1) + ...: a turn is not paid for what came
    before it. compare: with all turns of the group's attempts, or with the same (the k-th with the
    k-th). Statistics are of the turns in the batch; a set of one turn, or of equal returns, gives
    exactly 0. Turn-level credit: arXiv 2505.11821; normalised discounted returns: arXiv 2511.14846."""
    who = "advantage turn_returns"
    turns = turns_of(batch, who)
    returns = returns_to_go(turns.total(token_rewards(batch, who)), turns.owner, gamma)
    group = batch.require("group", who)[first_rows(batch)[0]][turns.owner]
    # Fewer turns than tokens
    sets = group if compare == "all" else group * batch.tokens.numel() + turns.number
    return turns.spread(standardized(returns, moments(returns, sets), std, eps))


@compares_attempts
def step_grpo(batch: Batch, std: Std = "sample", eps: NonNegativeFloat = 1e-6) -> Tensor:
    """(B, T) float32: as grpo, but every turn is a sample with the return of its whole trajectory,
    so that an attempt counts in mean and std as often as it has turns (DART, arXiv 2509.23866,
    step-wise GRPO). Statistics are of the turns in the batch."""
    who = "advantage step_grpo"
    turns = turns_of(batch, who)
    of_turn = first_rows(batch)[0][turns.owner]
    returns = batch.require("rewards", who).double()[of_turn]
    return turns.spread(
        standardized(returns, moments(returns, batch.require("group", who)[of_turn]), std, eps)
    )
