"""Claims about what a wrapper hands on."""

from __future__ import annotations

import asyncio
import threading

import pytest
from rlflow_tools.kit.checks.environments import check_environment

from rlflow import Step
from rlflow.errors import ConfigError, PolicyError
from rlflow_environments.wrappers.rubric import RubricRewards
from rlflow_environments.wrappers.stages import StageRewards
from rlflow_environments.wrappers.wrapper import Wrapper
from tests.unit.environments.wrappers import small
from tests.unit.environments.wrappers.small import Rooms, play, played


class Doubled(Wrapper):
    async def rewarded(self, episode, seen, step):
        return Step(step.observation, 2 * step.reward, step.terminated, step.metrics)


def test_everything_but_the_rewards_is_the_bases() -> None:
    base = Rooms()
    base.tools, base.frame = ({"type": "function"},), ("<", ">")
    wrapper = Doubled(base)
    for name in ("stop", "max_turns", "tools", "frame", "metrics"):
        assert getattr(wrapper, name) == getattr(base, name)
    assert wrapper.tasks("val") == base.tasks("val")
    steps = played(wrapper, "on", "on", "out")
    assert [step.observation for step in steps] == [
        f"You are in room {room}.\n" for room in (1, 2, 2)
    ]
    assert [step.reward for step in steps] == [0.0, 0.0, 4.0]
    assert wrapper.report() == {"rooms/closed": 1.0}
    wrapper.shutdown()
    assert base.shut == 1


class Started(Rooms):
    def worker_options(self):
        return {"size": 3}


def test_copies_of_workers_use_what_the_base_has_started() -> None:
    base = {"name": f"{__name__}:Started", "size": 1}
    inner = {"name": f"{__name__}:Doubled", "base": base}
    assert Doubled(inner).worker_options() == {"base": {**inner, "base": {**base, "size": 3}}}
    assert Doubled({"name": f"{small.__name__}:Rooms"}).worker_options() == {}


def test_wrappers_can_be_stacked_and_each_keeps_its_own_state() -> None:
    wrapper = Doubled(Doubled(Doubled(Rooms())))
    assert played(wrapper, "on", "out")[-1].reward == 8.0
    assert check_environment(wrapper, episodes=4).passed


def test_a_plain_step_of_the_base_runs_beside_the_event_loop() -> None:
    class Where(Rooms):
        def step(self, episode, response):
            assert threading.current_thread() is not threading.main_thread()
            return super().step(episode, response)

    assert played(Doubled(Where()), "out")[0].terminated


def test_the_base_is_closed_when_the_wrapper_fails() -> None:
    class Failing(Wrapper):
        async def rewarded(self, episode, seen, step):
            raise RuntimeError("no reward")

    base = Rooms()
    with pytest.raises(RuntimeError, match=r"no reward"):
        asyncio.run(play(Failing(base), ["on"]))
    assert base.closed == 1


def test_a_base_that_is_none_and_names_that_are_taken_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"environment.base: unknown name 'serch'.*Did you mean 'search'"
    ):
        Doubled({"name": "serch"})
    with pytest.raises(
        ConfigError, match=r"environment.base: expected an environment, found ChatServer"
    ):
        Doubled({"name": "tests.unit.environments.common.chat_server:ChatServer"})
    inner = RubricRewards(Rooms(), {"a": "base_return"})
    with pytest.raises(
        ConfigError, match=r"RubricRewards reports rubric_a, and so does its base RubricRewards"
    ):
        RubricRewards(inner, {"a": "base_return"})


class Dear(Rooms):
    """Expensive to make: a rehearsal makes a cheap one, or says what is wrong with its size."""

    def __init__(self, size: int = 2) -> None:
        raise AssertionError("a rehearsal builds nothing expensive")

    @classmethod
    def rehearse(cls, size: int = 2, **_):
        return (
            (None, [ConfigError(f"environment.size: found {size}.")])
            if size < 0
            else (Rooms(size), [])
        )


def test_a_rehearsal_is_that_of_the_base_with_the_wrapper_over_it() -> None:
    name = f"{__file__}:Dear"
    environment, problems = Doubled.rehearse(base={"name": name, "size": 3})
    assert (
        isinstance(environment, Doubled) and len(environment.tasks("val")) == 3 and problems == []
    )
    environment, problems = Doubled.rehearse(base={"name": name, "size": -1})
    assert environment is None and [str(problem) for problem in problems] == [
        "environment.size: found -1."
    ]
    environment, problems = Doubled.rehearse(base={"name": name, "sise": 3})
    assert environment is None and "unknown keyword 'sise'. Did you mean 'size'?" in str(
        problems[0]
    )
    assert Doubled.rehearse(base={"name": f"{__file__}:Rooms"}) is None  # made as for a run


class Losing(Rooms):
    """The policy is to blame in its second turn."""

    def step(self, episode, response):
        if episode.turns == 2:
            raise PolicyError("unreadable", reward=-2.0)
        return super().step(episode, response)


def test_a_base_that_blames_the_policy_is_rewarded_by_its_wrappers() -> None:
    """What the stages make of the base's last step stands, and the fault stays one."""
    staged = StageRewards(Losing(), {"one": "room 1"}, valid="left", failure=-10.0, per_stage=1.0)
    with pytest.raises(PolicyError, match="unreadable") as fault:
        played(Doubled(staged), "on", "on")
    # The first step brought -9, which is what the episode is worth without a valid result
    assert fault.value.reward == 0.0
    assert fault.value.metrics == {"stages_reached": 1.0, "valid_result": 0.0}
    with pytest.raises(PolicyError) as fault:
        played(Doubled(Losing()), "on", "on")
    assert fault.value.reward == -4.0


def test_a_wrapper_that_blames_the_policy_keeps_what_the_base_measured() -> None:
    class Blaming(Wrapper):
        async def rewarded(self, episode, seen, step):
            raise PolicyError("no judge reads this", metrics={"read": 0.0})

    with pytest.raises(PolicyError) as fault:
        played(Blaming(Rooms()), "out")
    assert fault.value.reward == 0.0
    assert fault.value.metrics == {"room": 0.0, "left": 1.0, "read": 0.0}
