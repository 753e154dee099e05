"""One training run: the order of its tasks, when it evaluates and saves, what it makes of odd steps."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow import Step, train
from rlflow.algorithms.algorithm import Algorithm
from rlflow.algorithms.curators.epochs import Epochs
from rlflow.config.schema import load_config
from rlflow.devices.gpu_buckets import GpuSharing
from rlflow.errors import (
    CheckpointError,
    ConfigError,
    MissingPackageError,
    RolloutError,
    StorageError,
)
from rlflow.loop import training_step
from rlflow.report.sinks import read_metrics
from rlflow.run.checkpoints import RunState, read_state
from rlflow.run.export import EXPORT_TOLERANCE
from rlflow.run.open import open_run
from rlflow.run.resume import check_continuation
from rlflow.storage.files import read_json
from rlflow.types import Batch, Episode, Task
from tests import gpu_memory
from tests.flow.letters import letters_config, write_letters_model
from tests.reference import ORACLE

EVERY_ROW_LEARNS = "algorithm.losses=[{name: ppo_clip}, {name: entropy, coefficient: 0.001}]"  # also without an advantage
TINY = ("rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "evaluation.questions=4", "metrics.picture=false",
        f"trainer.backend={ORACLE}", "evaluation.final_questions=4", "checkpoint.export=false")  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letters_model(tmp_path_factory.mktemp("letters"))


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Any]:
    yield lambda: read_metrics(tmp_path / "letters" / "metrics.jsonl")


def test_a_run_evaluates_at_the_start_on_schedule_and_at_the_end_but_never_twice(
    model: Path, tmp_path: Path, records: Any
) -> None:
    summary = train(
        letters_config(model, tmp_path, *TINY, "run.steps=3", "evaluation.every_steps=3")
    )
    lines = [
        json.loads(line)
        for line in (tmp_path / "letters" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines if "eval/reward" in line] == [0, 3]
    assert summary["status"] == "finished"
    assert (
        "picture" not in summary["written"] and not (tmp_path / "letters" / "progress.png").exists()
    )


def test_a_last_evaluation_over_more_questions_replaces_the_scheduled_one(
    model: Path, tmp_path: Path, records: Any
) -> None:
    values = (
        "run.steps=1",
        "evaluation.every_steps=1",
        "evaluation.at_start=false",
        "evaluation.final_questions=9",
    )
    train(letters_config(model, tmp_path, *TINY, *values))
    assert records()[-1]["eval/questions"] == 9
    state = read_json(tmp_path / "letters" / "checkpoints" / "step_000001" / "state.json")
    assert state["evaluation"]["step"] == 1 and state["evaluation"]["last"]["eval/questions"] == 9


def test_the_checkpoint_is_written_before_the_last_evaluation(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take long, and a kill in it must not cost the steps since the last checkpoint."""
    config = letters_config(model, tmp_path, *TINY, "run.steps=2", "evaluation.every_steps=0", "checkpoint.every_steps=0",
                            "evaluation.at_start=false")  # fmt: skip

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlflow.run.run.evaluate", killed)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    assert (
        read_json(tmp_path / "letters" / "checkpoints" / "step_000002" / "state.json")["step"] == 2
    )


@pytest.mark.parametrize("killed_in", ["evaluate", "export_policy", "write_trajectories"])
def test_a_kill_after_the_last_step_costs_no_step_and_leaves_each_evaluation_once(
    killed_in: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the evaluation of a step with a checkpoint, between an evaluation and its note in the checkpoint, in the export."""
    options = (*TINY, "run.steps=2", "evaluation.every_steps=2", "checkpoint.every_steps=2", "evaluation.at_start=false",
               "evaluation.final_questions=9", "checkpoint.export=true", "metrics.trajectories_per_step=0")  # fmt: skip

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(f"rlflow.run.run.{killed_in}", killed)
        train(letters_config(model, tmp_path, *options))
    directory = tmp_path / "letters"
    assert read_json(directory / "checkpoints" / "step_000002" / "state.json")["step"] == 2
    assert (
        train(letters_config(model, tmp_path, *options, "run.resume=true"))["status"] == "finished"
    )
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["eval/questions"] for line in lines if "eval/reward" in line] == [
        9
    ]  # not the first 4 of them before
    assert [line["step"] for line in lines if "train/reward" in line] == [1, 2]


def test_metrics_reach_the_disk_before_the_checkpoint_that_follows_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync, directory = os.fsync, tmp_path / "letters"
    with open_run(letters_config(model, tmp_path, *TINY)) as run:
        monkeypatch.setattr(
            os,
            "fsync",
            lambda file: (synced.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)),
        )
        run.save()
    names = [Path(path).relative_to(directory).as_posix() for path in synced]
    assert names[0] == "metrics.jsonl" and any(
        name.endswith("state.json") or "step_000000" in name for name in names[1:]
    )


@pytest.mark.parametrize("fate", ["deleted", "moved", "taken"])
def test_a_directory_that_is_not_the_runs_any_more_ends_it_and_is_left_alone(
    fate: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleted or moved away in the second step, or written by another machine by then."""
    place, elsewhere = tmp_path / "letters", tmp_path / "elsewhere"
    step, theirs = training_step, '{"process": 1, "host": "b", "epoch": 9, "token": "x"}'

    def disturbed(number: int, *arguments: Any) -> dict[str, float]:
        if number == 1 and fate == "deleted":
            shutil.rmtree(place)
        elif number == 1 and fate == "moved":
            place.rename(elsewhere)
        elif number == 1:
            (place / "run.lock").write_text(theirs)
        return step(number, *arguments)

    monkeypatch.setattr("rlflow.loop.training_step", disturbed)
    words = (
        "is written by process 1 of host b now"
        if fate == "taken"
        else "deleted, moved or unmounted"
    )
    with pytest.raises(StorageError, match=words):
        train(
            letters_config(
                model,
                tmp_path,
                *TINY,
                "run.steps=3",
                "evaluation.at_start=false",
                "checkpoint.every_steps=1",
            )
        )
    if fate == "taken":
        assert (place / "run.lock").read_text() == theirs and len(
            read_metrics(place / "metrics.jsonl")
        ) == 1
    else:
        assert not place.exists()
    if fate == "moved":
        elsewhere.rename(place)
        monkeypatch.undo()
        assert (
            train(letters_config(model, tmp_path, *TINY, "run.steps=3", "run.resume=true"))[
                "status"
            ]
            == "finished"
        )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "run.seed=7",
            r"run\.seed: expected 0, that of the checkpoint of step 1, found 7: a resumed run keeps it",
        ),
        (
            "environment={name: search}",
            r"environment\.name: expected .*letters\.py:Letters.*found search:",
        ),
    ],
)
def test_a_run_does_not_resume_as_another_one(
    override: str, words: str, model: Path, tmp_path: Path
) -> None:
    options = (*TINY, "evaluation.every_steps=0", "evaluation.at_start=false")
    train(letters_config(model, tmp_path, *options, "run.steps=1"))
    before = (tmp_path / "letters" / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=words):
        train(letters_config(model, tmp_path, *options, "run.steps=2", "run.resume=true", override))
    assert (tmp_path / "letters" / "config.yaml").read_text() == before


def test_what_a_resumed_run_changes_is_said(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = (*TINY, "evaluation.every_steps=0", "evaluation.at_start=false")
    train(letters_config(model, tmp_path, *options, "run.steps=1"))
    changed = ("rollout.prompts_per_step=6", "environment.tasks=30")
    train(letters_config(model, tmp_path, *options, "run.steps=2", "run.resume=true", *changed))
    told = "resume: other values than at step 1: environment.tasks nothing -> 30, rollout.prompts_per_step 4 -> 6"
    assert [record.message for record in caplog.records if "other values" in record.message] == [
        told
    ]


def test_a_resumed_run_goes_on_where_the_data_were_whatever_the_prompts_per_step(
    model: Path, tmp_path: Path
) -> None:
    train(letters_config(model, tmp_path, *TINY, "run.steps=3"))
    state = read_state(tmp_path / "letters" / "checkpoints" / "step_000003")
    assert list(state) == [
        "step",
        "seconds",
        "source",
        "groups",
        "rollout",
        "evaluation",
        "algorithm",
        "config",
    ]
    assert state["source"] == {"taken": 12, "tasks": 36}
    with open_run(
        letters_config(model, tmp_path, *TINY, "run.resume=true", "rollout.prompts_per_step=6")
    ) as run:
        assert (run.step, run.source.epoch) == (3, 1 / 3)
        whole = Epochs(run.rollout.environment.tasks("train"), run.config.run.seed).take(18)
        assert [task.id for task in run.source.take(6)] == [task.id for task in whole[12:]]


def test_a_checkpoint_of_another_format_is_one_clear_error(model: Path, tmp_path: Path) -> None:
    train(letters_config(model, tmp_path, *TINY, "run.steps=1"))
    checkpoint = tmp_path / "letters" / "checkpoints" / "step_000001"
    older = {"step": 1, "seconds": 2.0, "rollout": {}, "evaluated_step": 1}
    RunState(older).write(checkpoint)
    with pytest.raises(
        CheckpointError,
        match=r"state\.json: .*found no source, groups, evaluation, algorithm: another version",
    ):
        train(letters_config(model, tmp_path, *TINY, "run.steps=2", "run.resume=true"))
    assert read_state(checkpoint) == older


HAND_MADE: dict[str, Any] = {
    "step": True,
    "seconds": -1.0,
    "source": [],
    "groups": {"issued": 4, "groups": [[1, 2, 3]], "ended": None},
    "rollout": {"collections": 1, "version": 10**400, "named": {}},
    "evaluation": {
        "step": 0,
        "first_step": 0,
        "made": 1,
        "asked": 4,
        "first": {},
        "last": {"a": "b"},
    },
    "algorithm": 7,
    "config": [],
}


def test_a_hand_made_state_is_one_clear_error_that_names_its_part(
    model: Path, tmp_path: Path
) -> None:
    train(letters_config(model, tmp_path, *TINY, "run.steps=1"))
    checkpoint = tmp_path / "letters" / "checkpoints" / "step_000001"
    good = read_state(checkpoint)
    with open_run(letters_config(model, tmp_path, *TINY, "run.resume=true")) as run:
        for part, state in HAND_MADE.items():
            bad = {**good, part: state}
            RunState(bad).write(checkpoint)
            with pytest.raises(CheckpointError, match=rf"state\.json: {part}\b"):
                check_continuation(run.config)
                run.load_state_dict(bad, checkpoint / "state.json")
        run.load_state_dict(good)


def test_another_curator_cannot_go_on_where_this_one_stood(model: Path, tmp_path: Path) -> None:
    train(letters_config(model, tmp_path, *TINY, "run.steps=1"))
    adaptive = ("run.steps=2", "run.resume=true", "data.curator=adaptive")
    with pytest.raises(ConfigError, match=r"data\.curator\.name: expected epochs"):
        train(letters_config(model, tmp_path, *TINY, *adaptive))


def test_a_run_resumes_with_a_reference_that_it_began_without(
    model: Path, tmp_path: Path, records: Any
) -> None:
    train(
        letters_config(model, tmp_path, *TINY, "run.steps=1", "trainer.lr=0.01", EVERY_ROW_LEARNS)
    )
    losses = "algorithm.losses=[{name: ppo_clip}, {name: kl, coefficient: 0.01}]"
    train(letters_config(model, tmp_path, *TINY, "run.steps=2", "run.resume=true", losses))
    assert records()[-1]["train/kl"] > 0  # against the starting policy, one update away


def test_the_reference_is_refreshed_after_every_so_many_steps(
    model: Path, tmp_path: Path, records: Any
) -> None:
    """A reference that is the policy of before the step has a KL of 0 to it; the starting policy has not, from step 2 on."""
    frozen = "algorithm.losses=[{name: ppo_clip}, {name: kl, coefficient: 0.01, estimator: k2}, {name: entropy, coefficient: .1}]"
    values = (
        "run.steps=4",
        "trainer.lr=0.01",
        "evaluation.at_start=false",
        "evaluation.every_steps=0",
    )
    found = []
    for losses in (frozen, frozen.replace("k2", "k2, refresh_steps: 2")):
        train(letters_config(model, tmp_path, *TINY, *values, losses, "run.overwrite=true"))
        found.append([record["train/kl"] > 1e-8 for record in records() if "train/kl" in record])
    assert found == [[False, True, True, True], [False, True, False, True]]


def test_a_run_puts_reward_terms_turn_credit_and_row_weights_together(
    model: Path, tmp_path: Path, records: Any
) -> None:
    values = (
        "run.steps=2", "evaluation.at_start=false", "evaluation.every_steps=0", "algorithm.minibatches_per_step=2",
        "algorithm.transforms=[{name: kl_reward, coefficient: 0.1}, {name: overlong, buffer: 4}, normalize_advantages, "
        "duration_weight, size_weight, kept_mean]",
        "algorithm.advantage=turn_returns", "algorithm.aggregate=trajectory_mean",
        "algorithm.losses=[ppo_clip, {name: kl, coefficient: 0.01}, {name: entropy_target, target: 9, step: .5}]",
    )  # fmt: skip
    train(letters_config(model, tmp_path, *TINY, *values))
    first, second = [record for record in records() if "train/loss" in record]
    penalty = (
        first["rollout/response_tokens"] / 4
    )  # of at most 4 tokens; the KL to the starting policy is 0 yet
    assert penalty > 0 and first["train/shaped_reward"] == pytest.approx(
        first["train/reward"] - penalty, abs=1e-5
    )
    assert [first["train/entropy_coefficient"], second["train/entropy_coefficient"]] == [
        0.25,
        1.0,
    ]  # 0, .5; then at its limit
    assert all(math.isfinite(record["train/loss"]) for record in (first, second))


def test_two_parts_that_refresh_the_reference_at_different_steps_are_refused() -> None:
    terms = "algorithm.transforms=[{name: kl_reward, coefficient: .1, refresh_steps: 3}]"
    losses = "algorithm.losses=[ppo_clip, {name: kl, coefficient: .1, refresh_steps: 2}]"
    with pytest.raises(
        ConfigError, match="two parts refresh the reference, after 2 and after 3 steps"
    ):
        Algorithm.from_config(load_config(None, [terms, losses]), response_budget=8)
    made = Algorithm.from_config(load_config(None, [terms]), response_budget=8)
    assert made.refreshes == {"reference": 3} and "reference" in made.needs


def test_a_package_that_the_end_of_a_run_needs_is_missed_at_its_start(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    with pytest.raises(
        MissingPackageError, match=r"metrics.picture: the package 'matplotlib' is not installed"
    ):
        train(letters_config(model, tmp_path, *TINY, "metrics.picture=true"))
    assert not (tmp_path / "letters").exists()


def test_a_step_without_a_usable_episode_is_one_clear_error(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = letters_config(
        model, tmp_path, *TINY, "rollout.faults.max_aborted_share=1.0", "evaluation.at_start=false"
    )
    with open_run(config) as run:

        async def broken(episode: Episode, response: str) -> Step:
            raise TimeoutError("no answer in 10 s")

        monkeypatch.setattr(run.rollout.environment, "step", broken)

        with pytest.raises(
            RolloutError,
            match="step 0: all 8 episodes were aborted; first: TimeoutError: no answer",
        ):
            training_step(0, next(run.groups()), run.trainer, run.algorithm, run.timer)


def test_minibatches_are_split_by_the_runs_seed(model: Path, tmp_path: Path) -> None:
    """Two seeds that see the same episodes would otherwise train them in the same order."""

    rewards = []
    for seed in (0, 1):
        values = ("run.seed=0", f"run.name=seed{seed}", "algorithm.minibatches_per_step=4", "evaluation.at_start=false",
                  EVERY_ROW_LEARNS)  # fmt: skip
        with open_run(letters_config(model, tmp_path, *TINY, *values)) as run:
            run.algorithm.seed = seed
            seen: list[list[float]] = []
            update = run.trainer.update

            def record(batch: Any, loss: Any, seen: Any = seen, update: Any = update) -> Any:
                seen.append(batch.trajectory.tolist())
                return update(batch, loss)

            run.trainer.update = record  # type: ignore[method-assign]
            training_step(0, next(run.groups()), run.trainer, run.algorithm, run.timer)
            rewards.append(seen)
    assert rewards[0] != rewards[1]
    assert all(
        sorted(index for part in seen for index in part) == list(range(8)) for seen in rewards
    )


def test_updates_without_a_gradient_are_said_once_and_counted(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_run(letters_config(model, tmp_path, *TINY)) as run:
        groups = next(run.groups())
        for trajectory in (
            one for group in groups for one in group.trajectories
        ):  # no group has a spread
            trajectory.reward, trajectory.group_stats = 0.0, (2, 0.0, 0.0)
        found = [
            training_step(step, groups, run.trainer, run.algorithm, run.timer) for step in range(3)
        ]
    assert [metrics["train/updates_skipped"] for metrics in found] == [1.0] * 3
    assert (
        caplog.text.count("no gradient in 1 of 1 updates") == 1
        and "train/updates_skipped counts them" in caplog.text
    )


def test_every_minibatch_of_every_epoch_compares_with_the_policy_before_the_step(
    model: Path, tmp_path: Path
) -> None:
    values = ("algorithm.minibatches_per_step=2", "algorithm.epochs_per_step=3",
              "evaluation.at_start=false", "trainer.optimizer.weight_decay=0.5", EVERY_ROW_LEARNS,
              "algorithm.losses.0.anchor=proximal")  # fmt: skip
    with open_run(letters_config(model, tmp_path, *TINY, *values)) as run:
        batches: list[Batch] = []
        update, before = run.trainer.update, dict(run.trainer.weights())

        def record(batch: Batch, loss: Any) -> dict[str, float]:
            batches.append(batch)
            return update(batch, loss)

        run.trainer.update = record  # type: ignore[method-assign]
        metrics = training_step(0, next(run.groups()), run.trainer, run.algorithm, run.timer)
        assert any(not torch.equal(before[name], value) for name, value in run.trainer.weights())
    assert len(batches) == 6
    old: dict[int, torch.Tensor] = {}
    for epoch in range(3):
        rows = [
            pair
            for part in batches[2 * epoch : 2 * epoch + 2]
            for pair in _rows(part, "proximal_logprobs")
        ]
        assert sorted(trajectory for trajectory, _ in rows) == list(range(8))
        assert all(
            torch.equal(old.setdefault(trajectory, value), value) for trajectory, value in rows
        )
    for part in batches:
        assert float(part.weights.sum()) == pytest.approx(1.0)
        gap = (part.proximal_logprobs - part.logprobs)[part.loss_mask].abs()
        assert float(gap.mean()) < 1e-5  # on-policy: the engine's own
    assert (
        metrics["train/logprob_gap"] < 1e-5
    )  # of the first minibatch only: later ones are another policy's


def test_engines_get_the_trainers_own_tensors_where_they_all_take_them_and_copies_else(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its memory, where they open that."""
    with open_run(letters_config(model, tmp_path, *TINY, "evaluation.at_start=false")) as run:
        asked, given, (engine,) = [], [], run.rollout.engines
        weights, load = run.trainer.weights, engine.load_weights
        own = {value.data_ptr() for _, value in weights(None)}

        def making(device: str | None = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
            asked.append(device)
            return weights(device)

        async def loading(pairs: Any, version: int) -> None:
            async def seen() -> Any:
                async for name, tensor in pairs:
                    given.append(tensor.data_ptr())
                    yield name, tensor

            await load(seen(), version)

        run.trainer.weights, engine.load_weights = making, loading  # type: ignore[method-assign]
        for version, takes in enumerate((True, False), start=1):
            given.clear()
            engine.takes_device_tensors = takes
            run.sync_weights(version)
            assert asked == [None, "cpu"][:version] and engine.version == version
            assert (set(given) == own) if takes else not set(given) & own
        found = run.rollout.synced.metrics()
        opened: dict[str, torch.Tensor] = {}

        async def opening(buckets: Any, version: int) -> None:
            async for bucket in buckets:
                opened.update(gpu_memory.tensors_in(bucket, "GPU-0"))

        gpu_memory.stand_in(monkeypatch)
        engine.load_weights, engine.sharing = opening, GpuSharing(1 << 16)  # type: ignore[method-assign]
        run.rollout.verify_weights = False
        run.sync_weights(3)
        sent = dict(weights(None))
        assert opened.keys() == sent.keys() and all(
            torch.equal(opened[name], sent[name]) for name in sent
        )
    size = sum(tensor.nbytes for _, tensor in weights(None))
    assert found["sync/mib"] == size / 2**20 and found["sync/delta_share"] == 0.0
    parts = {f"time/sync_{part}_s" for part in ("gather", "load", "verify")}
    assert found.keys() == {"sync/mib", "sync/delta_share", *parts}
    assert all(value > 0 for name, value in found.items() if name.endswith("_s"))


def _rows(batch: Batch, column: str) -> list[tuple[int, torch.Tensor]]:
    values, lengths = getattr(batch, column), batch.lengths.tolist()
    return [(int(one), values[row, : lengths[row]]) for row, one in enumerate(batch.trajectory)]


def test_a_bfloat16_run_ends_with_a_checked_export(model: Path, tmp_path: Path) -> None:
    values = (
        "model.dtype=bfloat16",
        "trainer.backend=megatron",
        "checkpoint.export=true",
        "run.steps=1",
    )
    summary = train(letters_config(model, tmp_path, *TINY, *values))
    assert EXPORT_TOLERANCE < summary["export_logprob_difference"] < 0.1


@pytest.mark.parametrize(
    ("metrics", "stops"),
    [
        ({}, False),
        ({"eval/reward": 0.7}, True),
        (
            {"eval/reward": 0.7, "eval/exact_match": 0.5},
            False,
        ),  # exact match counts where there is one
        ({"eval/reward": 0.0, "eval/exact_match": 0.6}, True),
    ],
)
def test_a_run_stops_once_its_target_is_reached(
    model: Path, tmp_path: Path, metrics: dict[str, float], stops: bool
) -> None:
    with open_run(letters_config(model, tmp_path, *TINY, "run.target=0.6")) as run:
        run.evaluation.record(0, metrics)
        assert run.should_stop() is stops


def test_the_minutes_of_earlier_sessions_count(model: Path, tmp_path: Path) -> None:
    with open_run(letters_config(model, tmp_path, *TINY, "run.max_minutes=10")) as run:
        run.clock.before_s = 300.0
        assert not run.should_stop()
        run.clock.before_s = 600.0
        assert run.should_stop()


class Twelve(Epochs):
    """Ends after twelve tasks."""

    def take(self, count: int) -> list[Task]:
        return super().take(min(count, 12 - round(self.epoch * 36)))


def test_a_run_ends_where_its_curator_has_no_more_tasks(model: Path, tmp_path: Path) -> None:
    values = (f"data.curator={__name__}:Twelve", "rollout.prompts_per_step=8", "run.steps=9")
    summary = train(letters_config(model, tmp_path, *TINY, *values))
    assert (summary["status"], summary["steps"]) == (
        "finished",
        2,
    )  # the second step has what was left, four prompts


def test_the_log_of_a_run_tells_each_step_evaluation_and_checkpoint(
    model: Path, tmp_path: Path
) -> None:
    train(
        letters_config(
            model,
            tmp_path,
            *TINY,
            "run.steps=2",
            "evaluation.every_steps=1",
            "checkpoint.every_steps=2",
        )
    )
    lines = [
        line.split(": ", 1)[1]
        for line in (tmp_path / "letters" / "log.txt").read_text().splitlines()
        if ": " in line
    ]
    kinds = [" ".join(line.split()[:2]) for line in lines]
    wanted = [
        "run letters:",
        "eval 0/2",
        "step 1/2",
        "eval 1/2",
        "step 2/2",
        "checkpoint of",
        "eval 2/2",
        "finished after",
    ]
    assert [kind for kind in kinds if kind in wanted] == wanted
    assert "time/run_s" in read_metrics(tmp_path / "letters" / "metrics.jsonl")[-1]


def test_one_clock_counts_the_run_through_its_sessions(
    model: Path, tmp_path: Path, records: Any
) -> None:
    options = (*TINY, "evaluation.every_steps=1", "checkpoint.every_steps=1")
    train(letters_config(model, tmp_path, *options, "run.steps=1"))
    summary = train(letters_config(model, tmp_path, *options, "run.steps=2", "run.resume=true"))
    seconds = [record["time/run_s"] for record in records()]
    assert seconds == sorted(seconds) and seconds[-1] <= summary["seconds"] + 0.1
    assert seconds[-1] > sum(record.get("time/step_s", 0) for record in records()), (
        "loading and evaluations count too"
    )


def test_a_run_serves_and_writes_its_page_and_warns_once(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = (
        *TINY,
        "run.steps=4",
        "metrics.page=true",
        "rollout.temperature=1e-6",
        "evaluation.every_steps=0",
    )
    summary = train(letters_config(model, tmp_path, *options))
    report = tmp_path / "letters" / "report.html"
    assert summary["written"]["report"] == str(report)
    text = report.read_text()
    told = [
        record.getMessage()
        for record in caplog.records
        if "No group differed in reward for 3 steps" in record.getMessage()
    ]
    assert len(told) == 1 and told[0].startswith("step 3: ")
    assert "No group differed in reward for 3 steps" in text and "finished after 4 steps" in text
    assert "No group differed" in (tmp_path / "letters" / "log.txt").read_text()
