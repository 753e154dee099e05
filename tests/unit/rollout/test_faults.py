"""What an environment does wrong costs its episode, never the run: exits, hung calls, blocked loops."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from benchmarks.sleeping import FakeEngine
from rlflow.errors import EnvironmentContractError, PolicyError, RolloutError
from rlflow.report.metrics import Metric
from rlflow.rollout import Rollout, Tokenizer
from rlflow.rollout.environment_calls import tasks_of
from rlflow.rollout.episodes import LONG_TEXT
from rlflow.types import Episode, Step, StopReason, Task
from tests.unit.rollout.asking import Asking
from tests.waiting import until


class Unspeakable(Exception):
    """One that says nothing about itself: its text cannot be had."""

    def __str__(self) -> str:
        raise ValueError("no text")


ESCAPES = [
    StopIteration("empty"), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), BaseException("bare"),
]  # fmt: skip


def over(tokenizer: Tokenizer, environment: Asking, **options: Any) -> Rollout:
    defaults = {"samples_per_prompt": 2, "max_response_tokens": 8, "max_aborted_share": 0.6}
    return Rollout(FakeEngine(tokenizer), environment, tokenizer, **{**defaults, **options})


@pytest.mark.parametrize("method", ["reset", "step", "close"])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "async"])
@pytest.mark.parametrize("error", ESCAPES, ids=lambda error: type(error).__name__)
def test_whatever_a_method_raises_aborts_its_episode_alone(
    tokenizer: Tokenizer, error: BaseException, plain: bool, method: str
) -> None:
    class Escaping(Asking):
        pass

    def raising(self: Asking, subject: Any, *rest: Any) -> Any:
        if getattr(subject, "task", subject).id == "t0":
            raise error
        return asyncio.run(getattr(Asking, method)(self, subject, *rest))

    async def raising_async(self: Asking, subject: Any, *rest: Any) -> Any:
        if getattr(subject, "task", subject).id == "t0":
            raise error
        return await getattr(Asking, method)(self, subject, *rest)

    setattr(Escaping, method, raising if plain else raising_async)
    environment = Escaping(turns=1)
    with over(tokenizer, environment) as rollout:
        groups = rollout.collect(environment.tasks("train")[:2])
    assert [[trajectory.usable for trajectory in group.trajectories] for group in groups] == [
        [False] * 2,
        [True] * 2,
    ]
    said = groups[0].trajectories[0].error
    assert type(error).__name__ in said and (
        f"Escaping.{method} raised" in said or "coroutine raised" in said
    )


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "async"])
def test_what_the_policy_caused_counts_as_wrong(tokenizer: Tokenizer, plain: bool) -> None:
    """A PolicyError of the second step ends the episode; what it had earned before stays."""

    class Judging(Asking):
        metrics = {"found": Metric("share", "of things", score=True)}

        async def answer(self, episode: Episode, response: str) -> Step:
            if episode.task.id == "t0" and episode.turns == 2:
                raise PolicyError("too deep", reward=-1.0, metrics={"deep": 1.0}, rewards={"a": -2})
            return Step("\n", 0.25, metrics={} if episode.task.id == "t0" else {"found": 1.0})

    class Plain(Judging):
        def step(self, episode: Episode, response: str) -> Step:
            return asyncio.run(self.answer(episode, response))

    class Async(Judging):
        async def step(self, episode: Episode, response: str) -> Step:
            return await self.answer(episode, response)

    environment = Plain() if plain else Async()
    with over(tokenizer, environment, max_turns=3, max_aborted_share=0.0) as rollout:
        groups = rollout.collect(environment.tasks("train")[:2])
    wrong, right = (group.trajectories[0] for group in groups)
    assert (wrong.reward, wrong.rewards, len(wrong.turns)) == (-0.75, {"a": -2.0}, 2)
    assert wrong.stop is StopReason.TERMINATED and wrong.unscorable and not right.unscorable
    assert wrong.error == "PolicyError: too deep" and wrong.metrics["deep"] == 1.0
    assert (wrong.metrics["found"], right.metrics["found"]) == (0.0, 1.0)


def test_before_the_policy_has_said_anything_nothing_is_its_fault(tokenizer: Tokenizer) -> None:
    class Early(Asking):
        async def reset(self, task: Task) -> Episode:
            if task.id == "t0":
                raise PolicyError("too early")
            return await super().reset(task)

    environment = Early(turns=1)
    with over(tokenizer, environment) as rollout:
        groups = rollout.collect(environment.tasks("train")[:2])
    assert [len(group.usable) for group in groups] == [0, 2]


def test_an_error_without_a_text_aborts_its_episode_alone(tokenizer: Tokenizer) -> None:
    class Silent(Asking):
        async def step(self, episode: Episode, response: str) -> Step:
            if episode.task.id == "t0":
                raise Unspeakable
            return await super().step(episode, response)

    environment = Silent(turns=1)
    with over(tokenizer, environment) as rollout:
        groups = rollout.collect(environment.tasks("train")[:2])
    error = groups[0].trajectories[0].error
    assert (
        error.startswith("Unspeakable: no reason given (") and "in step; the response was" in error
    )
    assert groups[1].trajectories[0].usable


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        (Unspeakable(), "found Unspeakable: no reason given"),
        (SystemExit(3), "found SystemExit: 3"),
        (None, "NoneType"),
        (["abc"], "entry 0 is of type str"),
        ([Task("a", "b"), Task(7, "b")], "task 1: its id must be text"),
        ([Task("a", None)], "task 0: its id must be text, its prompt text or a list"),
    ],
)
def test_tasks_that_cannot_be_had_are_one_line(tasks: Any, said: str) -> None:
    class Giving(Asking):
        def tasks(self, split: str) -> Any:
            if isinstance(tasks, BaseException):
                raise tasks
            return tasks

    with pytest.raises(
        EnvironmentContractError, match=r"^Giving\.tasks: expected a sequence of Task"
    ) as caught:
        tasks_of(Giving(), "train")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_long_observations_are_tokenized_beside_the_event_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Long(Asking):
        async def step(self, episode: Episode, response: str) -> Step:
            step = await super().step(episode, response)
            if episode.task.id == "t0" and not step.terminated:
                step.observation = "many words " * (LONG_TEXT // 10)
            return step

    threads: dict[bool, set[str]] = {}
    encode = Tokenizer.encode_text

    def watched(self: Tokenizer, text: str) -> list[int]:
        threads.setdefault(len(text) > LONG_TEXT, set()).add(threading.current_thread().name)
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "encode_text", watched)
    environment = Long(turns=2)
    with over(tokenizer, environment, max_total_tokens=100_000) as rollout:
        rollout.collect(environment.tasks("train")[:2])
    assert threads[True] and threads[False] and not threads[True] & threads[False]


class Hanging(Asking):
    """One method hangs in episodes of the first task, until the test is over."""

    def __init__(self, method: str, plain: bool) -> None:
        super().__init__(turns=1)
        self.over = threading.Event()
        self.method, self.plain = method, plain
        hang = self._hang_plain if plain else self._hang
        setattr(self, method, hang)

    def _hang_plain(self, subject: Any, *rest: Any) -> Any:
        if getattr(subject, "task", subject).id == "t0":
            self.over.wait(30)
        return asyncio.run(getattr(Asking, self.method)(self, subject, *rest))

    async def _hang(self, subject: Any, *rest: Any) -> Any:
        if getattr(subject, "task", subject).id == "t0":
            await asyncio.sleep(30)
        return await getattr(Asking, self.method)(self, subject, *rest)


@pytest.mark.parametrize("method", ["reset", "step", "close"])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "async"])
@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "free"])
def test_a_call_that_hangs_is_given_up_at_its_deadline(
    tokenizer: Tokenizer, method: str, plain: bool, deterministic: bool
) -> None:
    environment = Hanging(method, plain)
    with over(
        tokenizer, environment, call_s=0.1, samples_per_prompt=3, deterministic=deterministic
    ) as rollout:
        groups = rollout.collect(environment.tasks("train"))
        environment.over.set()
    assert [len(group.usable) for group in groups] == [0, 3, 3, 3]
    assert f"Hanging.{method} did not end within 0.1 s" in groups[0].trajectories[0].error


def test_resets_that_wait_for_a_place_do_not_keep_episodes_from_giving_one_back(
    tokenizer: Tokenizer,
) -> None:
    class FewPlaces(Asking):
        places = threading.Semaphore(2)

        def reset(self, task: Task) -> Episode:  # type: ignore[override]
            self.places.acquire()
            return Episode(task)

        def step(self, episode: Episode, response: str) -> Step:  # type: ignore[override]
            return Step("", 0.0, True)

        def close(self, episode: Episode) -> None:  # type: ignore[override]
            self.places.release()

    with over(tokenizer, FewPlaces(), call_s=10.0, max_aborted_share=0.0) as rollout:
        groups = rollout.collect([Task(f"t{number}", "?") for number in range(40)])
    assert all(len(group.usable) == 2 for group in groups)


def test_hung_calls_do_not_use_the_threads_up(tokenizer: Tokenizer) -> None:
    environment = Hanging("step", plain=True)
    with over(tokenizer, environment, call_s=0.1, max_aborted_share=1.0) as rollout:
        first = rollout.collect(environment.tasks("train")[:1], samples_per_prompt=40)
        groups = rollout.collect(environment.tasks("train")[1:])
        environment.over.set()
    assert not first[0].usable and [len(group.usable) for group in groups] == [2, 2, 2]


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "free"])
def test_an_episode_that_never_ends_is_given_up_at_its_deadline(
    tokenizer: Tokenizer, deterministic: bool
) -> None:
    class Endless(Asking):
        async def step(self, episode: Episode, response: str) -> Step:
            if episode.task.id != "t0":
                return await super().step(episode, response)
            await asyncio.sleep(0.02)
            return Step(" go on")

    environment = Endless(turns=1)
    endless = {"max_response_tokens": 4000, "max_turns": 10**6, "max_total_tokens": 10**9}
    with over(
        tokenizer, environment, episode_s=0.3, deterministic=deterministic, **endless
    ) as rollout:
        groups = rollout.collect(environment.tasks("train")[:2])
    assert [len(group.usable) for group in groups] == [0, 2]
    aborted = groups[0].trajectories[0]
    assert aborted.stop is StopReason.ABORTED and len(aborted.turns) > 1
    assert "the episode (rollout.faults.episode_s) did not end within 0.3 s" in aborted.error
    assert sorted(environment.closed.values()) == [1, 1, 1, 1]


def test_the_first_error_is_told_also_where_close_fails_too(tokenizer: Tokenizer) -> None:
    class Twice(Asking):
        async def step(self, episode: Episode, response: str) -> Step:
            raise ConnectionError("gone")

        async def close(self, episode: Episode) -> None:
            raise ValueError("nothing to close")

    with over(tokenizer, Twice(), max_aborted_share=1.0) as rollout:
        (group,) = rollout.collect([Task("t0", "?")])
    assert group.trajectories[0].error.startswith("ConnectionError: gone (")


def test_an_async_method_that_blocks_the_loop_is_named(tokenizer: Tokenizer) -> None:
    class Blocking(Asking):
        async def step(self, episode: Episode, response: str) -> Step:
            time.sleep(1.0)
            return await super().step(episode, response)

    with (
        over(tokenizer, Blocking(turns=1), call_s=0.2) as rollout,
        pytest.raises(RolloutError, match=r"step \(.*test_faults"),
    ):
        rollout.collect([Task("t0", "?")], samples_per_prompt=1)


def test_a_thread_that_hangs_does_not_keep_the_process_from_ending() -> None:
    program = (
        "import asyncio, time\n"
        "from rlflow.net.calls import CallThreads, call\n"
        "async def main():\n"
        "    try:\n"
        "        await call(CallThreads(1, 'test'), lambda: time.sleep(60), (), 0.05, 'it')\n"
        "    except Exception as error:\n"
        "        print(error)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout) == (0, "it did not end within 0.05 s\n")


def test_an_episode_that_comes_after_the_deadline_of_reset_is_closed(tokenizer: Tokenizer) -> None:
    class Late(Asking):
        ended = 0

        def reset(self, task: Task) -> Episode:
            time.sleep(0.15)
            return Episode(task)

        def close(self, episode: Episode) -> None:
            self.ended += 1

    environment = Late()
    with over(tokenizer, environment, call_s=0.05, max_aborted_share=1.0) as rollout:
        (group,) = rollout.collect(environment.tasks("train")[:1])
        assert not group.usable
        until(lambda: environment.ended == 2, 5.0)
