"""When the steps of an asynchronous run give up, and what a restart plays again: on a virtual clock, over a player by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest
import torch

from rlflow.errors import RolloutError
from rlflow.rollout.episodes import Attempt
from rlflow.rollout.groups import MOST_LOSSES, Groups, Terms
from rlflow.rollout.pacing import Pacing
from rlflow.rollout.players import Begun, Ended, Event, Lost
from rlflow.types import Segment, StopReason, Trajectory
from tests.unit.run.simulation import Clock, Names, Tasks, attempt_of

LEASE_S = 20.0


class ByHand:
    """A player whose events `tell` makes of the attempts in flight, each time after `poll_s` on the clock."""

    poll_s = 1.0

    def __init__(self, clock: Clock, tell: Callable[[list[Attempt]], list[Event]]) -> None:
        self.clock, self.tell = clock, tell
        self.flying: dict[str, Attempt] = {}
        self.started: list[str] = []

    def start(self, attempts: Sequence[Attempt]) -> None:
        self.flying |= {attempt.request_id: attempt for attempt in attempts}
        self.started += [attempt.id for attempt in attempts]

    def events(self, timeout_s: float = 0.0) -> list[Event]:
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


def groups_of(player: ByHand, samples: int = 2, prompts: int = 2, **terms: float) -> Groups:
    source = Tasks(4)
    known = Terms(samples, 0.25, LEASE_S, steps=1, **terms)
    return Groups(
        player,
        attempt_of,
        Names(),
        source.take,
        Pacing(prompts),
        known,
        tasks=source.tasks,
        clock=player.clock,
    )


def test_what_had_not_ended_or_an_outage_aborted_is_played_again_by_the_resumed_run_and_nothing_else() -> (
    None
):
    def tool_is_out(flying: list[Attempt]) -> list[Event]:
        return [
            ended(one, StopReason.ABORTED if one.task.id == "t1" else StopReason.TERMINATED)
            for one in flying
            if one.id != "0:t2/1"
        ]

    clock = Clock()
    groups = groups_of(ByHand(clock, tool_is_out), prompts=3)
    groups._issue(0)
    groups._absorb(groups._player.events(1.0))
    state = groups.state_dict()
    with pytest.raises(RolloutError, match=r"2 of 6 episodes were aborted.*the tool is out"):
        groups._player.tell = lambda flying: [ended(one) for one in flying]
        groups.step(0)
    after = ByHand(Clock(), lambda flying: [ended(one) for one in flying])
    groups = groups_of(after, prompts=3)
    groups._take = Tasks(0).take
    groups.load_state_dict(state)
    taken = groups.step(0)
    assert sorted(after.started) == ["0:t1/0", "0:t1/1", "0:t2/1"]
    names = [one.id for group in taken for one in group.usable]
    assert names == [f"0:t{task}/{number}" for task in range(3) for number in range(2)]


def test_a_group_whose_task_is_there_no_longer_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    groups = groups_of(ByHand(Clock(), list))
    groups._issue(0)
    state = groups.state_dict()
    groups = groups_of(ByHand(Clock(), lambda flying: [ended(one) for one in flying]))
    del groups._tasks["t0"]
    groups._take = Tasks(0).take
    groups.load_state_dict(state)
    assert [group.task.id for group in groups.step(0)] == ["t1"] and "task 't0'" in caplog.text


def test_engines_that_were_not_given_the_steps_weights_are_told_of() -> None:
    groups = groups_of(ByHand(Clock(), lambda flying: [ended(one) for one in flying]))
    with pytest.raises(
        RolloutError, match="step 3: group 3:t0 has tokens of weight version 0, which is too old"
    ):
        groups._terms = replace(groups._terms, steps=9)
        groups.step(3)


def test_workers_that_all_start_again_for_longer_than_an_episode_may_last_do_not_end_the_run() -> (
    None
):
    def workers_are_down(flying: list[Attempt]) -> list[Event]:
        if clock.now <= 2:
            return [Begun(one.request_id, 0) for one in flying]
        if clock.now <= 3:
            return [Lost(one.request_id, "0", "it died") for one in flying]
        return [ended(one) for one in flying] if clock.now > 10 * LEASE_S else []

    clock = Clock()
    groups = groups_of(ByHand(clock, workers_are_down))
    assert len(groups.step(0)) == 2 and clock.now > 10 * LEASE_S


def test_attempts_that_have_begun_and_never_end_are_named_after_their_deadline() -> None:
    def begin_once(flying: list[Attempt]) -> list[Event]:
        return [Begun(one.request_id, 0) for one in flying] if clock.now <= 1 else []

    clock = Clock()
    groups = groups_of(ByHand(clock, begin_once))
    with pytest.raises(
        RolloutError, match=r"nothing has ended for 20 s .*beyond their deadline: 0:t0, 0:t1\."
    ):
        groups.step(0)
    assert LEASE_S < clock.now < LEASE_S + 5


def test_a_driver_that_was_stopped_for_hours_takes_nothing_as_late() -> None:
    def stopped_in_between(flying: list[Attempt]) -> list[Event]:
        if clock.now <= 1:
            return [Begun(one.request_id, 0) for one in flying]
        if clock.now <= 2:
            clock.now += 7200
            return []
        return [ended(one) for one in flying] if clock.now > 7210 else []

    clock = Clock()
    groups = groups_of(ByHand(clock, stopped_in_between))
    assert len(groups.step(0)) == 2


def test_an_attempt_that_kills_its_worker_each_time_ends_the_run_and_is_named() -> None:
    def killed(flying: list[Attempt]) -> list[Event]:
        return [
            Lost(one.request_id, "0", "it died") if one.id == "0:t1/1" else ended(one)
            for one in flying
        ]

    player = ByHand(Clock(), killed)
    groups = groups_of(player)
    with pytest.raises(
        RolloutError,
        match=rf"0:t1/1 was lost {MOST_LOSSES + 1} times.*it died\. The attempt itself",
    ):
        groups.step(0)
    assert player.started.count("0:t1/1") == MOST_LOSSES + 1


def test_a_group_waits_for_its_last_attempts_from_when_they_began() -> None:
    def one_hangs(flying: list[Attempt]) -> list[Event]:
        begun = [Begun(one.request_id, 0) for one in flying if clock.now <= 5]
        return begun + [ended(one) for one in flying if one.number == 0]

    clock = Clock()
    groups = groups_of(ByHand(clock, one_hangs), group_s=7.0)
    taken = groups.step(0)
    assert [len(group.trajectories) for group in taken] == [1, 1] and 12 < clock.now < 15
    assert groups.report()["rollout/groups_short"] == 2
