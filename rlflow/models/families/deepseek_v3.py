"""DeepSeek-V3 and DeepSeek-R1: the layers of V2, and a bias by which the router chooses."""

from functools import partial
from typing import Any

from rlflow.models.entries import sigmoid_routing
from rlflow.models.family import ModelFamily
from rlflow.models.layer_rules import (
    DENSE_MLP,
    EMBEDDING,
    FINAL_NORM,
    LATENT_ATTENTION,
    OUTPUT,
    ROUTER_BIAS,
    shared_mlp,
    sparse_mlp,
)
from rlflow.models.tiny_sizes import TinySizes, dense_sizes, grouped_expert_sizes, latent_sizes

EXPERTS = (*sparse_mlp(), *shared_mlp("shared_experts"), ROUTER_BIAS)


def tiny(sizes: TinySizes) -> dict[str, Any]:
    return {**dense_sizes(sizes), **grouped_expert_sizes(sizes), **latent_sizes(sizes)}


FAMILY = ModelFamily(
    rules=(EMBEDDING, *LATENT_ATTENTION, *DENSE_MLP, *EXPERTS, FINAL_NORM, OUTPUT),
    routing=partial(sigmoid_routing, groups=8, chosen=4, scaling=2.5),
    tiny=tiny,
)
