"""Advantages, token weights and losses: pure tensor code over a Batch. Torch only."""

from rlflow.algorithms.advantages.grpo import grpo
from rlflow.algorithms.base import SumLoss
from rlflow.algorithms.components import make_advantage, make_loss
from rlflow.algorithms.losses.entropy import EntropyLoss
from rlflow.algorithms.losses.kl import KLLoss
from rlflow.algorithms.losses.ppo_clip import PPOClipLoss
from rlflow.algorithms.losses.sft import SFTLoss
from rlflow.algorithms.token_weights import token_weights

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
