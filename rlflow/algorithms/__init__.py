"""Advantages, token weights and losses: pure tensor code over a Batch. Torch only; methods are imported when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlflow.algorithms.token_weights import token_weights

if TYPE_CHECKING:
    from rlflow.algorithms.advantages.grpo import grpo
    from rlflow.algorithms.base import SumLoss
    from rlflow.algorithms.losses.entropy import EntropyLoss
    from rlflow.algorithms.losses.kl import KLLoss
    from rlflow.algorithms.losses.ppo_clip import PPOClipLoss
    from rlflow.algorithms.losses.sft import SFTLoss

__all__ = ["EntropyLoss", "KLLoss", "PPOClipLoss", "SFTLoss", "SumLoss", "grpo", "token_weights"]

_HOMES = {
    "EntropyLoss": "losses.entropy",
    "KLLoss": "losses.kl",
    "PPOClipLoss": "losses.ppo_clip",
    "SFTLoss": "losses.sft",
    "SumLoss": "base",
    "grpo": "advantages.grpo",
}


def __getattr__(name: str) -> Any:
    """The public name from its module (PEP 562): whoever asks for the names of the methods need not import them."""
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
