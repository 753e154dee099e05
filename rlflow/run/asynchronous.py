"""The groups of an asynchronous run: attempts run ahead of training, a journal knows of each, steps claim what is due.

Everything here happens in the caller's thread, which alone writes the journal; episodes proceed in the flow's. What ends while
the caller trains waits in memory until it asks for the next step: a kill before that plays it again.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from rlflow.codec import from_bytes, to_bytes
from rlflow.errors import RolloutError
from rlflow.rollout.calls import RunningTime
from rlflow.rollout.episodes import Attempt
from rlflow.rollout.flow import Begun, Flow, Losses, Lost, News
from rlflow.rollout.rollout import group_name
from rlflow.rollout.source import TaskSource
from rlflow.run.journal import AttemptJournal
from rlflow.run.pacing import GroupAge, Pacing
from rlflow.run.versions import mirrored, trained_versions
from rlflow.types import Group, Task, stamp

logger = logging.getLogger(__name__)

Admit = Callable[[list[Group]], list[Group]]


@dataclass(frozen=True)
class Terms:
    """samples: attempts of a group. steps: of the run; nothing is issued for later ones. lease_s: by when an attempt that has
    started is over, one way or another. group_s: for how long a group's last attempts may run; None: until they
    end. max_aborted_share, max_rounds: as in `Rollout.stream`."""

    samples: int
    steps: int
    lease_s: float
    group_s: float | None = None
    max_aborted_share: float = 0.25
    max_rounds: int = 10


class GroupsAhead:
    """Issues groups as the pacing allows, journals what comes of them, and gives each step its own.

    attempt: makes an attempt of (task, group's id, number, request id). tasks: all that the source may name, found again by
    their ids after a restart. With run_ahead and max_staleness 0 the steps are those of `Rollout.stream`."""

    def __init__(
        self,
        journal: AttemptJournal,
        flow: Flow,
        attempt: Callable[[Task, str, int, str], Attempt],
        source: TaskSource,
        tasks: Iterable[Task],
        pacing: Pacing,
        terms: Terms,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.journal = journal
        self._flow = flow
        self._attempt = attempt
        self._source = source
        self._tasks = {task.id: task for task in tasks}
        self._pacing = pacing
        self._terms = terms
        self._clock = clock
        self._places: dict[
            str, tuple[int, int, int]
        ] = {}  # request id -> number, sample, attempt, of what is in flight
        self._begun: dict[str, float] = {}  # request id -> when it was heard that it began, of what is in flight
        self._losses = Losses()
        self._claimed: dict[int, str] = {}  # number -> id, of the groups that were claimed last
        self._taken: list[Group] = []  # by the current step, before any filter
        self._again = self._short = 0  # groups that became too old, or ended short, since the last report
        self._stopped = False
        self.on_group: Callable[[Group], object] | None = None  # given each group once it has ended, while a step waits
        self._given: set[int] = set()  # groups that on_group has got

    # --- restarts -----------------------------------------------------------------------------------------------------

    def recover(self, checkpoint: int) -> None:
        """Takes the journal back to the checkpoint of that step, with which the source was restored; 0: to the beginning."""
        journal = self.journal
        if not journal.recover(checkpoint):
            logger.warning(
                "resume: the journal knows no checkpoint of step %d; what ran ahead is sampled anew", checkpoint
            )
        with journal.transaction():
            self._name_again(journal.issued(checkpoint))
            lost = [number for number, task in journal.tasks(0) if task not in self._tasks]
            journal.drop(lost, "task gone", checkpoint)
            journal.issue_again(self._sort_finished(checkpoint), "restart")
        counts = journal.counts()
        if counts.get("done", 0) + counts.get("issued", 0):
            told = "resume: %d finished attempts are kept, %d unfinished ones are played again"
            logger.info(told, counts.get("done", 0), counts.get("issued", 0))

    def _sort_finished(self, checkpoint: int) -> set[int]:
        """Puts versions in terms of the checkpoint, and lets what was aborted be played again: whatever was out
        then may be back. Returns the groups that are too old for that."""
        journal, too_old = self.journal, set()
        for number, sample, newest in journal.finished():
            (trajectory,) = from_bytes(journal.payload(number, sample), f"{journal.path}: group {number}")
            if not trajectory.usable:
                journal.play_again(number, sample)
            elif newest is not None and newest > checkpoint:
                trajectory = mirrored(trajectory, checkpoint)
                versions = trained_versions(trajectory)
                if versions is None or versions[0] < 0:
                    too_old.add(number)
                else:
                    journal.rewrite(number, sample, to_bytes([trajectory]), versions)
        return too_old

    def _name_again(self, start: int) -> None:
        """Asks the source again for the groups from number `start` on, which it had named after the checkpoint. Where it decides
        otherwise now, its new task takes the place of the old one."""
        groups = self.journal.tasks(start)
        tasks = self._source.take(len(groups)) if groups else []
        self._tasks |= {task.id: task for task in tasks}
        for (number, before), task in zip(groups, tasks):
            if task.id != before:
                _, planned, _ = self.journal.group(number)
                self.journal.replace(number, task.id, planned, self._name(planned, task.id))
        if len(tasks) < len(groups):
            self.journal.forget_from(groups[len(tasks)][0])

    # --- steps --------------------------------------------------------------------------------------------------------

    def steps(self, start: int, admit: Admit) -> Iterator[list[Group]]:
        """The groups of one step after another, from number `start` on, until the source ends; see `Rollout.stream`. A step's
        number is the weight version that it trains."""
        for step in itertools.count(start):
            groups = self.take(step, admit)
            if not groups:
                return
            yield groups

    def take(self, step: int, admit: Admit) -> list[Group]:
        """The groups of a step, waited for; fewer, or none, where the source has ended. What `admit` leaves out is replaced, in
        at most max_rounds rounds.

        Raises RolloutError where nothing was admitted, where too many attempts were aborted, and where nothing ends any more."""
        admitted: list[Group] = []
        self._taken = []
        self._stopped = False
        for _ in range(self._terms.max_rounds):
            groups = self._claim(step, self._pacing.prompts - len(admitted))
            if not groups:
                break
            self._taken += groups
            self._check_aborted(groups)
            kept = admit(groups)
            names = {group.id for group in kept}
            refused = [number for number, name in self._claimed.items() if name not in names]
            self.journal.drop(refused, "filtered", step + 1)
            admitted += kept
            if len(admitted) >= self._pacing.prompts:
                break
        if self._taken and not admitted:
            raise RolloutError(
                f"step {step}: not one of {len(self._taken)} groups was admitted, in {self._terms.max_rounds} rounds at most; "
                "the filters let nothing through (do all attempts get the same reward?)."
            )
        self._start(step)  # what may run while the step is trained
        return admitted

    def _claim(self, step: int, wanted: int) -> list[Group]:
        """The groups that the step is given next, `wanted` of them but where the source ends."""
        time_here, quiet_since = RunningTime(self._flow.poll_s, self._clock), 0.0
        self._absorb(self._flow.news())
        while True:
            self._close_short(step)
            groups = self._start(step)
            choice = self._pacing.choose(step, groups, wanted)
            if choice.again:
                self._issue_again(choice.again)
                continue
            if choice.claim or not groups:
                break
            if self._give(groups):
                self._absorb(self._flow.news())
                continue
            news = self._flow.news(self._flow.poll_s)
            self._absorb(news)
            now = time_here.look()
            # What is on its way to a worker waits for one to come up: the pool has a deadline for that.
            if news or (self._places and not self._begun):
                quiet_since = now
            elif now - quiet_since > self._terms.lease_s:
                raise RolloutError(self._nothing_ends(groups))
        self._claimed = {number: self.journal.group(number)[2] for number in choice.claim}
        self.journal.claim(choice.claim, step + 1)
        return [self._group(number) for number in choice.claim]

    def _start(self, step: int) -> list[GroupAge]:
        """Starts what may start; returns the groups that no step has taken."""
        groups, taken = self.journal.open_groups(), self.journal.claimed(step + 1)
        flying = {number for number, _, _ in self._places.values()}
        idle = [group for group in groups if not group.ended and group.number not in flying]
        # What has tokens already, which a restart interrupted, ages meanwhile: it never waits for room.
        room = self._pacing.room(len(groups) - len(idle) + sum(group.oldest is not None for group in idle) + taken)
        fresh = [group.number for group in idle if group.oldest is None]
        for number in [group.number for group in idle if group.oldest is not None] + fresh[:room]:
            self._submit(number)
        count = len(groups) + taken
        most = (self._terms.steps - step) * self._pacing.prompts - count
        wanted = 0 if self._stopped else min(room - len(fresh), most)
        tasks = self._source.take(wanted) if wanted > 0 else []
        self._stopped = self._stopped or (wanted > 0 and not tasks)
        if not tasks:
            return groups
        with self.journal.transaction():
            for place, task in enumerate(tasks, start=count):
                planned = step + place // self._pacing.prompts
                self._tasks[task.id] = task  # as the source gives it now, with the attempts and turns it is to get
                name = self._name(planned, task.id)
                self._submit(self.journal.issue(task.id, planned, name, task.attempts(self._terms.samples)))
        return self.journal.open_groups()

    def _name(self, planned: int, task: str) -> str:
        return group_name(planned, self.journal.repeated(planned, task), task)

    def _submit(self, number: int) -> None:
        for row in self.journal.waiting(number):
            request_id = f"{number:08d}/{row.sample:04d}/{row.attempt}/{row.group_id}"
            if request_id in self._places:
                continue  # on its way; of a group of which another attempt was lost
            self._places[request_id] = (number, row.sample, row.attempt)
            self._flow.start(self._attempt(self._tasks[row.task], row.group_id, row.sample, request_id), number)

    def _absorb(self, news: Sequence[News]) -> None:
        if not news:
            return
        lost: list[tuple[tuple[int, int, int], Lost]] = []
        with self.journal.transaction():
            for item in news:
                place = self._places[item.request_id]
                if isinstance(item, Begun):
                    self._begun[item.request_id] = self._clock()
                    self.journal.begin(*place, item.version, item.at, item.worker)
                    continue
                del self._places[item.request_id]
                self._begun.pop(item.request_id, None)
                if isinstance(item, Lost):
                    self.journal.lose(*place, item.worker, item.reason, item.at)
                    lost.append((place, item))
                else:
                    found = item.trajectory
                    self.journal.finish(*place, to_bytes([found]), trained_versions(found), item.at)
        for (number, sample, _), item in lost:
            self._losses.add((number, sample), item)
        for number in sorted({place[0] for place, _ in lost}):
            self._submit(number)  # what was lost is played again; the rest of its group goes on

    def _issue_again(self, numbers: Collection[int]) -> None:
        self._flow.cancel(self._forget(numbers))
        self.journal.issue_again(numbers, "stale", stale=True)
        self._given.difference_update(numbers)
        self._again += len(numbers)

    def _give(self, groups: Sequence[GroupAge]) -> bool:
        """Gives one group that has ended to `on_group`; False where there is none."""
        new = [group.number for group in groups if group.ended and group.number not in self._given]
        if self.on_group is None or not new:
            return False
        self._given.add(new[0])
        self.on_group(self._group(new[0]))
        return True

    def _close_short(self, step: int) -> None:
        """Gives up the attempts that their groups have waited for too long. Before anything is asked of the pacing: a group that
        is in its last step would hold it up."""
        if self._terms.group_s is None:
            return
        begun: dict[int, float] = {}  # by group, the last of its attempts in flight
        for name, at in self._begun.items():
            number = self._places[name][0]
            begun[number] = max(at, begun.get(number, at))
        for number in self.journal.waiting_for_the_last():
            if self._clock() - begun[number] <= self._terms.group_s:
                continue
            self._flow.cancel(self._forget([number]))
            self.journal.close_short(number, step + 1)
            self._short += 1

    def _forget(self, numbers: Collection[int]) -> list[str]:
        """The requests of the groups in flight, of which nothing is expected any more."""
        names = [name for name, (number, _, _) in self._places.items() if number in numbers]
        for name in names:
            del self._places[name]
            self._begun.pop(name, None)
        return names

    def _group(self, number: int) -> Group:
        where = f"{self.journal.path}: group {number}"
        trajectories = [one for payload in self.journal.payloads(number) for one in from_bytes(payload, where)]
        stamp(trajectories)
        task, _, name = self.journal.group(number)
        return Group(name, self._tasks[task], trajectories)

    def _check_aborted(self, groups: Sequence[Group]) -> None:
        attempts = [trajectory for group in groups for trajectory in group.trajectories]
        aborted = [trajectory for trajectory in attempts if not trajectory.usable]
        if not aborted:
            return
        first, share = f"task '{aborted[0].task_id}': {aborted[0].error}", self._terms.max_aborted_share
        logger.warning("%d of %d episodes aborted; first: %s", len(aborted), len(attempts), first)
        if len(aborted) > share * len(attempts):
            raise RolloutError(
                f"rollout: {len(aborted)} of {len(attempts)} episodes were aborted, more than max_aborted_share={share}; first: "
                f"{first}"
            )

    def _nothing_ends(self, groups: Sequence[GroupAge]) -> str:
        latest = self._clock() - self._terms.lease_s
        late = sorted({self._places[name][0] for name, at in self._begun.items() if at < latest})
        which = ", ".join(self.journal.group(number)[2] for number in late[:3]) or "none"
        return (
            f"rollout: nothing has ended for {self._terms.lease_s:g} s (rollout.faults.episode_s and call_s) while "
            f"{len(groups)} groups were waited for; attempts beyond their deadline: {which}."
        )

    # --- checkpoints, metrics, the end --------------------------------------------------------------------------------

    def report(self) -> dict[str, float]:
        """`rollout/` metrics of the step that was taken last: how far its tokens lag behind the weights in training, and what is
        there for later steps."""
        groups = self.journal.open_groups()
        counted = {
            "rollout/groups_ahead": float(sum(group.ended for group in groups)),
            "rollout/groups_running": float(sum(not group.ended for group in groups)),
            "rollout/groups_stale": float(self._again),
            "rollout/groups_short": float(self._short),
        }
        self._again = self._short = 0
        return counted

    def mark(self, step: int) -> None:
        """To be called before a checkpoint of the step is written, whose state holds the source's position."""
        self.journal.mark(step)

    def settle(self, checkpoint: int) -> None:
        """To be called when the checkpoint of the step is on disk."""
        self.journal.settle(checkpoint)

    def stop(self) -> None:
        """Ends what is in flight; a resumed run plays it again."""
        self._places.clear()
        self._begun.clear()
        self._flow.close()

    def close(self) -> None:
        """Ends what is in flight and closes the journal."""
        self.stop()
        self.journal.close()


def staleness_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """How many versions the tokens of the groups' usable attempts lag behind the weights that train on them."""
    segments = [segment for group in groups for one in group.usable for segment in one.segments]
    versions = torch.cat([torch.empty(0, dtype=torch.int64), *(one.versions[one.loss_mask] for one in segments)])
    if not len(versions):
        return {}
    lags = (version - versions).double()
    return {
        "rollout/staleness": float(lags.mean()),
        "rollout/staleness_max": float(lags.max()),
        "rollout/on_policy": float((lags == 0).double().mean()),
    }
