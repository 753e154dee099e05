"""Attempts that a limit cut off have no say in the loss: their reward speaks of the limit, not of
the reasoning."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch

from rlflow.algorithms.base import Filter
from rlflow.types import Group, StopReason, Trajectory, stamp

Limit = Literal["max_tokens", "max_turns"]


class OverlongFilter(Filter):
    """Sets the loss mask of truncated attempts to 0 (overlong filtering of DAPO, arXiv 2503.14476
    section 3.4).

    limits: which truncations count. baseline: whether such an attempt still counts in the
    statistics of its group, as the others were compared with it; False stamps the group again
    without it."""

    def __init__(
        self, limits: Sequence[Limit] = ("max_tokens",), baseline: bool = True
    ) -> None:
        self._stops = frozenset(StopReason(limit) for limit in limits)
        self._baseline = baseline
        self._masked = 0

    def __call__(self, groups: list[Group]) -> list[Group]:
        return [
            self._masked_group(group)
            if any(map(self._overlong, group.trajectories))
            else group
            for group in groups
        ]

    def report(self) -> dict[str, float]:
        """Attempts that were masked."""
        counted, self._masked = float(self._masked), 0
        return {"attempts_masked": counted}

    def _overlong(self, trajectory: Trajectory) -> bool:
        return trajectory.stop in self._stops

    def _masked_group(self, group: Group) -> Group:
        whole = [
            _without_loss(one) if self._overlong(one) else dataclasses.replace(one)
            for one in group.trajectories
        ]
        self._masked += sum(map(self._overlong, whole))
        if not self._baseline:
            stamp([one for one in whole if not self._overlong(one)])
        return Group(group.id, group.task, whole)


def _without_loss(trajectory: Trajectory) -> Trajectory:
    segments = [
        dataclasses.replace(one, loss_mask=torch.zeros_like(one.loss_mask))
        for one in trajectory.segments
    ]
    return dataclasses.replace(trajectory, segments=segments)
