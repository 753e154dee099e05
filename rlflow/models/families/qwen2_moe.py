"""Qwen1.5-MoE and Qwen2-MoE: a token weighs the MLP beside the experts."""

from rlflow.models.family import Family
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

EXPERTS = (*sparse_mlp(), *shared_mlp("shared_expert"), SHARED_GATE)

FAMILY = Family(rules=(EMBEDDING, *DENSE_LAYER, QKV_BIAS, *EXPERTS, FINAL_NORM, OUTPUT))
