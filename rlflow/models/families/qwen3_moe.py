"""Qwen3 with experts."""

from rlflow.models.family import Family
from rlflow.models.layer_rules import (
    DENSE_LAYER,
    EMBEDDING,
    FINAL_NORM,
    K_NORM,
    OUTPUT,
    Q_NORM,
    sparse_mlp,
)

FAMILY = Family(rules=(EMBEDDING, *DENSE_LAYER, Q_NORM, K_NORM, *sparse_mlp(), FINAL_NORM, OUTPUT))
