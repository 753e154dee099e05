"""What a script needs to add a model family of its own: the table of families, and the rules that
families share. docs/add_a_model_family.md shows how."""

from rlflow.models.layer_rules import (
    ATTENTION,
    BIASES,
    DENSE_LAYER,
    DENSE_MLP,
    EMBEDDING,
    FAMILIES,
    FINAL_NORM,
    K_NORM,
    LATENT_ATTENTION,
    OUTPUT,
    Q_NORM,
    QKV_BIAS,
    ROUTER_BIAS,
    SHARED_GATE,
)
from rlflow.models.rules import Rule, Split, Where

__all__ = [
    "ATTENTION",
    "BIASES",
    "DENSE_LAYER",
    "DENSE_MLP",
    "EMBEDDING",
    "FAMILIES",
    "FINAL_NORM",
    "K_NORM",
    "LATENT_ATTENTION",
    "OUTPUT",
    "QKV_BIAS",
    "Q_NORM",
    "ROUTER_BIAS",
    "SHARED_GATE",
    "Rule",
    "Split",
    "Where",
]
