"""A group that fails as a whole gets one success of an earlier step, so that it has something to
learn from."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlflow.algorithms.base import Filter
from rlflow.rollout.codec import from_bytes, to_bytes
from rlflow.types import Group, Trajectory, stamp
from rlflow.values import PositiveInt


@dataclass
class SuccessPool(Filter):
    """Keeps successes by task; where every attempt of a group failed, a random one of its task
    comes in with source `replay`, and the group's statistics are stamped again.

    mode: `replace` exchanges a random failure for it (Mobile-Agent-v3, arXiv 2508.15144), `add`
    adds it to the group (DART, arXiv 2509.23866). success: the least return that is one. per_task,
    capacity: successes kept, of a task and in all; the oldest give way. recompute: forget the
    log-probs of the policy that sampled them, so that the trainer's own take their place, as in the
    papers; whatever has an `anchor` then needs `proximal`."""

    counters = ("groups_failed", "groups_rescued")

    seed: int
    mode: Literal["replace", "add"] = "replace"
    success: float = 1.0
    per_task: PositiveInt = 4
    capacity: PositiveInt = 512
    recompute: bool = False
    _pool: list[Trajectory] = field(default_factory=list, init=False)  # oldest first
    _draws = 0

    @property
    def unscored(self) -> bool:  # type: ignore[override]
        return self.recompute

    def __call__(self, groups: list[Group]) -> list[Group]:
        completed = [self._completed(group) for group in groups]
        for group in groups:
            for one in group.usable:
                if one.source == "local" and one.reward >= self.success:
                    self._remember(one)
        return completed

    def report(self) -> dict[str, float]:
        """Groups that failed as a whole, those that got a success, and successes in the pool."""
        return {**super().report(), "pool_size": float(len(self._pool))}

    def state_dict(self) -> dict[str, Any]:
        """The successes and the position in the order of draws."""
        return {"draws": self._draws, "pool": to_bytes(self._pool)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        self._draws = int(state["draws"])
        self._pool = from_bytes(state["pool"], "filter success_pool")

    def _completed(self, group: Group) -> Group:
        if not group.usable or any(one.reward >= self.success for one in group.usable):
            return group
        self.counted["groups_failed"] += 1
        stored = [one for one in self._pool if one.task_id == group.task.id]
        if not stored:
            return group
        self.counted["groups_rescued"] += 1
        draw = random.Random(f"{self.seed}/success_pool/{self._draws}")
        self._draws += 1
        attempts = [dataclasses.replace(one) for one in group.trajectories]
        usable = [place for place, one in enumerate(attempts) if one.usable]
        place = draw.choice(usable) if self.mode == "replace" else len(attempts)
        attempts[place : place + 1] = [self._replayed(draw.choice(stored), group, place)]
        stamp(attempts)
        return Group(group.id, group.task, attempts)

    def _replayed(self, success: Trajectory, group: Group, attempt: int) -> Trajectory:
        segments = success.segments
        if self.recompute:
            segments = [dataclasses.replace(segment, logprobs=None) for segment in segments]
        return dataclasses.replace(
            success,
            segments=segments,
            group_id=group.id,
            attempt=attempt,
            source="replay",
            id=f"{group.id}/replay/{success.id}",
            group_stats=None,
        )

    def _remember(self, success: Trajectory) -> None:
        same = [one for one in self._pool if one.task_id == success.task_id]
        if len(same) >= self.per_task:
            self._pool = [one for one in self._pool if one is not same[0]]
        self._pool = [*self._pool, success][-self.capacity :]
