"""Claims about episodes that begin where an earlier one failed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from rlflow_tools.kit.checks.environments import check_environment

from rlflow.environment import check_step
from rlflow.errors import ConfigError
from rlflow.types import Episode, Step, Task
from rlflow_environments.wrappers.revisit import RevisitFailures
from tests.unit.environments.wrappers.small import Rooms, played


def begun(environment: RevisitFailures) -> Episode:
    return asyncio.run(environment.reset(environment.tasks("train")[0]))


def test_an_episode_begins_on_the_way_of_the_one_that_failed() -> None:
    environment = RevisitFailures(Rooms(), 1.0, success=5.0)
    assert begun(environment).task.prompt == "Walk 0. "
    played(environment, "on", "stay", "on", "out")
    ways = {begun(environment).task.prompt for _ in range(50)}
    rooms = [
        "on",
        "You are in room 1.\n",
        "stay",
        "You are in room 1.\n",
        "on",
        "You are in room 2.\n",
    ]
    assert ways == {"Walk 0. " + "".join(rooms[:count]) for count in (2, 4, 6)}
    episode = begun(environment)
    assert episode.turns == episode.task.prompt.count("You are in")
    assert episode.scratch["room"] == episode.task.prompt.count(
        "on"
    )  # the base is where the prompt says


def test_only_the_steps_from_there_on_are_rewarded_and_a_success_from_scratch_ends_it() -> None:
    environment = RevisitFailures(Rooms(), 1.0, success=2.0)
    played(environment, "on", "out")
    again = played(environment, "on", "out")  # begins in room 1
    assert [step.reward for step in again] == [0.0, 2.0] and again[-1].metrics["revisited"] == 1
    assert begun(environment).turns == 1  # it was no success from scratch
    played(environment, "on", "out", split="val")
    assert set(environment._failed) == {"train0"}  # a held-out task begins at its beginning
    never = RevisitFailures(Rooms(), 0.0, success=2.0)
    played(never, "on", "out")
    played(never, "on", "on out")
    assert not never._failed


def test_where_the_base_does_not_go_that_way_twice_it_begins_from_scratch() -> None:
    environment = RevisitFailures(Rooms(), 1.0, success=5.0)
    environment._failed["train0"] = ["out", "on"]  # the first response ends the episode now
    episode = begun(environment)
    assert episode.turns == 0 and episode.task.prompt == "Walk 0. " and environment.base.closed == 1


class Reading(Rooms):
    """Each observation takes the place of a shorter one before it; the next response may end with a word of its own."""

    def step(self, episode: Episode, response: str) -> Step:
        step = super().step(episode, response)
        step.stop = (f"<{episode.turns}>",)
        if "again" in response:
            step.replace = dict.fromkeys(range(episode.turns - 1), "short")
        return step


def test_what_is_rewritten_is_counted_from_there_and_the_prompt_stays() -> None:
    environment = RevisitFailures(Reading(), 1.0, success=5.0)
    environment._failed["train0"] = ["on", "on"]

    async def go() -> Episode:
        episode = await environment.reset(environment.tasks("train")[0])
        assert (
            episode.turns == 1 and episode.opening is not None and episode.opening.stop == ("<1>",)
        )
        for number, expected in enumerate(
            [None, {0: "short"}]
        ):  # the first would rewrite the prompt alone
            episode.turns += 1
            step = await environment.step(episode, "again")
            check_step(environment, step, number)
            assert step.replace == expected
        return episode

    asyncio.run(go())


def test_a_base_without_validation_tasks_holds_none_out() -> None:
    class Training(Rooms):
        def tasks(self, split: str) -> Sequence[Task]:
            if split == "val":
                raise ConfigError("no questions for the split 'val'")
            return super().tasks(split)

    environment = RevisitFailures(Training(), 1.0, success=5.0)
    played(environment, "on", "out")
    assert set(environment._failed) == {"train0"}


class Slow(Rooms):
    """Its plain methods must not hold up the event loop."""

    def reset(self, task: Task) -> Episode:  # type: ignore[override]
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        return Episode(task)

    def close(self, episode: Episode) -> None:  # type: ignore[override]
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()


def test_plain_methods_of_the_base_run_in_a_thread_on_the_way_too() -> None:
    environment = RevisitFailures(Slow(), 1.0, success=5.0)
    environment._failed["train0"] = ["out", "on"]
    assert [step.reward for step in played(environment, "on", "out")] == [0.0, 1.0]


def test_an_episode_whose_way_fails_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = RevisitFailures(Rooms(), 1.0)
    environment._failed["train0"] = ["on", "on"]
    monkeypatch.setattr(environment.base, "step", None)
    with pytest.raises(TypeError):
        begun(environment)
    assert environment.base.closed == 1


def test_it_keeps_the_contract_of_environments() -> None:
    report = check_environment(RevisitFailures(Rooms()), episodes=4)
    assert report.passed, str(report)
