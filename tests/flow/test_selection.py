"""Whole runs that choose what they learn from: the step asks for more within its bound, and a resumed run chooses the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlflow.loop import train
from rlflow.report.records import read_trajectories
from rlflow.report.sinks import read_metrics
from tests.flow.letters import letters_config
from tests.reference import ORACLE

TINY = ("rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "evaluation.every_steps=0", "evaluation.at_start=false",
        "evaluation.questions=4", "evaluation.final_questions=4", "metrics.picture=false", f"trainer.backend={ORACLE}",
        "checkpoint.export=false", "run.deterministic=true", "metrics.trajectories_per_step=40")  # fmt: skip


def learned_from(run: Path) -> list[list[tuple[str, str, float]]]:
    """(id, source, reward) of what was written, step by step."""
    found = [read_trajectories(path) for path in sorted((run / "trajectories").iterdir())]
    return [[(row["id"], row["source"], row["reward"]) for row in rows] for rows in found]


def test_a_step_asks_for_more_within_its_bound(model: Path, tmp_path: Path) -> None:
    filters = "algorithm.filters=[{name: dynamic_sampling, max_rounds: 3}]"
    train(letters_config(model, tmp_path, *TINY, "run.steps=3", filters))
    for record in read_metrics(tmp_path / "letters" / "metrics.jsonl")[:3]:
        sampled, left_out = record["rollout/episodes"] / 4, record["train/groups_replaced"]
        assert 1 <= record["train/sampling_rounds"] <= 3
        assert sampled - left_out == 4 or (
            record["train/sampling_rounds"] == 3 and sampled - left_out < 4
        )
        assert record["train/advantage_zero"] == 0
        assert record["train/tokens"] < 2 * 4 * (sampled - left_out) * 2 + 1


@pytest.mark.slow
def test_a_resumed_run_selects_the_same(model: Path, tmp_path: Path) -> None:
    """Pool, buffer, curator and counters are in the checkpoint; every number of the log agrees."""
    parts = (
        "algorithm.filters=[{name: success_pool, success: 0.5, mode: add}, {name: dynamic_sampling, max_rounds: 2}, "
        "overlong_filter, {name: replay, groups: 2, capacity: 6}, zero_advantage]",
        "algorithm.transforms=[{name: high_entropy_steps}]", "data.curator=greso", "checkpoint.every_steps=3",
    )  # fmt: skip
    options = (*TINY, *parts)
    train(letters_config(model, tmp_path / "whole", *options, "run.steps=7"))
    train(letters_config(model, tmp_path / "cut", *options, "run.steps=4"))
    train(
        letters_config(
            model, tmp_path / "cut", *options, "run.steps=7", "run.resume=true", "run.resume_step=3"
        )
    )
    ours, theirs = (
        [
            {
                name: value
                for name, value in record.items()
                if not name.startswith(("time", "speed", "memory"))
            }
            for record in read_metrics(tmp_path / place / "letters" / "metrics.jsonl")
            if "train/loss" in record
        ]
        for place in ("cut", "whole")
    )
    assert json.dumps(ours) == json.dumps(theirs) and len(ours) == 7
    ours, theirs = (
        learned_from(tmp_path / "cut" / "letters"),
        learned_from(tmp_path / "whole" / "letters"),
    )
    assert ours == theirs and any(source == "replay" for step in ours for _, source, _ in step)
