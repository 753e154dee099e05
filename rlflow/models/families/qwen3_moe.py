"""Qwen3 with experts."""

from typing import Any

from rlflow.models.family import ModelFamily
from rlflow.models.layer_rules import (
    DENSE_LAYER,
    EMBEDDING,
    FINAL_NORM,
    K_NORM,
    OUTPUT,
    Q_NORM,
    sparse_mlp,
)
from rlflow.models.tiny_sizes import TinySizes, dense_sizes, expert_sizes


def tiny(sizes: TinySizes) -> dict[str, Any]:
    return {**dense_sizes(sizes), **expert_sizes(sizes), "head_dim": sizes.head_dim}


FAMILY = ModelFamily(
    rules=(EMBEDDING, *DENSE_LAYER, Q_NORM, K_NORM, *sparse_mlp(), FINAL_NORM, OUTPUT),
    tiny=tiny,
)
