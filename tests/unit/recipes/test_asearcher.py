"""The asearcher recipes: the published values, data in the releases' formats, and scripts that take them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from rlflow.config.loading import load_config, to_dict
from rlflow.config.schema import RunConfig
from rlflow.models.huggingface import WeightFiles
from rlflow.rollout.weights import WeightPublisher
from rlflow.trainer.optimizers import AdamW
from rlflow_environments.retrieval.corpus import write_rows
from rlflow_environments.search.questions import read_tasks
from tests.unit.rollout.buckets import Held

RECIPE = Path(__file__).resolve().parents[3] / "recipes" / "asearcher"
CONFIG = RECIPE / "config"


def config_of(name: str, *overrides: str) -> RunConfig:
    return load_config(CONFIG / f"{name}.yaml", list(overrides), RunConfig)


def test_the_recipe_has_the_values_of_the_published_one() -> None:
    """Spec: AstraFlow, examples/search/qwen2.5-7b-instruct-m2po-*/yaml/experiment.yaml."""
    config = config_of("m2po_delta")
    rollout, algorithm, trainer, environment = (
        config.rollout,
        config.algorithm,
        config.trainer,
        config.environment,
    )
    assert (rollout.prompts_per_step * rollout.samples_per_prompt, rollout.samples_per_prompt) == (
        256,
        8,
    )
    assert algorithm.minibatches_per_step == 4 and config.run.steps == 1000
    assert (rollout.max_response_tokens, rollout.max_total_tokens, rollout.temperature) == (
        1024,
        16384,
        1.0,
    )
    assert (environment["max_turns"], environment["top_k"], environment["tools"]) == (
        32,
        5,
        ["search", "access"],
    )
    assert (environment["protocol"], environment["reward"]) == ("asearcher", "asearcher_compat")
    assert environment["valid_inst_ratio"] == 0.3 and environment["managed"] is True
    assert environment["val"]["sets"] == ["triviaqa", "popqa", "hotpotqa", "bamboogle"]
    assert trainer.adamw == AdamW(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
    assert (trainer.lr, trainer.schedule["name"], trainer.max_gradient_norm) == (
        5e-6,
        "constant",
        1.0,
    )
    m2po = next(part for part in algorithm.transforms if part["name"] == "m2po")
    assert (m2po["variant"], m2po["threshold"]) == ("range", 0.004)
    assert [loss["name"] for loss in algorithm.losses] == ["ppo_clip"]  # no KL
    assert (config.asynchrony.max_staleness, config.asynchrony.when_stale) == (8, "drop")
    evaluation = config.evaluation
    assert (evaluation.every_steps, evaluation.temperature, evaluation.samples_per_prompt) == (
        25,
        0.6,
        4,
    )


@pytest.mark.parametrize("kind", ["m2po", "demo"])
def test_full_and_delta_differ_in_one_line(kind: str) -> None:
    full, delta = (
        (CONFIG / f"{kind}_{name}.yaml").read_text().splitlines() for name in ("full", "delta")
    )
    assert len(full) == len(delta) and sum(a != b for a, b in zip(full, delta, strict=True)) == 1
    sections = [to_dict(config_of(f"{kind}_{name}")) for name in ("full", "delta")]
    differing = [(section, key) for section in sections[0] for key in sections[0][section]
                 if sections[0][section][key] != sections[1][section][key]]  # fmt: skip
    assert differing == [("cluster", "weight_transfer")]


def test_a_step_at_the_demos_rate_leaves_most_of_its_models_bits_so_that_a_delta_is_sent() -> None:
    """Every weight moved by the mean rate of the first steps, up or down, as Adam does; in float32 all of them change."""
    demo = config_of("demo_delta")
    assert demo.cluster.weight_transfer["delta"] is True
    files = WeightFiles(RECIPE / "starting_policy")
    signs = torch.Generator().manual_seed(0)

    def delta(dtype: torch.dtype) -> bool:
        publisher = WeightPublisher(Held, delta=True)
        before = {name: files[name].float() for name in files}
        publisher.publish([(name, one.to(dtype)) for name, one in before.items()], 0)
        rate = demo.trainer.lr / 3
        moved = [
            (name, (one + rate * torch.randn(one.shape, generator=signs).sign()).to(dtype))
            for name, one in before.items()
        ]
        return bool(publisher.publish(moved, 1).changes)

    assert delta(getattr(torch, demo.model.dtype)) and not delta(torch.float32)


def test_the_demo_keeps_the_recipes_algorithm_and_asynchrony() -> None:
    full, demo = config_of("m2po_delta"), config_of("demo_delta")
    assert (
        demo.algorithm.transforms == full.algorithm.transforms
        and demo.algorithm.losses == full.algorithm.losses
    )
    assert demo.asynchrony.max_staleness > 0
    for key in ("protocol", "tools", "reward", "managed"):
        assert demo.environment[key] == full.environment[key]


def test_the_releases_are_read_as_they_are(tmp_path: Path) -> None:
    """Rows as in inclusionAI/ASearcher-train-data and ASearcher-test-data."""
    base = [
        {
            "question": "Who wrote it?",
            "answer": ["Ann Lee"],
            "source": "compose_chain_qa",
            "aug_answer": [],
            "qid": "a",
        },
        {
            "question": "And it?",
            "answer": ["nobody"],
            "source": "compose_chain_qa_invalid",
            "aug_answer": [],
            "qid": "b",
        },
    ]
    train = read_tasks(write_rows(tmp_path / "ASearcher-Base-35k.jsonl", base), "train")
    assert [(task.id, task.answer) for task in train] == [("a", ["Ann Lee"]), ("b", ["nobody"])]
    for folder in (
        "TriviaQA_rand1000",
        "PopQA_rand1000",
        "HotpotQA_rand1000",
        "Bamboogle",
        "NQ_rand1000",
        "Musique_rand1000",
    ):
        (tmp_path / "sets" / folder).mkdir(parents=True)
        write_rows(
            tmp_path / "sets" / folder / "test.jsonl",
            [{"question": "Who?", "answer": [folder], "id": "0"}],
        )
    sets = {**config_of("m2po_full").environment["val"], "path": str(tmp_path / "sets")}
    found = [(task.metadata["set"], task.answer[0]) for task in read_tasks(sets, "val")]
    assert found == [("triviaqa", "TriviaQA_rand1000"), ("popqa", "PopQA_rand1000"), ("hotpotqa", "HotpotQA_rand1000"),
                     ("bamboogle", "Bamboogle")]  # fmt: skip


@pytest.fixture
def asked(tmp_path: Path):
    """Runs a script of the recipe with a Python that only says what it was asked; returns what."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        f'#!/bin/bash\necho "$@" >> {tmp_path}/log\ncase "$*" in *"-c"*) echo {RECIPE.parents[1]}/rlflow; echo ;; esac\n'
    )
    python.chmod(0o755)

    def run(script: str, *arguments: str) -> str:
        variables = {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
        done = subprocess.run(
            ["bash", RECIPE / script, *arguments],
            env=variables,
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        return (tmp_path / "log").read_text().splitlines()[-1]

    return run


def test_without_data_the_demo_is_trained_and_with_data_the_recipe(asked, tmp_path: Path) -> None:
    assert f"--config {CONFIG}/demo_delta.yaml run.name=asearcher-demo-delta" in asked(
        "run_train.sh"
    )
    line = asked("run_train.sh", "--recipe", "m2po_full", "--short", "run.name=mine")
    assert line.endswith(
        f"--config {CONFIG}/demo_full.yaml run.name=asearcher-demo-full run.name=mine"
    )  # the last one wins
    (tmp_path / "t.jsonl").touch()
    (tmp_path / "sets").mkdir()
    line = asked(
        "run_train.sh",
        "--recipe=m2po_full",
        "--train-data",
        "t.jsonl",
        "--val-data",
        "sets",
        "--pages",
        "/p.jsonl",
    )
    assert (
        f"--config {CONFIG}/m2po_full.yaml --train-data {tmp_path}/t.jsonl --pages /p.jsonl run.name=asearcher-full"
        in line
    )
    assert line.endswith(f"environment.val.path={tmp_path}/sets")


def test_evaluation_takes_four_attempts_at_temperature_six_tenths(asked, tmp_path: Path) -> None:
    line = asked("run_eval.sh", "--model", "Some/Model", "--samples", "2")
    assert line.endswith(
        f"--samples=4 --temperature=0.6 --samples=2 --config {CONFIG}/demo.yaml --model Some/Model"
    )


def test_a_configuration_beside_the_script_is_chosen_by_its_name(asked) -> None:
    searchr1 = RECIPE.parent / "searchr1"
    for script in ("run_train.sh", "run_eval.sh"):
        line = asked(searchr1 / script, "qwen2.5_3b", "--model", "Some/Model", "run.name=mine")
        assert f"--config {searchr1}/config/qwen2.5_3b.yaml" in line and line.endswith(
            "run.name=mine"
        )
    assert f"--config {CONFIG}/m2po_full.yaml" in asked("run_train.sh", "m2po_full.yaml")
    done = subprocess.run(
        ["bash", searchr1 / "run_train.sh", "qwen2.5_3"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert (
        done.returncode == 2
        and "unexpected argument 'qwen2.5_3'" in done.stderr
        and " qwen2.5_3b " in done.stderr
    )


def test_another_recipe_is_refused_by_name() -> None:
    done = subprocess.run(
        ["bash", RECIPE / "run_train.sh", "--recipe", "m2p"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert (
        done.returncode == 2 and "expected one of: m2po_delta m2po_full, found 'm2p'" in done.stderr
    )
