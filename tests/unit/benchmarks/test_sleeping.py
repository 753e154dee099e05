"""The trainer that sleeps: as long as it is told, and everything else as a trainer does it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from fixtures import tiny_model

from rlflow.batching import token_batch
from rlflow.errors import CheckpointError, ConfigError
from rlflow.models.huggingface import digest, iterate_weights
from rlflow.trainer import Trainer
from rlflow.trainer.options import TrainerOptions
from tests.reference import ORACLE


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "qwen2", "qwen2")


BACKEND = "benchmarks.sleeping:FakeTrainer"
SLEEP = {"name": "benchmarks.sleeping:Sleep"}


def made(path: Path, **sleep: float) -> Trainer:
    return Trainer.from_pretrained(path, BACKEND, optimizer={**SLEEP, **sleep}, lr=0.5)


def test_an_update_takes_as_long_as_it_is_told_and_by_its_tokens(path: Path) -> None:
    trainer, batch = (
        made(path, update_s=0.1, token_s=0.01, score_token_s=0.02),
        token_batch([[3] * 6, [4] * 4]),
    )
    started = time.monotonic()
    report = trainer.update(batch, lambda output, batch: (output.logprobs, {}))
    updated = time.monotonic()
    scores = trainer.score(batch, want=("logprobs", "entropy"))
    assert updated - started >= 0.2 and time.monotonic() - updated >= 0.2
    assert report["lr"] == 0.5 and report["tokens"] == 10
    assert (
        torch.equal(scores["logprobs"], batch.logprobs)
        and scores["entropy"].shape == batch.tokens.shape
    )


def test_it_publishes_the_weights_of_the_directory(path: Path) -> None:
    assert digest(made(path).weights()) == digest(iterate_weights(path))


def test_a_checkpoint_holds_step_and_updates(path: Path, tmp_path: Path) -> None:
    trainer = made(path)
    trainer.update(token_batch([[3, 4]]), lambda output, batch: (output.logprobs, {}))
    trainer.save(tmp_path / "saved", 7)
    other = made(path)
    assert other.load(tmp_path / "saved") == 7 and other.updates == 1
    with pytest.raises(CheckpointError, match="not a checkpoint of the fake trainer"):
        other.load(tmp_path)


def test_what_it_cannot_do_is_refused_in_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"trainer\.optimizer: the fake trainer has no optimizer; .*found 'adamw'"
    ):
        TrainerOptions.of({"backend": BACKEND}).check()
    with pytest.raises(ConfigError, match="expected 0, found 2"):
        TrainerOptions.of({"backend": BACKEND, "optimizer": SLEEP}).check(ranks=2)
    with pytest.raises(ConfigError, match=r"the trainers have adamw, found '.*Sleep'"):
        TrainerOptions.of({"backend": ORACLE, "optimizer": SLEEP}).check()
