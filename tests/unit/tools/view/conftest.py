"""A tokenizer for episodes that tests make up."""

from __future__ import annotations

import pytest

from rlflow.rollout import Tokenizer
from tests.fixtures import tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))
