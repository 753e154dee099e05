"""The model families: which HuggingFace tensors make which Megatron tensor, and how that one is split over ranks.

One table serves loading into Megatron, the weight stream to engines, export, and checkpoint conversion. Shapes are
written in symbols: vocab, hidden, query (= heads * head_dim), key (= groups * head_dim), ffn, head.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlflow.errors import ModelError, did_you_mean


class Split(enum.Enum):
    """How a Megatron tensor is cut over tensor-parallel ranks."""

    REPLICATED = "replicated"
    COLUMN = "column"  # dimension 0
    ROW = "row"  # dimension 1
    QKV = "qkv"  # dimension 0 by query group: [queries of the group | key | value] per group
    GATE_UP = "gate_up"  # each rank holds [its gate rows | its up rows]
    VOCAB = "vocab"  # dimension 0, padded with zero rows to a multiple of the ranks


@dataclass(frozen=True)
class Rule:
    """One Megatron tensor. `sources`: (HuggingFace name, shape in symbols). `{i}` is the layer index."""

    megatron: str
    split: Split
    sources: tuple[tuple[str, str], ...]

    @property
    def per_layer(self) -> bool:
        return "{i}" in self.megatron

    def names(self, layer: int = 0) -> list[str]:
        """The HuggingFace names of the sources in a layer, in the order that `shard` takes and `merge` returns."""
        return [name.format(i=layer) for name, _ in self.sources]

    def shapes(self, model: Architecture) -> list[tuple[int, ...]]:
        """The HuggingFace shapes of the sources."""
        return [tuple(model.size(symbol) for symbol in shape.split()) for _, shape in self.sources]


@dataclass(frozen=True)
class Architecture:
    """What the weights' shapes and the computation follow from, read from config.json."""

    family: str
    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    norm_eps: float
    rope_theta: float
    rope_factor: float | None  # of Llama 3's rope scaling; None: no scaling
    max_positions: int

    def size(self, symbol: str) -> int:
        sizes = {
            "vocab": self.vocab,
            "hidden": self.hidden,
            "query": self.heads * self.head_dim,
            "key": self.groups * self.head_dim,
            "ffn": self.ffn,
            "head": self.head_dim,
        }
        return sizes[symbol]

    @property
    def qkv_bias(self) -> bool:
        return QKV_BIAS in FAMILIES[self.family]

    @property
    def qk_norm(self) -> bool:
        return Q_NORM in FAMILIES[self.family]


_LAYER = "model.layers.{i}."
_ATTENTION = _LAYER + "self_attn."
_MLP = _LAYER + "mlp."
_TO_LAYER = "decoder.layers.{i}."

EMBEDDING = Rule("embedding.word_embeddings.weight", Split.VOCAB, (("model.embed_tokens.weight", "vocab hidden"),))
QKV_BIAS = Rule(
    _TO_LAYER + "self_attention.linear_qkv.bias",
    Split.QKV,
    ((_ATTENTION + "q_proj.bias", "query"), (_ATTENTION + "k_proj.bias", "key"), (_ATTENTION + "v_proj.bias", "key")),
)
Q_NORM = Rule(
    _TO_LAYER + "self_attention.q_layernorm.weight", Split.REPLICATED, ((_ATTENTION + "q_norm.weight", "head"),)
)
K_NORM = Rule(
    _TO_LAYER + "self_attention.k_layernorm.weight", Split.REPLICATED, ((_ATTENTION + "k_norm.weight", "head"),)
)
DENSE_LAYER = (
    Rule(_TO_LAYER + "input_layernorm.weight", Split.REPLICATED, ((_LAYER + "input_layernorm.weight", "hidden"),)),
    Rule(
        _TO_LAYER + "self_attention.linear_qkv.weight",
        Split.QKV,
        (
            (_ATTENTION + "q_proj.weight", "query hidden"),
            (_ATTENTION + "k_proj.weight", "key hidden"),
            (_ATTENTION + "v_proj.weight", "key hidden"),
        ),
    ),
    Rule(_TO_LAYER + "self_attention.linear_proj.weight", Split.ROW, ((_ATTENTION + "o_proj.weight", "hidden query"),)),
    Rule(
        _TO_LAYER + "pre_mlp_layernorm.weight",
        Split.REPLICATED,
        ((_LAYER + "post_attention_layernorm.weight", "hidden"),),
    ),
    Rule(
        _TO_LAYER + "mlp.linear_fc1.weight",
        Split.GATE_UP,
        ((_MLP + "gate_proj.weight", "ffn hidden"), (_MLP + "up_proj.weight", "ffn hidden")),
    ),
    Rule(_TO_LAYER + "mlp.linear_fc2.weight", Split.ROW, ((_MLP + "down_proj.weight", "hidden ffn"),)),
)
FINAL_NORM = Rule("decoder.final_layernorm.weight", Split.REPLICATED, (("model.norm.weight", "hidden"),))
OUTPUT = Rule("output_layer.weight", Split.VOCAB, (("lm_head.weight", "vocab hidden"),))
TIED_OUTPUT = Rule("output_layer.weight", Split.VOCAB, EMBEDDING.sources)
"""The copy of the embedding on the last of several pipeline stages; not a tensor of its own in HuggingFace."""

FAMILIES: dict[str, tuple[Rule, ...]] = {
    "llama": (EMBEDDING, *DENSE_LAYER, FINAL_NORM, OUTPUT),
    "qwen2": (EMBEDDING, *DENSE_LAYER, QKV_BIAS, FINAL_NORM, OUTPUT),
    "qwen3": (EMBEDDING, *DENSE_LAYER, Q_NORM, K_NORM, FINAL_NORM, OUTPUT),
}
"""Rules by `model_type` of config.json. Qwen2.5 is of type qwen2; the output rule is left out where embeddings are tied."""

TE_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Where Transformer Engine layers keep a tensor whose name here is that of the local layers (it fuses norm and matmul)."""


def architecture(config: dict[str, Any]) -> Architecture:
    """Reads config.json (transformers 4 or 5 spelling). Raises ModelError for an unknown family, a missing entry, or a
    feature that the families here do not have."""
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(
            f"config.json: model family '{family}' is not supported; supported: {known}."
            f"{did_you_mean(family, FAMILIES)}"
        )
    _refuse_unsupported(config, family)
    heads = _entry(config, "num_attention_heads")
    hidden = _entry(config, "hidden_size")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return Architecture(
        family=family,
        layers=_entry(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        groups=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        ffn=_entry(config, "intermediate_size"),
        vocab=_entry(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        rope_factor=_rope_factor(rope),
        max_positions=int(config.get("max_position_embeddings", 32768)),
    )


def rules_of(model: Architecture) -> tuple[Rule, ...]:
    """The rules that apply to a model: its family's, without the output rule where embeddings are tied."""
    return tuple(rule for rule in FAMILIES[model.family] if not (model.tied and rule is OUTPUT))


def placed_rules(model: Architecture) -> Iterator[tuple[Rule, int]]:
    """(rule, layer) in the order of a forward pass; layer is 0 for rules that are not per layer."""
    rules = rules_of(model)
    yield EMBEDDING, 0
    for layer in range(model.layers):
        for rule in rules:
            if rule.per_layer:
                yield rule, layer
    for rule in rules:
        if not rule.per_layer and rule is not EMBEDDING:
            yield rule, 0


def huggingface_shapes(model: Architecture) -> dict[str, tuple[int, ...]]:
    """{HuggingFace name: shape} of everything that the model's directory holds."""
    shapes: dict[str, tuple[int, ...]] = {}
    for rule, layer in placed_rules(model):
        shapes.update(zip(rule.names(layer), rule.shapes(model)))
    return shapes


def padded_vocab(vocab: int, tensor_parallel: int) -> int:
    """Rows of the embedding in Megatron: the next multiple of the ranks."""
    return -(-vocab // tensor_parallel) * tensor_parallel


def _entry(config: dict[str, Any], key: str) -> int:
    if not isinstance(config.get(key), int):
        raise ModelError(f"config.json: '{key}' is missing or not a whole number (found {config.get(key)!r}).")
    return config[key]


def _refuse_unsupported(config: dict[str, Any], family: str) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"config.json: hidden_act '{config['hidden_act']}' is not supported; expected 'silu'.")
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise ModelError("config.json: sliding-window attention is not supported.")
    for key in ("attention_bias", "mlp_bias"):
        if family != "qwen2" and config.get(key):
            raise ModelError(f"config.json: {key}=true is not supported for model family '{family}'.")


def _rope_factor(rope: dict[str, Any]) -> float | None:
    """The factor of Llama 3's rope scaling, whose other constants Megatron fixes; None without scaling."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    found = {key: rope.get(key) for key in fixed}
    if kind != "llama3" or found != fixed:
        raise ModelError(
            f"config.json: rope scaling '{kind}' with {found} is not supported; default, or llama3 with {fixed}."
        )
    return float(rope["factor"])
