"""As a user does it: train over four ranks, convert the checkpoint, evaluate it, and get the trainer's own figures."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlflow.models.huggingface import digest, iterate_weights
from tools.ckpt_convert.command import main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.dist,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="pip install 'PATH_OR_GIT_URL[ray]'"
    ),
]
ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "searchr1"
STEPS, QUESTIONS = 2, 60


def bash(*command: str | Path) -> str:
    """The standard error of a script of the recipe, run with this Python's environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", *map(str, command)],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stderr


def answers(file: Path) -> dict[str, tuple[float, list[str]]]:
    """{question: (exact match, what the policy wrote)} of a file of trajectories."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {
        one["task_id"]: (one["metrics"]["exact_match"], [turn["response"] for turn in one["turns"]])
        for one in lines
    }


def test_training_over_tp2_pp2_converting_and_evaluating_agree_to_the_question(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    bash(
        RECIPE / "run_train.sh",
        "--short",
        f"run.directory={run}",
        f"run.steps={STEPS}",
        "cluster.ranks=4",
        "trainer.tensor_parallel=2",
        "trainer.pipeline_parallel=2",
        "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=4",
        f"evaluation.questions={QUESTIONS}",
        f"evaluation.final_questions={QUESTIONS}",
        f"environment.world.directory={tmp_path / 'world'}",
    )
    checkpoint = run / "checkpoints" / f"step_{STEPS:06d}"
    start = RECIPE / "starting_policy"
    assert (
        main(
            [
                "to-hf",
                str(checkpoint),
                str(tmp_path / "out"),
                "--hf",
                str(start),
                "--tp",
                "2",
                "--pp",
                "2",
            ]
        )
        == 0
    )
    assert digest(iterate_weights(tmp_path / "out")) == digest(iterate_weights(run / "export"))
    assert digest(iterate_weights(run / "export")) != digest(iterate_weights(start)), (
        "nothing was trained"
    )

    own = answers(run / "evaluations" / f"step_{STEPS:06d}.jsonl")
    assert len(own) == QUESTIONS and 0 < sum(score for score, _ in own.values()) < QUESTIONS
    evaluate = [RECIPE / "run_eval.sh", "--questions", str(QUESTIONS), "--model"]
    said = bash(*evaluate, checkpoint, "--out", tmp_path / "of-checkpoint")
    assert f"converting to {checkpoint}.hf" in said
    assert answers(tmp_path / "of-checkpoint" / "trajectories.jsonl") == own
    summary = json.loads((tmp_path / "of-checkpoint" / "summary.json").read_text())
    last = json.loads((run / "summary.json").read_text())["last_evaluation"]
    assert summary["eval/exact_match"] == last["eval/exact_match"]
