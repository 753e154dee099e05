"""Entries of a config.json, checked where they are read, and those of a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlflow.errors import ModelError

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
    found = default if config.get(key) is None else config[key]
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise refused(f"'{key}' is {short(found)}; expected a number above 0.")
    if not 0 < found < MOST_FLOAT:
        raise refused(f"'{key}' is {short(found)}; expected a number above 0.")
    return float(found)


def flag(config: Mapping[str, Any], key: str) -> bool:
    """Raises ModelError unless the entry is true, false or not there."""
    found = config.get(key)
    if found is not None and not isinstance(found, bool):
        raise refused(f"'{key}' is {short(found)}; expected true or false.")
    return bool(found)


def short(value: Any) -> str:
    """A value as a message shows it."""
    if isinstance(value, int) and abs(value) > MOST_FLOAT:
        return "a number of more than 30 digits"
    return repr(value)[:60]


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entry for rotary embeddings, in the spelling of transformers 5 or 4. Raises ModelError
    unless it is an object."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise refused(f"'rope_parameters' is {short(found)}; expected an object or null.")
    return found


def rope_kind(rope: Mapping[str, Any]) -> str:
    """How rotary embeddings are scaled: `default`, `linear`, `llama3`, `yarn`, ..."""
    return str(rope.get("rope_type") or rope.get("type") or "default")


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


def experts_of(config: dict[str, Any]) -> Experts:
    """The entries of Qwen, Mixtral and DeepSeek, whose names differ."""
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
        # Mixtral's always do, and it has no word for it
        normalized=config.get("model_type") == "mixtral" or flag(config, "norm_topk_prob"),
    )


def check_routing(config: dict[str, Any], experts: Experts) -> None:
    """Raises ModelError for a routing that Megatron does not have."""
    least = 2 if experts.normalized else 1  # the weight of one expert would always be 1
    if not least <= experts.top_k <= experts.count:
        raise refused(
            f"'num_experts_per_tok' is {experts.top_k}; expected {least} to {experts.count}."
        )
    if config.get("router_jitter_noise"):
        raise refused("router_jitter_noise is not supported; expected 0.")
