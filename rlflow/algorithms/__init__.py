"""Advantages, token weights and losses: pure tensor code over a Batch. Torch only; methods are
imported when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlflow.algorithms.advantages.gae import GAE
    from rlflow.algorithms.advantages.grpo import grpo
    from rlflow.algorithms.advantages.vtrace import VTrace
    from rlflow.algorithms.aggregates.means import token_mean
    from rlflow.algorithms.aggregates.means import token_mean as token_weights
    from rlflow.algorithms.base import SumLoss
    from rlflow.algorithms.losses.entropy import EntropyLoss
    from rlflow.algorithms.losses.kl import KLLoss
    from rlflow.algorithms.losses.ppo_clip import PPOClipLoss
    from rlflow.algorithms.losses.sft import SFTLoss
    from rlflow.algorithms.losses.value import ValueLoss

__all__ = [
    "EntropyLoss",
    "GAE",
    "KLLoss",
    "PPOClipLoss",
    "SFTLoss",
    "SumLoss",
    "VTrace",
    "ValueLoss",
    "grpo",
    "token_mean",
    "token_weights",
]

_HOMES = {
    "EntropyLoss": "losses.entropy:EntropyLoss",
    "GAE": "advantages.gae:GAE",
    "KLLoss": "losses.kl:KLLoss",
    "PPOClipLoss": "losses.ppo_clip:PPOClipLoss",
    "SFTLoss": "losses.sft:SFTLoss",
    "SumLoss": "base:SumLoss",
    "VTrace": "advantages.vtrace:VTrace",
    "ValueLoss": "losses.value:ValueLoss",
    "grpo": "advantages.grpo:grpo",
    "token_mean": "aggregates.means:token_mean",
    # The usual weights of a script that does not choose
    "token_weights": "aggregates.means:token_mean",
}


def __getattr__(name: str) -> Any:
    """The public name from its module (PEP 562): whoever asks for the names of the methods need not
    import them."""
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    module, _, attribute = _HOMES[name].partition(":")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    globals()[name] = value
    return value
