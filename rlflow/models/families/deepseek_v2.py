"""DeepSeek-V2: latent attention, experts beside a shared MLP."""

from rlflow.models.entries import scaled_softmax_routing
from rlflow.models.family import Family
from rlflow.models.layer_rules import (
    DENSE_MLP,
    EMBEDDING,
    FINAL_NORM,
    LATENT_ATTENTION,
    OUTPUT,
    shared_mlp,
    sparse_mlp,
)

EXPERTS = (*sparse_mlp(), *shared_mlp("shared_experts"))

FAMILY = Family(
    rules=(EMBEDDING, *LATENT_ATTENTION, *DENSE_MLP, *EXPERTS, FINAL_NORM, OUTPUT),
    routing=scaled_softmax_routing,
)
