"""HuggingFace -> Megatron -> HuggingFace moves every element to its place and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.errors import ModelError
from rlflow.models.architecture import (
    HOW_TO_ADD,
    Architecture,
    architecture,
    huggingface_shapes,
    placed_rules,
)
from rlflow.models.layer_rules import EMBEDDING
from rlflow.models.rules import Rule, Split
from rlflow.models.sharding import merge, shard

ROOT = Path(__file__).resolve().parents[3]


def config(family: str, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model_type": family,
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 3,
        "intermediate_size": 12,
        "vocab_size": 21,
    }
    return {**values, **changes}


def rule_of(model: Architecture, split: Split) -> Rule:
    return next(rule for rule, _ in placed_rules(model) if rule.split is split)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_merge_undoes_shard_for_every_tensor_of_every_family(family: str, ranks: int) -> None:
    model = architecture(config(family))
    draw = torch.Generator().manual_seed(0)
    for rule, _ in placed_rules(model):
        sources = [torch.randn(shape, generator=draw) for shape in rule.shapes(model)]
        shards = [shard(rule, sources, model, rank, ranks) for rank in range(ranks)]
        assert len({part.shape for part in shards}) == 1
        for merged, source in zip(merge(rule, shards, model), sources, strict=True):
            assert torch.equal(merged, source), rule.megatron


def test_qkv_rows_are_grouped_as_megatron_reads_them() -> None:
    """2 groups of 2 heads of size 1: [q0 q1 k0 v0 | q2 q3 k1 v1]; rank 1 of 2 owns the second group."""
    model = architecture(config("qwen2", num_attention_heads=4, num_key_value_heads=2, head_dim=1))
    rule = rule_of(model, Split.QKV)
    query, key, value = (
        torch.tensor([[0], [1], [2], [3]]),
        torch.tensor([[10], [11]]),
        torch.tensor([[20], [21]]),
    )
    whole = shard(rule, [query, key, value], model, 0, 1)
    assert whole.flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert shard(rule, [query, key, value], model, 1, 2).flatten().tolist() == [2, 3, 11, 21]


def test_each_rank_holds_its_gate_rows_above_its_up_rows() -> None:
    model = architecture(config("llama", intermediate_size=4))
    rule = rule_of(model, Split.GATE_UP)
    gate, up = torch.arange(4)[:, None], 10 + torch.arange(4)[:, None]
    assert shard(rule, [gate, up], model, 0, 2).flatten().tolist() == [0, 1, 10, 11]
    assert shard(rule, [gate, up], model, 1, 2).flatten().tolist() == [2, 3, 12, 13]


def test_vocabulary_is_padded_with_zero_rows_up_to_the_ranks() -> None:
    model = architecture(config("llama", vocab_size=5))
    rows = 1 + torch.arange(5.0)[:, None]
    assert [shard(EMBEDDING, [rows], model, rank, 4).flatten().tolist() for rank in range(4)] == [
        [1, 2],
        [3, 4],
        [5, 0],
        [0, 0],
    ]


def test_head_dim_need_not_be_hidden_size_over_heads() -> None:
    shapes = huggingface_shapes(architecture(config("qwen3", head_dim=5)))
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (40, 16)
    assert shapes["model.layers.1.self_attn.o_proj.weight"] == (16, 40)
    assert shapes["model.layers.0.self_attn.k_norm.weight"] == (5,)


def test_tied_models_have_no_output_tensor() -> None:
    assert "lm_head.weight" in huggingface_shapes(architecture(config("qwen2")))
    assert "lm_head.weight" not in huggingface_shapes(
        architecture(config("qwen2", tie_word_embeddings=True))
    )


@pytest.mark.parametrize("spelling", ["transformers 4", "transformers 5"])
def test_rope_is_read_in_both_spellings(spelling: str) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if spelling == "transformers 4":
        rope = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}}
    else:
        rope = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **scaling}}
    model = architecture(config("llama", **rope))
    assert (model.rope_theta, model.rope_factor) == (5e5, 8.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model_type": "qwen"},
            "'qwen' is not supported; supported: .*qwen3_moe. Did you mean 'qwen",
        ),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope scaling 'yarn'"),
    ],
)
def test_unsupported_models_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        architecture(config("qwen2", **changes))


def test_a_family_that_is_not_known_is_not_promised_what_training_then_refuses() -> None:
    with pytest.raises(ModelError) as caught:
        architecture({"model_type": "gpt2"})
    promised = str(caught.value).split("; supported: ")[1].split(".")[0].split(", ")
    assert "model family 'gpt2'" in str(caught.value) and str(caught.value).endswith(HOW_TO_ADD)
    assert (ROOT / HOW_TO_ADD.split()[0]).is_file()
    assert {"llama", "qwen2", "qwen3"} <= set(promised)
    for family in promised:
        sizes = {
            "num_hidden_layers": 1,
            "hidden_size": 8,
            "num_attention_heads": 2,
            "intermediate_size": 8,
            "vocab_size": 8,
        }
        sizes |= {
            "num_experts": 2,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "norm_topk_prob": family != "deepseek_v2",
        }
        sizes |= {"kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
        assert architecture({"model_type": family, **sizes}).family == family
