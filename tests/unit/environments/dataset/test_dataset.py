"""Prompts out of files, judged by functions of the user's own: which rows, which functions, what None means."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from rlflow import Rollout, check_environment
from rlflow.components import ENVIRONMENT
from rlflow.environment import awaited
from rlflow.errors import ConfigError, DataError, EnvironmentContractError
from rlflow.types import Episode, Step, StopReason
from rlflow_environments.dataset.environment import DatasetEnvironment
from rlflow_environments.dataset.rewards import reward_function
from tests.fixtures import tiny_model

FUNCTIONS = """
import re

def share(prompt, completion, answer, **row):
    return float(completion.strip() == answer)

def bare(completion):
    return len(completion)

def nobody(completion, **row):
    return None

def half_the_time(completion, **row):
    return None if "?" in completion else 1.0

async def later(prompt, completion, answer):
    return prompt.count(answer)

def word(completion):
    return "good"

# As they stand in TRL's documentation: the form, not the words.
def trl_accuracy(completions, answer, **kwargs):
    matches = [re.search(r"(\\d+)", one) for one in completions]
    return [1.0 if found and found[1] == truth else 0.0 for found, truth in zip(matches, answer)]

def trl_lengths(prompts, completions, **kwargs):
    return [len(one) - len(prompt) for prompt, one in zip(prompts, completions)]

def trl_chat(completions, **kwargs):
    return [len(one[0]["content"]) for one in completions]

def trl_maths_only(completions, task, **kwargs):
    return [1.0 if kind == "maths" else None for kind in task]

def trl_ids(completion_ids, completions):
    return [0.0]

def one_for_all(completions, **kwargs):
    return 1.0

def nothing_of_it(answer):
    return 1.0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards_of_mine.py").write_text(FUNCTIONS)
    return tmp_path


def write(name: str, *rows: dict[str, Any]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def made(*names: str, rows: tuple[dict[str, Any], ...] = (), **options: Any) -> DatasetEnvironment:
    rows = rows or ({"prompt": "2 + 2?", "answer": "4", "task": "maths"},)
    references = [f"rewards_of_mine.py:{name}" for name in names]
    return DatasetEnvironment(write("rows.jsonl", *rows), reward=references, **options)


def judged(environment: DatasetEnvironment, response: str) -> Step:
    episode = Episode(environment.tasks("train")[0])
    step: Step = asyncio.run(awaited(environment.step(episode, response)))
    assert step.terminated
    return step


@pytest.mark.parametrize(
    ("name", "response", "reward"),
    [("share", " 4\n", 1.0), ("share", "5", 0.0), ("bare", "abc", 3.0), ("later", "", 0.0),
     ("trl_accuracy", "it is 4", 1.0), ("trl_accuracy", "it is 5", 0.0), ("trl_lengths", "a" * 10, 4.0)],
)  # fmt: skip
def test_a_function_judges_a_completion_by_the_columns_of_its_row(
    folder: Path, name: str, response: str, reward: float
) -> None:
    assert (judged(made(name), response)).reward == reward


def test_prompts_of_messages_reach_lists_as_messages_and_single_ones_as_text(
    folder: Path,
) -> None:
    """As TRL gives them to conversational datasets."""
    messages = [{"role": "user", "content": "2 + 2?"}]
    rows = ({"prompt": messages, "answer": "4"},)
    assert (judged(made("trl_chat", rows=rows), "four")).reward == 4.0
    assert (judged(made("share", rows=rows), "4")).reward == 1.0
    with_system = made("share", rows=rows, system="Be short.")
    shown = with_system.tasks("train")[0].prompt
    assert shown == [{"role": "system", "content": "Be short."}, *messages]
    plain = made("share", system="Be short.").tasks("train")[0].prompt
    assert plain == [{"role": "system", "content": "Be short."}, *messages]


def test_several_functions_add_up_and_each_is_a_reward_of_its_name(folder: Path) -> None:
    step = judged(made("share", "bare", "nobody"), "4")
    assert step.reward == 2.0
    assert step.rewards == {"share": 1.0, "bare": 1.0}
    assert (judged(made("share"), "4")).rewards == {}


def test_no_verdict_leaves_the_episode_out_and_is_no_zero(folder: Path, tmp_path: Path) -> None:
    """Of TRL's multi-task functions too, which answer None for rows of another task."""
    model = tiny_model(tmp_path / "model")
    rows = ({"prompt": "a", "task": "maths"}, {"prompt": "b", "task": "code"})
    environment = made("trl_maths_only", rows=rows)
    options = {"samples_per_prompt": 2, "max_response_tokens": 2, "max_total_tokens": 32}
    with Rollout.from_pretrained(model, environment, **options) as rollout:
        groups = rollout.collect(environment.tasks("train"), max_aborted_share=0.9)
    judged, left_out = ([*group.trajectories] for group in groups)
    assert {one.reward for one in judged} == {1.0}
    assert {one.stop for one in left_out} == {StopReason.ABORTED}
    assert "no verdict" in left_out[0].error and "train-1" in left_out[0].error


@pytest.mark.parametrize(
    ("name", "told"),
    [("trl_ids", "needs completion_ids"), ("nothing_of_it", "takes answer; expected"),
     ("FUNCTION", "has no 'FUNCTION'")],
)  # fmt: skip
def test_a_function_that_cannot_judge_is_refused_at_the_start(
    folder: Path, name: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        made(name)


@pytest.mark.parametrize(
    ("name", "told"), [("word", "found 'good'"), ("one_for_all", "must return a list")]
)
def test_what_is_no_number_is_a_mistake_of_the_function(folder: Path, name: str, told: str) -> None:
    with pytest.raises(EnvironmentContractError, match=told):
        judged(made(name), "x")


def test_numbers_of_numpy_and_torch_count_and_rewards_must_be_as_many_as_completions(
    folder: Path,
) -> None:
    import numpy
    import torch

    listed, single = (
        reward_function(f"rewards_of_mine.py:{name}") for name in ("trl_chat", "share")
    )
    assert single.verdict(numpy.float32(0.5)) == single.verdict(torch.tensor(0.5)) == 0.5
    assert single.verdict(True) == 1.0 and single.verdict(None) is None
    assert listed.verdict(numpy.array([0.25])) == 0.25 and listed.verdict([None]) is None
    assert math.isnan(single.verdict(math.nan) or 0.0), "which the contract refuses"
    with pytest.raises(EnvironmentContractError, match="returned 2 rewards"):
        listed.verdict([1.0, 2.0])


def test_rows_that_a_function_cannot_judge_are_named(folder: Path) -> None:
    write("rows.jsonl", {"prompt": "a", "answer": "1"}, {"prompt": "b"}, {"question": "c"})
    with pytest.raises(DataError) as raised:
        DatasetEnvironment("rows.jsonl", reward="rewards_of_mine.py:share")
    told = str(raised.value)
    assert "line 2: share needs answer" in told and "line 3" in told and "line 1" not in told
    with pytest.raises(DataError, match=r"line 1: 'prompt': expected text, found true"):
        DatasetEnvironment(
            write("numbers.jsonl", {"prompt": True}), reward="rewards_of_mine.py:bare"
        )
    with pytest.raises(ConfigError, match=r"expected train=ROWS"):
        DatasetEnvironment("rows.jsonl")


def test_a_prompt_may_be_made_of_other_columns_and_reads_braces_as_they_are(folder: Path) -> None:
    rows = ({"question": "2 + {x}?", "answer": "4"},)
    with pytest.raises(DataError, match="'x'"):
        made("share", rows=rows, prompt="{x}")
    environment = made("share", rows=rows, prompt="Q: {question}\nIn {} A:")
    task = environment.tasks("train")[0]
    assert (task.prompt, task.answer) == ("Q: 2 + {x}?\nIn {} A:", "4")
    assert task.metadata["question"] == "2 + {x}?"
    assert environment.task_from_text("{1}?").prompt == "Q: {1}?\nIn {} A:"
    asked = Episode(environment.task_from_text("what?"))
    assert environment.step(asked, "that").terminated, "without a row there is nothing to judge"
    with pytest.raises(ConfigError, match="2 columns"):
        made("share", rows=rows, prompt="{question} {answer}").task_from_text("x")


def test_no_prompt_for_validation_is_trained_on(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": str(number)} for number in range(40)]
    alone = DatasetEnvironment(write("all.jsonl", *rows), reward="rewards_of_mine.py:bare")
    assert [len(alone.tasks(split)) for split in ("train", "val")] == [36, 4]
    val = write("val.jsonl", *rows[:10])
    both = DatasetEnvironment("all.jsonl", val, reward="rewards_of_mine.py:bare")
    trained = {task.prompt for task in both.tasks("train")}
    assert len(trained) == 30 and trained.isdisjoint(task.prompt for task in both.tasks("val"))
    assert "left out 10 prompts" in caplog.text


def test_it_keeps_the_contract_by_its_installed_name(folder: Path) -> None:
    rows = write("rows.jsonl", {"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"})
    environment = ENVIRONMENT.build(
        {"name": "dataset", "train": rows, "reward": "rewards_of_mine.py:share"}
    )
    report = check_environment(environment, episodes=4)
    assert report.passed, str(report)
