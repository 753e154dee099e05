"""Means and deviations over the trajectories of a batch, its groups, and tokens in the order
sampled. Everything is float64.

A row is a segment, and a trajectory may have several: in every statistic here a trajectory counts
once. Values that are all equal give a deviation of exactly 0: differences are taken to one of them
before anything is added up, so that no rounding is left for a division to magnify."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from rlflow.errors import ConfigError, RLFlowError, did_you_mean
from rlflow.types import NAMED_MEAN, NAMED_REWARD, NAMED_STD, Batch

Std = Literal["sample", "population", "none"]
"""Of a group's rewards: with Bessel's correction, without it, or no division at all."""


@dataclass(frozen=True)
class Moments:
    """Per entry the size, mean and standard deviation (Bessel's correction; 0 of one) of the set
    that it belongs to."""

    size: Tensor  # int64
    mean: Tensor  # float64
    std: Tensor  # float64


def first_rows(batch: Batch) -> tuple[Tensor, Tensor]:
    """((N,), (B,)): one row of each of the N trajectories, and for every row the place of its
    trajectory among them. Where the batch does not name trajectories, each row is its own."""
    rows = torch.arange(len(batch), device=batch.tokens.device)
    if batch.trajectory is None:
        return rows, rows
    names, place = batch.trajectory.unique(return_inverse=True)
    first = torch.full((len(names),), len(batch), device=rows.device).scatter_reduce_(
        0, place, rows, "amin"
    )
    return first, place


def totals(values: Tensor, place: Tensor, count: int) -> Tensor:
    """(count,) float64: the sums of the values (N,) that have the same place (N,)."""
    sums = torch.zeros(count, dtype=torch.float64, device=values.device)
    return sums.index_add_(0, place, values.double())


def moments(values: Tensor, sets: Tensor) -> Moments:
    """Those of the set that each value (N,) is in; sets: (N,) int64, any numbers."""
    values = values.double()
    names, place = sets.unique(return_inverse=True)
    size = torch.bincount(place, minlength=len(names))
    anchor = values.new_zeros(len(names)).scatter_(0, place, values)  # any of the set
    apart = values - anchor[place]
    mean_apart = totals(apart, place, len(names)) / size
    spread = totals((apart - mean_apart[place]).square(), place, len(names))
    std = (spread / (size - 1).clamp(min=1)).sqrt()
    return Moments(size[place], (anchor + mean_apart)[place], std[place])


def mean_of(values: Tensor) -> float:
    """The mean of some values; of equal ones exactly their value."""
    values = values.double()
    return float(values[0] + (values - values[0]).mean())


def group_moments(batch: Batch, who: str) -> Moments:
    """(B,) of the rewards of each row's group, as stamped while the group was whole. Raises
    RLFlowError where they never were."""
    size = batch.require("group_size", who)
    if bool((size < 1).any()):
        rows = (size < 1).nonzero().flatten().tolist()
        raise RLFlowError(
            f"{who}: {len(rows)} of {len(batch)} rows (first: row {rows[0]}) lack group "
            "statistics: expected "
            "Trajectory.group_stats = (size, mean, std), as Rollout stamps them while a group is "
            "whole"
        )
    return Moments(size, batch.require("group_mean", who), batch.require("group_std", who))


def standardized(values: Tensor, found: Moments, std: Std, eps: float) -> Tensor:
    """(value - mean) / (std + eps), or the difference alone; exactly 0 in a set of one or of equal
    values.

    Raises ConfigError for a std that does not exist."""
    if std not in get_args(Std):
        raise ConfigError(
            f"algorithm.advantage.std: expected one of {', '.join(get_args(Std))}, found '{std}'."
            f"{did_you_mean(str(std), get_args(Std))}"
        )
    centred = values.double() - found.mean
    if std != "none":
        bessel = ((found.size - 1).double() / found.size).sqrt() if std == "population" else 1.0
        centred = centred / (found.std * bessel + eps)
    return centred.masked_fill(flat(found, torch.finfo(values.dtype).eps), 0.0)


def flat(found: Moments, rounding: float = torch.finfo(torch.float64).eps) -> Tensor:
    """(N,) bool: a set of one, or of values that differ by no more than the rounding of their
    mean."""
    return (found.size == 1) | (found.std <= 4 * rounding * found.mean.abs())


def whitened(values: Tensor, shares: Tensor, eps: float = 1e-8) -> Tensor:
    """(value - mean) / (population std + eps) under the shares, both of the values' shape; 0 where
    the values do not differ.

    Shares are 0 where a value is not to count; they need not add up to 1. What stands there comes
    out as 0. A mean that is 0 but for rounding, as that of group-centred values, is 0: else a group
    that teaches nothing would not stay at 0."""
    values, shares = values.double(), shares.double()
    counted = shares > 0
    total = shares.sum()
    if not counted.any():
        return torch.zeros_like(values)
    anchor = values[counted][0]
    apart = torch.where(counted, values - anchor, 0.0)
    mean_apart = (shares * apart).sum() / total
    mean, centred = anchor + mean_apart, torch.where(counted, apart - mean_apart, 0.0)
    std = ((shares * centred.square()).sum() / total).sqrt()
    if std <= 4 * torch.finfo(torch.float64).eps * mean.abs():
        return torch.zeros_like(values)
    if mean.abs() <= 1e-12 * std:
        centred = torch.where(counted, values, 0.0)
    return centred / (std + eps)


def token_shares(batch: Batch, over: Literal["trajectories", "tokens"]) -> Tensor:
    """(B, T) float64: 1 on every trained token, or 1 per trajectory, shared by its trained
    tokens."""
    mask = batch.loss_mask.double()
    if over == "tokens":
        return mask
    first, place = first_rows(batch)
    tokens = totals(mask.sum(dim=1), place, len(first))
    return mask / tokens.clamp(min=1)[place, None]


def sampled_order(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """((M,), (M,), (M,)): row, position and trajectory's place of the M trained tokens, trajectory
    by trajectory, in the order in which they were sampled, across the segments."""
    _, place = first_rows(batch)
    row, position = batch.loss_mask.nonzero(as_tuple=True)
    keys = [place[row]]
    # By turn first: conversations of an agent take turns in their segments. Turns may be unknown
    keys += [] if batch.turn is None else [batch.turn[row, position]]
    keys += [] if batch.segment is None else [batch.segment[row]]
    order = torch.arange(len(row), device=row.device)
    for key in reversed(keys):
        order = order[key[order].argsort(stable=True)]
    return row[order], position[order], place[row[order]]


def returns_to_go(rewards: Tensor, owners: Tensor, gamma: float = 1.0) -> Tensor:
    """(M,) float64: each reward plus gamma times what follows it in the same trajectory. owners:
    (M,) the trajectories, whose entries stand together and in order."""
    total, last, found = 0.0, None, []
    for reward, owner in zip(
        reversed(rewards.double().tolist()), reversed(owners.tolist()), strict=True
    ):
        total = reward + (gamma * total if owner == last else 0.0)
        last = owner
        found.append(total)
    return torch.tensor(found[::-1], dtype=torch.float64, device=rewards.device)


def named_rewards(batch: Batch) -> dict[str, Tensor]:
    """{name: (B,) float64} of the rewards that the environment gave by name; empty where it gave
    none."""
    return {
        key.removeprefix(NAMED_REWARD): value
        for key, value in batch.extras.items()
        if key.startswith(NAMED_REWARD)
    }


def named_moments(batch: Batch, name: str, who: str) -> Moments:
    """(B,) of that reward in each row's group, as `group_moments`."""
    return Moments(
        group_moments(batch, who).size,
        batch.extras[NAMED_MEAN + name],
        batch.extras[NAMED_STD + name],
    )
