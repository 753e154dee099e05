"""Qwen1.5-MoE and Qwen2-MoE: a token weighs the MLP beside the experts."""

from typing import Any

from rlflow.models.family import ModelFamily
from rlflow.models.layer_rules import (
    DENSE_LAYER,
    EMBEDDING,
    FINAL_NORM,
    OUTPUT,
    QKV_BIAS,
    SHARED_GATE,
    shared_mlp,
    sparse_mlp,
)
from rlflow.models.tiny_sizes import TinySizes, dense_sizes, expert_sizes

EXPERTS = (*sparse_mlp(), *shared_mlp("shared_expert"), SHARED_GATE)


def tiny(sizes: TinySizes) -> dict[str, Any]:
    shared = {"shared_expert_intermediate_size": sizes.ffn}
    return {**dense_sizes(sizes), **expert_sizes(sizes), **shared}


FAMILY = ModelFamily(
    rules=(EMBEDDING, *DENSE_LAYER, QKV_BIAS, *EXPERTS, FINAL_NORM, OUTPUT),
    tiny=tiny,
)
