"""The groups of one step after another, played as far ahead of the steps as the pacing allows.

Everything here happens in the caller's thread; episodes proceed in the player's. With nothing ahead
this is the synchronous run. What was issued and not yet taken by a step is the state of a
checkpoint: finished attempts ride along, others are issued again under the same ids and seeds. What
happened after a checkpoint is forgotten with the training that followed it, so nothing is trained
twice and nothing is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlflow.errors import RolloutError
from rlflow.net.calls import RunningTime
from rlflow.rollout.codec import from_bytes, to_bytes
from rlflow.rollout.episodes import Attempt
from rlflow.rollout.issued import IssuedAttempt, IssuedGroup, oldest_version, restored
from rlflow.rollout.pacing import Pacing
from rlflow.rollout.players import Begun, Event, Lost, Player
from rlflow.types import Group, Task, Trajectory
from rlflow.values import NonNegativeInt, PositiveInt, checked

logger = logging.getLogger(__name__)

Admit = Callable[[list[Group]], list[Group]]
OnEpisode = Callable[[int, int, Trajectory], object]
"""(how many have ended, of how many, the one that just did)."""


ROW = {
    "number": NonNegativeInt,
    "name": str,
    "task": str,
    "most attempts": PositiveInt | None,
    "most turns": PositiveInt | None,
    "again": NonNegativeInt,
    "attempts": list,
}
"""What the state of a group consists of; of each attempt its number and whether it has ended."""

MOST_LOSSES = 20
"""Give up after this many lost workers: the attempt itself probably kills them."""


@dataclass(frozen=True)
class Terms:
    """samples: attempts of a group. max_aborted_share: of the attempts of a round. max_rounds: of a
    step, to replace what filters refuse. lease_s: by when something has ended. group_s: for how
    long a group's last attempts may run; None: until they end. steps: nothing is issued for later
    ones."""

    samples: int
    max_aborted_share: float
    lease_s: float
    max_rounds: int = 10
    group_s: float | None = None
    steps: int | None = None


class Groups:
    """Issues groups of tasks from a source and gives each step its own.

    attempt: makes an attempt of (task, group's id, number, what tells it from others in flight).
    name: the id of a new group of (step, task's id). take: the next so many tasks; fewer, or none,
    where they end. tasks: those of a restored state are found here by their ids."""

    def __init__(
        self,
        player: Player,
        attempt: Callable[[Task, str, int, str], Attempt],
        name: Callable[[int, str], str],
        take: Callable[[int], Sequence[Task]],
        pacing: Pacing,
        terms: Terms,
        *,
        tasks: Iterable[Task] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._player = player
        self._attempt = attempt
        self._name = name
        self._take = take
        self._pacing = pacing
        self._terms = terms
        self._tasks = {task.id: task for task in tasks}
        self._clock = clock
        self._open: dict[int, IssuedGroup] = {}  # by number, in the order of issue
        # By request id: group and number of the attempt
        self._flying: dict[str, tuple[IssuedGroup, int]] = {}
        self._issued = 0
        self._taken = 0  # groups of the current step
        self._ended = 0  # attempts, since groups were claimed last
        # Groups that became too old, or ended short, since the last report
        self._again = self._short = 0
        self._exhausted = False
        self.on_episode: OnEpisode | None = None
        self.on_group: Callable[[Group], object] | None = None
        """Given each group once it has ended, while a step waits for others."""

    def step(self, number: int, admit: Admit = list) -> list[Group]:
        """The groups of a step, waited for, of the weight version that the step trains or as old as
        the pacing allows; fewer, or none, where the source has ended. What `admit` leaves out is
        replaced.

        Raises RolloutError where nothing was admitted, where too many attempts were aborted, and
        where nothing ends any more."""
        admitted: list[Group] = []
        seen, self._taken, self._exhausted = 0, 0, False
        for _ in range(self._terms.max_rounds):
            groups = self._claim(number, self._pacing.prompts - len(admitted))
            if not groups:
                break
            seen += len(groups)
            self._check_aborted(groups)
            admitted += admit(groups)
            self._taken = len(admitted)
            if len(admitted) >= self._pacing.prompts:
                break
        if seen and not admitted:
            raise RolloutError(
                f"step {number}: not one of {seen} groups was admitted, in "
                f"{self._terms.max_rounds} rounds at most; the filters let nothing through (do all "
                "attempts get the same reward?)."
            )
        if self._pacing.run_ahead:
            self._issue(number)  # what may run while the step is trained
        return admitted

    @property
    def in_flight(self) -> bool:
        """Whether attempts are being played, for all that has been heard."""
        return bool(self._flying)

    def _claim(self, step: int, wanted: int) -> list[Group]:
        """The groups that the step is given next, `wanted` of them but where the source ends."""
        # What is on its way to a worker waits for one to come up: the pool has a deadline for that.
        time_here, quiet_since = RunningTime(self._player.poll_s, self._clock), 0.0
        self._ended = 0
        self._absorb(self._player.events())
        while True:
            self._close_short()
            self._issue(step)
            choice = self._pacing.choose(
                step, [group.age() for group in self._open.values()], wanted
            )
            if choice.again:
                self._issue_again(choice.again, step)
                continue
            if choice.claim or not self._open:
                return [self._open.pop(number).whole() for number in choice.claim]
            if self._give():
                self._absorb(self._player.events())
            elif self._hear() or (self._flying and not self._any_begun()):
                quiet_since = time_here.look()
            elif time_here.look() - quiet_since > self._terms.lease_s:
                raise RolloutError(self._nothing_ends())

    def _hear(self) -> bool:
        """Waits until a group has ended, or there is no news for a moment; returns whether there
        was any."""
        heard = False
        while events := self._player.events(self._player.poll_s):
            heard = True
            if self._absorb(events):
                break
        return heard

    def _issue(self, step: int) -> None:
        """Starts what may start."""
        idle = [group for group in self._open.values() if group.idle]
        # What has tokens already, which a restart interrupted, ages: it never waits for room.
        begun = [group for group in idle if group.age().oldest is not None]
        fresh = [group for group in idle if group not in begun]
        count = len(self._open) + self._taken
        room = self._pacing.room(count - len(fresh))
        wanted = room - len(fresh)
        if self._terms.steps is not None:
            wanted = min(wanted, (self._terms.steps - step) * self._pacing.prompts - count)
        tasks = self._take(wanted) if wanted > 0 and not self._exhausted else []
        self._exhausted = self._exhausted or (wanted > 0 and not tasks)
        new = [
            self._new(task, self._name(step + place // self._pacing.prompts, task.id))
            for place, task in enumerate(tasks, start=count)
        ]
        self._start([*begun, *fresh[:room], *new])

    def _new(self, task: Task, name: str) -> IssuedGroup:
        numbers = range(task.attempts(self._terms.samples))
        group = IssuedGroup(
            self._issued, name, task, {number: IssuedAttempt() for number in numbers}
        )
        self._open[self._issued] = group
        self._issued += 1
        return group

    def _start(self, groups: Iterable[IssuedGroup]) -> None:
        """Starts the attempts of these groups that nobody plays."""
        attempts: list[Attempt] = []
        for group in groups:
            group.started += 1
            for number, one in group.attempts.items():
                if one.trajectory is None and one.request_id is None:
                    request = f"{group.number:08d}.{number:04d}.{group.started}"
                    attempt = self._attempt(group.task, group.id, number, request)
                    one.request_id = attempt.request_id
                    self._flying[attempt.request_id] = group, number
                    attempts.append(attempt)
        if attempts:
            self._player.start(attempts)

    def _issue_again(self, numbers: Collection[int], step: int) -> None:
        """Lets groups that became too old be played from their beginning, with all of their
        attempts."""
        for number in numbers:
            group = self._open[number]
            if group.again_at == step:
                raise RolloutError(
                    f"step {step}: group {group.id} has tokens of weight version "
                    f"{group.age().oldest}, which is too old, although it was begun anew for this "
                    f"step: the engines were not given version {step}."
                )
            group.again_at = step
            self._cancel(group.left)
            samples = range(group.task.attempts(self._terms.samples))
            group.attempts = {sample: IssuedAttempt() for sample in samples}
            group.again, group.given = group.again + 1, False
        self._again += len(numbers)

    def _close_short(self) -> None:
        """Gives up the attempts that their groups have waited for too long. Before anything is
        asked of the pacing: a group that is in its last step would hold it up."""
        if self._terms.group_s is None:
            return
        for group in self._open.values():
            left = group.left
            begun = [one.begun_s for one in left if one.begun_s is not None]
            trains = any(
                one.trajectory is not None and one.oldest is not None
                for one in group.attempts.values()
            )
            if not trains or not left or len(begun) < len(left):
                continue
            if self._clock() - max(begun) > self._terms.group_s:
                self._cancel(left)
                group.attempts = {
                    n: one for n, one in group.attempts.items() if one.trajectory is not None
                }
                self._short += 1

    def _cancel(self, attempts: Iterable[IssuedAttempt]) -> None:
        """Ends attempts in flight; they wait to be started again."""
        names = [one.request_id for one in attempts if one.request_id is not None]
        self._player.cancel(names)
        for name in names:
            group, number = self._flying.pop(name)
            group.attempts[number].reset()

    def _absorb(self, events: Sequence[Event]) -> bool:
        """Notes what has happened; returns whether a group has ended."""
        whole = False
        lost: dict[int, IssuedGroup] = {}
        for event in events:
            group, number = self._flying[event.request_id]
            one = group.attempts[number]
            if isinstance(event, Begun):
                one.begun_s, one.oldest = self._clock(), event.version
                continue
            del self._flying[event.request_id]
            one.reset()
            if isinstance(event, Lost):
                one.losses += 1
                if one.losses > MOST_LOSSES:
                    raise RolloutError(
                        f"rollout: attempt {group.id}/{number} was lost {one.losses} times, each "
                        f"time with the worker that played it; last: {event.reason}. The attempt "
                        "itself probably kills them: play its task alone with `rlflow env check`, "
                        "or leave it out."
                    )
                lost[group.number] = group
                continue
            one.trajectory, one.oldest = event.trajectory, oldest_version(event.trajectory)
            self._ended += 1
            whole = whole or not group.left
            if self.on_episode is not None:
                self.on_episode(self._ended, self._ended + len(self._flying), event.trajectory)
        # Played again, under the same ids and seeds; the rest of the group goes on
        self._start(lost.values())
        return whole

    def _give(self) -> bool:
        """Gives one group that has ended to `on_group`; False where there is none."""
        new = next(
            (group for group in self._open.values() if not group.left and not group.given), None
        )
        if self.on_group is None or new is None:
            return False
        new.given = True
        self.on_group(new.whole())
        return True

    def _check_aborted(self, groups: Sequence[Group]) -> None:
        attempts = [trajectory for group in groups for trajectory in group.trajectories]
        aborted = [trajectory for trajectory in attempts if not trajectory.usable]
        if not aborted:
            return
        first, share = aborted[0], self._terms.max_aborted_share
        told = f"task '{first.task_id}': {first.error}"
        logger.warning("%d of %d episodes aborted; first: %s", len(aborted), len(attempts), told)
        if len(aborted) > share * len(attempts):
            some = len(aborted) < len(attempts)  # an evaluation bears all but these
            limit = f", more than max_aborted_share={share}" if some else ""
            raise RolloutError(
                f"rollout: {len(aborted)} of {len(attempts)} episodes were aborted{limit}; first: "
                f"{told}"
            )

    def _in_flight(self) -> Iterator[IssuedAttempt]:
        return (group.attempts[number] for group, number in self._flying.values())

    def _any_begun(self) -> bool:
        return any(one.begun_s is not None for one in self._in_flight())

    def _nothing_ends(self) -> str:
        latest = self._clock() - self._terms.lease_s
        late = dict.fromkeys(
            group.id
            for group, number in self._flying.values()
            if (begun_s := group.attempts[number].begun_s) is not None and begun_s < latest
        )
        return (
            f"rollout: nothing has ended for {self._terms.lease_s:g} s (rollout.faults.episode_s "
            f"and call_s) while {len(self._open)} groups were waited for; attempts beyond their "
            f"deadline: {', '.join(list(late)[:3]) or 'none'}."
        )

    def state_dict(self) -> dict[str, Any]:
        """The groups that no step has taken, with the attempts that have ended. Together with the
        state of the source all that is needed to go on."""
        self._absorb(self._player.events())
        rows, ended = [], []
        for group in self._open.values():
            task, attempts = group.task, group.attempts.items()
            found = [[number, one.trajectory is not None] for number, one in attempts]
            facts = [task.id, task.most_attempts, task.most_turns, group.again]
            rows.append([group.number, group.id, *facts, found])
            ended += [one.trajectory for _, one in attempts if one.trajectory is not None]
        kept = to_bytes(ended) if ended else None
        return {"issued": self._issued, "groups": rows, "ended": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`. An attempt that was aborted is played again: whatever was out may
        be back."""
        ended = iter(from_bytes(state["ended"], "checkpoint: groups") if state["ended"] else [])
        self._issued = checked(NonNegativeInt, state["issued"], "issued")
        self._open = {}
        for row in state["groups"]:
            number, name, task_id, most_attempts, most_turns, again, rows = (
                checked(hint, value, f"groups: {key}")
                for (key, hint), value in zip(ROW.items(), row, strict=True)
            )
            attempts = {n: restored(next(ended) if is_ended else None) for n, is_ended in rows}
            task = self._tasks.get(task_id)
            if task is None:
                told = "resume: task '%s' of group %s is there no longer; the group is dropped"
                logger.warning(told, task_id, name)
                continue
            task = replace(task, most_attempts=most_attempts, most_turns=most_turns)
            self._open[number] = IssuedGroup(number, name, task, attempts, again)
        if self._open:
            left = sum(len(group.left) for group in self._open.values())
            kept = sum(len(group.attempts) for group in self._open.values()) - left
            told = "resume: %d finished attempts are kept, %d unfinished ones are played again"
            logger.info(told, kept, left)

    def report(self) -> dict[str, float]:
        """`rollout/` metrics since the last call: what is there for later steps, and what did not
        go its way."""
        ended = sum(not group.left for group in self._open.values())
        again, short = self._again, self._short
        self._again = self._short = 0
        return {
            "rollout/groups_ahead": float(ended),
            "rollout/groups_running": float(len(self._open) - ended),
            "rollout/groups_stale": float(again),
            "rollout/groups_short": float(short),
        }

    def stop(self) -> None:
        """Ends what is in flight; `step` starts it again."""
        self._cancel(list(self._in_flight()))

    def close(self) -> None:
        """Ends what is in flight, for good."""
        self._player.close()
