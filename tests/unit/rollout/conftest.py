"""Models that the rollout tests share; each is written once per session."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures import tiny_model

from rlflow.rollout import Tokenizer


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "qwen2", "qwen2", scale=0.2)


@pytest.fixture(scope="session")
def other_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture as `qwen` with other weights."""
    return tiny_model(tmp_path_factory.mktemp("models") / "other", "qwen2", scale=0.2, seed=1)


@pytest.fixture(scope="session")
def tokenizer(qwen: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(qwen)
