"""Asynchronous runs end to end: they learn, keep their bound, and survive kill -9 with nothing lost or trained twice."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlflow.config.schema import load_config
from rlflow.errors import ConfigError
from rlflow.loop import train, training_step
from rlflow.report.records import read_trajectories
from rlflow.report.sinks import read_metrics
from rlflow.rollout.codec import from_bytes
from rlflow.run.checkpoints import read_state
from rlflow.run.directory import RunDirectory
from tests.flow.letters import LEARNING, letters_config, write_config, write_letters_model
from tests.flow.test_resume import finish, reached, start, wait_for

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="pip install 'PATH_OR_GIT_URL[ray]'"
)
AHEAD = ("rollout.asynchronous.max_staleness=3", "rollout.asynchronous.run_ahead=2", "metrics.picture=false",
         "checkpoint.export=false", "metrics.trajectories_per_step=1000000", "rollout.prompts_per_step=12",
         "rollout.samples_per_prompt=2")  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letters_model(tmp_path_factory.mktemp("model") / "letters")


def assert_trained_exactly_once(
    run: RunDirectory, steps: int, groups: int = 12, samples: int = 2, tasks: int = 36
) -> None:
    """By the trajectories that every step of the surviving timeline left behind, and by the state of the last checkpoint."""
    written = [
        record
        for step in range(1, steps + 1)
        for record in read_trajectories(run.trajectories(step))
    ]
    assert len(written) == len({record["id"] for record in written}) == steps * groups * samples
    records = [record for record in read_metrics(run.metrics) if "rollout/staleness_max" in record]
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    assert all(0 <= record["rollout/staleness_max"] <= 3 for record in records)
    state = read_state(run.saved.path(steps))["groups"]
    trained = {record["group_id"]: record["task_id"] for record in written}
    left = {name: task for _, name, task, *_ in state["groups"]}
    assert not trained.keys() & left.keys() and state["issued"] == len(trained) + len(left)
    counts = Counter([*trained.values(), *left.values()])
    # Each pass over the tasks is whole: none was skipped, none came twice.
    assert max(counts.values()) - min(counts.values()) <= 1 and (
        len(counts) == tasks or max(counts.values()) == 1
    )
    # Nothing stays behind for long: what was not trained was issued last.
    assert all(number >= state["issued"] - 3 * groups for number, *_ in state["groups"])


@pytest.mark.slow
def test_an_asynchronous_run_learns_and_says_how_old_its_tokens_were(
    model: Path, tmp_path: Path
) -> None:
    summary = train(letters_config(model, tmp_path, *AHEAD, *LEARNING, "run.steps=40"))
    run = RunDirectory.open(tmp_path / "letters")
    assert summary["last_evaluation"]["eval/exact_match"] > 0.9
    records = [record for record in read_metrics(run.metrics) if record["step"] > 0]
    assert max(record["rollout/staleness_max"] for record in records) <= 3
    assert 0 < max(record["rollout/staleness"] for record in records) <= 3
    assert all(0 <= record["rollout/on_policy"] <= 1 for record in records)
    assert_trained_exactly_once(run, 40, samples=8)


@pytest.mark.parametrize(
    "step, layout",
    [
        (3, "trainer.tokens_per_microbatch=200"),
        pytest.param(4, "cluster.ranks=2", marks=[pytest.mark.slow, pytest.mark.dist, needs_ray]),
    ],
)
def test_a_run_that_ends_between_checkpoints_goes_on_in_another_layout_and_trains_nothing_twice(
    step: int,
    layout: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "rlflow")
    options = (*AHEAD, "run.steps=5", "evaluation.at_start=false", "evaluation.every_steps=0", "checkpoint.every_steps=2",
               "evaluation.final_questions=4")  # fmt: skip

    def training_step_or_death(number: int, *rest: Any) -> dict[str, float]:
        if number == step:
            raise KeyboardInterrupt
        return training_step(number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr("rlflow.loop.training_step", training_step_or_death)
        with pytest.raises(KeyboardInterrupt):
            train(letters_config(model, tmp_path, *options))
    run = RunDirectory.open(tmp_path / "letters")
    last, _ = run.saved.latest()
    kept = {one.id: one for one in from_bytes(run.saved.read_state(last)["groups"]["ended"])}
    assert last == step // 2 * 2 and kept
    train(letters_config(model, tmp_path, *options, "run.resume=true", layout))
    assert_trained_exactly_once(run, 5)
    assert f"{len(kept)} finished attempts are kept" in caplog.text
    found = {
        record["id"]: record
        for step in range(1, 6)
        for record in read_trajectories(run.trajectories(step))
    }
    for name, one in kept.items():  # what had been finished was not sampled twice
        assert [turn["duration_s"] for turn in found[name]["turns"]] == [
            round(turn.duration_s, 4) for turn in one.turns
        ]


def test_scores_that_come_early_train_the_same_weights(model: Path, tmp_path: Path) -> None:
    """In step and deterministic every metric of the updates is equal to the last bit; running ahead trains as well."""
    few = ("run.steps=2", "evaluation.at_start=false", "evaluation.final_questions=4", "evaluation.every_steps=0",
           "rollout.prompts_per_step=3", "rollout.samples_per_prompt=4", "checkpoint.export=false", "metrics.picture=false",
           "trainer.tokens_per_microbatch=1", "algorithm.losses=[{name: ppo_clip}, {name: kl, coefficient: 0.1}]")  # fmt: skip
    found = {}
    for early in ("false", "true"):
        options = (*few, "run.deterministic=true", f"rollout.asynchronous.score_early={early}")
        train(letters_config(model, tmp_path / early, *options))
        records = read_metrics(RunDirectory.open(tmp_path / early / "letters").metrics)
        found[early] = [
            {key: one[key] for key in one if key.startswith("train/")}
            for one in records
            if "train/loss" in one
        ]
    assert (
        found["true"] == found["false"]
        and len(found["true"]) == 2
        and found["true"][1]["train/kl"] != 0
    )
    train(letters_config(model, tmp_path, *AHEAD, *few, "rollout.asynchronous.score_early=true"))
    assert_trained_exactly_once(RunDirectory.open(tmp_path / "letters"), 2, groups=3, samples=4)


def test_a_schedule_is_tried_by_an_engine_and_a_trainer_that_sleep(
    model: Path, tmp_path: Path
) -> None:
    """No weight is touched: so the whole run, checkpoints included, takes a second or two."""
    fakes = (
        "rollout.engine={name: 'benchmarks.sleeping:FakeEngine', token_s: 0.001, sigma: 1.0}",
        "trainer.backend=benchmarks.sleeping:FakeTrainer",
        "trainer.optimizer={name: 'benchmarks.sleeping:Sleep', update_s: 0.05}",
        "trainer.schedule=constant",
        "run.steps=4",
        "evaluation.final_questions=4",
    )
    started = time.monotonic()
    summary = train(letters_config(model, tmp_path, *AHEAD, *fakes, "checkpoint.export=true"))
    assert time.monotonic() - started < 60
    run = RunDirectory.open(tmp_path / "letters")
    assert_trained_exactly_once(run, 4)
    records = [record for record in read_metrics(run.metrics) if "time/update_s" in record]
    assert len(records) == 4 and all(record["time/update_s"] >= 0.05 for record in records)
    assert all(record["train/loss"] == 0 for record in records)
    assert (
        summary["steps"] == 4 and not run.export.exists()
    )  # there is nothing that anybody learned


@pytest.mark.parametrize("mode, overlap", [("abort", "true"), ("wait", "false")])
def test_every_way_of_updating_weights_trains(
    mode: str, overlap: str, model: Path, tmp_path: Path
) -> None:
    options = (f"rollout.asynchronous.on_update={mode}", f"rollout.asynchronous.overlap={overlap}", "run.steps=4",
               "evaluation.at_start=false", "evaluation.final_questions=4")  # fmt: skip
    train(letters_config(model, tmp_path, *AHEAD, *options))
    assert_trained_exactly_once(RunDirectory.open(tmp_path / "letters"), 4)


def test_a_run_may_change_between_in_step_and_ahead(model: Path, tmp_path: Path) -> None:
    few = (
        "evaluation.at_start=false",
        "evaluation.final_questions=4",
        "evaluation.every_steps=0",
        "checkpoint.every_steps=2",
    )
    zero = "rollout.asynchronous.max_staleness=0", "rollout.asynchronous.run_ahead=0"
    train(letters_config(model, tmp_path, *AHEAD, *few, *zero, "run.steps=2"))
    run = RunDirectory.open(tmp_path / "letters")
    assert not run.saved.read_state(2)["groups"]["groups"]
    train(letters_config(model, tmp_path, *AHEAD, *few, "run.steps=5", "run.resume=true"))
    assert {
        record["rollout/staleness_max"]
        for record in read_metrics(run.metrics)
        if record["step"] > 3
    } != {0}
    train(letters_config(model, tmp_path, *AHEAD, *few, *zero, "run.steps=7", "run.resume=true"))
    records = read_metrics(run.metrics)
    assert {record["rollout/staleness_max"] for record in records if record["step"] >= 6} == {0}
    steps = range(1, 8)
    names = [
        record["group_id"] for step in steps for record in read_trajectories(run.trajectories(step))
    ]
    tasks = Counter(name.partition(":")[2] for name in set(names))
    assert (
        sum(tasks.values()) == 7 * 12 and max(tasks.values()) - min(tasks.values()) <= 1
    )  # epochs go on where they were


def test_losses_that_nothing_corrects_are_refused_for_old_tokens(
    model: Path, tmp_path: Path
) -> None:
    for losses, found in (
        ("[reinforce]", "no importance ratio"),
        ("[{name: ppo_clip, anchor: proximal}]", "proximal"),
    ):
        with pytest.raises(
            ConfigError, match=rf"rollout.asynchronous with loss \w+: .*{found}.*transforms=\[tis\]"
        ):
            train(letters_config(model, tmp_path, *AHEAD, f"algorithm.losses={losses}"))
    assert not (tmp_path / "letters").exists()


@pytest.mark.parametrize(
    "options, message",
    [
        (
            ["run_ahead=3", "max_staleness=1"],
            r"run_ahead: expected at most max_staleness \(1\), found 3",
        ),
        (["run_ahead=1", "max_staleness=0"], "max_staleness: expected at least 1"),
        (["max_stalenes=1"], "max_staleness"),
        (["when_stale=never"], "wait, drop"),
        (["group_s=60"], "group_s: expected null where nothing runs ahead"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: list[str], message: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(
            letters_config(
                model, tmp_path, *(f"rollout.asynchronous.{option}" for option in options)
            )
        )
    with pytest.raises(ConfigError, match=r"run\.deterministic"):
        train(
            letters_config(
                model, tmp_path, "rollout.asynchronous.max_staleness=1", "run.deterministic=true"
            )
        )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("asynchronous", ["false", "true"], ids=["saved-at-once", "saved-behind"])
def test_kills_at_random_moments_lose_nothing_and_train_nothing_twice(
    asynchronous: str, model: Path, tmp_path: Path
) -> None:
    steps = 60
    options = (f"run.steps={steps}", "checkpoint.every_steps=3", f"checkpoint.asynchronous={asynchronous}",
               "evaluation.every_steps=0", "evaluation.final_questions=4", "trainer.lr=1e-4")  # fmt: skip
    config = write_config(
        letters_config(model, tmp_path, *AHEAD, *LEARNING, *options), tmp_path / "config.yaml"
    )
    run, draw, killed = RunDirectory(tmp_path / "letters"), random.Random(7), 0
    for _ in range(8):
        before = run.saved.latest()
        process = start(config, *(["--resume"] if run.path.exists() else []))
        goal = (before[0] if before else 0) + draw.randint(1, 8)
        wait_for(
            lambda goal=goal, process=process: (
                reached(run, min(goal, steps))() or process.poll() is not None
            ),
            process,
            240.0,
        )
        time.sleep(draw.uniform(0, 0.3))
        killed += process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
        finish(process)
        after = run.saved.latest()
        assert (after[0] if after else 0) >= (before[0] if before else 0)
    assert killed >= 6
    train(load_config(config, ["run.resume=true"]))
    assert_trained_exactly_once(run, steps, samples=8)
