"""DeepSeek-V2: latent attention, experts beside a shared MLP."""

from typing import Any

from rlflow.models.entries import scaled_softmax_routing
from rlflow.models.family import ModelFamily
from rlflow.models.layer_rules import (
    DENSE_MLP,
    EMBEDDING,
    FINAL_NORM,
    LATENT_ATTENTION,
    OUTPUT,
    shared_mlp,
    sparse_mlp,
)
from rlflow.models.tiny_sizes import TinySizes, dense_sizes, grouped_expert_sizes, latent_sizes

EXPERTS = (*sparse_mlp(), *shared_mlp("shared_experts"))


def tiny(sizes: TinySizes) -> dict[str, Any]:
    experts = {**grouped_expert_sizes(sizes), "norm_topk_prob": False}
    return {**dense_sizes(sizes), **experts, **latent_sizes(sizes)}


FAMILY = ModelFamily(
    rules=(EMBEDDING, *LATENT_ATTENTION, *DENSE_MLP, *EXPERTS, FINAL_NORM, OUTPUT),
    routing=scaled_softmax_routing,
    tiny=tiny,
)
