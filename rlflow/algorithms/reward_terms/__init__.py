"""Reward terms: Batch -> (B,) or (B, T), added to the rewards before the advantage. One small file per method."""

from __future__ import annotations

BUILT_IN = {
    "kl": "rlflow.algorithms.reward_terms.kl:KLPenalty",
    "overlong": "rlflow.algorithms.reward_terms.overlong:overlong",
    "turn_mean": "rlflow.algorithms.reward_terms.turn_mean:turn_mean",
    "affine": "rlflow.algorithms.reward_terms.affine:affine",
}
"""Name -> `module:Name`."""
