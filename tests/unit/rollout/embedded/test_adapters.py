"""Adapters over the embedded engine's weights: against weights that they were merged into by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from fixtures import tiny_model
from torch import Tensor

from rlflow.errors import ModelError, RolloutError
from rlflow.models.adapter import PROJECTIONS
from rlflow.models.huggingface import digest, iterate_weights
from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine
from rlflow.rollout.engine import Completion, Sampling
from tests.unit.rollout.adapters import drawn_adapter
from tests.unit.rollout.embedded.test_graphs import Recorder, recording_engine

PROMPT = [10, 20, 30, 40, 50]
ATTENTION = PROJECTIONS[:4]


def merged(path: Path, update: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with scale * B A added, in float64."""
    weights = dict(iterate_weights(path))
    for name, b in update.items():
        if name.endswith(".lora_B.weight"):
            a = update[name.replace("lora_B", "lora_A")]
            weight = name.replace("lora_B.", "")
            change = float(update["lora_scale"]) * b.double() @ a.double()
            weights[weight] = (weights[weight].double() + change).float()
    return weights


def greedy(engine: EmbeddedEngine, count: int = 12) -> Completion:
    return asyncio.run(engine.generate(PROMPT, Sampling(count, temperature=0.0)))


def load(engine: EmbeddedEngine, update: Mapping[str, Tensor], version: int = 1) -> None:
    asyncio.run(engine.load_weights(list(update.items()), version))


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen2", PROJECTIONS),  # with biases
        ("qwen3", ("k_proj", "up_proj")),
        ("llama", ("v_proj", "q_proj", "down_proj")),
        ("qwen3_moe", ATTENTION),
    ],
)
def test_it_samples_as_from_merged_weights_and_not_as_from_the_base(
    tmp_path: Path, family: str, targets: tuple[str, ...]
) -> None:
    path = tiny_model(tmp_path, family, scale=0.2)
    update = dict(drawn_adapter(path, targets=targets))
    adapted, whole, base = (EmbeddedEngine(path) for _ in range(3))
    load(adapted, update)
    load(whole, merged(path, update))
    found, expected, without = greedy(adapted), greedy(whole), greedy(base)
    assert found.tokens == expected.tokens and set(found.versions) == {1}
    difference = [abs(a - b) for a, b in zip(found.logprobs, expected.logprobs)]
    assert max(difference) < 1e-4
    assert found.tokens != without.tokens or abs(found.logprobs[0] - without.logprobs[0]) > 0.01


def test_the_hash_is_that_of_what_was_sent_and_of_no_other_scale_or_version(qwen: Path) -> None:
    engine = EmbeddedEngine(qwen, dtype="bfloat16")
    update = dict(drawn_adapter(qwen, scale=1 / 3, dtype=torch.bfloat16))
    load(engine, update)
    assert asyncio.run(engine.weights_digest()) == digest(update.items())
    older = dict(drawn_adapter(qwen, scale=1 / 3, seed=1, dtype=torch.bfloat16))
    other_scale = {**update, "lora_scale": update["lora_scale"] * 2}
    for another in (older, other_scale):
        load(engine, another, 2)
        assert asyncio.run(engine.weights_digest()) == digest(another.items())
        assert digest(another.items()) != digest(update.items())


def test_another_adapter_and_whole_weights_replace_one_and_the_base_comes_back(
    qwen: Path, other_qwen: Path
) -> None:
    """Whole weights take the base's place; adapters are over the base again."""
    engine, update = EmbeddedEngine(qwen), dict(drawn_adapter(qwen))
    load(engine, update)
    first = greedy(engine)
    load(engine, dict(drawn_adapter(qwen, rank=2, seed=3, targets=("q_proj", "o_proj"))))
    second = greedy(engine)
    load(engine, dict(iterate_weights(other_qwen)))
    assert asyncio.run(engine.weights_digest()) == digest(iterate_weights(other_qwen))
    assert greedy(engine).logprobs == greedy(EmbeddedEngine(other_qwen)).logprobs
    load(engine, update)
    again = greedy(engine)
    assert first.logprobs == again.logprobs != second.logprobs


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda update: update.pop("lora_scale"), "expected 'lora_scale' and the factors"),
        (lambda update: update.pop("model.layers.1.mlp.up_proj.lora_B.weight"), "not both of"),
        (
            lambda update: update.update({"model.embed_tokens.lora_A.weight": torch.ones(2, 64),
                                          "model.embed_tokens.lora_B.weight": torch.ones(9, 2)}),
            "'model.embed_tokens' is no projection",
        ),
        (lambda update: update.update({"model.norm.weight": torch.ones(64)}), "came in one update of weights and"),
    ],
)  # fmt: skip
def test_what_is_no_adapter_of_this_model_is_refused_and_a_whole_one_repairs_it(
    qwen: Path, spoil: object, message: str
) -> None:
    engine, update = EmbeddedEngine(qwen), dict(drawn_adapter(qwen))
    spoiled = dict(update)
    spoil(spoiled)  # type: ignore[operator]
    with pytest.raises(ModelError, match=message):
        load(engine, spoiled)
    with pytest.raises(RolloutError, match="did not complete"):
        greedy(engine)
    load(engine, update)
    fresh = EmbeddedEngine(qwen)
    load(fresh, update)
    assert greedy(engine).logprobs == greedy(fresh).logprobs


def test_recorded_steps_follow_an_adapter_and_are_recorded_anew_for_one_of_another_form(
    qwen: Path,
) -> None:
    recorder, other = Recorder(), dict(drawn_adapter(qwen, seed=1))
    engine, plain = recording_engine(qwen, recorder), EmbeddedEngine(qwen)
    counts = []
    for update in (dict(drawn_adapter(qwen)), other, dict(drawn_adapter(qwen, rank=2))):
        for one in (engine, plain):
            load(one, update)
        assert greedy(engine).tokens == greedy(plain).tokens
        counts.append(recorder.recorded)
    assert counts[0] == counts[1] < counts[2]
    load(engine, dict(iterate_weights(qwen)))
    assert greedy(engine).tokens == greedy(EmbeddedEngine(qwen)).tokens


def test_requests_of_several_adapters_run_together_as_each_would_alone(qwen: Path) -> None:
    """In one batch, with prompts in common, which the cache keeps apart; the one of load_weights for who names none."""
    updates = {name: dict(drawn_adapter(qwen, 2 + seed, seed=seed)) for seed, name in enumerate(("", "first", "second"))}  # fmt: skip
    prompt = [5 + place % 200 for place in range(80)]

    async def generate(engine: EmbeddedEngine, name: str, seed: int) -> Completion:
        sampling = Sampling(12, seed=seed, adapter=name)
        return await engine.generate(prompt, sampling, f"{name}/{seed}")

    async def together() -> list[Completion]:
        engine = EmbeddedEngine(qwen)
        await engine.load_weights(list(updates[""].items()), 1)
        for name in ("first", "second"):
            await engine.load_adapter(name, list(updates[name].items()))
        asked = [generate(engine, name, seed) for seed in (1, 2) for name in updates]
        return list(await asyncio.gather(*asked))

    async def alone(name: str, seed: int) -> Completion:
        engine = EmbeddedEngine(qwen)
        await engine.load_weights(list(updates[name].items()), 1)
        return await generate(engine, "", seed)

    found = asyncio.run(together())
    expected = [asyncio.run(alone(name, seed)) for seed in (1, 2) for name in updates]
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        assert max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs)) < 1e-4
    assert len({tuple(one.tokens) for one in found}) == 6


def test_a_kept_turn_of_another_adapter_is_computed_anew_and_one_that_is_gone_is_an_error(
    qwen: Path,
) -> None:
    engine, fresh = EmbeddedEngine(qwen), EmbeddedEngine(qwen)
    update = list(drawn_adapter(qwen))

    async def turns() -> Completion:
        await engine.load_adapter("one", update)
        first = await engine.generate(PROMPT * 10, Sampling(4, seed=1), "episode")
        row = [*PROMPT * 10, *first.tokens]
        return await engine.generate(row, Sampling(8, seed=2, adapter="one"), "episode")

    async def anew() -> Completion:
        await fresh.load_adapter("one", update)
        first = await fresh.generate(PROMPT * 10, Sampling(4, seed=1))
        row = [*PROMPT * 10, *first.tokens]
        return await fresh.generate(row, Sampling(8, seed=2, adapter="one"))

    assert asyncio.run(turns()).tokens == asyncio.run(anew()).tokens
    with pytest.raises(ModelError, match="unload_adapter first"):
        load(engine, dict(iterate_weights(qwen)))
    engine = EmbeddedEngine(qwen)
    asyncio.run(engine.load_adapter("one", update))
    asyncio.run(engine.unload_adapter("one"))
    with pytest.raises(RolloutError, match="there is no adapter 'one' in this engine"):
        asyncio.run(engine.generate(PROMPT, Sampling(2, adapter="one")))
