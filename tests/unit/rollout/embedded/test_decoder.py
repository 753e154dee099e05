from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model
from torch import Tensor

from rlflow.errors import ModelError
from rlflow.models.architecture import architecture
from rlflow.models.families import FAMILIES
from rlflow.models.family import ModelFamily
from rlflow.models.huggingface import digest, iterate_weights, read_config
from rlflow.models.layer_rules import ATTENTION
from rlflow.rollout.embedded.block_manager import BLOCK_SIZE
from rlflow.rollout.embedded.cache import KeyValueCache
from rlflow.rollout.embedded.decoder import Decoder
from tests import rounding

CPU = torch.device("cpu")
KINDS = [
    ("qwen2", True), ("qwen2", False), ("qwen3", False), ("llama", False), ("mistral", False),
    ("qwen3_moe", False), ("mixtral", True), ("qwen2_moe", False), ("glm4_moe", False), ("deepseek_v2", False),
    ("deepseek_v3", True),
]  # fmt: skip
KINDS += [(family, False) for family in FAMILIES if family not in dict(KINDS)]


def load(path: Path) -> Decoder:
    decoder = Decoder(architecture(read_config(path)), torch.float32, CPU)
    decoder.load(iterate_weights(path))
    return decoder


def assert_logits(found: Tensor, path: Path, rows: list[list[int]], last: bool = False) -> None:
    """Those of transformers for all tokens of the rows, or their last ones, up to the rounding of float32."""
    exact, bound = rounding.logits(path, rows)
    expected = torch.stack([row[-1] for row in exact]) if last else torch.cat(exact)
    assert (found - expected).abs().max() <= bound


def random_rows(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 384, (length,), generator=generator).tolist() for length in lengths]


class Paged:
    """A decoder with a cache of 8 sequences, whose blocks are scattered over the pool."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.cache = KeyValueCache(decoder.architecture, 8 * 16 + 1, torch.float32, CPU)
        order = torch.randperm(8 * 16, generator=torch.Generator().manual_seed(1))
        self.tables = 1 + order.view(8, 16)
        decoder.reserve(16 * BLOCK_SIZE)

    def prefill(self, rows: list[list[int]], slots: list[int], starts: list[int]) -> Tensor:
        """Logits of the new tokens of the rows, whose first `starts` tokens are cached already."""
        tokens = torch.tensor([token for row, start in zip(rows, starts) for token in row[start:]])
        positions = torch.cat([torch.arange(start, len(row)) for row, start in zip(rows, starts)])
        attend = self.cache.prefilling(
            self.tables[slots], [(start, len(row)) for row, start in zip(rows, starts)]
        )
        return self.decoder.forward(tokens, positions, attend)

    def decode(self, rows: list[list[int]], slots: list[int], static: bool = False) -> Tensor:
        """Logits of the last tokens of the rows, all others being cached."""
        order = sorted(
            range(len(rows)), key=lambda row: -len(rows[row])
        )  # decoding wants the longest first
        tables = self.tables[[slots[row] for row in order]]
        lengths = [len(rows[row]) for row in order]
        positions = torch.tensor(lengths) - 1
        attend = self.cache.decoding(tables, positions, None if static else lengths)
        logits = self.decoder.forward(
            torch.tensor([rows[row][-1] for row in order]), positions, attend
        )
        return logits[torch.tensor(order).argsort()]


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("glm4_moe", {"n_routed_experts": 8, "n_group": 4, "attention_bias": False, "use_qk_norm": False}),
        ("deepseek_v2", {"q_lora_rank": 24, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
            "mscale": 0.707, "mscale_all_dim": 0.9}}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
        ("mistral", {"sliding_window": 7}),
        ("mixtral", {"sliding_window": 7}),
        ("gemma3_text", {"num_hidden_layers": 3, "sliding_window_pattern": 3, "num_key_value_heads": 1}),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_groups_of_experts_windows_and_stretched_positions_equal_transformers(
    family: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    path = tiny_model(tmp_path, family, tokenizer=False, **sizes)
    rows = random_rows([3, 300])
    assert_logits(Paged(load(path)).prefill(rows, [6, 0], [0, 0]), path, rows)


def test_a_family_with_names_of_its_own_is_computed_by_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, projection = tiny_model(tmp_path, "llama", tokenizer=False), ATTENTION[-1]
    renamed = dataclasses.replace(
        projection, sources=(("model.layers.{i}.self_attn.out_proj.weight", "hidden query"),)
    )
    rules = tuple(renamed if rule is projection else rule for rule in FAMILIES["llama"].rules)
    monkeypatch.setitem(FAMILIES, "out_llama", ModelFamily(rules))
    decoder = Decoder(
        architecture({**read_config(path), "model_type": "out_llama"}), torch.float32, CPU
    )
    decoder.load(
        (name.replace("o_proj", "out_proj"), tensor) for name, tensor in iterate_weights(path)
    )
    rows = random_rows([5, 17])
    assert_logits(Paged(decoder).prefill(rows, [0, 1], [0, 0]), path, rows)


@pytest.mark.parametrize("family, tied", KINDS)
def test_logits_equal_transformers_in_one_pass_in_parts_and_decoded(
    tmp_path: Path, family: str, tied: bool
) -> None:
    path = tiny_model(tmp_path, family, tied=tied, tokenizer=False)
    decoder = load(path)
    rows = random_rows([60, 23, 2, 300, 41, 42, 3, 44])
    ragged = [*rows[:2], rows[2][:1], *rows[3:]]
    assert_logits(Paged(decoder).prefill(ragged, list(range(8)), [0] * 8), path, ragged)

    slots, starts = [5, 2, 7, 0, 1, 3, 4, 6], [31, 9, 0, 256, 0, 0, 0, 32]
    begun = [row for row in range(8) if starts[row]]
    paged = Paged(decoder)
    paged.prefill(
        [rows[row][: starts[row]] for row in begun], [slots[row] for row in begun], [0] * len(begun)
    )
    paged.prefill([row[:-1] for row in rows], slots, starts)
    for static in (False, True):  # each writes what is there already
        assert_logits(paged.decode(rows, slots, static), path, rows, last=True)


def test_a_prompt_whose_mask_would_be_large_is_attended_to_in_parts(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load(qwen)
    rows = random_rows([300, 10, 90])
    assert_logits(Paged(decoder).prefill(rows, [0, 1, 2], [0, 0, 0]), qwen, rows)
    monkeypatch.setattr("rlflow.rollout.embedded.cache.MASK_ELEMENTS", 8 * 300 * 7)
    assert_logits(Paged(decoder).prefill(rows, [0, 1, 2], [0, 0, 0]), qwen, rows)


def test_what_another_sequence_left_in_a_page_does_not_matter(qwen: Path) -> None:
    short, long = random_rows([10, 50])
    clean, used = Paged(load(qwen)), Paged(load(qwen))
    used.prefill([long], [1], [0])
    assert torch.equal(used.prefill([short], [1], [0]), clean.prefill([short], [1], [0]))


def test_a_copied_page_serves_another_sequence(qwen: Path) -> None:
    paged = Paged(load(qwen))
    (row,) = random_rows([40])
    assert_logits(paged.prefill([row], [1], [0]), qwen, [row])
    for source, target in zip(paged.tables[1, :2].tolist(), paged.tables[4, :2].tolist()):
        paged.cache.copy(source, target)
    assert torch.equal(paged.prefill([row], [4], [39]), paged.prefill([row], [1], [39]))
    assert_logits(paged.decode([row], [4]), qwen, [row], last=True)


def test_memory_of_the_pool_is_touched_only_where_it_is_used(qwen: Path) -> None:
    psutil = pytest.importorskip("psutil")
    decoder = load(qwen)
    before = psutil.Process().memory_info().rss
    blocks = (1 << 30) // KeyValueCache.block_bytes(decoder.architecture, torch.float32)
    cache = KeyValueCache(decoder.architecture, blocks, torch.float32, CPU)
    cache.clear(3)
    assert psutil.Process().memory_info().rss - before < 1 << 27  # of 1 GiB


@pytest.mark.parametrize("family, tied", KINDS)
def test_parameters_hash_to_the_files_of_the_directory(
    tmp_path: Path, family: str, tied: bool
) -> None:
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
        (
            lambda weights: weights.pop("model.norm.weight"),
            "missing, the first is 'model.norm.weight'",
        ),
        (
            lambda weights: weights.update({"model.nrm.weight": torch.ones(64)}),
            "'model.nrm.weight' is not part",
        ),
        (
            lambda weights: weights.update({"model.norm.weight": torch.ones(63)}),
            "floating point of shape (64,)",
        ),
    ],
)
def test_wrong_weights_are_named(qwen: Path, change: object, message: str) -> None:
    weights = dict(iterate_weights(qwen))
    change(weights)
    with pytest.raises(ModelError) as caught:
        load(qwen).load(weights.items())
    assert message in str(caught.value)
