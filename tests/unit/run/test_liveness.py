"""When the steps of an asynchronous run give up, and what a restart plays again: on a virtual clock, over a flow by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from rlflow.errors import RolloutError
from rlflow.rollout.episodes import Attempt
from rlflow.rollout.flow import MOST_LOSSES, Begun, Ended, Lost, News
from rlflow.run.asynchronous import GroupsAhead, Terms
from rlflow.run.journal import AttemptJournal
from rlflow.run.pacing import Pacing
from rlflow.types import Group, Segment, StopReason, Trajectory
from tests.unit.run.simulation import Clock, Tasks, attempt_of

LEASE_S = 20.0


class ByHand:
    """A flow whose news `tell` makes of the attempts in flight, each time after `poll_s` on the clock."""

    poll_s = 1.0

    def __init__(self, clock: Clock, tell: Callable[[list[Attempt]], list[News]]) -> None:
        self.clock, self.tell = clock, tell
        self.flying: dict[str, Attempt] = {}
        self.started: list[str] = []

    def start(self, attempt: Attempt, lane: int) -> None:
        self.flying[attempt.request_id] = attempt
        self.started.append(attempt.id)

    def news(self, timeout_s: float = 0.0) -> list[News]:
        if not timeout_s:
            return []
        self.clock.now += timeout_s
        found = self.tell(list(self.flying.values()))
        for item in found:
            if not isinstance(item, Begun):
                del self.flying[item.request_id]
        return found

    def cancel(self, request_ids: Iterable[str]) -> None:
        for name in request_ids:
            del self.flying[name]

    def close(self) -> None:
        self.flying.clear()


def ended(attempt: Attempt, stop: StopReason = StopReason.TERMINATED) -> Ended:
    tokens, mask = torch.tensor([0, 1]), torch.tensor([False, True])
    segment = Segment(tokens, mask, torch.zeros(2), torch.where(mask, 0, -1))
    facts = {
        "attempt": attempt.number,
        "id": attempt.id,
        "error": "the tool is out" if stop is StopReason.ABORTED else "",
    }
    return Ended(
        attempt.request_id,
        Trajectory(attempt.task.id, attempt.group_id, [segment], [], 1.0, stop, **facts),
    )


def ahead_of(
    path: Path, flow: ByHand, samples: int = 2, prompts: int = 2, **terms: float
) -> GroupsAhead:
    source = Tasks(4)
    known = Terms(samples, steps=1, lease_s=LEASE_S, **terms)
    journal = AttemptJournal(path)
    return GroupsAhead(
        journal, flow, attempt_of, source, source.tasks, Pacing(prompts), known, flow.clock
    )


def take(ahead: GroupsAhead) -> list[Group]:
    """The groups of the first step, of a run that begins or was resumed."""
    ahead.recover(0)
    return ahead.take(0, lambda groups: groups)


def test_what_an_outage_aborted_is_played_again_by_the_resumed_run_and_nothing_else(
    tmp_path: Path,
) -> None:
    def tool_is_out(flying: list[Attempt]) -> list[News]:
        return [
            ended(one, StopReason.TERMINATED if one.task.id == "t0" else StopReason.ABORTED)
            for one in flying
        ]

    before = ByHand(Clock(), tool_is_out)
    ahead = ahead_of(tmp_path / "journal.sqlite", before)
    with pytest.raises(RolloutError, match=r"2 of 4 episodes were aborted.*the tool is out"):
        take(ahead)
    ahead.close()
    after = ByHand(Clock(), lambda flying: [ended(one) for one in flying])
    ahead = ahead_of(tmp_path / "journal.sqlite", after)
    groups = take(ahead)
    ahead.close()
    assert sorted(after.started) == ["0:t1/0", "0:t1/1"]
    assert [one.id for group in groups for one in group.usable] == [
        "0:t0/0",
        "0:t0/1",
        "0:t1/0",
        "0:t1/1",
    ]


def test_workers_that_all_start_again_for_longer_than_an_episode_may_last_do_not_end_the_run(
    tmp_path: Path,
) -> None:
    def workers_are_down(flying: list[Attempt]) -> list[News]:
        if clock.now <= 2:
            return [Begun(one.request_id, 0) for one in flying]
        if clock.now <= 3:
            return [Lost(one.request_id, "0", "it died") for one in flying]
        return [ended(one) for one in flying] if clock.now > 10 * LEASE_S else []

    clock = Clock()
    ahead = ahead_of(tmp_path / "journal.sqlite", ByHand(clock, workers_are_down))
    assert len(take(ahead)) == 2 and clock.now > 10 * LEASE_S
    ahead.close()


def test_attempts_that_have_begun_and_never_end_are_named_after_their_deadline(
    tmp_path: Path,
) -> None:
    def begin_once(flying: list[Attempt]) -> list[News]:
        return [Begun(one.request_id, 0) for one in flying] if clock.now <= 1 else []

    clock = Clock()
    ahead = ahead_of(tmp_path / "journal.sqlite", ByHand(clock, begin_once))
    with pytest.raises(
        RolloutError, match=r"nothing has ended for 20 s .*beyond their deadline: 0:t0, 0:t1\."
    ):
        take(ahead)
    assert LEASE_S < clock.now < LEASE_S + 5
    ahead.close()


def test_a_driver_that_was_stopped_for_hours_takes_nothing_as_late(tmp_path: Path) -> None:
    def stopped_in_between(flying: list[Attempt]) -> list[News]:
        if clock.now <= 1:
            return [Begun(one.request_id, 0) for one in flying]
        if clock.now <= 2:
            clock.now += 7200
            return []
        return [ended(one) for one in flying] if clock.now > 7210 else []

    clock = Clock()
    ahead = ahead_of(tmp_path / "journal.sqlite", ByHand(clock, stopped_in_between))
    assert len(take(ahead)) == 2
    ahead.close()


def test_an_attempt_that_kills_its_worker_each_time_ends_the_run_and_is_named(
    tmp_path: Path,
) -> None:
    def killed(flying: list[Attempt]) -> list[News]:
        return [
            Lost(one.request_id, "0", "it died") if one.id == "0:t1/1" else ended(one)
            for one in flying
        ]

    flow = ByHand(Clock(), killed)
    ahead = ahead_of(tmp_path / "journal.sqlite", flow)
    with pytest.raises(
        RolloutError, match=rf"0:t1 was lost {MOST_LOSSES + 1} times.*it died\. The attempt itself"
    ):
        take(ahead)
    assert flow.started.count("0:t1/1") == MOST_LOSSES + 1
    ahead.close()


def test_a_group_waits_for_its_last_attempts_from_when_they_began(tmp_path: Path) -> None:
    def one_hangs(flying: list[Attempt]) -> list[News]:
        begun = [Begun(one.request_id, 0) for one in flying if clock.now <= 5]
        return begun + [ended(one) for one in flying if one.number == 0]

    clock = Clock()
    ahead = ahead_of(tmp_path / "journal.sqlite", ByHand(clock, one_hangs), group_s=7.0)
    groups = take(ahead)
    assert [len(group.trajectories) for group in groups] == [1, 1] and 12 < clock.now < 15
    assert ahead.report()["rollout/groups_short"] == 2
    ahead.close()
