"""PPO with a critic, whole runs: the preset as it stands, and that critic and policy learn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlflow.algorithms import GAE
from rlflow.batching import make_batch
from rlflow.config.schema import RunConfig
from rlflow.errors import ConfigError
from rlflow.loop import score_step, train
from rlflow.report.sinks import read_metrics
from rlflow.run.directory import RunDirectory
from rlflow.types import Batch, Segment, StopReason, Trajectory
from tests.flow.letters import letters_config

PPO = (
    "algorithm.advantage={name: gae, whiten: true}",
    "algorithm.losses=[{name: ppo_clip}, {name: value, clip: 0.5}]",
    "rollout.prompts_per_step=72",  # two attempts' worth of every task
    "rollout.samples_per_prompt=1",
    "evaluation.at_start=false",
    "evaluation.every_steps=0",
    "checkpoint.every_steps=0",
)


def records(config: RunConfig) -> list[dict[str, float]]:
    """Of the steps, in order."""
    directory = RunDirectory.open(train(config)["written"]["run"])
    return [record for record in read_metrics(directory.metrics) if "train/lr" in record]


class Places:
    """Scores every state by how many tokens it has: a trainer as far as `score_step` knows one."""

    routing = None

    def score(
        self, batch: Batch, model: str = "policy", want: Sequence[str] = ("logprobs",)
    ) -> dict[str, Tensor]:
        places = torch.arange(batch.tokens.shape[1]).expand(batch.tokens.shape).float()
        return {name: torch.where(places < batch.lengths[:, None], places, 0.0) for name in want}


def test_a_step_asks_for_the_values_before_each_token_and_after_the_last() -> None:
    segments = [
        Segment(
            torch.arange(length),
            torch.arange(length) >= 2,
            torch.zeros(length),
            torch.zeros(length, dtype=torch.int64),
        )
        for length in (3, 5)
    ]
    batch = make_batch(
        [Trajectory("t", "g", [one], [], 1.0, StopReason.MAX_TURNS) for one in segments]
    )
    scored = score_step(batch, Places(), frozenset({"values"}))  # type: ignore[arg-type]
    assert scored.values.tolist() == [
        [0, 0, 2, 0, 0],
        [0, 0, 2, 3, 4],
    ] and scored.final_values.tolist() == [3, 5]
    _, returns = GAE(bootstrap=True, whiten=False, lam=0.0)(scored)
    assert returns.tolist() == [
        [0, 0, 4, 0, 0],
        [0, 0, 3, 4, 6],
    ]  # the successor's value, at the end with the reward of 1
    assert score_step(batch, Places(), frozenset()).values is None  # type: ignore[arg-type]


def preset_run(model: Path, runs: Path, *overrides: str) -> list[dict[str, float]]:
    small = ["rollout.prompts_per_step=8", "rollout.samples_per_prompt=1", "evaluation.final_questions=4",
             "evaluation.every_steps=0", "evaluation.at_start=false", "metrics.picture=false", "run.steps=3"]  # fmt: skip
    return records(letters_config(model, runs, *small, *overrides, preset="searchr1_ppo"))


def test_the_preset_trains_three_steps(model: Path, tmp_path: Path) -> None:
    steps = preset_run(model, tmp_path, "checkpoint.every_steps=0", "checkpoint.export=false")
    assert [record["step"] for record in steps] == [1, 2, 3]
    for number, record in enumerate(steps):
        assert all(math.isfinite(value) for value in record.values())
        assert record["train/critic_lr"] == pytest.approx(
            1e-5 * (2 * number + 1.5) / 30
        )  # the mean of two updates
        assert record["train/gradient_norm"] > 0 and record["train/critic_gradient_norm"] > 0
        assert record["train/value_clip_fraction"] == 0
    assert steps[0]["train/value"] == 0 != steps[1]["train/value"]  # the head starts as 0


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_critic(model: Path, tmp_path: Path) -> None:
    """The same numbers as without an interruption, but for times, speed and memory."""

    def kept(steps: list[dict[str, float]]) -> list[dict[str, float]]:
        return [
            {key: value for key, value in record.items() if key.startswith("train/")}
            for record in steps
        ]

    options = (
        "run.deterministic=true",
        "algorithm.critic.lr=1e-3",
        "algorithm.critic.warmup_updates=3",
    )
    whole = preset_run(model, tmp_path / "whole", *options)
    first = preset_run(model, tmp_path / "cut", *options, "run.steps=1")
    steps = preset_run(model, tmp_path / "cut", *options, "run.resume=true")
    assert kept(first) == kept(whole)[:1] and kept(steps) == kept(whole)
    assert "train/policy_loss" not in whole[0] and "train/policy_loss" in whole[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm.advantage=gae", "algorithm.losses=[ppo_clip, value]"],
            r"algorithm\.critic: .* none: set algorithm\.critic",
        ),
        (
            ["algorithm.critic={lr: 1e-4}"],
            r"algorithm\.critic: the other parts expect null.*: remove it",
        ),
        (
            ["algorithm.critic={}", "algorithm.advantage=gae"],
            "the advantage reads a critic that no loss trains",
        ),
    ],
)
def test_a_critic_without_use_and_a_use_without_critic_are_refused(
    model: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(letters_config(model, tmp_path, *overrides))
    assert not (tmp_path / "letters").exists()


@pytest.mark.slow
@pytest.mark.parametrize("warmup", [0, 10])
def test_critic_and_policy_learn_with_and_without_warm_up(
    model: Path, tmp_path: Path, warmup: int
) -> None:
    critic = f"algorithm.critic={{lr: 5e-3, warmup_updates: {warmup}}}"
    found = records(letters_config(model, tmp_path, *PPO, critic, f"run.steps={60 + warmup}"))
    rewards = [record["train/reward"] for record in found]
    explained = [record["train/value_explained_variance"] for record in found[:60]]
    assert sum(rewards[:5]) / 5 < 0.3 and sum(rewards[-5:]) / 5 > 0.8
    assert explained[0] <= 0 and max(explained) > 0.3
    assert [record["train/lr"] for record in found[: warmup + 1]] == [0.0] * warmup + [5e-3]
    if warmup:  # the policy stands still, and the critic, from 0, comes nearer to what it gets
        gaps = [abs(record["train/value"] - record["train/return"]) for record in found[:warmup]]
        assert max(rewards[:warmup]) < 0.3 and gaps[0] > 0.05 > sum(gaps[-3:]) / 3, gaps
