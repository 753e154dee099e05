"""Groups of earlier steps come again."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

from rlflow.algorithms.base import Filter
from rlflow.algorithms.filters.dynamic_sampling import scores_alike
from rlflow.codec import groups_from_bytes, groups_to_bytes
from rlflow.types import Group
from rlflow.values import NonNegativeInt, PositiveInt


class Replay(Filter):
    """Adds `groups` random groups of earlier steps to every step, as they were sampled: log-probs,
    statistics and all, with source `replay` (AstraFlow's replay buffer, arXiv 2605.15565).

    capacity: groups kept; the oldest give way. Those whose attempts score alike are not kept.
    max_staleness: a group is dropped when V - v exceeds it, v the least weight version of its
    tokens and V the newest that was sampled; None keeps all."""

    whole_step = True

    def __init__(
        self,
        seed: int,
        groups: PositiveInt = 4,
        capacity: PositiveInt = 128,
        max_staleness: NonNegativeInt | None = None,
    ) -> None:
        self._seed, self._groups, self._capacity, self._max_staleness = (
            seed,
            groups,
            capacity,
            max_staleness,
        )
        self._buffer: list[Group] = []  # oldest first
        self._steps = 0
        self._stale = self._replayed = 0

    def __call__(self, groups: list[Group]) -> list[Group]:
        if self._max_staleness is not None:
            newest = max(
                [version for group in groups for version in _versions(group)], default=0
            )
            fresh = [
                group
                for group in self._buffer
                if newest - min(_versions(group)) <= self._max_staleness
            ]
            self._stale += len(self._buffer) - len(fresh)
            self._buffer = fresh
        draw = random.Random(f"{self._seed}/replay/{self._steps}")
        self._steps += 1
        again = draw.sample(self._buffer, min(self._groups, len(self._buffer)))
        self._replayed += len(again)
        own = [
            group
            for group in groups
            if not scores_alike(group)
            and all(one.source == "local" for one in group.usable)
        ]
        self._buffer = [*self._buffer, *own][-self._capacity :]
        return [*groups, *(_again(group, self._steps) for group in again)]

    def report(self) -> dict[str, float]:
        """Groups that came again, that were too old, and that are kept."""
        counted = {
            "groups_replayed": float(self._replayed),
            "groups_stale": float(self._stale),
        }
        self._stale = self._replayed = 0
        return {**counted, "replay_size": float(len(self._buffer))}

    def state_dict(self) -> dict[str, Any]:
        """The groups and the number of steps so far."""
        return {"steps": self._steps, "groups": groups_to_bytes(self._buffer)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        self._steps = int(state["steps"])
        self._buffer = groups_from_bytes(state["groups"], "filter replay")


def _versions(group: Group) -> list[int]:
    """The weight versions that sampled the group's tokens; [0] where none is known."""
    versions = [
        segment.versions[segment.versions >= 0]
        for one in group.usable
        for segment in one.segments
    ]
    return [
        int(bound)
        for found in versions
        if len(found)
        for bound in (found.min(), found.max())
    ] or [0]


def _again(group: Group, step: int) -> Group:
    """The group under an id of its own; its trajectories' ids too name no other of the run."""
    name = f"{group.id}/replay/{step}"
    attempts = [
        dataclasses.replace(
            one, source="replay", group_id=name, id=f"{one.id}/replay/{step}"
        )
        for one in group.trajectories
    ]
    return Group(name, group.task, attempts)
