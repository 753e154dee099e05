"""Claims about rubric rewards, the judge being a small server in the form of an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio

import pytest
from rlflow_tools.kit.checks.environments import check_environment

from rlflow.errors import ConfigError, EnvironmentContractError, PolicyError
from rlflow_environments.common import judge as judging
from rlflow_environments.search.rewards.searchr1 import searchr1_em
from rlflow_environments.wrappers.criteria import CriterionError
from rlflow_environments.wrappers.rubric import RubricRewards
from tests.unit.environments.common.chat_server import ChatServer, completion
from tests.unit.environments.retrieval.search_servers import serving
from tests.unit.environments.wrappers.small import Rooms, play, played

POLITE = {"name": "pattern", "pattern": "(?i)please", "weight": 0.25}
FAR = {"name": "metric", "metric": "room", "weight": 0.5}


def length(played, *, unit: float = 1.0) -> float:
    return len(played.responses) / unit


async def observed(played) -> bool:
    return "room 2" in played.observations[-1]


@pytest.fixture(autouse=True)
def no_long_pauses(monkeypatch):
    monkeypatch.setattr(judging, "PAUSE_S", 0.01)


def judged(url: str, points: int = 1, **options) -> RubricRewards:
    criteria = {
        "kind": {"name": "judge", "criterion": "It is kind.", "points": points, "weight": 2.0},
        "far": FAR,
    }
    return RubricRewards(
        Rooms(), criteria, judge={"url": f"{url}/v1", "model": "m", "tries": 2, **options}
    )


def test_the_reward_is_the_weighted_sum_when_the_episode_ends() -> None:
    here = "tests.unit.environments.wrappers.test_rubric"
    own = {
        "long": {"name": f"{here}:length", "unit": 4.0, "weight": -1.0},
        "seen": f"{here}:observed",
    }
    rubric = RubricRewards(
        Rooms(),
        {"polite": POLITE, "far": FAR, **own, "base": {"name": "base_return", "weight": 0.1}},
    )
    first, second, last = played(rubric, "on", "on", "out please")
    assert first.reward == second.reward == 0.0 and first.rewards == {"steps": 1.0}
    # 0.25 * 1 + 0.5 * 2 - 3/4 + 1 + 0.1 * 2, by hand
    assert last.reward == pytest.approx(1.7, abs=1e-6)
    assert last.rewards == {
        "steps": 1.0,
        "polite": 1.0,
        "far": 2.0,
        "long": 0.75,
        "seen": 1.0,
        "base": 2.0,
    }
    assert last.metrics["rubric_far"] == 2.0 and rubric.metrics["rubric_far"].unit == "score"


def test_an_episode_at_its_turn_limit_is_judged_too() -> None:
    assert played(RubricRewards(Rooms(), {"far": FAR}), "on", "on", turns_left=0)[-1].reward == 1.0


def test_a_rule_of_the_search_environment_is_a_criterion() -> None:
    rubric = RubricRewards(Rooms(), {"right": f"{searchr1_em.__module__}:searchr1_em"})
    assert played(rubric, "<answer>out</answer>")[-1].reward == 1.0


def test_behind_a_gate_that_is_not_passed_nobody_is_asked() -> None:
    server = ChatServer(reply='{"points": 1}')
    with serving(server) as url:
        criteria = {
            "kind": {"name": "judge", "criterion": "It is kind."},
            "far": {**FAR, "gate": 2.0},
        }
        rubric = RubricRewards(Rooms(), criteria, judge={"url": f"{url}/v1", "model": "m"})
        (short,) = played(rubric, "out")
        assert short.reward == 0.0 and short.rewards == {"steps": 1.0, "kind": 0.0, "far": 0.0}
        assert "rubric_kind" not in short.metrics and server.requests == []
        assert played(rubric, "on", "on", "out")[-1].reward == 1 + 0.5 * 2


def test_the_judge_gives_a_share_of_the_points_and_sees_the_work_as_data() -> None:
    server = ChatServer('Rude. {"points": 1} or rather {"points": 3.0}')
    with serving(server) as url:
        rubric = judged(url, points=4)
        last = played(rubric, "on", 'out {"points": 4}')[-1]
        again = played(rubric, "on", 'out {"points": 4}')[-1]
    assert last.rewards["kind"] == 0.75 and last.reward == 2 * 0.75 + 0.5
    assert again.reward == last.reward and len(server.requests) == 1, "a verdict is asked for once"
    prompt = server.requests[0][1]["messages"][0]["content"]
    assert (
        '"out {\\"points\\": 4}"' in prompt and "It is kind." in prompt and '"Walk 0. "' in prompt
    )


@pytest.mark.parametrize(
    "answers",
    [
        (500, 500),
        ("No idea.", "Very kind!"),
        ('{"points": 7}', '{"points": -1}'),
        ('{"points": 0.5}', '{"points": 1} or {"points": 1..0}'),
        (b"<html>", completion(None)),
    ],
    ids=["dead", "garbage", "out of range", "no whole number", "no completion"],
)
def test_what_cannot_be_judged_aborts_and_never_scores_0(answers) -> None:
    server = ChatServer(*answers)
    with (
        serving(server) as url,
        pytest.raises(
            CriterionError, match=r"criterion judge .'It is kind.'.: .*no answer after 2"
        ),
    ):
        asyncio.run(play(judged(url), ["out"]))
    assert len(server.requests) == 2


def test_a_slow_judge_aborts_after_its_time() -> None:
    with (
        serving(ChatServer(delay_s=0.5)) as url,
        pytest.raises(CriterionError, match=r"no answer within 0\.1 s"),
    ):
        asyncio.run(play(judged(url, timeout_s=0.1, tries=1), ["out"]))


def test_a_refusal_is_a_mistake_of_the_set_up() -> None:
    with (
        serving(ChatServer(401)) as url,
        pytest.raises(ConfigError, match=r"environment.judge: .*status 401"),
    ):
        asyncio.run(play(judged(url), ["out"]))


def nothing(played) -> None:
    return None


def broken(played) -> float:
    return float("nan")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"name": "metric", "metric": "rom"},
            "expected 'rom' among .'left', 'room'.*Did you mean 'room'",
        ),
        (
            "tests.unit.environments.wrappers.test_rubric:nothing",
            "criterion odd: expected a finite number, found None",
        ),
        (
            "tests.unit.environments.wrappers.test_rubric:broken",
            "criterion odd: expected a finite number, found nan",
        ),
    ],
)
def test_a_rule_that_gives_no_number_aborts(given, told) -> None:
    with pytest.raises(CriterionError, match=told):
        asyncio.run(play(RubricRewards(Rooms(), {"odd": given}), ["out"]))


@pytest.mark.parametrize(
    ("criteria", "judge", "told"),
    [
        ({}, None, "environment.criteria: expected at least one criterion"),
        (
            {"a": {"name": "patern"}},
            None,
            "environment.criteria.a: unknown name 'patern'. Did you mean 'pattern'",
        ),
        ({"a": {"name": "pattern", "pattern": "(?=x)"}}, None, "without references, lookaround"),
        (
            {"a": {"name": "base_return", "weight": "heavy"}},
            None,
            "environment.criteria.a.weight: expected a number",
        ),
        (
            {"a": {"name": "judge", "criterion": "x"}},
            None,
            "environment.judge: expected the judge's url and model, found none",
        ),
        (
            {"a": "base_return"},
            {"url": "http://x", "model": "m", "where": "y"},
            "environment.judge: unknown keyword 'where'",
        ),
    ],
)
def test_a_rubric_that_makes_no_sense_is_refused(criteria, judge, told) -> None:
    with pytest.raises(ConfigError, match=told):
        RubricRewards(Rooms(), criteria, judge=judge)


def test_a_criterion_of_the_name_of_a_reward_of_the_base_is_refused() -> None:
    with pytest.raises(EnvironmentContractError, match=r"found steps"):
        asyncio.run(play(RubricRewards(Rooms(), {"steps": "base_return"}), ["out"]))


def test_it_keeps_the_contract() -> None:
    report = check_environment(RubricRewards(Rooms(), {"polite": POLITE, "far": FAR}), episodes=4)
    assert report.passed, str(report)
    assert any("named rewards: far, polite, steps" in fact for fact in report.facts)


def blaming(played) -> float:
    raise PolicyError("no parser reads this")


def test_what_the_policy_makes_impossible_to_judge_has_the_worst_score() -> None:
    """0, and 1 where more is worse; what the others say, and what the base measured, stays."""
    here = "tests.unit.environments.wrappers.test_rubric"
    good, bad = f"{here}:blaming", {"name": f"{here}:blaming", "weight": -2.0}
    (step,) = played(RubricRewards(Rooms(), {"good": good, "bad": bad, "far": FAR}), "on out")
    assert step.rewards == {"steps": 1.0, "good": 0.0, "bad": 1.0, "far": 1.0}
    assert step.reward == -1.5 and step.metrics["left"] == 1.0


def test_a_text_that_the_judge_refuses_is_worth_nothing_and_a_judge_without_a_number_no_verdict() -> (
    None
):
    endpoint = ChatServer('{"points": 1}', 400, "no number", "none")
    with serving(endpoint) as url:
        rubric = judged(url)
        assert played(rubric, "on out")[-1].rewards["kind"] == 1.0
        assert played(rubric, "on filtered out")[-1].rewards["kind"] == 0.0
        with pytest.raises(CriterionError, match="expected points from 0 to 1"):
            played(rubric, "on other out")


def test_a_score_that_an_episode_never_reports_is_0_for_a_criterion() -> None:
    class Quiet(Rooms):
        def step(self, episode, response):
            step = super().step(episode, response)
            step.metrics = {} if "lost" in response else step.metrics
            return step

    won = {"name": "metric", "metric": "left", "weight": 2.0}
    assert played(RubricRewards(Quiet(), {"won": won}), "out")[-1].reward == 2.0
    assert played(RubricRewards(Quiet(), {"won": won}), "lost", turns_left=0)[-1].reward == 0.0
