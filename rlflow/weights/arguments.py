"""Megatron's arguments, as a checkpoint keeps them, in the words of this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODEL = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "kv_channels": "head_dim",
    "ffn_hidden_size": "ffn",
    "norm_epsilon": "norm_eps",
    "rotary_base": "rope_theta",
}
"""Arguments by field of `families.Architecture`."""
LAYOUT = {
    "tensor_model_parallel_size": "tensor_parallel",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline_parallel",
    "expert_model_parallel_size": "expert_parallel",
    "context_parallel_size": "context_parallel",
    "data_parallel_size": "data_parallel",
}


def described_model(args: Mapping[str, Any]) -> dict[str, Any]:
    """{field of Architecture: value} of the arguments that are given."""
    found = {ours: args[theirs] for theirs, ours in MODEL.items() if args.get(theirs) is not None}
    if args.get("group_query_attention"):
        found["groups"] = args.get("num_query_groups")
    return found


def described_layout(args: Mapping[str, Any]) -> dict[str, int]:
    """{`tensor_parallel`: ranks, ...} of the arguments that are given."""
    return {ours: args[theirs] for theirs, ours in LAYOUT.items() if isinstance(args.get(theirs), int)}
