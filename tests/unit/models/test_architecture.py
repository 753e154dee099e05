"""The tables name the tensors that transformers has, and config.json is read as it is written."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import fixtures
import pytest
from fixtures import tiny_config, tiny_model
from rlflow_tools.ckpt_convert.export_model import to_huggingface
from rlflow_tools.ckpt_convert.import_model import Options, to_megatron
from rlflow_tools.ckpt_convert.mapping.layout import CheckpointLayout
from transformers import AutoConfig

from rlflow.errors import ModelError
from rlflow.models.architecture import (
    architecture,
    huggingface_shapes,
    placed_rules,
    routing_of,
    stored_architecture,
    window_of,
)
from rlflow.models.entries import rope_kind, rope_of
from rlflow.models.families import FAMILIES
from rlflow.models.huggingface import digest, header, iterate_weights, read_config

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    ("qwen2", {"tied": True}),
    ("qwen2_moe", {"num_hidden_layers": 4, "mlp_only_layers": [3], "decoder_sparse_step": 2}),
    ("qwen3_moe", {"tied": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("glm4_moe", {"attention_bias": False, "use_qk_norm": False}),
    ("deepseek_v2", {"q_lora_rank": 20}),
    ("deepseek_v3", {"first_k_dense_replace": 0}),
]


@pytest.mark.parametrize(("family", "options"), VARIANTS, ids=lambda value: str(value))
def test_tables_name_exactly_what_transformers_writes(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    path = tiny_model(tmp_path, family, tokenizer=False, vocab_size=101, **options)
    written = {
        name: tuple(entry["shape"]) for name, entry in header(path / "model.safetensors").items()
    }
    assert huggingface_shapes(stored_architecture(read_config(path))) == written


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fused", [False, True])
def test_no_two_rules_make_the_same_megatron_tensor(family: str, fused: bool) -> None:
    model = stored_architecture(tiny_config(family))
    names = [
        rule.megatron_name(layer, rule.expert or 0, fused) for rule, layer in placed_rules(model)
    ]
    assert len(set(names)) == len(names)


def test_the_family_of_the_docs_is_all_that_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "add_a_model_family.md"
    file, script = (block.split("```")[0] for block in page.read_text().split("```python\n")[1:3])
    before = set(FAMILIES)
    namespace: dict[str, Any] = {}
    exec(file, namespace)  # both as they are printed
    exec(script, {"__name__": "my_family"})
    (added,) = FAMILIES.keys() - before
    assert namespace["FAMILY"] == FAMILIES[added]
    monkeypatch.setitem(FAMILIES, added, FAMILIES.pop(added))  # taken out again afterwards
    monkeypatch.setitem(fixtures._OF_FAMILY, added, {"head_dim": 32})
    path = tiny_model(tmp_path / "hf", added, tokenizer=False, vocab_size=101)
    assert architecture(read_config(path)).qkv_bias, "cannot be trained"
    to_megatron(path, tmp_path / "megatron", Options(layout=CheckpointLayout(2), verify="full"))
    to_huggingface(tmp_path / "megatron", tmp_path / "back", path)
    assert digest(iterate_weights(tmp_path / "back")) == digest(iterate_weights(path))


def test_experts_are_in_the_layers_that_the_config_names() -> None:
    values = {
        "model_type": "qwen3_moe",
        "hidden_size": 8,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    values |= {
        "vocab_size": 9,
        "num_hidden_layers": 6,
        "num_experts": 3,
        "moe_intermediate_size": 5,
    }
    model = stored_architecture({**values, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert model.experts is not None
    assert model.experts.sparse == (False, True, False, False, False, True)
    fc1 = [
        (layer, rule.expert)
        for rule, layer in placed_rules(model)
        if rule.megatron.endswith("{e}.linear_fc1.weight")
    ]
    assert fc1 == [(layer, expert) for layer in (1, 5) for expert in range(3)]


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        (
            "glm4_moe",
            {"norm_topk_prob": False},
            "norm_topk_prob is not supported here; expected true",
        ),
        (
            "deepseek_v2",
            {"norm_topk_prob": True},
            "norm_topk_prob is not supported here; expected false",
        ),
        (
            "glm4_moe",
            {"n_group": 2, "topk_group": 2},
            "'topk_group' is 2 of 2 groups for 2 of 4 experts",
        ),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 2},
            "'group_limited_greedy' is not",
        ),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=false"),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05 is not supported"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads 2 is not supported"),
        (
            "deepseek_v3",
            {"rope_parameters": {"rope_type": "yarn", "mscale": 0.7}},
            "both or none of mscale",
        ),
        ("qwen3_moe", {"num_experts_per_tok": None}, "'num_experts_per_tok' is 0; expected 2 to 4"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "'num_experts_per_tok' is 1; expected 2 to 4"),
        ("qwen2_moe", {"num_experts_per_tok": 5, "norm_topk_prob": False}, "is 5; expected 1 to 4"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is not supported"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("llama", {"layer_types": ["sliding_attention"] * 2}, "sliding-window"),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": True}, "sliding-window"),
        ("llama", {"attention_bias": True, "mlp_bias": True}, "biases on every projection"),
        ("llama", {"partial_rotary_factor": 0.5}, "a part of each head"),
        (
            "qwen3",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "fp8 can be converted, but not trained",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            "rope scaling 'yarn'",
        ),
    ],
)
def test_what_is_only_converted_is_refused_for_training(
    family: str, changes: dict[str, Any], words: str
) -> None:
    config = tiny_config(family, **changes)
    stored_architecture(config)
    with pytest.raises(ModelError, match=words):
        architecture(config)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantized by 'fp8'"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias=true"),
        ("llama", {"attention_bias": True}, "Megatron has both or neither"),
        ("mistral", {"mlp_bias": True}, "mlp_bias=true"),
        ("qwen2_moe", {"qkv_bias": False}, "qkv_bias=false"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("mixtral", {"num_local_experts": None}, "'num_experts' is missing"),
    ],
)
def test_tensors_beyond_the_tables_are_refused(
    family: str, changes: dict[str, Any], words: str
) -> None:
    config = tiny_config(family, **changes)
    with pytest.raises(ModelError, match=words):
        stored_architecture(config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sliding_window": None}, "'sliding_window' is null; expected a number"),
        ({"layer_types": ["full_attention"]}, "for each of the 2 layers"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "'layer_types' is "),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope scaling 'linear' of layers with a window",
        ),
    ],
)
def test_windows_that_are_not_known_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        window_of(tiny_config("gemma3_text", **changes))


def test_gemma_is_read_alike_in_the_spelling_of_transformers_4() -> None:
    """Of google/gemma-3-4b-it's text model: what its config.json says, and leaves out."""
    old = {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "vocab_size": 262208,
        "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    model = architecture(old)
    assert (model.tied, model.head_dim, model.rope_theta, model.rope_divisor) == (True, 256, 1e6, 8)
    assert model.softmax_scale == 256**-0.5 and model.embedding_scale == 2560**0.5
    assert model.window is not None and model.window.rope_theta == 1e4
    everywhere = [layer for layer in range(34) if model.window_at(layer) is None]
    assert everywhere == [5, 11, 17, 23, 29] and model.window_at(0) == 1024
    assert architecture(AutoConfig.for_model(**old).to_dict()) == model


BROKEN: dict[str, Any] = {
    "num_attention_heads": [0, None, "4", 4.5, [], True, 10**400],
    "num_key_value_heads": [0, -2, "2", 3],
    "head_dim": [-16, "16"],
    "num_hidden_layers": [0, -1, 10**9, {}],
    "vocab_size": [0, "many"],
    "tie_word_embeddings": ["no", 1],
    "rms_norm_eps": [0, "small", float("nan"), float("inf"), -1e-6],
    "rope_parameters": [["default"], "default", {"rope_type": "llama3"}, {"rope_theta": "big"}],
    "max_position_embeddings": [0, "long"],
    "quantization_config": ["fp8", ["fp8"]],
    "model_type": [None, ["qwen3_moe"], {}],
    "num_experts": [0, "all"],
    "num_experts_per_tok": [-1, "2"],
    "norm_topk_prob": ["yes"],
    "mlp_only_layers": [3, "1"],
    "decoder_sparse_step": [0, "2"],
}


@pytest.mark.parametrize("key", BROKEN)
def test_malformed_entries_are_one_line_that_names_them(key: str) -> None:
    config = tiny_config("qwen3_moe")
    for value in BROKEN[key]:
        with pytest.raises(ModelError, match=r"^config.json: ") as caught:
            stored_architecture({**config, key: value})
        assert len(str(caught.value)) < 400 and "\n" not in str(caught.value), value


@pytest.mark.parametrize(
    "left_out",
    [
        {"rope_parameters": None, "rms_norm_eps": None},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 5e5},
        {"rope_scaling": {}},
        dict.fromkeys(("routed_scaling_factor", "n_group", "topk_group", "sliding_window")),
        {"use_sliding_window": True, "sliding_window": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_config_json_leaves_open_is_what_transformers_takes(
    family: str, left_out: dict[str, Any]
) -> None:
    config = tiny_config(family, **left_out)
    config = {key: value for key, value in config.items() if left_out.get(key, 0) is not None}
    theirs = AutoConfig.for_model(**copy.deepcopy(config)).to_dict()
    for read in (
        stored_architecture,
        routing_of,
        window_of,
        lambda config: rope_kind(rope_of(config)),
    ):
        assert read(config) == read(theirs)


def test_nulls_stand_for_defaults() -> None:
    config = tiny_config("qwen3")
    optional = (
        "rms_norm_eps",
        "rope_parameters",
        "max_position_embeddings",
        "num_key_value_heads",
        "head_dim",
    )
    found = stored_architecture({**config, **dict.fromkeys(optional)})
    assert (found.norm_eps, found.rope_theta, found.groups) == (1e-6, 10000.0, found.heads)
