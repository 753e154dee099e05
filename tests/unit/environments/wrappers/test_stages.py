"""Claims about partial credit by stages, with the figures of the paper."""

from __future__ import annotations

import asyncio
import re

import pytest
from rlflow_tools.kit.checks.environments import check_environment

from rlflow import Environment, Metric, Step, Task
from rlflow.errors import ConfigError
from rlflow_environments.common import judge as judging
from rlflow_environments.common.chat_endpoint import UnreadableReply
from rlflow_environments.common.judge import JudgeError
from rlflow_environments.wrappers.stages import StageRewards, read_stages
from tests.unit.environments.common.chat_server import ChatServer
from tests.unit.environments.retrieval.search_servers import serving
from tests.unit.environments.wrappers.small import play, played

STAGES = {
    name: rf"(?m)^done: {name}$"
    for name in ("import", "load", "split", "build", "train", "predict", "write")
}


class Program(Environment):
    """Runs "programs" of print(...) lines; `submit(x)` is a valid result with the score x."""

    metrics = {"valid_score": Metric("share", "of programs with a score")}

    def tasks(self, split):
        return [Task(f"{split}0", "Write a program. ")]

    def step(self, episode, response):
        printed = re.findall(r"print\((.*?)\)", response)
        score = re.findall(r"submit\((.*?)\)", response)
        metrics = {"valid_score": float(bool(score))}
        return Step("\n".join(printed), float(score[0]) if score else 0.0, bool(score), metrics)


def staged(**options) -> StageRewards:
    return StageRewards(Program(), STAGES, valid="valid_score", **options)


@pytest.mark.parametrize(
    ("k", "worth"), list(enumerate((-10, -9.9, -9.8, -9.7, -9.6, -9.5, -9.4, -9.3)))
)
def test_each_stage_that_was_reached_is_worth_a_tenth(k: int, worth: float) -> None:
    program = " ".join(f"print(done: {name})" for name in list(STAGES)[:k])
    (step,) = played(staged(), program)
    assert step.reward == pytest.approx(worth, abs=1e-6)
    assert step.metrics == {"valid_score": 0.0, "stages_reached": float(k), "valid_result": 0.0}


@pytest.mark.parametrize("score", [-1.0, 0.0, 0.7])
def test_a_valid_result_has_the_bases_score_alone_and_beats_all_partial_credit(
    score: float,
) -> None:
    everything = " ".join(f"print(done: {name})" for name in STAGES)
    (step,) = played(staged(), f"{everything} submit({score})")
    assert step.reward == score > -9.3 and step.metrics["valid_result"] == 1.0


def test_the_return_is_right_after_every_step_of_an_episode() -> None:
    steps = played(
        staged(),
        "print(done: load)",
        "nothing",
        "print(done: load) print(done: import)",
        "submit(0.5)",
    )
    returns = [sum(step.reward for step in steps[: number + 1]) for number in range(4)]
    assert returns == pytest.approx([-9.9, -9.9, -9.8, 0.5], abs=1e-6)


def test_the_text_of_a_stage_in_a_program_that_did_not_print_it_does_not_count() -> None:
    (step,) = played(staged(), 'note = "done: load"')
    assert step.reward == -10.0


def labelled(url: str, **options) -> StageRewards:
    labeller = {"url": f"{url}/v1", "model": "m", "tries": 2, **options}
    return StageRewards(Program(), ["load data", "train"], valid="valid_score", labeller=labeller)


def test_a_frozen_labeller_names_the_stages() -> None:
    server = ChatServer(
        'It loads. {"stages": ["load data", "unheard of"]}', '{"stages": ["load data", "train"]}'
    )
    with serving(server) as url:
        steps = played(labelled(url), "print(rows: 5)", "print(epoch 1)", "again")
    assert [step.reward for step in steps] == pytest.approx([-9.9, 0.1, 0.0], abs=1e-6)
    assert len(server.requests) == 2, "all stages are reached: nobody is asked"
    assert '"rows: 5"' in server.requests[0][1]["messages"][0]["content"]


@pytest.mark.parametrize(
    "answers", [(500, 500), ("hm", "[]"), (b"<html>", "{")], ids=["dead", "garbage", "broken"]
)
def test_a_labeller_that_cannot_be_asked_aborts_the_episode(answers, monkeypatch) -> None:
    monkeypatch.setattr(judging, "PAUSE_S", 0.01)
    with (
        serving(ChatServer(*answers)) as url,
        pytest.raises(JudgeError, match=r"environment.labeller: .*after 2 attempts"),
    ):
        asyncio.run(play(labelled(url), ["x"]))


def test_a_reply_is_read_from_its_end_in_linear_time() -> None:
    assert read_stages('{"stages": ["a"]} {"stages": ["b", 3]} {"x": 1}') == ["b"]
    with pytest.raises(UnreadableReply):
        read_stages("{" * 100_000)


@pytest.mark.parametrize(
    ("stages", "options", "told"),
    [
        (STAGES, {"valid": "valid_scor"}, "environment.valid: .*Did you mean 'valid_score'"),
        (["load"], {"valid": "valid_score"}, "found .'load'. with no labeller"),
        ({}, {"valid": "valid_score"}, "environment.stages: expected name -> pattern"),
        (
            {"a": "("},
            {"valid": "valid_score"},
            "environment.stages.a: '.': expected a regular expression",
        ),
    ],
)
def test_stages_that_make_no_sense_are_refused(stages, options, told) -> None:
    with pytest.raises(ConfigError, match=told):
        StageRewards(Program(), stages, **options)


def test_it_keeps_the_contract() -> None:
    report = check_environment(staged(), episodes=4)
    assert report.passed, str(report)
