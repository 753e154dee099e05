"""Entries of a config.json, checked where they are read, and those of a mixture of experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlflow.errors import ModelError

PREDICTING = "num_nextn_predict_layers"
"""The entry for layers of multi-token prediction."""
MOST, MOST_LAYERS, MOST_FLOAT = 2**31 - 1, 2**16, 1e30
"""Above these, an entry is a mistake, and planning with it would take all memory."""


def refused(text: str) -> ModelError:
    """The error for a config.json."""
    return ModelError(f"config.json: {text}")


def whole(
    config: Mapping[str, Any],
    *keys: str,
    default: int | None = None,
    least: int = 1,
    most: int = MOST,
) -> int:
    """The first of these entries that is there. Raises ModelError unless it is a whole number from
    `least` to `most`."""
    key = next((key for key in keys if config.get(key) is not None), keys[0])
    found = default if config.get(key) is None else config[key]
    if not isinstance(found, int) or isinstance(found, bool):
        raise refused(f"'{key}' is missing or not a whole number (found {short(found)}).")
    if not least <= found <= most:
        raise refused(f"'{key}' is {short(found)}; expected a number from {least} to {most}.")
    return found


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Raises ModelError unless the entry is a finite number above 0."""
    found: Any = default if config.get(key) is None else config[key]
    numeric = isinstance(found, int | float) and not isinstance(found, bool)
    if not numeric or not 0 < found < MOST_FLOAT:
        raise refused(f"'{key}' is {short(found)}; expected a number above 0.")
    return float(found)


def flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """Raises ModelError unless the entry is true, false or not there."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise refused(f"'{key}' is {short(value)}; expected true or false.")
    return value


def short(value: Any) -> str:
    """A value as a message shows it."""
    if isinstance(value, int) and abs(value) > MOST_FLOAT:
        return "a number of more than 30 digits"
    return repr(value)[:60]


FULL = "full_attention"
SLIDING = "sliding_attention"
"""Kinds of layers, as `layer_types` names them."""


def rope_of(config: Mapping[str, Any], kind: str = FULL) -> dict[str, Any]:
    """The entry for rotary embeddings, in the spelling of transformers 5 or 4; of both, the one
    that transformers takes. kind: of the layers; none but FULL has an entry unless each kind has
    one of its own. Raises ModelError unless it is an object."""
    parameters = _object(config, "rope_parameters")
    scaling = _object(config, "rope_scaling")
    if kind != FULL:
        return _object(parameters, kind)
    if {FULL, SLIDING} & parameters.keys():
        return {**_object(parameters, FULL), **scaling}
    return scaling or parameters


def _object(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An entry that is an object, empty where it is not there. Raises ModelError."""
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise refused(f"'{key}' is {short(value)}; expected an object or null.")
    return value


def rope_kind(rope: Mapping[str, Any]) -> str:
    """How rotary embeddings are scaled: `default`, `linear`, `llama3`, `yarn`, ..."""
    return str(rope.get("rope_type") or rope.get("type") or "default")


def predicting_layers(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What the names of tensors for multi-token prediction begin with: layers after the model's
    own, which transformers passes over. Raises ModelError."""
    count = whole(config, PREDICTING, default=0, least=0, most=MOST_LAYERS)
    first = whole(config, "num_hidden_layers", most=MOST_LAYERS) if count else 0
    return tuple(f"model.layers.{first + number}." for number in range(count))


@dataclass(frozen=True)
class SlidingWindow:
    """Attention that looks back on so many tokens, the current one included, from a layer on.

    layers: for each layer, whether it does; None where that is known well enough for a conversion
    alone. rope_theta: base of these layers' rotary embedding; None: that of the others."""

    tokens: int
    first_layer: int = 0
    layers: tuple[bool, ...] | None = None
    rope_theta: float | None = None


def sliding_window(config: Mapping[str, Any], default: int | None = None) -> SlidingWindow | None:
    """Of families that look back on a window in every layer unless it is null. default: what
    transformers takes where config.json does not say it. Raises ModelError."""
    tokens = config.get("sliding_window", default)
    if tokens is None:
        return None
    layers = whole(config, "num_hidden_layers", most=MOST_LAYERS)
    return SlidingWindow(
        whole({"sliding_window": tokens}, "sliding_window"), layers=(True,) * layers
    )


def window_if_used(config: Mapping[str, Any]) -> SlidingWindow | None:
    """Of families whose window must be switched on, such as Qwen. Raises ModelError."""
    window = sliding_window(config, 4096) if config.get("use_sliding_window") else None
    if window is None:
        return None
    first = whole(config, "max_window_layers", default=0, least=0)
    return replace(window, first_layer=first, layers=None)


def alternating_window(
    config: Mapping[str, Any], default: int, pattern: int, rope_theta: float
) -> SlidingWindow | None:
    """Of families in which the layers that `layer_types` names look back on a window, with a rotary
    base of their own (`rope_local_base_freq` of transformers 4). default, pattern, rope_theta: what
    transformers takes where config.json says neither the window, nor the layers (each so many-th
    has none), nor the base. Raises ModelError."""
    window = sliding_window(config, default)
    if window is None:
        raise refused("'sliding_window' is null; expected a number of tokens.")
    assert window.layers is not None
    every = whole(config, "sliding_window_pattern", default=pattern)
    kinds = config.get("layer_types") or [
        SLIDING if number % every else FULL for number in range(1, len(window.layers) + 1)
    ]
    known = isinstance(kinds, list) and all(kind in (FULL, SLIDING) for kind in kinds)
    if not known or len(kinds) != len(window.layers):
        raise refused(
            f"'layer_types' is {short(kinds)}; expected '{FULL}' or '{SLIDING}' for each of the "
            f"{len(window.layers)} layers."
        )
    rope = rope_of(config, SLIDING)
    if rope_kind(rope) != "default":
        raise refused(
            f"rope scaling '{rope_kind(rope)}' of layers with a window is not supported; expected "
            "'default'."
        )
    base = number(rope, "rope_theta", number(config, "rope_local_base_freq", rope_theta))
    windowed = tuple(kind == SLIDING for kind in kinds)
    return replace(window, layers=windowed, rope_theta=base) if any(windowed) else None


@dataclass(frozen=True)
class Yarn:
    """Rotary embeddings for more positions than the `original` ones (Peng et al. 2023, arXiv
    2309.00071). beta_fast, beta_slow: turns within the original positions above which a dimension
    stays as it is, and below which it turns slower by `factor`; attention: what cosines and sines
    are multiplied by, and `scores` attention scores, in DeepSeek's variant."""

    factor: float
    original: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float

    @property
    def attention(self) -> float:
        return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)

    @property
    def scores(self) -> float:
        return self._mscale(self.mscale_all_dim) ** 2

    def _mscale(self, share: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * share * math.log(self.factor) + 1.0


def yarn_of(rope: Mapping[str, Any]) -> Yarn | None:
    """The entries of DeepSeek; None for another scaling. Raises ModelError for what Megatron
    computes otherwise than transformers."""
    if rope_kind(rope) != "yarn":
        return None
    both = [rope.get(name) for name in ("mscale", "mscale_all_dim")]
    if any(both) != all(both) or rope.get("attention_factor") or not rope.get("truncate", True):
        raise refused(
            "rope scaling 'yarn' is supported with both or none of mscale and mscale_all_dim, and "
            "without attention_factor and truncate."
        )
    return Yarn(
        factor=number(rope, "factor"),
        original=whole(rope, "original_max_position_embeddings"),
        beta_fast=number(rope, "beta_fast", 32.0),
        beta_slow=number(rope, "beta_slow", 1.0),
        mscale=number(rope, "mscale", 1.0) if all(both) else 1.0,
        mscale_all_dim=number(rope, "mscale_all_dim") if all(both) else 0.0,
    )


@dataclass(frozen=True)
class Experts:
    """Mixture of experts. ffn: width of one expert. shared_ffn: of the MLP that every token passes
    through, 0 without. sparse: for each layer, whether it has experts. top_k: experts of a token, 0
    where config.json does not say. normalized: their weights add up to one."""

    count: int
    ffn: int
    shared_ffn: int
    sparse: tuple[bool, ...]
    top_k: int = 0
    normalized: bool = False


@dataclass(frozen=True)
class RouterShape:
    """How tokens choose experts, where it is not by the largest shares of a softmax alone. sigmoid:
    each expert is scored by itself, and chosen by its score and a bias (DeepSeek-V3, arXiv
    2412.19437, section 2.1.2). groups: only experts of the best `chosen` of so many groups are
    taken. scaling: what their weights are multiplied by."""

    sigmoid: bool
    groups: int
    chosen: int
    scaling: float


def sigmoid_routing(
    config: Mapping[str, Any], groups: int = 1, chosen: int = 1, scaling: float = 1.0
) -> RouterShape:
    """Of families whose routers score each expert by itself, with a bias. groups, chosen, scaling:
    what transformers takes where config.json does not say them. Raises ModelError."""
    groups = whole(config, "n_group", default=groups)
    return RouterShape(
        sigmoid=True,
        groups=groups,
        chosen=whole(config, "topk_group", default=chosen, most=groups) if groups > 1 else 1,
        scaling=number(config, "routed_scaling_factor", scaling),
    )


def scaled_softmax_routing(config: Mapping[str, Any]) -> RouterShape:
    """Of families that choose by a softmax, multiply its shares, and keep to the best groups of
    experts unless `topk_method` is greedy. Raises ModelError."""
    limited = config.get("topk_method", "greedy") != "greedy"
    groups = whole(config, "n_group", default=1) if limited else 1
    return RouterShape(
        sigmoid=False,
        groups=groups,
        chosen=whole(config, "topk_group", default=1, most=groups) if groups > 1 else 1,
        scaling=number(config, "routed_scaling_factor", 1.0),
    )


def experts_of(config: Mapping[str, Any], normalized: bool = False) -> Experts:
    """The entries of Qwen, Mixtral and DeepSeek, whose names differ. normalized: whatever
    norm_topk_prob says. Raises ModelError."""
    ffn = whole(config, "moe_intermediate_size", "intermediate_size")
    layers = whole(config, "num_hidden_layers", most=MOST_LAYERS)
    first = whole(config, "first_k_dense_replace", default=0, least=0)
    every = whole(config, "decoder_sparse_step", default=1)
    dense = config.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple):
        raise refused(f"'mlp_only_layers' is {short(dense)}; expected a list of layers.")
    shared = whole(config, "n_shared_experts", default=0, least=0) * ffn
    return Experts(
        count=whole(
            config, "num_experts", "num_local_experts", "n_routed_experts", most=MOST_LAYERS
        ),
        ffn=ffn,
        shared_ffn=whole(config, "shared_expert_intermediate_size", default=0, least=0) or shared,
        sparse=tuple(
            layer >= first and layer not in dense and (layer + 1) % every == 0
            for layer in range(layers)
        ),
        top_k=whole(config, "num_experts_per_tok", default=0, least=0),
        normalized=normalized or flag(config, "norm_topk_prob"),
    )


def router_aux_loss(config: Mapping[str, Any]) -> float:
    """The coefficient of the load-balancing loss that transformers adds where
    `output_router_logits` is set; else 0. Raises ModelError."""
    coefficient = config.get("router_aux_loss_coef")
    if not flag(config, "output_router_logits") or not coefficient:
        return 0.0
    return number(config, "router_aux_loss_coef")


def check_routing(config: dict[str, Any], experts: Experts, routing: RouterShape | None) -> None:
    """Raises ModelError for a routing that Megatron does not have."""
    if routing is not None:
        _check_special_routing(config, experts, routing)
    least = 2 if experts.normalized else 1  # the weight of one expert would always be 1
    if not least <= experts.top_k <= experts.count:
        raise refused(
            f"'num_experts_per_tok' is {experts.top_k}; expected {least} to {experts.count}."
        )
    if config.get("router_jitter_noise"):
        raise refused("router_jitter_noise is not supported; expected 0.")


def _check_special_routing(config: dict[str, Any], experts: Experts, routing: RouterShape) -> None:
    if routing.sigmoid != experts.normalized:
        expected = str(routing.sigmoid).lower()
        raise refused(f"norm_topk_prob is not supported here; expected {expected}.")
    if routing.groups == 1:
        return
    if not routing.sigmoid:
        method = short(config.get("topk_method"))
        raise refused(f"topk_method {method} is not supported; expected 'greedy'.")
    # Megatron ranks a group by its best top_k / chosen experts, these families by its best two
    if experts.count % routing.groups or experts.top_k // routing.chosen != 2:
        raise refused(
            f"'topk_group' is {routing.chosen} of {routing.groups} groups for {experts.top_k} of "
            f"{experts.count} experts; expected groups of one size, and half of "
            "'num_experts_per_tok' as 'topk_group'."
        )
