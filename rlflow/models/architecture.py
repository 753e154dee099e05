"""The architecture of a model, read from config.json, and which rules of its family's table
apply to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlflow.errors import did_you_mean
from rlflow.models.entries import (
    MOST_LAYERS,
    SLIDING,
    Experts,
    RouterShape,
    SlidingWindow,
    Yarn,
    check_routing,
    flag,
    number,
    refused,
    rope_kind,
    rope_of,
    short,
    whole,
    yarn_of,
)
from rlflow.models.families import FAMILIES
from rlflow.models.family import ModelFamily
from rlflow.models.layer_rules import (
    EMBEDDING,
    LATENT_DOWN,
    POST_ATTENTION_NORM,
    Q_NORM,
    QKV_BIAS,
    SHARED_GATE,
    TIED_OUTPUT,
)
from rlflow.models.rules import Rule, Where, makes

SWITCHES = {Where.BIASES, Where.QKV_BIAS, Where.QK_NORM}
"""What config.json may switch on."""
DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "partial_rotary_factor": 1.0}
"""What transformers takes where config.json does not say it, unless a family says otherwise."""
UNKNOWN_COMPUTATIONS = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
)
"""Entries of config.json that change what is computed, and which nothing here computes."""
HOW_TO_ADD = "docs/add_a_model_family.md shows how to add one."


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): ranks of the
    compressed queries and keys, and sizes per head: of what has no position, of what rotates, and
    of the values."""

    query_rank: int | None
    key_rank: int
    plain: int
    rotating: int
    value: int


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
    rope_divisor: float = 1.0  # of positions: linear rope scaling
    experts: Experts | None = None
    latent: Latent | None = None
    biases: bool = False  # on every projection of attention and MLP
    qkv_biases: bool = False  # on queries, keys and values, where a family has both kinds
    head_norms: bool = False  # of queries and keys, likewise
    rotary_share: float = 1.0  # of a head's dimensions, those that rotate
    activation: str = "silu"  # of the MLP's gate
    zero_centered_norms: bool = False  # they multiply by 1 + weight
    post_norms: bool = False  # of what attention and MLP add
    embedding_scale: float = 1.0  # before it is rounded to the dtype of embeddings
    query_scalar: float | None = None  # scores are divided by its root; None: by key_dim's
    routing: RouterShape | None = None
    yarn: Yarn | None = None
    window: SlidingWindow | None = None

    def size(self, symbol: str) -> int:
        """The number that a symbol of the tables stands for."""
        sizes = {
            "one": 1,
            "vocab": self.vocab,
            "hidden": self.hidden,
            "query": self.heads * self.head_dim,
            "key": self.groups * self.head_dim,
            "ffn": self.ffn,
            "head": self.head_dim,
        }
        if self.experts is not None:
            sizes |= {
                "experts": self.experts.count,
                "expert": self.experts.ffn,
                "shared": self.experts.shared_ffn,
            }
        if self.latent is not None:
            sizes |= {
                "query_rank": self.latent.query_rank or 0,
                "key_rank": self.latent.key_rank,
                "latent": self.latent.key_rank + self.latent.rotating,
                "latent_query": self.heads * (self.latent.plain + self.latent.rotating),
                "latent_key_value": self.heads * (self.latent.plain + self.latent.value),
                "value": self.heads * self.latent.value,
            }
        return sizes[symbol]

    @property
    def key_dim(self) -> int:
        """Of a head's query and key."""
        return self.latent.plain + self.latent.rotating if self.latent else self.head_dim

    @property
    def value_dim(self) -> int:
        """Of a head's value."""
        return self.latent.value if self.latent else self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Of a head's query and key, those dimensions that rotate."""
        return self.latent.rotating if self.latent else int(self.head_dim * self.rotary_share)

    @property
    def softmax_scale(self) -> float:
        """What attention scores are multiplied by."""
        return (self.query_scalar or self.key_dim) ** -0.5 * (
            self.yarn.scores if self.yarn else 1.0
        )

    @property
    def own_scale(self) -> float | None:
        """`softmax_scale` where it is another than that of the queries' size."""
        return None if self.softmax_scale == self.key_dim**-0.5 else self.softmax_scale

    @property
    def active_ffn(self) -> int:
        """Width of the MLPs that a token passes through in a layer, the widest layer's."""
        if self.experts is None:
            return self.ffn
        chosen = self.experts.top_k * self.experts.ffn + self.experts.shared_ffn
        return chosen if all(self.experts.sparse) else max(chosen, self.ffn)

    @property
    def shared_gate(self) -> bool:
        """Whether a token weighs the MLP that stands beside the experts."""
        return makes(FAMILIES[self.family].rules, SHARED_GATE)

    @property
    def qkv_bias(self) -> bool:
        return self.qkv_biases or makes(FAMILIES[self.family].rules, QKV_BIAS)

    @property
    def qk_norm(self) -> bool:
        return self.head_norms or makes(FAMILIES[self.family].rules, Q_NORM)

    def window_at(self, layer: int) -> int | None:
        """On how many tokens a layer looks back, the current one included; None: on all."""
        if self.window is None or self.window.layers is None or not self.window.layers[layer]:
            return None
        return self.window.tokens

    def has(self, where: Where, layer: int = 0) -> bool:
        """Whether a rule with this `where` applies to a layer."""
        sparse = self.experts is not None and self.experts.sparse[layer]
        query_rank = self.latent is not None and self.latent.query_rank is not None
        claims = {
            Where.ALWAYS: True,
            Where.DENSE: not sparse,
            Where.SPARSE: sparse,
            Where.SHARED: sparse and self.experts is not None and self.experts.shared_ffn > 0,
            Where.UNTIED: not self.tied,
            Where.QUERY_RANK: query_rank,
            Where.NO_QUERY_RANK: not query_rank,
            Where.BIASES: self.biases,
            Where.QKV_BIAS: self.qkv_biases,
            Where.QK_NORM: self.head_norms,
        }
        return claims[where]


def architecture(config: dict[str, Any]) -> Architecture:
    """Reads config.json (transformers 4 or 5 spelling) of a model that is to be computed by the
    trainer or the embedded engine. Raises ModelError for an unknown family, a missing entry, or a
    feature that they do not have."""
    model = stored_architecture(config)
    family = FAMILIES[model.family]
    may_rotate_partly = "partial_rotary_factor" in family.defaults
    for what, found in (
        ("weights in fp8", config.get("quantization_config")),
        ("biases on every projection", model.biases),
        (
            "rotary embedding of a part of each head",
            model.rotary_share != 1 and not may_rotate_partly,
        ),
    ):
        if found:
            raise refused(f"{what} can be converted, but not trained or sampled from here.")
    window = _checked_window(config, family)
    if model.latent is not None:
        _check_latent(config, model)
    rope = rope_of(config)
    yarn = yarn_of(rope) if model.latent is not None else None
    if yarn is None:
        _check_rope(rope)
    routing = None if family.routing is None else family.routing(config)
    if model.experts is not None:
        check_routing(config, model.experts, routing)
    return replace(model, routing=routing, yarn=yarn, window=window)


def stored_architecture(config: dict[str, Any]) -> Architecture:
    """Reads config.json of a model that is to be converted: what its files hold, whether or not it
    can be computed here.

    Raises ModelError for an unknown family, a missing entry, or tensors that the family's table
    does not have."""
    family = family_of(config)
    switched_on = _switched_on(config, family)
    has_experts = any(rule.where is Where.SPARSE for rule in family.rules)
    heads = whole(config, "num_attention_heads")
    hidden = whole(config, "hidden_size")
    groups = whole(config, "num_key_value_heads", default=heads)
    if heads % groups:
        raise refused(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}."
        )
    rope = rope_of(config)
    defaults = {**DEFAULTS, **family.defaults}
    return Architecture(
        family=str(config["model_type"]),
        layers=whole(config, "num_hidden_layers", most=MOST_LAYERS),
        hidden=hidden,
        heads=heads,
        groups=groups,
        head_dim=whole(
            config, "head_dim", default=int(defaults.get("head_dim", max(1, hidden // heads)))
        ),
        ffn=whole(config, "intermediate_size"),
        vocab=whole(config, "vocab_size"),
        tied=flag(config, "tie_word_embeddings", bool(defaults.get("tie_word_embeddings"))),
        norm_eps=number(config, "rms_norm_eps", defaults["rms_norm_eps"]),
        rope_theta=number(rope, "rope_theta", number(config, "rope_theta", defaults["rope_theta"])),
        rope_factor=number(rope, "factor") if rope_kind(rope) == "llama3" else None,
        rope_divisor=number(rope, "factor") if rope_kind(rope) == "linear" else 1.0,
        max_positions=whole(
            config,
            "max_position_embeddings",
            default=int(defaults.get("max_position_embeddings", 32768)),
        ),
        experts=family.experts(config) if has_experts else None,
        latent=_latent(config) if makes(family.rules, LATENT_DOWN) else None,
        biases=Where.BIASES in switched_on,
        qkv_biases=Where.QKV_BIAS in switched_on,
        head_norms=Where.QK_NORM in switched_on,
        rotary_share=number(
            rope,
            "partial_rotary_factor",
            number(config, "partial_rotary_factor", defaults["partial_rotary_factor"]),
        ),
        activation=family.activation,
        zero_centered_norms=family.zero_centered_norms,
        post_norms=makes(family.rules, POST_ATTENTION_NORM),
        embedding_scale=hidden**0.5 if family.scaled_embedding else 1.0,
        query_scalar=(
            number(config, "query_pre_attn_scalar", defaults["query_pre_attn_scalar"])
            if "query_pre_attn_scalar" in defaults
            else None
        ),
    )


def family_of(config: Mapping[str, Any]) -> ModelFamily:
    """The family that config.json names. Raises ModelError for an unknown one."""
    name = str(config.get("model_type"))[:100]
    if name not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise refused(
            f"model family '{name}' is not supported; supported: {known}."
            f"{did_you_mean(name, FAMILIES)} {HOW_TO_ADD}"
        )
    return FAMILIES[name]


def routing_of(config: Mapping[str, Any]) -> RouterShape | None:
    """How tokens choose experts; None where it is by the largest shares of a softmax. Raises
    ModelError."""
    routing = family_of(config).routing
    return None if routing is None else routing(config)


def window_of(config: Mapping[str, Any]) -> SlidingWindow | None:
    """The window that attention looks back on; None where it looks at all. Raises ModelError."""
    return family_of(config).window(config)


def rules_of(model: Architecture) -> tuple[Rule, ...]:
    """The rules of a model's family that apply to at least one of its layers."""
    return tuple(
        rule
        for rule in FAMILIES[model.family].rules
        if any(model.has(rule.where, layer) for layer in range(model.layers))
    )


def own_rule(model: Architecture, rule: Rule) -> Rule:
    """The rule by which the model's family makes the same Megatron tensor, or the very rule if it
    makes none."""
    return next((own for own in FAMILIES[model.family].rules if own.stands_for(rule)), rule)


def tied_output(model: Architecture) -> Rule:
    """The copy of a tied model's embedding on the last of several pipeline stages."""
    return replace(TIED_OUTPUT, sources=own_rule(model, EMBEDDING).sources)


def placed_rules(model: Architecture) -> Iterator[tuple[Rule, int]]:
    """(rule, layer) in the order of a forward pass; layer is 0 for rules that are not per layer. A
    rule of experts comes once for each of them."""
    rules = rules_of(model)
    yield own_rule(model, EMBEDDING), 0
    for layer in range(model.layers):
        for rule in rules:
            if rule.per_expert and model.experts is not None and model.has(rule.where, layer):
                yield from (
                    (rule.of_expert(expert), layer) for expert in range(model.experts.count)
                )
            elif rule.per_layer and model.has(rule.where, layer):
                yield rule, layer
    for rule in rules:
        if not rule.per_layer and not rule.stands_for(EMBEDDING):
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


def _checked_window(config: dict[str, Any], family: ModelFamily) -> SlidingWindow | None:
    """The window of layers that are to be computed. Raises ModelError where it is not known which
    layers have it, and for what layers of the family compute otherwise here."""
    key = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    activation = config.get(key) or family.activation
    if activation != family.activation:
        raise refused(
            f"{key} {short(activation)} is not supported; expected '{family.activation}'."
        )
    for key in UNKNOWN_COMPUTATIONS:
        if config.get(key):
            raise refused(f"{key} {short(config[key])} is not supported; expected null.")
    window = family.window(config)
    kinds = config.get("layer_types") or ()
    named = isinstance(kinds, list | tuple | str) and SLIDING in kinds
    unknown = named if window is None else window.layers is None
    if unknown:
        raise refused("sliding-window attention is not supported; expected sliding_window null.")
    return window


def _latent(config: dict[str, Any]) -> Latent:
    return Latent(
        query_rank=None if config.get("q_lora_rank") is None else whole(config, "q_lora_rank"),
        key_rank=whole(config, "kv_lora_rank"),
        plain=whole(config, "qk_nope_head_dim"),
        rotating=whole(config, "qk_rope_head_dim"),
        value=whole(config, "v_head_dim"),
    )


def _check_latent(config: dict[str, Any], model: Architecture) -> None:
    """Raises ModelError for latent attention that Megatron does not compute as transformers do."""
    if model.groups != model.heads:
        raise refused(
            f"num_key_value_heads {model.groups} is not supported with latent attention; expected "
            f"{model.heads}, as many as num_attention_heads."
        )
    if not config.get("rope_interleave", True):
        raise refused("rope_interleave=false is not supported; expected true.")
    if model.norm_eps != 1e-6:  # transformers takes it for the norms within attention anyway
        raise refused(
            f"rms_norm_eps {model.norm_eps:g} is not supported with latent attention; expected "
            "1e-06."
        )


def _switched_on(config: dict[str, Any], family: ModelFamily) -> set[Where]:
    """Of SWITCHES, what the family's table has and config.json says. Raises ModelError for entries
    that mean tensors which the table does not have."""
    name, switches = config["model_type"], {rule.where for rule in family.rules} & SWITCHES
    attention, mlp = flag(config, "attention_bias"), flag(config, "mlp_bias")
    on: set[Where] = set()
    if Where.BIASES in switches:
        if attention != mlp:
            raise refused(
                f"attention_bias={attention} with mlp_bias={mlp} is not supported; "
                "Megatron has both or neither (add_bias_linear)."
            )
        on |= {Where.BIASES} if mlp else set()
    elif Where.QKV_BIAS in switches and attention:
        on.add(Where.QKV_BIAS)
    elif attention and not makes(family.rules, QKV_BIAS):
        raise refused(f"attention_bias=true is not supported for model family '{name}'.")
    if mlp and Where.BIASES not in on:
        raise refused(f"mlp_bias=true is not supported for model family '{name}'.")
    if Where.QK_NORM in switches and flag(config, "use_qk_norm"):
        on.add(Where.QK_NORM)
    _refuse_other_tensors(config, name)
    return on


def _refuse_other_tensors(config: dict[str, Any], family: str) -> None:
    if not config.get("qkv_bias", True):
        raise refused(f"qkv_bias=false is not supported for model family '{family}'.")
    if config.get("moe_layer_freq", 1) != 1:
        raise refused(f"moe_layer_freq={config['moe_layer_freq']} is not supported; expected 1.")
    quantized = config.get("quantization_config")
    if quantized and not _scaled_by_block(quantized):
        method = (
            quantized.get("quant_method", "unknown")
            if isinstance(quantized, dict)
            else short(quantized)
        )
        raise refused(
            f"weights quantized by '{method}' are not supported; expected 16 or "
            "32-bit floats, or fp8 with weight_block_size [128, 128]."
        )


def _scaled_by_block(quantized: Any) -> bool:
    """Whether weights are as DeepSeek-V3 has them: e4m3, with a scale per 128 x 128."""
    wanted = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return (
        isinstance(quantized, dict)
        and all(quantized.get(key) == value for key, value in wanted.items())
        and quantized.get("fmt", "e4m3") == "e4m3"
    )


def _check_rope(rope: dict[str, Any]) -> None:
    """Raises ModelError for scaling other than linear, or Llama 3's with the constants that
    Megatron fixes."""
    kind = rope_kind(rope)
    if kind in ("default", "linear"):
        return
    fixed = {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    found = {key: rope.get(key) for key in fixed}
    if kind != "llama3" or found != fixed:
        raise refused(
            f"rope scaling '{kind}' with {found} is not supported; default, linear, or llama3 "
            f"with {fixed}."
        )
