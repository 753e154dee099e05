"""Groups that were issued and that no step has taken yet."""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.rollout.pacing import GroupAge
from rlflow.types import Group, Task, Trajectory, stamp


@dataclass(eq=False)
class IssuedAttempt:
    """An attempt of a group that no step has taken. request_id: while it is in flight. oldest: weight version
    of its trained tokens, before it has ended that at its start."""

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
    """A group that no step has taken. again: how often it became too old; again_at: at which step last.
    started: how often attempts of it were. given: `on_group` has got it."""

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
        trajectories = [one.trajectory for one in self.attempts.values() if one.trajectory is not None]
        stamp(trajectories)
        return Group(self.id, self.task, trajectories)


def restored(trajectory: Trajectory | None) -> IssuedAttempt:
    """An attempt that had ended with this trajectory; one that was aborted, or had not, is to be played."""
    if trajectory is None or not trajectory.usable:
        return IssuedAttempt()
    return IssuedAttempt(oldest=oldest_version(trajectory), trajectory=trajectory)


def oldest_version(trajectory: Trajectory) -> int | None:
    """The least weight version of the tokens that the policy sampled; None where there is none."""
    found = [one.versions[one.loss_mask] for one in trajectory.segments]
    return min((int(versions.min()) for versions in found if len(versions)), default=None)
