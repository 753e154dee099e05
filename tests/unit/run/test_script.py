"""The run directory of a loop of one's own: what it goes on from, what it refuses, what others read of it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow import Environment, Metric, Rollout, RunFolder, Step, Task, Trainer, make_batch
from rlflow.algorithms import PPOClipLoss, grpo, token_weights
from rlflow.commands.cli import main
from rlflow.devices.matmul import PRODUCTS, Library
from rlflow.errors import ConfigError
from rlflow.models.huggingface import iterate_weights
from rlflow.report.sinks import read_metrics
from tests.fixtures import tiny_model
from tests.reference import ORACLE


class Lengths(Environment):
    """Pays for short words."""

    metrics = {"short": Metric("share", "of short words", score=True)}

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"{split}-{letter}", f"{letter}: ") for letter in "abcdefgh"]

    def step(self, episode: Any, response: str) -> Step:
        paid = 1.0 / (1 + len(response))
        return Step(reward=paid, terminated=True, metrics={"short": paid})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("script") / "model")


class Killed(Exception):
    """Ends a loop between two steps."""


def loop(
    model: Path, folder: Path, steps: int, killed_after: int = 99, say: Any = lambda line: None
) -> dict[str, torch.Tensor]:
    """The script of the docs on a tiny model, which saves after every second step; the weights at
    its end."""
    environment = Lengths()
    tasks = environment.tasks("train")
    trainer = Trainer.from_pretrained(model, ORACLE, lr=1e-3)
    rollout = Rollout.from_pretrained(
        model,
        environment,
        samples_per_prompt=2,
        max_response_tokens=3,
        max_total_tokens=32,
        deterministic=True,
    )
    try:
        with RunFolder(folder, trainer, rollout, say=say) as run:
            assert run.state == ({"last": tasks[0].id} if run.step else {})
            while run.step < steps:
                if run.step == killed_after:
                    raise Killed
                chosen = random.Random(run.step).sample(tasks, 3)
                groups = rollout.collect(chosen, step=run.step)
                batch = make_batch([one for group in groups for one in group.usable])
                advantages = grpo(batch)[:, None] * batch.loss_mask
                batch = batch.replace(advantages=advantages, weights=token_weights(batch))
                metrics = trainer.update(batch, PPOClipLoss())
                rollout.load_weights(trainer.weights(), version=run.step + 1)
                run.record(groups, metrics)
                if run.step % 2 == 0:
                    run.evaluate(tasks[:2])
                    run.save({"last": tasks[0].id})
            return dict(iterate_weights(run.export(model)))
    finally:
        rollout.close()
        trainer.close()


def recorded(folder: Path) -> list[dict[str, float]]:
    """Everything in metrics.jsonl but the times."""
    records = read_metrics(folder / "metrics.jsonl")
    return [
        {name: value for name, value in one.items() if not name.startswith("time")}
        for one in records
    ]


def test_a_loop_that_was_stopped_goes_on_as_if_it_had_not_been(model: Path, tmp_path: Path) -> None:
    """Stopped after its third step, whose checkpoint was not written yet: bit for bit the same."""
    whole = loop(model, tmp_path / "whole", steps=4)
    with pytest.raises(Killed):
        loop(model, tmp_path / "cut", steps=4, killed_after=3)
    assert [one["step"] for one in recorded(tmp_path / "cut")] == [1, 2, 3]
    lines: list[str] = []
    resumed = loop(model, tmp_path / "cut", steps=4, say=lines.append)
    assert lines[0].startswith("going on after step 2") and lines[1].startswith("step 3")
    assert recorded(tmp_path / "cut") == recorded(tmp_path / "whole")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    before = dict(iterate_weights(model))
    assert not all(torch.equal(before[name], whole[name]) for name in whole), "it was trained"


def test_what_it_wrote_is_a_run_to_every_command_that_reads_runs(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "mine"
    loop(model, run, steps=2)
    assert main(["view", str(run)]) == 0 and (run / "view.html").is_file()
    assert main(["show", str(run), "--color", "never"]) == 0
    shown = capsys.readouterr().out
    assert "step 2" in shown and "checkpoints  2" in shown and "short" in shown
    assert (run / "progress.png").read_bytes().startswith(b"\x89PNG")
    loop(model, run, steps=2)
    assert [one["step"] for one in recorded(run)] == [1, 2], "nothing was left to do"


def test_without_a_checkpoint_it_begins_anew_and_others_folders_are_refused(
    model: Path, tmp_path: Path
) -> None:
    with pytest.raises(Killed):
        loop(model, tmp_path / "cut", steps=2, killed_after=1)
    loop(model, tmp_path / "cut", steps=1)
    assert [one["step"] for one in recorded(tmp_path / "cut")] == [1]
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "to_my_aunt.txt").write_text("Dear aunt")
    with pytest.raises(ConfigError, match="not of a run"):
        loop(model, tmp_path / "letters", steps=1)
    assert [one.name for one in (tmp_path / "letters").iterdir()] == ["to_my_aunt.txt"]
    configured = tmp_path / "configured"  # killed before its first checkpoint
    configured.mkdir()
    for name, text in (("config.yaml", "run: {name: x}\n"), ("metrics.jsonl", '{"step": 1}\n')):
        (configured / name).write_text(text)
    with pytest.raises(ConfigError, match="expected the run of a script"):
        loop(model, configured, steps=1)
    assert len([*configured.iterdir()]) == 2


def test_two_loops_in_one_folder_are_refused(model: Path, tmp_path: Path) -> None:
    trainer = Trainer.from_pretrained(model, ORACLE)
    rollout = Rollout.from_pretrained(model, Lengths())
    with (
        RunFolder(tmp_path / "run", trainer, rollout, say=lambda line: None),
        pytest.raises(ConfigError),
    ):
        RunFolder(tmp_path / "run", trainer, rollout)
    rollout.close()
    trainer.close()


def test_no_clock_chooses_the_products_of_a_deterministic_rollout(model: Path) -> None:
    """Which library computes them decides the last bits; a process that resumes must choose alike."""
    before = dict(PRODUCTS.chosen())
    PRODUCTS.fix()
    without_a_clock = dict(PRODUCTS.chosen())
    other: dict[Library, Library] = {"mkl": "onednn", "onednn": "mkl"}
    try:
        PRODUCTS.fix({name: other[library] for name, library in without_a_clock.items()})
        Rollout.from_pretrained(model, Lengths(), deterministic=True).close()
        assert PRODUCTS.chosen() == without_a_clock
    finally:
        PRODUCTS.fix(before)
