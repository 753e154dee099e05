"""Groups as they end, several collections in flight, steps that are filled from a source, and steps that run ahead."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks.sleeping import FIRST_WEIGHTS, FakeEngine
from rlflow.errors import ConfigError, EnvironmentContractError, RolloutError
from rlflow.rollout import Rollout, TaskSource, Tokenizer
from rlflow.rollout.groups import Groups, Terms
from rlflow.rollout.issued import IssuedAttempt, IssuedGroup
from rlflow.rollout.pacing import Pacing
from rlflow.types import Episode, Group, Step, StopReason, Task, Trajectory, stamp
from tests.unit.rollout.asking import Asking
from tests.waiting import until


class Stuck(Asking):
    """The first task's second episode waits until it is let go."""

    def __init__(self) -> None:
        super().__init__(turns=1)
        self.go = threading.Event()

    async def step(self, episode: Episode, response: str) -> Step:
        while episode.task.id == "t0" and episode is self.episodes[1] and not self.go.is_set():
            await asyncio.sleep(0.005)
        return await super().step(episode, response)


class Listed:
    """A source of some tasks."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = list(tasks)

    def take(self, count: int) -> list[Task]:
        taken, self.tasks = self.tasks[:count], self.tasks[count:]
        return taken


class Counting:
    """A source of tasks c0, c1, ...; `total` of them."""

    def __init__(self, total: int = 10**6) -> None:
        self.position, self.total = 0, total

    def take(self, count: int) -> list[Task]:
        first, self.position = self.position, min(self.position + count, self.total)
        return [Task(f"c{index}", f"Question {index}?") for index in range(first, self.position)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


def over(tokenizer: Tokenizer, environment: Asking, **options: Any) -> Rollout:
    defaults = {"samples_per_prompt": 2, "max_response_tokens": 12, "max_aborted_share": 0.0}
    return Rollout(FakeEngine(tokenizer), environment, tokenizer, **{**defaults, **options})


def trajectory(reward: float, stop: StopReason = StopReason.TERMINATED) -> Trajectory:
    return Trajectory("a", "0:a", [], [], reward, stop)


# --- groups -----------------------------------------------------------------------------------------------------------


def ended(*trajectories: tuple[int, Trajectory]) -> Group:
    """The group of attempts at one task that end in this order: (number, trajectory)."""
    group = IssuedGroup(
        0, "0:a", Task("a", "?"), {number: IssuedAttempt() for number in range(len(trajectories))}
    )
    for number, one in trajectories:
        assert group.left, "not before the last attempt has ended"
        group.attempts[number].trajectory = one
    assert not group.left
    return group.whole()


def test_a_group_comes_out_whole_in_order_and_stamped_when_its_last_attempt_ends() -> None:
    group = ended(
        (2, trajectory(4.0)), (0, trajectory(1.0)), (1, trajectory(9.0, StopReason.ABORTED))
    )
    assert [t.reward for t in group.trajectories] == [1.0, 9.0, 4.0]
    stats = (2, 2.5, pytest.approx(4.5**0.5))  # of 1 and 4: variance 2 * 1.5**2 / (2 - 1)
    assert [t.group_stats for t in group.trajectories] == [stats, None, stats]


def test_a_named_reward_counts_as_0_for_an_attempt_that_never_got_it_and_not_at_all_for_an_aborted_one() -> (
    None
):
    attempts = [trajectory(1.0), trajectory(0.0), trajectory(0.0, StopReason.ABORTED)]
    attempts[0].rewards, attempts[2].rewards = {"style": 1.0}, {"style": 9.0, "speed": 1.0}
    stamp(attempts)
    found = {"style": (0.5, pytest.approx(0.5**0.5))}
    assert [one.rewards_stats for one in attempts] == [found, found, {}]


def test_a_group_whose_attempts_were_all_aborted_comes_out_too() -> None:
    group = ended((0, trajectory(0.0, StopReason.ABORTED)))
    assert not group.usable and group.trajectories[0].group_stats is None


# --- collect ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [3, 16])
def test_a_stuck_attempt_keeps_no_finished_group_back(tokenizer: Tokenizer, places: int) -> None:
    environment, given = Stuck(), []

    def take(group: Group) -> None:
        given.append(group.id)
        if len(given) == 3:
            assert sorted(given) == ["2:t1", "2:t2", "2:t3"]
            environment.go.set()

    with over(tokenizer, environment) as rollout:
        rollout.engines[0].max_concurrency, rollout.on_group = places, take
        groups = next(rollout.stream(Listed(environment.tasks("train")), 4, start=2))
    assert [group.id for group in groups] == ["2:t0", "2:t1", "2:t2", "2:t3"] and len(given) == 3


def test_collect_returns_the_order_of_the_tasks_whoever_ends_first(tokenizer: Tokenizer) -> None:
    environment = Stuck()
    with over(tokenizer, environment) as rollout:
        threading.Timer(0.1, environment.go.set).start()
        groups = rollout.collect(environment.tasks("train"))
    assert [group.id for group in groups] == ["0:t0", "0:t1", "0:t2", "0:t3"]
    assert all(len(group.trajectories) == 2 for group in groups)


@pytest.mark.parametrize("deterministic", [False, True])
def test_collections_in_flight_together_give_what_each_gives_alone(
    tokenizer: Tokenizer, deterministic: bool
) -> None:
    def tokens(groups: Sequence[Group]) -> dict[str, list[list[int]]]:
        return {
            group.id: [t.segments[0].tokens.tolist() for t in group.trajectories]
            for group in groups
        }

    environment = Asking()
    tasks = environment.tasks("train")
    with over(tokenizer, environment, deterministic=deterministic) as rollout:
        alone = [tokens(rollout.collect(tasks, step)) for step in (1, 2, 3)]
    with (
        over(tokenizer, environment, deterministic=deterministic) as rollout,
        ThreadPoolExecutor(3) as threads,
    ):
        together = list(threads.map(lambda step: tokens(rollout.collect(tasks, step)), (1, 2, 3)))
    assert together == alone


def test_leaving_early_or_closing_ends_what_is_in_flight(tokenizer: Tokenizer) -> None:
    environment = Stuck()
    rollout = over(tokenizer, environment)
    groups = rollout.groups(
        Listed(environment.tasks("train")).take, Pacing(1, 1, 1), Terms(2, 0.0, 20.0)
    )
    assert [group.task.id for group in groups.step(0)] == ["t1"] and groups.in_flight
    left = rollout.groups(
        Listed(environment.tasks("train")).take, Pacing(1, 1, 1), Terms(2, 0.0, 20.0)
    )
    left._issue(0)
    time.sleep(0.05)
    groups.close()
    rollout.close()
    assert sorted(environment.closed.values()) == [1] * len(environment.episodes)


def test_an_error_of_one_collection_ends_it_and_leaves_the_others(tokenizer: Tokenizer) -> None:
    class Wrong(Stuck):
        async def step(self, episode: Episode, response: str) -> Any:
            return "text" if episode.task.id == "wrong" else await super().step(episode, response)

    environment = Wrong()
    with over(tokenizer, environment) as rollout, ThreadPoolExecutor(1) as threads:
        good = threads.submit(rollout.collect, environment.tasks("train"))
        until(lambda: len(environment.episodes) >= 2)
        with pytest.raises(EnvironmentContractError, match=r"expected an rlflow\.Step"):
            rollout.collect([*environment.tasks("train")[1:2], Task("wrong", "?")], step=1)
        assert not good.done()
        environment.go.set()
        assert len(good.result()) == 4


def test_an_interrupt_while_waiting_for_a_group_ends_the_collection(tokenizer: Tokenizer) -> None:
    environment = Stuck()
    with over(tokenizer, environment) as rollout:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            rollout.collect(environment.tasks("train")[:1])
        assert sorted(environment.closed.values()) == [1, 1]


def test_an_attempt_whose_request_was_ended_is_aborted_and_says_by_whom(
    tokenizer: Tokenizer,
) -> None:
    class Ending(FakeEngine):
        async def generate(self, *arguments: Any, **keywords: Any) -> Any:
            completion = await super().generate(*arguments, **keywords)
            completion.stop = "aborted"
            return completion

    environment = Asking()
    with Rollout(
        Ending(tokenizer), environment, tokenizer, samples_per_prompt=1, max_aborted_share=1.0
    ) as rollout:
        (group,) = rollout.collect(environment.tasks("train")[:1])
    assert group.trajectories[0].stop is StopReason.ABORTED
    assert "it was aborted" in group.trajectories[0].error


# --- stream -----------------------------------------------------------------------------------------------------------


def test_stream_asks_the_source_when_a_step_is_wanted_and_samples_with_the_newest_weights(
    tokenizer: Tokenizer,
) -> None:
    source = Counting(total=7)
    assert isinstance(source, TaskSource)
    seen = []
    with over(tokenizer, Asking()) as rollout:
        for groups in rollout.stream(source, 3, start=5):
            versions = {
                int(v)
                for group in groups
                for t in group.trajectories
                for v in t.segments[0].versions
            }
            seen.append(([group.id for group in groups], source.position, max(versions)))
            rollout.load_weights(rollout.engines[0].weights.items(), version=len(seen))
    assert seen == [
        (["5:c0", "5:c1", "5:c2"], 3, 0),
        (["6:c3", "6:c4", "6:c5"], 6, 1),
        (["7:c6"], 7, 2),
    ]


def test_stream_takes_as_many_tasks_as_the_filter_refused(tokenizer: Tokenizer) -> None:
    source, asked = Counting(), []

    def every_second(groups: list[Group]) -> list[Group]:
        asked.append(len(groups))
        return [group for group in groups if int(group.task.id[1:]) % 2]

    with over(tokenizer, Asking()) as rollout:
        stream = rollout.stream(source, 4, admit=every_second)
        assert [group.id for group in next(stream)] == ["0:c1", "0:c3", "0:c5", "0:c7"]
        assert (asked, source.position) == ([4, 2, 1, 1], 8)
        assert [group.id for group in next(stream)] == ["1:c9", "1:c11", "1:c13", "1:c15"]


def test_stream_gives_up_after_max_rounds_with_what_it_has_or_an_error(
    tokenizer: Tokenizer,
) -> None:
    def only_the_first(groups: list[Group]) -> list[Group]:
        return [group for group in groups if group.task.id == "c0"]

    source = Counting()
    with over(tokenizer, Asking()) as rollout:
        stream = rollout.stream(source, 3, admit=only_the_first, max_rounds=2)
        assert [group.id for group in next(stream)] == ["0:c0"]
        assert source.position == 5
        with pytest.raises(
            RolloutError, match="step 1: not one of 6 groups was admitted, in 2 rounds"
        ):
            next(stream)
        with pytest.raises(ConfigError, match="max_rounds: expected at least 1, found 0"):
            next(rollout.stream(source, 3, max_rounds=0))


def test_the_environment_reports_once_a_step_however_many_rounds_it_took(
    tokenizer: Tokenizer,
) -> None:
    class Reporting(Asking):
        reports = 0

        def report(self) -> dict[str, float]:
            self.reports += 1
            return {
                "world/reports": float(self.reports),
                "world/episodes": float(len(self.episodes)),
            }

    environment = Reporting()
    with over(tokenizer, environment) as rollout:
        next(rollout.stream(Counting(), 2, admit=lambda groups: groups[:1]))
        assert rollout.report == {"world/reports": 1.0, "world/episodes": 6.0}


def test_a_task_may_get_fewer_attempts_and_turns_than_the_run_gives(tokenizer: Tokenizer) -> None:
    environment = Asking(turns=3)
    tasks = [
        Task("t0", "A?"),
        Task("t1", "B?", most_attempts=1, most_turns=2),
        Task("t2", "C?", most_attempts=9, most_turns=9),
    ]
    with over(tokenizer, environment, samples_per_prompt=3, max_total_tokens=512) as rollout:
        groups = rollout.collect(tasks)
        assert [len(group.trajectories) for group in groups] == [3, 1, 3]
        [short] = groups[1].trajectories
        assert (
            short.stop is StopReason.MAX_TURNS
            and len(short.turns) == 2
            and short.group_stats[0] == 1
        )
        assert (
            max(len(one.turns) for group in (groups[0], groups[2]) for one in group.trajectories)
            == 3
        )
        assert [
            len(group.trajectories) for group in rollout.collect(tasks, samples_per_prompt=1)
        ] == [1, 1, 1]


# --- ahead of the step ------------------------------------------------------------------------------------------------


def every_other(groups: list[Group]) -> list[Group]:
    """A filter that has a memory of its own: it refuses every third group it is shown."""
    return [group for group in groups if not group.task.id.endswith(("2", "5", "8"))]


def ahead_of(rollout: Rollout, source: Counting, pacing: Pacing, **terms: Any) -> Groups:
    known = {"samples": 2, "max_aborted_share": 0.0, "lease_s": 20.0, "steps": 100, **terms}
    return rollout.groups(source.take, pacing, Terms(**known))


COLUMNS = ("tokens", "loss_mask", "logprobs", "versions")


def facts(steps: Sequence[Sequence[Group]]) -> list[Any]:
    """Everything about the groups but times: also who they are, in which order, and with which statistics."""
    return [
        [
            (group.id, group.task.id, one.id, one.reward, one.rewards, one.group_stats, one.stop, one.metrics, one.prompt,
             [(turn.response, turn.observation, turn.reward) for turn in one.turns],
             [tuple(getattr(part, name).tolist() for name in COLUMNS) for part in one.segments])
            for group in groups for one in group.trajectories
        ]
        for groups in steps
    ]  # fmt: skip


def test_with_both_keys_at_zero_the_steps_are_those_of_the_synchronous_stream(
    tokenizer: Tokenizer,
) -> None:
    with over(tokenizer, Asking(turns=2)) as rollout:
        stream, expected = rollout.stream(Counting(22), 4, admit=every_other), []
        for version, groups in enumerate(stream, start=1):
            expected.append(groups)
            rollout.load_weights(FIRST_WEIGHTS.items(), version)
    with over(tokenizer, Asking(turns=2)) as rollout:
        ahead = ahead_of(rollout, Counting(22), Pacing(4))
        found = []
        for version in range(1, 5):
            found.append(ahead.step(version - 1, every_other))
            rollout.pause("keep")
            rollout.load_weights(FIRST_WEIGHTS.items(), version)
        ahead.close()
    assert len(expected) == 4 and facts(found) == facts(expected)


def test_groups_run_ahead_of_the_step_but_no_further_than_they_may(tokenizer: Tokenizer) -> None:
    with over(tokenizer, Asking(turns=1)) as rollout:
        source = Counting()
        ahead = ahead_of(rollout, source, Pacing(3, 2, 1))
        for step in range(4):
            groups = ahead.step(step, list)
            lags = [step - int(version) for group in groups for one in group.trajectories
                    for version in one.segments[0].versions[one.segments[0].loss_mask]]  # fmt: skip
            assert len(groups) == 3 and min(lags) >= 0 and max(lags) <= 2
            assert source.position == 3 * (step + 2)  # this step, and one beyond
            rollout.load_weights(FIRST_WEIGHTS.items(), step + 1)
        ahead.close()


def test_nothing_is_issued_beyond_the_last_step(tokenizer: Tokenizer) -> None:
    with over(tokenizer, Asking(turns=1)) as rollout:
        source = Counting()
        ahead = ahead_of(rollout, source, Pacing(2, 4, 4), steps=3)
        assert [len(ahead.step(step, list)) for step in range(3)] == [
            2,
            2,
            2,
        ] and source.position == 6
        ahead.close()


def test_too_many_aborted_attempts_stop_the_run_and_the_first_error_is_named(
    tokenizer: Tokenizer,
) -> None:
    class Failing(Asking):
        async def step(self, episode: Any, response: str) -> Any:
            raise ValueError("the tool broke")

    with over(tokenizer, Failing()) as rollout:
        ahead = ahead_of(rollout, Counting(), Pacing(2, 1, 1))
        with pytest.raises(
            RolloutError, match=r"4 of 4 episodes were aborted; first: .*the tool broke"
        ):
            ahead.step(0, list)
        ahead.close()


def test_filters_that_let_nothing_through_stop_the_run(tokenizer: Tokenizer) -> None:
    with over(tokenizer, Asking(turns=1)) as rollout:
        ahead = ahead_of(rollout, Counting(), Pacing(2, 1, 1), max_rounds=3)
        with pytest.raises(
            RolloutError, match="step 0: not one of 6 groups was admitted, in 3 rounds"
        ):
            ahead.step(0, lambda groups: [])
        ahead.close()
