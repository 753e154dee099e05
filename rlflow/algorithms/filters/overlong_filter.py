"""Attempts that a limit cut off have no say in the loss: their reward speaks of the limit, not of
the reasoning."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from rlflow.algorithms.base import Filter
from rlflow.types import Group, Trajectory, stamp

Limit = Literal["max_tokens", "max_turns"]


@dataclass
class OverlongFilter(Filter):
    """Sets the loss mask of truncated attempts to 0 (overlong filtering of DAPO, arXiv 2503.14476
    section 3.4).

    limits: which truncations count. baseline: whether such an attempt still counts in the
    statistics of its group, as the others were compared with it; False stamps the group again
    without it."""

    counters = ("attempts_masked",)

    limits: Sequence[Limit] = ("max_tokens",)
    baseline: bool = True

    def __call__(self, groups: list[Group]) -> list[Group]:
        return [
            self._masked_group(group) if any(map(self._overlong, group.trajectories)) else group
            for group in groups
        ]

    def _overlong(self, trajectory: Trajectory) -> bool:
        return trajectory.stop.value in self.limits

    def _masked_group(self, group: Group) -> Group:
        whole = [
            self._without_loss(one) if self._overlong(one) else dataclasses.replace(one)
            for one in group.trajectories
        ]
        self.counted["attempts_masked"] += sum(map(self._overlong, whole))
        if not self.baseline:
            stamp(whole)
        return Group(group.id, group.task, whole)

    def _without_loss(self, trajectory: Trajectory) -> Trajectory:
        segments = [
            dataclasses.replace(one, loss_mask=torch.zeros_like(one.loss_mask))
            for one in trajectory.segments
        ]
        return dataclasses.replace(trajectory, segments=segments, compared=self.baseline)
