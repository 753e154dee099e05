"""The rules that families of models share, by part of a layer.

A family's rules serve loading into Megatron, the weight stream to engines, export, and checkpoint
conversion. docs/add_a_model_family.md shows how to add a family. Shapes are written in symbols,
which `Architecture.size` turns into numbers: vocab, hidden, query (= heads * head_dim), key
(= groups * head_dim), ffn, head; experts and latent attention have more.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rlflow.models.rules import Rule, Split, Where

if TYPE_CHECKING:
    import torch

_HUGGINGFACE = {
    "layer": "model.layers.{i}.",
    "attn": "model.layers.{i}.self_attn.",
    "mlp": "model.layers.{i}.mlp.",
}
_MEGATRON = {
    "layer": "decoder.layers.{i}.",
    "attn": "decoder.layers.{i}.self_attention.",
    "mlp": "decoder.layers.{i}.mlp.",
}


def _rule(name: str, split: Split, *sources: str, **options: object) -> Rule:
    """A rule by short names, of which the first word stands for a part of a layer. sources: a name
    and its shape, such as `attn.q_proj.weight query hidden`."""
    pairs = (source.partition(" ") for source in sources)
    named = tuple((_full(source, _HUGGINGFACE), shape) for source, _, shape in pairs)
    names = {
        key: _full(value, _MEGATRON) if isinstance(value, str) else value
        for key, value in options.items()
    }
    return Rule(_full(name, _MEGATRON), split, named, **names)  # type: ignore[arg-type]


def _full(name: str, parts: dict[str, str]) -> str:
    first, _, rest = name.partition(".")
    return parts[first] + rest if first in parts else name


EMBEDDING = _rule(
    "embedding.word_embeddings.weight", Split.VOCAB, "model.embed_tokens.weight vocab hidden"
)
FINAL_NORM = _rule("decoder.final_layernorm.weight", Split.REPLICATED, "model.norm.weight hidden")
OUTPUT = _rule(
    "output_layer.weight", Split.VOCAB, "lm_head.weight vocab hidden", where=Where.UNTIED
)
TIED_OUTPUT = Rule("output_layer.weight", Split.VOCAB, EMBEDDING.sources)
"""The copy of the embedding on the last of several pipeline stages; not a tensor of its own in
HuggingFace. `tied_output` gives it the sources of a model's family."""

ATTENTION = (
    _rule(
        "layer.input_layernorm.weight",
        Split.REPLICATED,
        "layer.input_layernorm.weight hidden",
        fused="attn.linear_qkv.layer_norm_weight",
    ),
    _rule(
        "attn.linear_qkv.weight",
        Split.QKV,
        "attn.q_proj.weight query hidden",
        "attn.k_proj.weight key hidden",
        "attn.v_proj.weight key hidden",
    ),
    _rule("attn.linear_proj.weight", Split.ROW, "attn.o_proj.weight hidden query"),
)
QKV_BIAS = _rule(
    "attn.linear_qkv.bias",
    Split.QKV,
    "attn.q_proj.bias query",
    "attn.k_proj.bias key",
    "attn.v_proj.bias key",
)
BIASES = tuple(
    dataclasses.replace(rule, where=Where.BIASES)
    for rule in (
        QKV_BIAS,
        _rule("attn.linear_proj.bias", Split.REPLICATED, "attn.o_proj.bias hidden"),
        _rule(
            "mlp.linear_fc1.bias", Split.GATE_UP, "mlp.gate_proj.bias ffn", "mlp.up_proj.bias ffn"
        ),
        _rule("mlp.linear_fc2.bias", Split.REPLICATED, "mlp.down_proj.bias hidden"),
    )
)
"""Megatron has all of them (`add_bias_linear`) or none of the last three."""
Q_NORM = _rule("attn.q_layernorm.weight", Split.REPLICATED, "attn.q_norm.weight head")
K_NORM = _rule("attn.k_layernorm.weight", Split.REPLICATED, "attn.k_norm.weight head")
POST_ATTENTION_NORM = _rule(
    "attn.linear_proj.post_layernorm.weight",
    Split.REPLICATED,
    "layer.post_attention_layernorm.weight hidden",
)
POST_MLP_NORM = _rule(
    "mlp.linear_fc2.post_layernorm.weight",
    Split.REPLICATED,
    "layer.post_feedforward_layernorm.weight hidden",
)
"""Norms of what attention and MLP add to the residual stream; named as Megatron-Bridge does."""
OPTIONAL_QKV_BIAS = dataclasses.replace(QKV_BIAS, where=Where.QKV_BIAS)
OPTIONAL_QK_NORM = tuple(
    dataclasses.replace(rule, where=Where.QK_NORM) for rule in (Q_NORM, K_NORM)
)
"""Of families whose config.json says whether models have them."""

_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


def _gated_mlp(
    to: str,
    source: str,
    ffn: str,
    where: Where,
    names: tuple[str, str, str] = _GATE_UP_DOWN,
    fused: str = "",
) -> tuple[Rule, Rule]:
    """fc1 and fc2 of an MLP below two prefixes. names: of gate, up and down. fused: of Transformer
    Engine's two, with `{}` for fc1 or fc2."""
    gate, up, down = (f"{source}{name}.weight" for name in names)
    wide = (f"{gate} {ffn} hidden", f"{up} {ffn} hidden")
    first, second = (fused.replace("{}", name) for name in ("fc1", "fc2"))
    return (
        _rule(f"{to}linear_fc1.weight", Split.GATE_UP, *wide, where=where, fused=first),
        _rule(
            f"{to}linear_fc2.weight", Split.ROW, f"{down} hidden {ffn}", where=where, fused=second
        ),
    )


_MLP_NORM = _rule(
    "layer.pre_mlp_layernorm.weight",
    Split.REPLICATED,
    "layer.post_attention_layernorm.weight hidden",
)
_FUSED_MLP_NORM = "decoder.layers.{i}.mlp.linear_fc1.layer_norm_weight"
DENSE_MLP = (
    dataclasses.replace(_MLP_NORM, where=Where.DENSE, fused=_FUSED_MLP_NORM),
    *_gated_mlp("mlp.", "mlp.", "ffn", Where.DENSE),
)
DENSE_LAYER = (*ATTENTION, *DENSE_MLP)


def sparse_mlp(
    block: str = "mlp.", names: tuple[str, str, str] = _GATE_UP_DOWN
) -> tuple[Rule, ...]:
    """Norm, router and experts below a HuggingFace prefix. names: of an expert's gate, up and down
    projection."""
    router, to = f"{block}gate.weight experts hidden", "mlp.experts.local_experts.{e}."
    fused, source = "mlp.experts.linear_{}.weight{e}", f"{block}experts.{{e}}."
    return (
        dataclasses.replace(_MLP_NORM, where=Where.SPARSE, local_key=_FUSED_MLP_NORM),
        _rule("mlp.router.weight", Split.REPLICATED, router, where=Where.SPARSE),
        *_gated_mlp(to, source, "expert", Where.SPARSE, names, fused),
    )


def shared_mlp(name: str) -> tuple[Rule, ...]:
    """The experts that every token passes through, which Megatron keeps as one wide MLP."""
    return _gated_mlp("mlp.shared_experts.", f"mlp.{name}.", "shared", Where.SHARED)


SHARED_GATE = _rule(
    "mlp.shared_experts.gate_weight",
    Split.REPLICATED,
    "mlp.shared_expert_gate.weight one hidden",
    where=Where.SHARED,
)
ROUTER_BIAS = _rule(
    "mlp.router.expert_bias",
    Split.REPLICATED,
    "mlp.gate.e_score_correction_bias experts",
    where=Where.SPARSE,
    exact=True,
)


ADAPTER_SCALE = "lora_scale"
"""The name of the number by which adapters are multiplied, among the tensors of an update."""


def is_exact(name: str) -> bool:
    """Whether a tensor is in float32 whatever the model's dtype: a router's bias (`Rule.exact`),
    the scale of adapters."""
    return name == ADAPTER_SCALE or name.endswith(ROUTER_BIAS.sources[0][0].rpartition(".")[2])


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """Of a HuggingFace tensor in a model of that dtype."""
    import torch

    return torch.float32 if is_exact(name) else dtype


LATENT_DOWN = _rule(
    "attn.linear_kv_down_proj.weight",
    Split.LATENT,
    "attn.kv_a_proj_with_mqa.weight latent hidden",
)
LATENT_ATTENTION = (
    dataclasses.replace(ATTENTION[0], fused=""),
    _rule(
        "attn.linear_q_proj.weight",
        Split.COLUMN,
        "attn.q_proj.weight latent_query hidden",
        where=Where.NO_QUERY_RANK,
    ),
    _rule(
        "attn.linear_q_down_proj.weight",
        Split.LATENT,
        "attn.q_a_proj.weight query_rank hidden",
        where=Where.QUERY_RANK,
    ),
    _rule(
        "attn.q_layernorm.weight",
        Split.REPLICATED,
        "attn.q_a_layernorm.weight query_rank",
        fused="attn.linear_q_up_proj.layer_norm_weight",
        where=Where.QUERY_RANK,
    ),
    _rule(
        "attn.linear_q_up_proj.weight",
        Split.COLUMN,
        "attn.q_b_proj.weight latent_query query_rank",
        where=Where.QUERY_RANK,
    ),
    LATENT_DOWN,
    _rule(
        "attn.kv_layernorm.weight",
        Split.REPLICATED,
        "attn.kv_a_layernorm.weight key_rank",
        fused="attn.linear_kv_up_proj.layer_norm_weight",
    ),
    _rule(
        "attn.linear_kv_up_proj.weight",
        Split.COLUMN,
        "attn.kv_b_proj.weight latent_key_value key_rank",
    ),
    _rule("attn.linear_proj.weight", Split.ROW, "attn.o_proj.weight hidden value"),
)
