"""Groups of earlier steps come again."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlflow.algorithms.base import Filter
from rlflow.algorithms.filters.dynamic_sampling import scores_alike
from rlflow.rollout.codec import groups_from_bytes, groups_to_bytes
from rlflow.types import Group
from rlflow.values import NonNegativeInt, PositiveInt


@dataclass
class Replay(Filter):
    """Adds `groups` random groups of earlier steps to every step, as they were sampled: log-probs,
    statistics and all, with source `replay` (AstraFlow's replay buffer, arXiv 2605.15565).

    capacity: groups kept; the oldest give way. Those whose attempts score alike are not kept.
    max_staleness: a group is dropped when V - v exceeds it, v the least weight version of its
    tokens and V the newest that was sampled; None keeps all."""

    whole_step = True
    counters = ("groups_replayed", "groups_stale")

    seed: int
    groups: PositiveInt = 4
    capacity: PositiveInt = 128
    max_staleness: NonNegativeInt | None = None
    _buffer: list[Group] = field(default_factory=list, init=False)  # oldest first
    _steps = 0

    def __call__(self, groups: list[Group]) -> list[Group]:
        if self.max_staleness is not None:
            oldest = max(map(max, map(_versions, groups)), default=0) - self.max_staleness
            fresh = [group for group in self._buffer if min(_versions(group)) >= oldest]
            self.counted["groups_stale"] += len(self._buffer) - len(fresh)
            self._buffer = fresh
        draw = random.Random(f"{self.seed}/replay/{self._steps}")
        self._steps += 1
        chosen = draw.sample(self._buffer, min(self.groups, len(self._buffer)))
        self.counted["groups_replayed"] += len(chosen)
        own = [
            group
            for group in groups
            if not scores_alike(group) and all(one.source == "local" for one in group.usable)
        ]
        self._buffer = [*self._buffer, *own][-self.capacity :]
        suffix = f"/replay/{self._steps}"
        return [*groups, *(again(group, suffix, "replay") for group in chosen)]

    def report(self) -> dict[str, float]:
        """Groups that came again, that were too old, and that are kept."""
        return {**super().report(), "replay_size": float(len(self._buffer))}

    def state_dict(self) -> dict[str, Any]:
        """The groups and the number of steps so far."""
        return {"steps": self._steps, "groups": groups_to_bytes(self._buffer)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        self._steps = int(state["steps"])
        self._buffer = groups_from_bytes(state["groups"], "filter replay")


def _versions(group: Group) -> set[int]:
    """The weight versions that sampled the group's tokens; {0} where none is known."""
    found = {
        version
        for one in group.usable
        for segment in one.segments
        for version in segment.versions.unique().tolist()
    }
    return found - {-1} or {0}


def again(group: Group, suffix: str, source: str) -> Group:
    """The group with a suffix to its id and to those of its trajectories: they name no other of the
    run."""
    name = group.id + suffix
    attempts = [
        dataclasses.replace(one, source=source, group_id=name, id=one.id + suffix)
        for one in group.trajectories
    ]
    return Group(name, group.task, attempts)
