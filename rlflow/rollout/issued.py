"""Groups that were issued and that no step has taken yet."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlflow.rollout.pacing import GroupAge
from rlflow.types import Group, Task, Trajectory, stamp

STEPS_REMEMBERED = 64
"""Of which a task that comes again is recognised."""


class GroupNames:
    """Ids of groups: the step and the task, and how often that has come in the step before. Any
    thread may ask. counts: what `since` gave."""

    def __init__(self, counts: Mapping[str, Mapping[str, int]] = {}) -> None:
        self._counts = defaultdict[int, Counter[str]](Counter)
        self._counts |= {int(step): Counter(tasks) for step, tasks in counts.items()}
        self._lock = threading.Lock()

    def new(self, step: int, task: str) -> str:
        """The id of a new group."""
        with self._lock:
            repeated = self._counts[step][task]
            self._counts[step][task] += 1
            if len(self._counts) > STEPS_REMEMBERED:
                del self._counts[next(iter(self._counts))]
        # The repetition stands before the colon, where a task's id cannot look like it.
        return f"{step}.{repeated}:{task}" if repeated else f"{step}:{task}"

    def of_collection(self) -> Callable[[int, str], str]:
        """`new` for one collection: evaluations, whose steps are below 0, get the same ids in
        each."""
        own = GroupNames()
        return lambda step, task: (self if step >= 0 else own).new(step, task)

    def since(self, step: int) -> dict[str, dict[str, int]]:
        """What was counted from a step on, as plain data."""
        with self._lock:
            return {str(at): dict(tasks) for at, tasks in self._counts.items() if at >= step}


@dataclass(eq=False)
class IssuedAttempt:
    """An attempt of a group that no step has taken. request_id: while it is in flight. oldest:
    weight version of its trained tokens, before it has ended that at its start."""

    request_id: str | None = None
    begun_s: float | None = None
    oldest: int | None = None
    trajectory: Trajectory | None = None
    losses: int = 0

    def reset(self) -> None:
        """It is to be played from its beginning."""
        self.request_id = self.begun_s = self.oldest = self.trajectory = None


@dataclass(eq=False)
class IssuedGroup:
    """A group that no step has taken. again: how often it became too old; again_at: at which step
    last. started: how often attempts of it were. given: `on_group` has got it."""

    number: int
    id: str
    task: Task
    attempts: dict[int, IssuedAttempt]
    again: int = 0
    again_at: int | None = None
    started: int = 0
    given: bool = False

    @property
    def left(self) -> list[IssuedAttempt]:
        """The attempts that have not ended."""
        return [one for one in self.attempts.values() if one.trajectory is None]

    @property
    def idle(self) -> bool:
        """Whether it waits to be started."""
        left = self.left
        return bool(left) and all(one.request_id is None for one in left)

    def age(self) -> GroupAge:
        """What the pacing has to know."""
        known = [one.oldest for one in self.attempts.values() if one.oldest is not None]
        return GroupAge(self.number, min(known, default=None), not self.left, self.again)

    def whole(self) -> Group:
        """The group of the attempts that have ended, stamped."""
        trajectories = [
            one.trajectory for one in self.attempts.values() if one.trajectory is not None
        ]
        stamp(trajectories)
        return Group(self.id, self.task, trajectories)


def restored(trajectory: Trajectory | None) -> IssuedAttempt:
    """An attempt that had ended with this trajectory; one that was aborted, or had not, is to be
    played."""
    if trajectory is None or not trajectory.usable:
        return IssuedAttempt()
    return IssuedAttempt(oldest=oldest_version(trajectory), trajectory=trajectory)


def oldest_version(trajectory: Trajectory) -> int | None:
    """The least weight version of the tokens that the policy sampled; None where there is none."""
    found = [one.versions[one.loss_mask & (one.versions >= 0)] for one in trajectory.segments]
    return min((int(versions.min()) for versions in found if len(versions)), default=None)
