"""GLM-4.5 and GLM-4.6: biases and norms of queries and keys are optional, heads rotate in part."""

from typing import Any

from rlflow.models.entries import sigmoid_routing
from rlflow.models.family import ModelFamily
from rlflow.models.layer_rules import (
    DENSE_LAYER,
    EMBEDDING,
    FINAL_NORM,
    OPTIONAL_QK_NORM,
    OPTIONAL_QKV_BIAS,
    OUTPUT,
    ROUTER_BIAS,
    shared_mlp,
    sparse_mlp,
)
from rlflow.models.tiny_sizes import TinySizes, dense_sizes, grouped_expert_sizes

ATTENTION_OPTIONS = (OPTIONAL_QKV_BIAS, *OPTIONAL_QK_NORM)
EXPERTS = (*sparse_mlp(), ROUTER_BIAS, *shared_mlp("shared_experts"))


def tiny(sizes: TinySizes) -> dict[str, Any]:
    return {**dense_sizes(sizes), **grouped_expert_sizes(sizes), "head_dim": sizes.head_dim}


FAMILY = ModelFamily(
    rules=(EMBEDDING, *DENSE_LAYER, *ATTENTION_OPTIONS, *EXPERTS, FINAL_NORM, OUTPUT),
    defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    routing=sigmoid_routing,
    tiny=tiny,
)
