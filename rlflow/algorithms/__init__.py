"""Advantages, token weights and losses: pure tensor code over a Batch. Torch only."""

from rlflow.algorithms.advantages.grpo import grpo
from rlflow.algorithms.token_weights import token_weights
from rlflow.algorithms.components import make_advantage, make_loss
from rlflow.algorithms.losses.ppo_clip import EntropyLoss, KLLoss, PPOClipLoss, SFTLoss, SumLoss

__all__ = [
    "EntropyLoss",
    "KLLoss",
    "PPOClipLoss",
    "SFTLoss",
    "SumLoss",
    "grpo",
    "make_advantage",
    "make_loss",
    "token_weights",
]
