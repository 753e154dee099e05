"""What rlflow knows of a family of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlflow.models.entries import Experts, RouterShape, SlidingWindow, experts_of, window_if_used
from rlflow.models.rules import Rule
from rlflow.models.tiny_sizes import TinySizes

Config = Mapping[str, Any]
"""A config.json, in the spelling of transformers 4 or 5."""


@dataclass(frozen=True)
class ModelFamily:
    """What is particular to the models of one `model_type`; what is left out is as of a Llama.
    docs/add_a_model_family.md shows how to add one.

    rules: of which HuggingFace tensors Megatron's are made, in the order of a forward pass. They
    also say which parts the layers have: norms of heads, experts, latent attention, ...

    defaults: what transformers takes where config.json leaves an entry out: rms_norm_eps (else
    1e-6), rope_theta (1e4), head_dim (a head's share of hidden_size), max_position_embeddings
    (32768), tie_word_embeddings (false), partial_rotary_factor (1), query_pre_attn_scalar
    (head_dim). Naming one of the last two says that models of the family may rotate a part of each
    head, or scale attention scores by it.

    activation: of the MLP's gate, as config.json names it: silu or gelu_pytorch_tanh.
    zero_centered_norms: norms multiply by 1 + weight, in float32. scaled_embedding: embeddings are
    multiplied by the root of hidden_size, rounded to their dtype.

    window, experts, routing: readers of what config.json says of sliding windows, of experts (asked
    where rules have some) and of how tokens choose them (None: the largest shares of a softmax).
    They raise ModelError.

    tiny: what the config.json of a tiny model says beside the sizes that all families have; None:
    `write_random_model` makes none of the family."""

    rules: tuple[Rule, ...]
    defaults: Mapping[str, float] = field(default_factory=dict)
    activation: str = "silu"
    zero_centered_norms: bool = False
    scaled_embedding: bool = False
    window: Callable[[Config], SlidingWindow | None] = window_if_used
    experts: Callable[[Config], Experts] = experts_of
    routing: Callable[[Config], RouterShape] | None = None
    tiny: Callable[[TinySizes], dict[str, Any]] | None = None
