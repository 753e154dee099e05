"""A small model and trainers of it, closed after each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures import tiny_model

from rlflow.trainer.base import Trainer
from tests.unit.trainer.batches import VOCAB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return tiny_model(
        path,
        "qwen2",
        tied=True,
        tokenizer=False,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
    )


@pytest.fixture
def defaults() -> dict[str, Any]:
    """Options of the trainers that `make` makes; a file that needs others has a fixture of this name."""
    return {"lr": 1e-3}


@pytest.fixture
def make(model: Path, defaults: dict[str, Any]) -> Iterator[Any]:
    """A function that makes trainers; they are closed in reverse order, so the groups outlive their users."""
    trainers: list[Trainer] = []

    def build(path: Path = model, **options: Any) -> Trainer:
        trainers.append(Trainer.from_pretrained(path, **{**defaults, **options}))
        return trainers[-1]

    yield build
    for trainer in reversed(trainers):
        trainer.close()
