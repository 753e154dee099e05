"""Environments of other libraries keep the contract here, and train; each test needs the library."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow import check_environment, train
from rlflow.components import ENVIRONMENT
from rlflow.errors import ConfigError
from rlflow.types import Episode
from tests.fixtures import tiny_model
from tests.flow.letters import letters_config

GYMNASIUM = "rlflow_environments.adapters.gymnasium:GymnasiumEnvironment"
REASONING = "rlflow_environments.adapters.reasoning:ReasoningGym"


def one_step(tmp_path: Path, environment: str) -> float:
    """The number of episodes of a training step of a random model."""
    from rlflow.metrics.sinks import read_metrics

    model = tiny_model(tmp_path / "model")
    values = ("rollout.max_total_tokens=900", "rollout.max_response_tokens=4", "rollout.prompts_per_step=2",
              "rollout.samples_per_prompt=2",
              "run.steps=1", "trainer.backend=reference", "evaluation.questions=2", "evaluation.final_questions=2",
              "checkpoint.export=false", "metrics.picture=false", "data.max_prompt_tokens=800")  # fmt: skip
    train(letters_config(model, tmp_path, f"environment={environment}", *values))
    return read_metrics(tmp_path / "letters" / "metrics.jsonl")[-1]["rollout/episodes"]


def test_a_gymnasium_game_keeps_the_contract_and_trains(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed: pip install gymnasium")
    options = {"id": "Taxi-v4", "tasks_per_split": 4}
    report = check_environment(ENVIRONMENT.build({"name": GYMNASIUM, **options}), episodes=8)
    assert report.passed, str(report)
    assert one_step(tmp_path, f"{{name: '{GYMNASIUM}', id: Taxi-v4, tasks_per_split: 4}}") == 4.0


def test_actions_and_rewards_are_the_games_own() -> None:
    gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed: pip install gymnasium")
    environment = ENVIRONMENT.build({"name": GYMNASIUM, "id": "CliffWalking-v1", "tasks_per_split": 1})
    (task,) = environment.tasks("train")
    assert "Actions: 0 to 3." in task.prompt
    episode, game = environment.reset(task), gymnasium.make("CliffWalking-v1")
    observation, _ = game.reset(seed=task.answer)
    assert episode.task.prompt.endswith(f"{observation}\n")
    for said in ("0\n", "1\n", "nonsense\n", "7\n", "1\n"):
        step = environment.step(episode, said)
        if said.strip() in ("0", "1"):
            observation, reward, *_ = game.step(int(said))
            assert (step.observation, step.reward) == (f"{observation}\n", reward)
        else:
            assert step.observation == "Not an action; one of: 0 to 3.\n" and step.reward == 0
    assert step.metrics["invalid_actions"] == 2.0
    environment.close(episode)
    with pytest.raises(ConfigError, match="gymnasium cannot make 'NoSuch-v0'"):
        ENVIRONMENT.build({"name": GYMNASIUM, "id": "NoSuch-v0"})


def test_problems_of_reasoning_gym_keep_the_contract_are_scored_by_its_rule_and_train(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning_gym is not installed: pip install reasoning-gym")
    options = {"dataset": "basic_arithmetic", "tasks_per_split": 6}
    environment = ENVIRONMENT.build({"name": REASONING, **options})
    report = check_environment(environment, episodes=8)
    assert report.passed, str(report)
    for split in ("train", "val"):
        for task in environment.tasks(split):
            assert environment.step(Episode(task), f"{task.answer}\n").reward == 1.0
            assert environment.step(Episode(task), "neither\n").reward < 1.0
    assert {task.prompt for task in environment.tasks("train")} != {task.prompt for task in environment.tasks("val")}
    with pytest.raises(ConfigError, match="Did you mean 'basic_arithmetic'"):
        ENVIRONMENT.build({"name": REASONING, "dataset": "basic_arithmetics"})
    assert one_step(tmp_path, f"{{name: '{REASONING}', dataset: basic_arithmetic, tasks_per_split: 6}}") == 4.0
