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

    defaults: rms_norm_eps, rope_theta and partial_rotary_factor where config.json leaves them out,
    if transformers does not take 1e-6, 1e4 and 1. Naming the last says that models of the family
    may rotate a part of each head.

    window, experts, routing: readers of what config.json says of sliding windows, of experts (asked
    where rules have some) and of how tokens choose them (None: the largest shares of a softmax).
    They raise ModelError.

    tiny: what the config.json of a tiny model says beside the sizes that all families have; None:
    `write_random_model` makes none of the family."""

    rules: tuple[Rule, ...]
    defaults: Mapping[str, float] = field(default_factory=dict)
    window: Callable[[Config], SlidingWindow | None] = window_if_used
    experts: Callable[[Config], Experts] = experts_of
    routing: Callable[[Config], RouterShape] | None = None
    tiny: Callable[[TinySizes], dict[str, Any]] | None = None
