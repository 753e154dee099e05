"""The model families as tables. docs/add_a_model_family.md shows how to add one.

One table serves loading into Megatron, the weight stream to engines, export, and checkpoint
conversion. Shapes are written in symbols, which `Architecture.size` turns into numbers: vocab,
hidden, query (= heads * head_dim), key (= groups * head_dim), ffn, head; experts and latent
attention have more.
"""

from __future__ import annotations

import dataclasses

from rlflow.models.rules import Rule, Split, Where

_LAYER = "model.layers.{i}."
_ATTENTION = _LAYER + "self_attn."
_MLP = _LAYER + "mlp."
_TO = "decoder.layers.{i}."
_TO_ATTENTION = _TO + "self_attention."
_TO_MLP = _TO + "mlp."

EMBEDDING = Rule(
    "embedding.word_embeddings.weight",
    Split.VOCAB,
    (("model.embed_tokens.weight", "vocab hidden"),),
)
FINAL_NORM = Rule(
    "decoder.final_layernorm.weight", Split.REPLICATED, (("model.norm.weight", "hidden"),)
)
OUTPUT = Rule(
    "output_layer.weight", Split.VOCAB, (("lm_head.weight", "vocab hidden"),), Where.UNTIED
)
TIED_OUTPUT = Rule("output_layer.weight", Split.VOCAB, EMBEDDING.sources)
"""The copy of the embedding on the last of several pipeline stages; not a tensor of its own in
HuggingFace."""

ATTENTION = (
    Rule(
        _TO + "input_layernorm.weight",
        Split.REPLICATED,
        ((_LAYER + "input_layernorm.weight", "hidden"),),
        fused=_TO_ATTENTION + "linear_qkv.layer_norm_weight",
    ),
    Rule(
        _TO_ATTENTION + "linear_qkv.weight",
        Split.QKV,
        (
            (_ATTENTION + "q_proj.weight", "query hidden"),
            (_ATTENTION + "k_proj.weight", "key hidden"),
            (_ATTENTION + "v_proj.weight", "key hidden"),
        ),
    ),
    Rule(
        _TO_ATTENTION + "linear_proj.weight",
        Split.ROW,
        ((_ATTENTION + "o_proj.weight", "hidden query"),),
    ),
)
QKV_BIAS = Rule(
    _TO_ATTENTION + "linear_qkv.bias",
    Split.QKV,
    (
        (_ATTENTION + "q_proj.bias", "query"),
        (_ATTENTION + "k_proj.bias", "key"),
        (_ATTENTION + "v_proj.bias", "key"),
    ),
)
BIASES = (
    dataclasses.replace(QKV_BIAS, where=Where.BIASES),
    Rule(
        _TO_ATTENTION + "linear_proj.bias",
        Split.REPLICATED,
        ((_ATTENTION + "o_proj.bias", "hidden"),),
        Where.BIASES,
    ),
    Rule(
        _TO_MLP + "linear_fc1.bias",
        Split.GATE_UP,
        ((_MLP + "gate_proj.bias", "ffn"), (_MLP + "up_proj.bias", "ffn")),
        Where.BIASES,
    ),
    Rule(
        _TO_MLP + "linear_fc2.bias",
        Split.REPLICATED,
        ((_MLP + "down_proj.bias", "hidden"),),
        Where.BIASES,
    ),
)
"""Megatron has all of them (`add_bias_linear`) or none of the last three."""
Q_NORM = Rule(
    _TO_ATTENTION + "q_layernorm.weight",
    Split.REPLICATED,
    ((_ATTENTION + "q_norm.weight", "head"),),
)
K_NORM = Rule(
    _TO_ATTENTION + "k_layernorm.weight",
    Split.REPLICATED,
    ((_ATTENTION + "k_norm.weight", "head"),),
)

_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


def _gated_mlp(
    to: str, source: str, ffn: str, where: Where, names: tuple[str, str, str], **options: str
) -> tuple[Rule, ...]:
    """fc1 and fc2 of an MLP below two prefixes. names: of gate, up and down. options: `fused_fc1`,
    `fused_fc2`."""
    gate, up, down = (f"{source}{name}.weight" for name in names)
    fused_fc1, fused_fc2 = options.get("fused_fc1", ""), options.get("fused_fc2", "")
    return (
        Rule(
            f"{to}linear_fc1.weight",
            Split.GATE_UP,
            ((gate, f"{ffn} hidden"), (up, f"{ffn} hidden")),
            where,
            fused_fc1,
        ),
        Rule(f"{to}linear_fc2.weight", Split.ROW, ((down, f"hidden {ffn}"),), where, fused_fc2),
    )


DENSE_MLP = (
    Rule(
        _TO + "pre_mlp_layernorm.weight",
        Split.REPLICATED,
        ((_LAYER + "post_attention_layernorm.weight", "hidden"),),
        Where.DENSE,
        fused=_TO_MLP + "linear_fc1.layer_norm_weight",
    ),
    *_gated_mlp(_TO_MLP, _MLP, "ffn", Where.DENSE, _GATE_UP_DOWN),
)
DENSE_LAYER = (*ATTENTION, *DENSE_MLP)


def _sparse_mlp(block: str = _MLP, names: tuple[str, str, str] = _GATE_UP_DOWN) -> tuple[Rule, ...]:
    """Norm, router and experts below a HuggingFace prefix. names: of an expert's gate, up and down
    projection."""
    return (
        Rule(
            _TO + "pre_mlp_layernorm.weight",
            Split.REPLICATED,
            ((_LAYER + "post_attention_layernorm.weight", "hidden"),),
            Where.SPARSE,
            local_key=_TO_MLP + "linear_fc1.layer_norm_weight",
        ),
        Rule(
            _TO_MLP + "router.weight",
            Split.REPLICATED,
            ((block + "gate.weight", "experts hidden"),),
            Where.SPARSE,
        ),
        *_gated_mlp(
            _TO_MLP + "experts.local_experts.{e}.",
            block + "experts.{e}.",
            "expert",
            Where.SPARSE,
            names,
            fused_fc1=_TO_MLP + "experts.linear_fc1.weight{e}",
            fused_fc2=_TO_MLP + "experts.linear_fc2.weight{e}",
        ),
    )


def _shared_mlp(name: str) -> tuple[Rule, ...]:
    """The experts that every token passes through, which Megatron keeps as one wide MLP."""
    return _gated_mlp(
        _TO_MLP + "shared_experts.", f"{_MLP}{name}.", "shared", Where.SHARED, _GATE_UP_DOWN
    )


SHARED_GATE = Rule(
    _TO_MLP + "shared_experts.gate_weight",
    Split.REPLICATED,
    ((_MLP + "shared_expert_gate.weight", "one hidden"),),
    Where.SHARED,
)
ROUTER_BIAS = Rule(
    _TO_MLP + "router.expert_bias",
    Split.REPLICATED,
    ((_MLP + "gate.e_score_correction_bias", "experts"),),
    Where.SPARSE,
    exact=True,
)

LATENT_ATTENTION = (
    Rule(
        _TO + "input_layernorm.weight",
        Split.REPLICATED,
        ((_LAYER + "input_layernorm.weight", "hidden"),),
    ),
    Rule(
        _TO_ATTENTION + "linear_q_proj.weight",
        Split.COLUMN,
        ((_ATTENTION + "q_proj.weight", "latent_query hidden"),),
        Where.NO_QUERY_RANK,
    ),
    Rule(
        _TO_ATTENTION + "linear_q_down_proj.weight",
        Split.LATENT,
        ((_ATTENTION + "q_a_proj.weight", "query_rank hidden"),),
        Where.QUERY_RANK,
    ),
    Rule(
        _TO_ATTENTION + "q_layernorm.weight",
        Split.REPLICATED,
        ((_ATTENTION + "q_a_layernorm.weight", "query_rank"),),
        Where.QUERY_RANK,
        fused=_TO_ATTENTION + "linear_q_up_proj.layer_norm_weight",
    ),
    Rule(
        _TO_ATTENTION + "linear_q_up_proj.weight",
        Split.COLUMN,
        ((_ATTENTION + "q_b_proj.weight", "latent_query query_rank"),),
        Where.QUERY_RANK,
    ),
    Rule(
        _TO_ATTENTION + "linear_kv_down_proj.weight",
        Split.LATENT,
        ((_ATTENTION + "kv_a_proj_with_mqa.weight", "latent hidden"),),
    ),
    Rule(
        _TO_ATTENTION + "kv_layernorm.weight",
        Split.REPLICATED,
        ((_ATTENTION + "kv_a_layernorm.weight", "key_rank"),),
        fused=_TO_ATTENTION + "linear_kv_up_proj.layer_norm_weight",
    ),
    Rule(
        _TO_ATTENTION + "linear_kv_up_proj.weight",
        Split.COLUMN,
        ((_ATTENTION + "kv_b_proj.weight", "latent_key_value key_rank"),),
    ),
    Rule(
        _TO_ATTENTION + "linear_proj.weight",
        Split.ROW,
        ((_ATTENTION + "o_proj.weight", "hidden value"),),
    ),
)
_DEEPSEEK_V2 = (*LATENT_ATTENTION, *DENSE_MLP, *_sparse_mlp(), *_shared_mlp("shared_experts"))
_OPTIONAL = (
    dataclasses.replace(QKV_BIAS, where=Where.QKV_BIAS),
    *(dataclasses.replace(rule, where=Where.QK_NORM) for rule in (Q_NORM, K_NORM)),
)
_MIXTRAL_MLP = _sparse_mlp(_LAYER + "block_sparse_moe.", ("w1", "w3", "w2"))

FAMILIES: dict[str, tuple[Rule, ...]] = {
    "llama": (EMBEDDING, *DENSE_LAYER, *BIASES, FINAL_NORM, OUTPUT),
    "mistral": (EMBEDDING, *DENSE_LAYER, FINAL_NORM, OUTPUT),
    "qwen2": (EMBEDDING, *DENSE_LAYER, QKV_BIAS, FINAL_NORM, OUTPUT),
    "qwen3": (EMBEDDING, *DENSE_LAYER, Q_NORM, K_NORM, FINAL_NORM, OUTPUT),
    "mixtral": (EMBEDDING, *ATTENTION, *_MIXTRAL_MLP, FINAL_NORM, OUTPUT),
    "qwen2_moe": (
        *(
            EMBEDDING,
            *DENSE_LAYER,
            QKV_BIAS,
            *_sparse_mlp(),
            *_shared_mlp("shared_expert"),
            SHARED_GATE,
        ),
        *(FINAL_NORM, OUTPUT),
    ),
    "qwen3_moe": (EMBEDDING, *DENSE_LAYER, Q_NORM, K_NORM, *_sparse_mlp(), FINAL_NORM, OUTPUT),
    "glm4_moe": (
        *(
            EMBEDDING,
            *DENSE_LAYER,
            *_OPTIONAL,
            *_sparse_mlp(),
            ROUTER_BIAS,
            *_shared_mlp("shared_experts"),
        ),
        *(FINAL_NORM, OUTPUT),
    ),
    "deepseek_v2": (EMBEDDING, *_DEEPSEEK_V2, FINAL_NORM, OUTPUT),
    "deepseek_v3": (EMBEDDING, *_DEEPSEEK_V2, ROUTER_BIAS, FINAL_NORM, OUTPUT),
}
"""Rules by `model_type` of config.json, in the order of a forward pass. Qwen2.5 is of type qwen2,
DeepSeek-R1 of type deepseek_v3, GLM-4.5 and 4.6 of type glm4_moe."""
