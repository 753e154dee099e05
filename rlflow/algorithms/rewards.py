"""Rewards per token, and the terms that are added to them."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.algorithms.statistics import first_rows, moments, sampled_order, totals
from rlflow.types import Batch


def token_rewards(batch: Batch, who: str) -> Tensor:
    """(B, T) float64: what each trained token earned, adding up to the trajectory's return.

    A turn's reward is on its last token. What is not on any (the reward of a turn without a token,
    or a return that somebody changed as a whole) is on the trajectory's last one; a trajectory
    without a trained token has none. Reward terms are in it."""
    if batch.token_rewards is not None:
        return batch.token_rewards
    returns = batch.require("rewards", who).double()
    found = torch.zeros(batch.tokens.shape, dtype=torch.float64, device=returns.device)
    if batch.turn is not None and batch.turn_rewards is not None:
        follower = torch.nn.functional.pad(batch.turn, (0, 1), value=-1)[:, 1:]
        found = torch.where(batch.loss_mask & (follower != batch.turn), batch.turn_rewards, found)
    rest = returns[first_rows(batch)[0]] - per_trajectory(batch, found)
    return found + _on_last_token(batch, rest)


def per_trajectory(batch: Batch, values: Tensor) -> Tensor:
    """(N,) float64 sums of (B, T) values over the trained tokens of each trajectory."""
    first, place = first_rows(batch)
    rows = torch.where(batch.loss_mask, values.double(), 0.0).sum(dim=1)
    return totals(rows, place, len(first))


def add_reward_term(batch: Batch, term: Tensor, who: str) -> Batch:
    """The batch with a term (B,) or (B, T) added to `rewards` and `token_rewards`, the latter for
    the first time if need be.

    The statistics of the groups are taken again, over the trajectories in the batch: what the term
    is for one that a filter left out nobody knows. Trajectories whose stamped sizes differ were not
    compared with each other, and are not here. A group whose statistics were never stamped stays
    so."""
    first, place = first_rows(batch)
    earned = token_rewards(batch, who)
    if term.dim() == 1:
        whole = term.double()[first]
        earned = earned + _on_last_token(batch, whole)
    else:
        whole = per_trajectory(batch, term)
        earned = earned + torch.where(batch.loss_mask, term.double(), 0.0)
    returns = batch.require("rewards", who).double()[first] + whole
    changed = batch.replace(rewards=returns[place], token_rewards=earned)
    if batch.group is None or batch.group_size is None:
        return changed
    compared = torch.stack([batch.group[first], batch.group_size[first]])
    found = moments(returns, compared.unique(dim=1, return_inverse=True)[1])
    return changed.replace(
        group_size=torch.where(batch.group_size > 0, found.size[place], 0),
        group_mean=found.mean[place],
        group_std=found.std[place],
    )


def _on_last_token(batch: Batch, values: Tensor) -> Tensor:
    """(B, T): the trajectories' values (N,), each on its last trained token."""
    row, position, owner = sampled_order(batch)
    ends = owner != torch.nn.functional.pad(owner, (0, 1), value=-1)[1:]
    placed = torch.zeros(batch.tokens.shape, dtype=torch.float64, device=values.device)
    placed[row[ends], position[ends]] = values[owner[ends]]
    return placed
