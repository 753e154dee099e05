"""A template that forgets thoughts: the policy trains on what it saw, segment by segment, and learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlflow.batching import make_batch
from rlflow.loop import train
from rlflow.report.records import read_trajectories
from rlflow.report.sinks import read_metrics
from rlflow.report.tokens import read_tokens
from rlflow.run.assemble import make_rollout
from rlflow.run.directory import RunDirectory
from rlflow.trainer.base import Trainer
from tests.flow.thinking import TURNS, thinking_config, write_thinking_model
from tests.reference import ORACLE

TOLERANCE = 1e-5
KEPT = "metrics.trajectories_per_step=96"  # all of them


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thinking_model(tmp_path_factory.mktemp("model") / "thinking")


def timeless(run: RunDirectory) -> list[dict[str, float]]:
    left_out = ("time", "speed", "memory")
    return [
        {key: value for key, value in one.items() if not key.startswith(left_out)}
        for one in read_metrics(run.metrics)
    ]


def test_a_step_with_forks_trains_every_sampled_token_once_on_policy(
    model: Path, tmp_path: Path
) -> None:
    config = thinking_config(
        model,
        tmp_path,
        "run.steps=1",
        "evaluation.at_start=false",
        "evaluation.every_steps=0",
        KEPT,
    )
    train(config)
    run = RunDirectory.open(tmp_path / "letters")
    record = next(one for one in read_metrics(run.metrics) if "train/loss" in one)
    assert abs(record["train/ratio"] - 1) < TOLERANCE and record["train/logprob_gap"] < TOLERANCE
    assert record["train/clip_fraction"] == 0 and record["rollout/forks"] > 0.5
    counted = sum(record[f"rollout/{name}_tokens"] for name in ("response", "observation", "refed"))
    assert record["train/tokens"] == pytest.approx(96 * record["rollout/response_tokens"])
    assert record["train/fed_tokens"] == pytest.approx(
        96 * (counted + 4)
    )  # <user> a <assistant> <think>
    episodes, tokens = read_trajectories(run.trajectories(1)), read_tokens(run.tokens(1))
    longest = max(episodes, key=lambda one: len(one["turns"]))
    kept = tokens[longest["id"]]
    assert [segment for segment, _, _ in kept.turns] == [*range(len(kept.segments))] and len(
        kept.segments
    ) > 1
    for (number, start, _), texts in zip(kept.turns, kept.texts, strict=True):
        asked = longest["prompt"][-1]
        assert "".join(texts[:start]).startswith(f"<user>{asked}<assistant>")
        assert sum(kept.segments[number].sampled[:start]) == 0 and texts[start - 1] == "<think>"
    for episode in episodes:  # an episode's advantage is that of all its segments
        own = torch.cat(
            [torch.as_tensor(segment.advantages) for segment in tokens[episode["id"]].segments]
        )
        assert float(own.max() - own.min()) < TOLERANCE
        assert episode["observation_tokens"] == episode["metrics"]["observation_tokens"]


def test_forks_and_the_exact_history_sample_what_the_trainer_computes(
    model: Path, tmp_path: Path
) -> None:
    for history, segments in (("template", TURNS), ("exact", 1)):
        with make_rollout(
            thinking_config(model, tmp_path, f"rollout.history={history}")
        ) as rollout:
            trainer = Trainer.from_pretrained(model, backend=ORACLE)
            rollout.load_weights(trainer.weights(), 0)
            groups = rollout.collect(rollout.environment.tasks("train")[:24])
            found = [one for group in groups for one in group.usable]
            batch = make_batch(found)
            gap = (trainer.score(batch)["logprobs"] - batch.logprobs)[batch.loss_mask].abs()
            assert gap.max() < TOLERANCE
            whole = [one for one in found if len(one.turns) == TURNS]
            assert whole and {len(one.segments) for one in whole} == {segments}


def test_a_deterministic_run_with_forks_goes_on_bit_for_bit(model: Path, tmp_path: Path) -> None:
    options = ("run.deterministic=true", "checkpoint.every_steps=2", "evaluation.at_start=false", "evaluation.every_steps=0",
               "algorithm.filters=[{name: success_pool, success: 0.3}]", "rollout.prompts_per_step=24",
               "rollout.samples_per_prompt=2", "metrics.trajectories_per_step=48", "evaluation.final_questions=4")  # fmt: skip
    train(thinking_config(model, tmp_path / "whole", "run.steps=3", *options))
    train(thinking_config(model, tmp_path / "cut", "run.steps=2", *options))
    train(thinking_config(model, tmp_path / "cut", "run.steps=3", "run.resume=true", *options))
    whole, cut = (RunDirectory.open(tmp_path / name / "letters") for name in ("whole", "cut"))
    steps = [[one for one in timeless(run) if "train/loss" in one] for run in (whole, cut)]
    ours, theirs = (
        [{k: v for k, v in one.items() if not k.startswith("eval/")} for one in run]
        for run in steps
    )
    assert len(ours) == 3 and ours == theirs
    for step in range(1, 4):
        one, other = (read_tokens(run.tokens(step)) for run in (whole, cut))
        assert one.keys() == other.keys()
        for name in one:
            pairs = zip(one[name].segments, other[name].segments, strict=True)
            assert all(a.tokens.tolist() == b.tokens.tolist() for a, b in pairs)
    again = [one for one in read_trajectories(cut.trajectories(3)) if one["source"] == "replay"]
    assert any(
        one["metrics"]["forks"] for one in again
    )  # remembered from earlier steps, with all of its segments


@pytest.mark.slow
def test_a_thinking_model_learns_a_conversation_of_three_turns(model: Path, tmp_path: Path) -> None:
    train(
        thinking_config(
            model, tmp_path, "run.steps=80", "evaluation.every_steps=40", "checkpoint.every_steps=0"
        )
    )
    records = read_metrics(RunDirectory.open(tmp_path / "letters").metrics)
    first, last = records[0], records[-1]
    assert first["eval/exact_match"] < 0.1 and last["eval/exact_match"] > 0.9
    assert (
        last["rollout/forks"] == pytest.approx(TURNS - 1, abs=0.05)
        and last["rollout/thoughts"] > 2.8
    )
    assert max(abs(one["train/ratio"] - 1) for one in records if "train/ratio" in one) < TOLERANCE
