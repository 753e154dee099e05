"""Adapters over real vLLM: the contract of an engine, and log-probs against transformers with the adapter merged in.

Needs the interpreter of an environment with vLLM in RLFLOW_VLLM_PYTHON; `tests/run.sh --full` makes one where it can."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow.errors import ModelError, RolloutError
from rlflow.models.adapter import Adapter, merged_model
from rlflow.models.huggingface import iterate_weights
from rlflow.models.weight_files import write_model
from rlflow.rollout import Tokenizer
from rlflow.rollout.engine import Completion, Engine, Sampling
from rlflow.rollout.vllm.vllm_engine import VLLMEngine
from tests.unit.rollout.adapters import drawn_adapter
from tests.unit.rollout.engine_contract import PROMPT, EngineContract, Make, Pairs, run, start
from tests.unit.rollout.vllm.real import (
    LONG,
    LONG_PROMPT,
    NEEDS_VLLM,
    Started,
    gap,
    probe,
    rollout_over,
    some_tokens,
)

pytestmark = NEEDS_VLLM
RANK = 3  # of which vLLM has none: it takes the next one
EXACT = 2e-5


class Adapted(Started):
    """A server that takes adapters."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, tied=True, adapters={"rank": RANK})
        self.folder = folder

    def borrow(self, **options: Any) -> VLLMEngine:
        assert isinstance(self.engine, VLLMEngine)
        return super().borrow(adapters=self.engine._adapters, **options)

    def update(self, seed: int = 0, scale: float = 1.5) -> dict[str, Tensor]:
        return dict(drawn_adapter(self.path, RANK, scale, seed))

    def restore(self) -> None:
        """An adapter that changes nothing, as version 0."""
        nothing = [(name, 0 * tensor) for name, tensor in self.update().items()]
        run(self.borrow().load_weights(nothing, 0))

    def merged(self, update: dict[str, Tensor], name: str) -> Path:
        """A model directory with the adapter in its weights."""
        adapter = Adapter.of_update(update, "test")
        write_model(self.folder / name, merged_model(adapter, self.path), self.path)
        return self.folder / name


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    started = Adapted(tmp_path_factory.mktemp("adapted"))
    yield started
    started.close()


class TestRealAdapters(EngineContract):
    longer = 12

    async def a_while(self, engine: Engine) -> None:
        await some_tokens(engine)

    @pytest.fixture
    def make(self, adapted: Adapted) -> Iterator[Make]:
        made: list[VLLMEngine] = []

        def new(**options: Any) -> VLLMEngine:
            if any(engine.version for engine in made):
                adapted.restore()
                made.clear()
            made.append(adapted.borrow(**options))
            return made[-1]

        yield new
        adapted.restore()

    @pytest.fixture
    def tokenizer(self, adapted: Adapted) -> Tokenizer:
        return adapted.tokenizer

    @pytest.fixture
    def weights(self, adapted: Adapted) -> Pairs:
        return list(adapted.update().items())


def test_log_probs_are_those_of_merged_weights_and_the_base_differs_by_far_more(
    adapted: Adapted,
) -> None:
    update = adapted.update()
    whole = adapted.score(adapted.merged(update, "whole"))
    base = adapted.score(adapted.path)

    async def sample() -> list[Completion]:
        engine = adapted.borrow()
        await engine.load_weights(list(update.items()), 5)
        return [await engine.generate(one, Sampling(40, 0.7, seed=5)) for one in (PROMPT, LONG_PROMPT)]  # fmt: skip

    for prompt, done in zip((PROMPT, LONG_PROMPT), run(sample()), strict=True):
        assert set(done.versions) == {5}
        assert gap(done, prompt, {5: whole}, 0.7) < EXACT
        assert gap(done, prompt, {5: base}, 0.7) > 1000 * EXACT
    adapted.restore()


def test_a_request_in_flight_goes_on_with_the_new_adapter_and_no_old_cache(
    adapted: Adapted,
) -> None:
    updates = {version: adapted.update(seed=version) for version in (1, 2)}
    scorers = {0: adapted.score(adapted.path)}
    for version, update in updates.items():
        scorers[version] = adapted.score(adapted.merged(update, f"version{version}"))

    async def flight() -> Completion:
        engine = adapted.borrow()
        request = start(engine, LONG_PROMPT, LONG, 1)
        for version, update in updates.items():
            await some_tokens(engine)
            await engine.load_weights(list(update.items()), version)
        return await request

    done = run(flight())
    assert set(done.versions) == {0, 1, 2}
    assert gap(done, LONG_PROMPT, scorers, 1.0) < EXACT
    adapted.restore()


def test_another_adapter_in_vllm_than_the_one_that_was_sent_ends_the_load(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the first one is handed over again in place of the second; the second with another scale."""
    first, second = adapted.update(seed=1), adapted.update(seed=2)
    engine = adapted.borrow()
    form = engine._adapters
    assert form is not None
    run(engine.load_weights(list(first.items()), 1))
    other_scale = {**second, "lora_scale": 2 * second["lora_scale"]}
    for wrong in (first, other_scale):
        told = form.expected_hash(Adapter.of_update(wrong, "test"), torch.float32)
        monkeypatch.setattr(type(form), "expected_hash", lambda *_, told=told: told)
        with pytest.raises(RolloutError, match=r"was given an adapter with the hash .* and has"):
            run(engine.load_weights(list(second.items()), 2))
        monkeypatch.undo()
        with pytest.raises(RolloutError, match="did not complete"):
            run(engine.generate(PROMPT, Sampling(2)))
    adapted.restore()


def test_the_probe_finds_an_adapter_that_is_not_the_trainers(adapted: Adapted) -> None:
    update = adapted.update()
    whole = probe(adapted.score(adapted.merged(update, "probed")))
    with rollout_over(adapted) as rollout:
        rollout.load_weights(iter(update.items()), 1, whole)
        other = {**update, "lora_scale": 0.5 * update["lora_scale"]}
        with pytest.raises(RolloutError, match="engine and trainer differ by"):
            rollout.load_weights(iter(other.items()), 2, whole)


def test_whole_weights_are_refused_in_one_sentence(adapted: Adapted) -> None:
    with pytest.raises(ModelError, match=r"the engine takes adapters; give it trainer\.adapters"):
        run(adapted.borrow().load_weights(iterate_weights(adapted.path), 1))
    adapted.restore()
