"""Aggregates: each token's share in the loss of one optimizer step, (B, T) float32, 0 off the loss
mask. The whole difference between a mean over tokens, over sequences or over trajectories, and
Dr.GRPO's constant. One small file per idea."""

BUILT_IN = {
    "token_mean": "rlflow.algorithms.aggregates.means:token_mean",
    "sequence_mean": "rlflow.algorithms.aggregates.means:sequence_mean",
    "trajectory_mean": "rlflow.algorithms.aggregates.means:trajectory_mean",
    "constant": "rlflow.algorithms.aggregates.constant:constant",
}
"""Name -> `module:Name`."""
