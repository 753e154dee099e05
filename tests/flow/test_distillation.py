"""Runs that learn from a teacher: the preset, the forward KL, the policy under another prompt, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import rlflow.algorithms
from rlflow.config.schema import RunConfig
from rlflow.errors import CheckpointError, ConfigError
from rlflow.loop import train
from rlflow.report.sinks import read_metrics
from rlflow.run.directory import RunDirectory
from tests.fixtures import tiny_model
from tests.flow.letters import letters_config, write_letters_model

PRESET = Path(rlflow.algorithms.__file__).parent / "presets" / "opd.yaml"
SHORT = (
    "run.steps=3", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.temperature=0.8",
    "evaluation.at_start=false", "evaluation.every_steps=0", "evaluation.questions=4", "metrics.picture=false",
    "checkpoint.export=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another family and size, and opinions (its weights are larger)."""
    path = tmp_path_factory.mktemp("teacher") / "letters"
    return write_letters_model(
        path, "llama", seed=3, hidden_size=48, num_hidden_layers=3, scale=0.3
    )


def distilled(model: Path, runs: Path, algorithm: dict[str, Any], *overrides: str) -> RunConfig:
    values = [f"algorithm.{key}={json.dumps(value)}" for key, value in algorithm.items()]
    return letters_config(model, runs, *SHORT, *values, *overrides)


def records(summary: dict[str, Any]) -> list[dict[str, float]]:
    return [
        row
        for row in read_metrics(RunDirectory.open(summary["written"]["run"]).metrics)
        if "train/loss" in row
    ]


def test_the_preset_trains_three_steps_and_its_run_keeps_its_teacher(
    model: Path, teacher: Path, tmp_path: Path
) -> None:
    preset = yaml.safe_load(PRESET.read_text())["algorithm"]
    preset["teacher"]["path"] = str(teacher)
    rows = records(train(distilled(model, tmp_path, preset)))
    assert len(rows) == 3 and all(row["train/gradient_norm"] > 0 for row in rows)
    assert (
        rows[2]["train/teacher_gap"] < rows[0]["train/teacher_gap"]
    )  # nats; an estimate of KL(policy || teacher)
    preset["teacher"]["path"] = str(model)
    with pytest.raises(
        CheckpointError, match="holds other weights than the teacher of the checkpoint"
    ):
        train(distilled(model, tmp_path, preset, "run.steps=4", "run.resume=true"))


@pytest.mark.slow
def test_the_forward_kl_alone_brings_the_policy_to_the_teacher(
    model: Path, teacher: Path, tmp_path: Path
) -> None:
    algorithm = {
        "losses": ["teacher_kl"],
        "teacher": {"name": "model", "path": str(teacher), "top_k": 4},
    }
    rows = records(train(distilled(model, tmp_path, algorithm, "run.steps=12")))
    assert rows[-1]["train/teacher_kl"] < 0.4 * rows[0]["train/teacher_kl"]
    assert 0 < rows[0]["train/teacher_mass"] < 1


def test_the_policy_learns_from_itself_under_another_prompt(model: Path, tmp_path: Path) -> None:
    algorithm = {
        "advantage": {"name": "opd", "base": "grpo"},
        "teacher": {"name": "policy", "prompt": "ab|{prompt}"},
    }
    rows = records(train(distilled(model, tmp_path, {**algorithm, "losses": ["ppo_clip"]})))
    assert all(row["train/teacher_gap"] != 0 and row["train/gradient_norm"] > 0 for row in rows)


def test_a_resumed_run_shows_its_teacher_the_answers_of_replayed_groups(
    model: Path, tmp_path: Path
) -> None:
    """Every metric of the updates equals the uninterrupted run's, to the last bit."""
    algorithm = {"advantage": {"name": "opd", "base": "grpo"}, "teacher": {"name": "policy", "prompt": "{answer}|{prompt}"},
                 "losses": ["ppo_clip"], "filters": [{"name": "replay", "groups": 2}]}  # fmt: skip
    options = (
        "run.deterministic=true",
        "checkpoint.every_steps=2",
        "rollout.samples_per_prompt=4",
        "trainer.schedule=constant",
    )

    def steps(runs: str, *lengths: int) -> list[dict[str, float]]:
        for number, length in enumerate(lengths):
            resumed = ("run.resume=true",) if number else ()
            summary = train(
                distilled(
                    model, tmp_path / runs, algorithm, *options, f"run.steps={length}", *resumed
                )
            )
        return [
            {name: value for name, value in row.items() if name.startswith("train/")}
            for row in records(summary)
        ]

    whole = steps("whole", 4)
    assert whole[-1]["train/groups_replayed"] > 0
    assert steps("resumed", 2, 4) == whole


@pytest.mark.parametrize(
    "algorithm, message",
    [
        ({"advantage": "opd"}, r"algorithm\.teacher: a part needs a teacher, found none"),
        (
            {"teacher": {"name": "policy", "prompt": "a{prompt}"}},
            "no part of the algorithm learns from it",
        ),
        (
            {"losses": ["teacher_kl"], "teacher": {"name": "policy", "prompt": "a{prompt}"}},
            r"teacher\.top_k: a loss needs",
        ),
        (
            {"advantage": "opd", "teacher": {"name": "policy", "prompt": "a{prompt}", "top_k": 2}},
            r"teacher\.top_k: no loss uses",
        ),
        ({"advantage": "opd", "teacher": {"name": "model"}}, "missing keyword path"),
        (
            {"advantage": {"name": "opd", "base": "grop"}, "teacher": "policy"},
            r"advantage\.base: unknown name 'grop'",
        ),
    ],
)
def test_combinations_that_make_no_sense_are_refused(
    model: Path, tmp_path: Path, algorithm: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(distilled(model, tmp_path, algorithm))


def test_a_teacher_with_another_vocabulary_is_refused(model: Path, tmp_path: Path) -> None:
    other = tiny_model(
        tmp_path / "other", hidden_size=16, intermediate_size=16, num_hidden_layers=1
    )
    with pytest.raises(
        ConfigError, match=r"algorithm\.teacher: .*another vocabulary than the policy"
    ):
        train(
            distilled(
                model,
                tmp_path,
                {"advantage": "opd", "teacher": {"name": "model", "path": str(other)}},
            )
        )
