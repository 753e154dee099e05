"""The whole loop: a policy learns from reward alone, and everything that a run writes agrees with what happened."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow.algorithms import token_weights
from rlflow.algorithms.algorithm import Algorithm
from rlflow.config.schema import RunConfig
from rlflow.loop import train, training_step
from rlflow.report.records import read_trajectories
from rlflow.report.sinks import read_metrics
from rlflow.report.timer import PhaseTimer
from rlflow.run.assemble import make_rollout
from rlflow.run.directory import RunDirectory
from rlflow.run.evaluate import evaluation_metrics
from rlflow.storage.files import read_json
from rlflow.trainer.base import Loss, Trainer
from rlflow.types import Batch
from tests.flow.letters import LEARNING, Letters, letters_config
from tests.reference import ORACLE

STEPS = 50
TOLERANCE = 1e-5


@dataclasses.dataclass
class Finished:
    """A run that ended: its directory, what `train` returned, its records by step, its processor seconds."""

    run: RunDirectory
    summary: dict[str, Any]
    records: list[dict[str, float]]
    seconds: float

    @classmethod
    def of(cls, config: RunConfig) -> Finished:
        began = time.process_time()
        summary = train(config)
        directory = RunDirectory.open(summary["written"]["run"])
        return cls(directory, summary, read_metrics(directory.metrics), time.process_time() - began)


@pytest.fixture(scope="module")
def solved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    options = (
        f"run.steps={STEPS}",
        "evaluation.every_steps=25",
        "metrics.trajectories_per_step=96",  # all of them
        "metrics.picture=true",
    )
    return Finished.of(letters_config(model, tmp_path_factory.mktemp("runs"), *options, *LEARNING))


def test_a_random_policy_solves_the_task_from_reward_alone_within_a_minute(
    solved: Finished,
) -> None:
    assert solved.records[0]["eval/exact_match"] <= 0.1
    assert solved.records[-1]["eval/exact_match"] >= 0.9
    assert solved.records[-1]["train/reward"] >= 0.95 and solved.records[1]["train/reward"] <= 0.25
    assert solved.seconds < 60


def test_engine_and_trainer_agree_in_every_step(solved: Finished) -> None:
    gaps = [record["train/logprob_gap"] for record in solved.records[1:]]
    assert len(gaps) == STEPS and max(gaps) < TOLERANCE
    # On-policy: at the only update of a step the policy still is the behaviour policy.
    assert all(abs(record["train/ratio"] - 1) < TOLERANCE for record in solved.records[1:])
    assert all(record["train/clip_fraction"] == 0 for record in solved.records[1:])


def test_metrics_have_every_step_once_and_figures_that_fit_together(solved: Finished) -> None:
    lines = [json.loads(line) for line in solved.run.metrics.read_text().splitlines()]
    steps = [line["step"] for line in lines if "train/loss" in line]
    assert steps == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines if "eval/exact_match" in line] == [0, 25, STEPS]
    for record in solved.records[1:]:
        assert record["rollout/episodes"] == 96 and record["rollout/aborted"] == 0
        assert record["train/tokens"] == pytest.approx(96 * record["rollout/response_tokens"])
        prompt = 2
        fed = prompt + record["rollout/response_tokens"] + record["rollout/observation_tokens"]
        assert record["train/fed_tokens"] == pytest.approx(96 * fed)
        assert (
            record["time/rollout_s"] + record["time/update_s"] + record["time/sync_s"]
            < record["time/step_s"]
        )
        assert all(math.isfinite(value) for value in record.values())
    assert solved.records[-1]["data/epoch"] == pytest.approx(STEPS * 12 / 36)


def test_trajectories_are_those_that_the_metrics_speak_of(solved: Finished) -> None:
    for step in (1, STEPS // 2, STEPS):
        episodes = read_trajectories(solved.run.trajectories(step))
        record = solved.records[step]
        assert len(episodes) == 96 and len({episode["group_id"] for episode in episodes}) == 12
        rewards = [episode["reward"] for episode in episodes]
        assert sum(rewards) / 96 == pytest.approx(record["train/reward"])
        assert sum(episode["metrics"]["exact_match"] for episode in episodes) / 96 == pytest.approx(
            record["train/exact_match"]
        )
        for episode in episodes:
            said = [turn["response"] for turn in episode["turns"]]
            right = [one == other for one, other in zip(said, episode["answer"])]
            assert (
                episode["reward"] == sum(right) / 2
                and episode["prompt"] == f"{episode['answer'][0]}?"
            )


def test_every_epoch_visits_every_task_once_in_another_order(solved: Finished) -> None:
    def tasks(steps: Sequence[int]) -> list[str]:
        groups = [
            [episode["task_id"] for episode in read_trajectories(solved.run.trajectories(step))]
            for step in steps
        ]
        return [task for group in groups for task in dict.fromkeys(group)]

    first, second = tasks([1, 2, 3]), tasks([4, 5, 6])
    assert sorted(first) == sorted(second) == sorted(task.id for task in Letters().tasks("train"))
    assert first != second


def test_evaluations_are_those_that_the_metrics_speak_of(solved: Finished) -> None:
    for step in (0, 25, STEPS):
        episodes = read_trajectories(solved.run.evaluations(step))
        assert sorted(episode["task_id"] for episode in episodes) == sorted(
            task.id for task in Letters().tasks("val")
        )
        right = [episode["metrics"].get("exact_match", 0.0) for episode in episodes]
        assert sum(right) / 36 == pytest.approx(solved.records[step]["eval/exact_match"])
        low, high = (solved.records[step][f"eval/exact_match_{end}"] for end in ("low", "high"))
        assert low <= sum(right) / 36 <= high


def test_the_summary_and_the_picture_are_of_this_run(solved: Finished) -> None:
    summary = read_json(solved.run.summary)
    assert summary["status"] == "finished" and summary["steps"] == STEPS
    assert summary["first_evaluation"]["eval/exact_match"] == solved.records[0]["eval/exact_match"]
    assert summary["last_evaluation"]["eval/exact_match"] == solved.records[-1]["eval/exact_match"]
    assert all(Path(path).exists() for path in summary["written"].values())
    assert (
        solved.run.picture.read_bytes().startswith(b"\x89PNG")
        and solved.run.picture.stat().st_size > 10_000
    )
    assert solved.run.saved.steps() == [STEPS - 10, STEPS]  # the newest two are kept


def test_the_export_is_the_policy_that_was_evaluated(solved: Finished) -> None:
    """transformers alone, greedily, answers as the last evaluation says that the policy does."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = AutoModelForCausalLM.from_pretrained(solved.run.export)
    tokenizer = AutoTokenizer.from_pretrained(solved.run.export)
    right = 0
    for task in Letters().tasks("val"):
        text = task.prompt
        for letter in task.answer:
            with torch.no_grad():
                said = (
                    policy(torch.tensor([tokenizer.encode(text, add_special_tokens=False)]))
                    .logits[0, -1]
                    .argmax()
                )
            right += tokenizer.decode([int(said)]) == letter
            text += f"{letter}|{task.answer[1]}?"
    assert right / 72 >= 0.9
    assert 0 <= solved.summary["export_logprob_difference"] < 1e-5


def test_backends_follow_the_same_curve(model: Path, tmp_path: Path) -> None:
    """Equal seeds sample equal episodes as long as the weights agree, so the curves can be compared step by step."""
    runs = {}
    for backend in ("megatron", ORACLE):
        options = [f"trainer.backend={backend}", "run.steps=4", "evaluation.every_steps=2", "run.deterministic=true",
                   "algorithm.losses=[{name: ppo_clip}, {name: kl, coefficient: 0.01}, {name: entropy, coefficient: 0.01}]",
                   "algorithm.losses.0.anchor=proximal", "algorithm.minibatches_per_step=2", "trainer.optimizer.eps=1e-4",
                   "trainer.schedule=cosine", "trainer.optimizer.weight_decay=0.05", "checkpoint.export=false"]  # fmt: skip
        runs[backend] = Finished.of(
            letters_config(model, tmp_path / str(len(runs)), *options)
        ).records
    for step, (one, other) in enumerate(zip(*runs.values(), strict=True)):
        names = {name for name in one if not name.startswith(("time", "speed", "memory"))}
        # The backends agree but for the figure that only one of them can know.
        assert names - {"train/microbatches", "train/tokens"} <= set(other)
        for name in names & set(other) - {"train/logprob_gap", "train/microbatches"}:
            assert one[name] == pytest.approx(
                other[name], rel=1e-4, abs=TOLERANCE if step < 2 else 1e-4
            ), (step, name)


class Recording(Trainer):
    """A trainer that hands everything on to another one and keeps the batches that it was given."""

    def __init__(self, inner: Trainer) -> None:
        self.inner = inner
        self.batches: list[Batch] = []

    def score(
        self, batch: Batch, model: str = "policy", want: Sequence[str] = ("logprobs",)
    ) -> dict[str, Tensor]:
        return self.inner.score(batch, model, want)

    def update(self, batch: Batch, loss: Loss) -> dict[str, float]:
        self.batches.append(batch)
        return self.inner.update(batch, loss)

    def snapshot(self, name: str) -> None:
        self.inner.snapshot(name)

    def weights(self, device: str | None = "cpu") -> Iterator[tuple[str, Tensor]]:
        return self.inner.weights(device)

    def save(self, path: str | Path, step: int) -> None:
        self.inner.save(path, step)

    def load(self, path: str | Path) -> int:
        return self.inner.load(path)


@pytest.fixture
def recorded(model: Path, tmp_path: Path) -> Iterator[tuple[RunConfig, Recording, list[Any], Any]]:
    """One training step through the reference trainer, every row of it: (config, trainer, groups, rollout)."""
    losses = "algorithm.losses=[{name: ppo_clip}, {name: entropy, coefficient: 0.001}]"  # rows without advantage learn too
    config = letters_config(model, tmp_path, "algorithm.minibatches_per_step=2", losses)
    trainer = Recording(Trainer.from_pretrained(model, backend=ORACLE, lr=1e-3))
    with make_rollout(config) as rollout:
        tasks = rollout.environment.tasks("train")[:12]
        groups = rollout.collect(tasks)
        training_step(
            0, groups, trainer, Algorithm.from_config(config, rollout.response_budget), PhaseTimer()
        )
        yield config, trainer, groups, rollout


def test_exactly_the_policys_own_tokens_are_trained(
    recorded: tuple[RunConfig, Recording, list[Any], Any],
) -> None:
    """What the mask marks reads as the responses, what it leaves out as prompt and observations."""
    _, trainer, groups, rollout = recorded
    decode = rollout.tokenizer.decode
    expected = sorted(
        (
            "".join(turn.response for turn in one.turns),
            one.prompt + "".join(turn.observation for turn in one.turns[:-1]),
        )
        for group in groups
        for one in group.trajectories
    )
    found = []
    for batch in trainer.batches:
        for row in range(len(batch)):
            length = int(batch.lengths[row])
            tokens, mask = batch.tokens[row, :length], batch.loss_mask[row, :length]
            found.append((decode(tokens[mask].tolist()), decode(tokens[~mask].tolist())))
        assert bool((batch.weights[~batch.loss_mask] == 0).all()) and float(
            batch.weights.sum()
        ) == pytest.approx(1)
        assert bool((batch.advantages[~batch.loss_mask] == 0).all())
    assert sorted(found) == expected
    assert any("|" in fed for _, fed in found)  # some episodes have an observation


def test_what_the_environment_wrote_has_no_gradient(
    recorded: tuple[RunConfig, Recording, list[Any], Any],
) -> None:
    """The loss of a batch does not change with the behaviour log-probs and advantages of the environment's tokens."""
    config, trainer, _, _ = recorded
    batch = trainer.batches[0]
    noise = torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(0))
    spoiled = batch.replace(
        logprobs=torch.where(batch.loss_mask, batch.logprobs, noise),
        advantages=torch.where(batch.loss_mask, batch.advantages, noise),
    )
    algorithm = Algorithm.from_config(config, response_budget=1)
    results = []
    for one in (batch, spoiled):
        fresh = Trainer.from_pretrained(config.model.path, backend=ORACLE, lr=1e-3)
        weighed = one.replace(weights=token_weights(one))
        results.append((fresh.update(weighed, algorithm.loss), dict(fresh.weights())))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(tensor, results[1][1][name]) for name, tensor in results[0][1].items())


def test_equal_seeds_give_equal_runs_and_other_seeds_others(model: Path, tmp_path: Path) -> None:
    def rewards(name: str, seed: int) -> list[float]:
        options = [
            f"run.name={name}",
            f"run.seed={seed}",
            "run.steps=2",
            "evaluation.every_steps=0",
            "evaluation.at_start=false",
            "evaluation.final_questions=4",
            "checkpoint.export=false",
            "metrics.picture=false",
        ]
        return [
            record.get("train/reward", -1.0)
            for record in Finished.of(letters_config(model, tmp_path, *options)).records
        ]

    assert rewards("one", 1) == rewards("again", 1) != rewards("other", 2)


def test_an_engine_that_sleeps_while_the_trainer_works_changes_nothing(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    few = (
        "run.steps=2",
        f"trainer.backend={ORACLE}",
        "evaluation.every_steps=0",
        "evaluation.at_start=false",
        "evaluation.final_questions=4",
        "checkpoint.export=false",
        "metrics.picture=false",
    )
    found = {}
    for name, sleep in (("awake", "false"), ("asleep", "true")):
        config = letters_config(
            model, tmp_path / name, *few, f"rollout.engine={{name: embedded, sleep: {sleep}}}"
        )
        caplog.clear()
        with caplog.at_level("INFO"):
            train(config)
        records = read_metrics(RunDirectory(tmp_path / name / "letters").metrics)
        found[name] = [
            {key: value for key, value in record.items() if key.startswith("train/")}
            for record in records
        ]
        handed = [record for record in records if "memory/engine_freed_gib" in record]
        assert len(handed) == (2 if name == "asleep" else 0)
        assert (len([line for line in caplog.messages if "  engine " in line]) == 2) is (
            name == "asleep"
        )
    assert found["asleep"] == found["awake"]


def test_a_run_stops_at_its_target(model: Path, tmp_path: Path) -> None:
    summary = train(
        letters_config(
            model, tmp_path, "run.target=0.0", "evaluation.every_steps=2", "metrics.picture=false"
        )
    )
    assert summary["status"] == "finished" and summary["steps"] == 0
    assert Path(summary["written"]["export"]).is_dir()


def test_a_question_that_infrastructure_failed_is_counted_apart(
    model: Path, tmp_path: Path
) -> None:
    config = letters_config(model, tmp_path, "rollout.samples_per_prompt=2")
    with make_rollout(config) as rollout:
        groups = rollout.collect(rollout.environment.tasks("val"))
    episodes = [one for group in groups for one in group.trajectories]
    whole = evaluation_metrics(episodes, Letters.metrics)
    lost = [dataclasses.replace(one, stop=type(one.stop).ABORTED) for one in episodes[:7]]
    metrics = evaluation_metrics([*lost, *episodes[7:]], Letters.metrics)
    assert whole["eval/failed"] == 0 and metrics["eval/failed"] == 7
    assert (metrics["eval/attempts"], metrics["eval/questions"]) == (65, 33)
    assert metrics["eval/reward"] == pytest.approx(sum(one.reward for one in episodes[7:]) / 65)
