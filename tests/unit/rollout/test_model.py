from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fixtures import tiny_model
from torch import Tensor

from rlflow.errors import ModelError
from rlflow.rollout.cache import KeyValueCache
from rlflow.rollout.model import Decoder
from rlflow.weights.families import architecture
from rlflow.weights.hf import digest, iterate_weights, read_config

CPU = torch.device("cpu")
KINDS = [("qwen2", True), ("qwen2", False), ("qwen3", False), ("llama", False), ("mistral", False)]


def load(path: Path) -> Decoder:
    decoder = Decoder(architecture(read_config(path)), torch.float32, CPU)
    decoder.load(iterate_weights(path))
    return decoder


def reference_logits(path: Path, rows: list[list[int]]) -> list[Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
    with torch.no_grad():
        return [model(torch.tensor([row])).logits[0] for row in rows]


def random_rows(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 384, (length,), generator=generator).tolist() for length in lengths]


def prefill(
    decoder: Decoder, cache: KeyValueCache, rows: list[list[int]], slots: list[int], starts: list[int]
) -> Tensor:
    """Logits of the new tokens of the rows, whose first `starts` tokens are cached already."""
    cache.reserve(max(map(len, rows)))
    tokens = torch.tensor([token for row, start in zip(rows, starts) for token in row[start:]])
    positions = torch.cat([torch.arange(start, len(row)) for row, start in zip(rows, starts)])
    attend = cache.prefilling(slots, starts, [len(row) for row in rows])
    return decoder.forward(tokens, positions, attend)


@pytest.mark.parametrize("family, tied", KINDS)
def test_logits_equal_transformers_for_ragged_rows(tmp_path: Path, family: str, tied: bool) -> None:
    path = tiny_model(tmp_path, family, tied=tied, tokenizer=False)
    rows = random_rows([3, 300, 41, 1, 77])
    decoder = load(path)
    cache = KeyValueCache(decoder.architecture, 8, torch.float32, CPU)
    logits = prefill(decoder, cache, rows, [6, 0, 3, 1, 7], [0] * 5)
    expected = torch.cat(reference_logits(path, rows))
    assert (logits - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("family, tied", KINDS)
def test_prefill_in_parts_and_decoding_equal_one_pass(tmp_path: Path, family: str, tied: bool) -> None:
    decoder = load(tiny_model(tmp_path, family, tied=tied, tokenizer=False))
    rows = random_rows([60, 23, 40])
    whole = KeyValueCache(decoder.architecture, 3, torch.float32, CPU)
    expected = prefill(decoder, whole, rows, [0, 1, 2], [0, 0, 0]).split([60, 23, 40])

    cache = KeyValueCache(decoder.architecture, 8, torch.float32, CPU)
    slots, starts = [5, 2, 7], [31, 9, 0]
    prefill(decoder, cache, [row[:start] for row, start in zip(rows, starts)][:2], slots[:2], [0, 0])
    prefill(decoder, cache, [row[:-1] for row in rows], slots, starts)
    order = [1, 0, 2]  # decoding wants ascending slots
    batch = torch.tensor([slots[row] for row in order])
    positions = torch.tensor([len(rows[row]) - 1 for row in order])
    tokens = torch.tensor([rows[row][-1] for row in order])
    logits = decoder.forward(tokens, positions, cache.decoding(batch, positions))
    assert (logits - torch.stack([expected[row][-1] for row in order])).abs().max() <= 1e-5


def test_what_another_sequence_left_in_a_slot_does_not_matter(qwen: Path) -> None:
    decoder = load(qwen)
    short, long = random_rows([10, 50])
    clean = KeyValueCache(decoder.architecture, 2, torch.float32, CPU)
    used = KeyValueCache(decoder.architecture, 2, torch.float32, CPU)
    prefill(decoder, used, [long], [1], [0])
    assert torch.equal(prefill(decoder, used, [short], [1], [0]), prefill(decoder, clean, [short], [1], [0]))


def test_a_grown_cache_keeps_what_it_held(qwen: Path) -> None:
    decoder = load(qwen)
    (row,) = random_rows([40])
    cache = KeyValueCache(decoder.architecture, 2, torch.float32, CPU)
    prefill(decoder, cache, [row[:-1]], [1], [0])
    before = prefill(decoder, cache, [row], [1], [39])
    assert cache.reserve(2000)
    assert torch.equal(prefill(decoder, cache, [row], [1], [39]), before)


@pytest.mark.parametrize("family, tied", KINDS)
def test_parameters_hash_to_the_files_of_the_directory(tmp_path: Path, family: str, tied: bool) -> None:
    path = tiny_model(tmp_path, family, tied=tied, tokenizer=False)
    assert digest(load(path).named_weights()) == digest(iterate_weights(path))


def test_a_tied_model_ignores_the_copy_of_its_embedding(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, tied=True, tokenizer=False)
    decoder = load(path)
    decoder.load([*iterate_weights(path), ("lm_head.weight", torch.zeros(384, 64))])
    assert digest(decoder.named_weights()) == digest(iterate_weights(path))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda weights: weights.pop("model.norm.weight"), "missing, the first is 'model.norm.weight'"),
        (lambda weights: weights.update({"model.nrm.weight": torch.ones(64)}), "'model.nrm.weight' is not part"),
        (lambda weights: weights.update({"model.norm.weight": torch.ones(63)}), "shape (63,), the model's is (64,)"),
    ],
)
def test_wrong_weights_are_named(qwen: Path, change: object, message: str) -> None:
    weights = dict(iterate_weights(qwen))
    change(weights)
    with pytest.raises(ModelError) as caught:
        load(qwen).load(weights.items())
    assert message in str(caught.value)
