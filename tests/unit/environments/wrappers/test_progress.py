"""Claims about rewards of progress; the critic is a function, or a small server in the form of an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio

import pytest
from rlflow_tools.kit.checks.environments import check_environment

from rlflow.errors import ConfigError, EnvironmentContractError
from rlflow_environments.common import judge as judging
from rlflow_environments.common.judge import JudgeError
from rlflow_environments.wrappers.progress import ProgressRewards
from tests.unit.environments.common.chat_server import ChatServer
from tests.unit.environments.retrieval.search_servers import serving
from tests.unit.environments.wrappers.small import Rooms, play, played

HERE = "tests.unit.environments.wrappers.test_progress"


def rooms(pair, *, last: int = 4) -> tuple[float, bool]:
    """The share of the way to the last room that a step went."""
    before, after = (
        int(text.rstrip(".")[-1]) if "room" in text else 0 for text in (pair.before, pair.after)
    )
    return (after - before) / (last - before), after == last


async def wrong(pair, *, value=None):
    return value


def test_each_step_is_rewarded_by_what_it_did_of_the_remaining_work() -> None:
    environment = ProgressRewards(Rooms(), f"{HERE}:rooms", outcome=0.5)
    steps = played(environment, "on", "stay", "on", "on out")
    assert [step.rewards["progress"] for step in steps] == pytest.approx(
        [0.25, 0.0, 1 / 3, 0.5], abs=1e-6
    )
    assert [step.reward for step in steps] == pytest.approx(
        [0.25, 0.0, 1 / 3, 0.5 + 0.5 * 3], abs=1e-6
    )
    last = steps[-1]
    assert last.rewards["outcome"] == 3.0 and last.terminated
    assert last.metrics["progress_value"] == pytest.approx(0.75, abs=1e-6), "three of four rooms"
    # values 0 .25 .25 .5 .75: ranks 0 1.5 1.5 3 4, joint 9.5, squares 9.5 and 10
    assert last.metrics["progress_order"] == pytest.approx((9.5 / 10) ** 0.5, abs=1e-6)
    assert last.metrics["progress_negative"] == last.metrics["progress_done"] == 0.0


@pytest.mark.parametrize("ends", [True, False])
def test_the_critics_done_ends_the_episode_where_it_may(ends: bool) -> None:
    environment = ProgressRewards(Rooms(), {"name": f"{HERE}:rooms", "last": 2}, ends=ends)
    steps = played(environment, "on", "on")
    assert [step.terminated for step in steps] == [False, ends]
    assert steps[-1].metrics["progress_done"] == 1.0 and steps[-1].metrics["progress_value"] == 1.0


def critic(url: str, **options) -> ProgressRewards:
    return ProgressRewards(
        Rooms(), {"name": "endpoint", "url": f"{url}/v1", "model": "m", "tries": 2, **options}
    )


def test_a_language_model_is_asked_about_pairs_that_differ() -> None:
    server = ChatServer(
        '{"progress": 20, "done": 0}',
        'Back. {"progress": -25.5, "done": false} {"progress": 50, "done": true}',
    )
    with serving(server) as url:
        steps = played(critic(url, reference="room 1, room 2"), "on", "stay", "on")
    assert [step.rewards["progress"] for step in steps] == [0.2, 0.0, 0.5]
    assert [step.terminated for step in steps] == [False, False, True]
    first, second = (body["messages"][0]["content"] for _, body, _ in server.requests)
    assert 'before its last action: "Walk 0."' in first and '"room 1, room 2"' in first
    assert 'action: "You are in room 1."' in second and 'sees now: "You are in room 2."' in second


@pytest.mark.parametrize(
    "answers",
    [(500, 500), ("Well.", '{"progress": 101, "done": 0}'), (b"[]", b"")],
    ids=["dead", "garbage", "no completion"],
)
def test_a_critic_that_cannot_be_asked_aborts_the_episode(answers, monkeypatch) -> None:
    monkeypatch.setattr(judging, "PAUSE_S", 0.01)
    with (
        serving(ChatServer(*answers)) as url,
        pytest.raises(JudgeError, match=r"environment.critic: .*after 2 attempts"),
    ):
        asyncio.run(play(critic(url), ["on"]))


def test_a_slow_critic_aborts_after_its_time() -> None:
    with (
        serving(ChatServer(delay_s=0.5)) as url,
        pytest.raises(JudgeError, match=r"no answer within 0\.1 s"),
    ):
        asyncio.run(play(critic(url, timeout_s=0.1, tries=1), ["on"]))


@pytest.mark.parametrize("value", ["far", 1.5, float("nan"), True, [0.1, 1]])
def test_a_critic_that_gives_no_share_is_a_mistake_of_the_set_up(value) -> None:
    with pytest.raises(
        EnvironmentContractError, match=r"environment.critic: expected a number from -1 to 1"
    ):
        asyncio.run(
            play(ProgressRewards(Rooms(), {"name": f"{HERE}:wrong", "value": value}), ["on"])
        )


def test_a_critic_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"environment.critic: unknown name 'endpont'. Did you mean 'endpoint'"
    ):
        ProgressRewards(Rooms(), "endpont")


def test_it_keeps_the_contract() -> None:
    report = check_environment(ProgressRewards(Rooms(), f"{HERE}:rooms"), episodes=4)
    assert report.passed, str(report)
    assert any("named rewards: outcome, progress, steps" in fact for fact in report.facts)
