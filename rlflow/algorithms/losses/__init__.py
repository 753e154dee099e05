"""Loss terms: (PolicyOutput, Batch) -> per-token loss (B, T). One small file per term."""

from __future__ import annotations

BUILT_IN = {
    "ppo_clip": "rlflow.algorithms.losses.ppo_clip:PPOClipLoss",
    "kl": "rlflow.algorithms.losses.kl:KLLoss",
    "entropy": "rlflow.algorithms.losses.entropy:EntropyLoss",
    "entropy_target": "rlflow.algorithms.losses.entropy:EntropyTargetLoss",
    "value": "rlflow.algorithms.losses.value:ValueLoss",
    "sft": "rlflow.algorithms.losses.sft:SFTLoss",
}
"""Name -> `module:Name`."""
