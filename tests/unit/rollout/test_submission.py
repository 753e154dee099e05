"""Groups as they end, several collections in flight, and steps that are filled from a source."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from benchmarks.sleeping import FakeEngine
from rlflow.errors import ConfigError, EnvironmentContractError, RolloutError
from rlflow.rollout import Rollout, TaskSource, Tokenizer
from rlflow.rollout.episodes import Attempt
from rlflow.rollout.submission import Submission
from rlflow.types import Episode, Group, Step, StopReason, Task, Trajectory, stamp
from tests.unit.rollout.asking import Asking


class Stuck(Asking):
    """The first task's second episode waits until it is let go."""

    def __init__(self) -> None:
        super().__init__(turns=1)
        self.go = threading.Event()

    async def step(self, episode: Episode, response: str) -> Step:
        while episode.task.id == "t0" and episode is self.episodes[1] and not self.go.is_set():
            await asyncio.sleep(0.005)
        return await super().step(episode, response)


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


def ended(*trajectories: tuple[int, Trajectory]) -> list[Group]:
    """The groups of attempts at one task that end in this order: (number, trajectory)."""
    attempts = [
        Attempt(Task("a", "?"), "0:a", f"{number}", lambda turn: turn, number, "") for number, _ in trajectories
    ]
    submission = Submission(attempts, max_aborted_share=None)
    for place, (_, one) in enumerate(trajectories):
        assert submission._groups.empty(), "not before the last attempt has ended"
        submission._end(place, one)
    return [submission._groups.get_nowait()]


def test_a_group_comes_out_whole_in_order_and_stamped_when_its_last_attempt_ends() -> None:
    (group,) = ended((2, trajectory(4.0)), (0, trajectory(1.0)), (1, trajectory(9.0, StopReason.ABORTED)))
    assert [t.reward for t in group.trajectories] == [1.0, 9.0, 4.0]
    stats = (2, 2.5, pytest.approx(4.5**0.5))  # of 1 and 4: variance 2 * 1.5**2 / (2 - 1)
    assert [t.group_stats for t in group.trajectories] == [stats, None, stats]


def test_a_named_reward_counts_as_0_for_an_attempt_that_never_got_it_and_not_at_all_for_an_aborted_one() -> None:
    attempts = [trajectory(1.0), trajectory(0.0), trajectory(0.0, StopReason.ABORTED)]
    attempts[0].rewards, attempts[2].rewards = {"style": 1.0}, {"style": 9.0, "speed": 1.0}
    stamp(attempts)
    found = {"style": (0.5, pytest.approx(0.5**0.5))}
    assert [one.rewards_stats for one in attempts] == [found, found, {}]


def test_a_group_whose_attempts_were_all_aborted_comes_out_too() -> None:
    (group,) = ended((0, trajectory(0.0, StopReason.ABORTED)))
    assert not group.usable and group.trajectories[0].group_stats is None


# --- submit and completed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [3, 16])
def test_a_stuck_attempt_keeps_no_finished_group_back(tokenizer: Tokenizer, lanes: int) -> None:
    environment = Stuck()
    with over(tokenizer, environment) as rollout:
        rollout.engines[0].max_concurrency = lanes
        submission = rollout.submit(environment.tasks("train"), step=2)
        groups = submission.completed()
        assert sorted(next(groups).id for _ in range(3)) == ["2:t1", "2:t2", "2:t3"]
        assert not submission.ended
        environment.go.set()
        assert [group.id for group in groups] == ["2:t0"]
        assert submission.ended and list(submission.completed()) == []


def test_collect_returns_the_order_of_the_tasks_whoever_ends_first(tokenizer: Tokenizer) -> None:
    environment = Stuck()
    with over(tokenizer, environment) as rollout:
        threading.Timer(0.1, environment.go.set).start()
        groups = rollout.collect(environment.tasks("train"))
    assert [group.id for group in groups] == ["0:t0", "0:t1", "0:t2", "0:t3"]
    assert all(len(group.trajectories) == 2 for group in groups)


@pytest.mark.parametrize("deterministic", [False, True])
def test_collections_in_flight_together_give_what_each_gives_alone(tokenizer: Tokenizer, deterministic: bool) -> None:
    def tokens(groups: Sequence[Group]) -> dict[str, list[list[int]]]:
        return {group.id: [t.segments[0].tokens.tolist() for t in group.trajectories] for group in groups}

    environment = Asking()
    tasks = environment.tasks("train")
    with over(tokenizer, environment, deterministic=deterministic) as rollout:
        alone = [tokens(rollout.collect(tasks, step)) for step in (1, 2, 3)]
    with over(tokenizer, environment, deterministic=deterministic) as rollout:
        submissions = [rollout.submit(tasks, step, priority=-step) for step in (1, 2, 3)]
        together = [tokens(list(submission.completed())) for submission in reversed(submissions)]
    assert together[::-1] == alone


def test_leaving_early_or_closing_ends_what_is_in_flight(tokenizer: Tokenizer) -> None:
    environment = Stuck()
    with over(tokenizer, environment) as rollout:
        groups = rollout.submit(environment.tasks("train")).completed()
        next(groups)
        groups.close()
        assert sorted(environment.closed.values()) == [1] * len(environment.episodes)
        left = rollout.submit(environment.tasks("train")[:1], step=1)
        time.sleep(0.05)
    assert left.ended
    assert sorted(environment.closed.values()) == [1] * len(environment.episodes)


def test_an_error_of_one_collection_ends_it_and_leaves_the_others(tokenizer: Tokenizer) -> None:
    class Wrong(Stuck):
        async def step(self, episode: Episode, response: str) -> Any:
            return "text" if episode.task.id == "wrong" else await super().step(episode, response)

    environment = Wrong()
    with over(tokenizer, environment) as rollout:
        good = rollout.submit(environment.tasks("train"))
        bad = rollout.submit([*environment.tasks("train")[:1], Task("wrong", "?")], step=1)
        with pytest.raises(EnvironmentContractError, match="expected a Step"):
            list(bad.completed())
        assert bad.ended and not good.ended
        environment.go.set()
        assert len(list(good.completed())) == 4
        with pytest.raises(EnvironmentContractError):
            list(bad.completed())


def test_an_interrupt_while_waiting_for_a_group_ends_the_collection(tokenizer: Tokenizer) -> None:
    environment = Stuck()
    with over(tokenizer, environment) as rollout:
        submission = rollout.submit(environment.tasks("train")[:1])
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            list(submission.completed())
        assert submission.ended
        assert sorted(environment.closed.values()) == [1, 1]


@pytest.mark.parametrize("mode", ["paused", "aborted"])
def test_an_attempt_whose_request_was_ended_is_aborted_and_says_by_whom(tokenizer: Tokenizer, mode: str) -> None:
    class Ending(FakeEngine):
        async def generate(self, *arguments: Any, **keywords: Any) -> Any:
            completion = await super().generate(*arguments, **keywords)
            completion.stop = mode
            return completion

    environment = Asking()
    with Rollout(Ending(tokenizer), environment, tokenizer, samples_per_prompt=1, max_aborted_share=1.0) as rollout:
        (group,) = rollout.collect(environment.tasks("train")[:1])
    assert group.trajectories[0].stop is StopReason.ABORTED
    assert f"it was {mode}" in group.trajectories[0].error


# --- stream -----------------------------------------------------------------------------------------------------------


def test_stream_asks_the_source_when_a_step_is_wanted_and_samples_with_the_newest_weights(tokenizer: Tokenizer) -> None:
    source = Counting(total=7)
    assert isinstance(source, TaskSource)
    seen = []
    with over(tokenizer, Asking()) as rollout:
        for groups in rollout.stream(source, 3, start=5):
            versions = {int(v) for group in groups for t in group.trajectories for v in t.segments[0].versions}
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


def test_stream_gives_up_after_max_rounds_with_what_it_has_or_an_error(tokenizer: Tokenizer) -> None:
    def only_the_first(groups: list[Group]) -> list[Group]:
        return [group for group in groups if group.task.id == "c0"]

    source = Counting()
    with over(tokenizer, Asking()) as rollout:
        stream = rollout.stream(source, 3, admit=only_the_first, max_rounds=2)
        assert [group.id for group in next(stream)] == ["0:c0"]
        assert source.position == 5
        with pytest.raises(RolloutError, match="step 1: not one of 6 groups was admitted, in 2 rounds"):
            next(stream)
        with pytest.raises(ConfigError, match="max_rounds: expected at least 1, found 0"):
            next(rollout.stream(source, 3, max_rounds=0))


def test_the_environment_reports_once_a_step_however_many_rounds_it_took(tokenizer: Tokenizer) -> None:
    class Reporting(Asking):
        reports = 0

        def report(self) -> dict[str, float]:
            self.reports += 1
            return {"world/reports": float(self.reports), "world/episodes": float(len(self.episodes))}

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
        assert short.stop is StopReason.MAX_TURNS and len(short.turns) == 2 and short.group_stats[0] == 1
        assert max(len(one.turns) for group in (groups[0], groups[2]) for one in group.trajectories) == 3
        assert [len(group.trajectories) for group in rollout.collect(tasks, samples_per_prompt=1)] == [1, 1, 1]
