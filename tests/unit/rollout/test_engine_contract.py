"""The contract over the engines that there are."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from benchmarks.sleeping import FakeEngine
from rlflow.models.huggingface import iterate_weights
from rlflow.rollout import Tokenizer
from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine
from tests.unit.rollout.adapters import drawn_adapter
from tests.unit.rollout.engine_contract import EngineContract, Make, Pairs


class TestEmbeddedEngine(EngineContract):
    @pytest.fixture
    def make(self, qwen: Path, tokenizer: Tokenizer) -> Make:
        return functools.partial(EmbeddedEngine, qwen, tokenizer)

    @pytest.fixture
    def weights(self, other_qwen: Path) -> Pairs:
        return list(iterate_weights(other_qwen))


class TestAdapters(TestEmbeddedEngine):
    """Adapters in place of whole weights."""

    @pytest.fixture
    def weights(self, qwen: Path) -> Pairs:
        return list(drawn_adapter(qwen, rank=3, scale=1.5))


class TestSmallPool(TestEmbeddedEngine):
    """Where sequences preempt each other."""

    @pytest.fixture
    def make(self, qwen: Path, tokenizer: Tokenizer) -> Make:
        return functools.partial(EmbeddedEngine, qwen, tokenizer, kv_tokens=512, prefill_tokens=16)


class TestFakeEngine(EngineContract):
    @pytest.fixture(params=[True, False], ids=["hashes", "cannot_hash"])
    def make(self, tokenizer: Tokenizer, request: pytest.FixtureRequest) -> Make:
        return functools.partial(FakeEngine, tokenizer, hashes_weights=request.param)

    @pytest.fixture
    def weights(self) -> Pairs:
        return [("scale", torch.full((3,), 2.0)), ("shift", torch.ones(2))]
