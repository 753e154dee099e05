"""Aggregates: each token's share in the loss of one optimizer step, (B, T) float32, 0 off the loss mask. The whole difference
between a mean over tokens, over sequences or over trajectories, and Dr.GRPO's constant."""

BUILT_IN = {
    "token_mean": f"{__name__}.means:token_mean",
    "sequence_mean": f"{__name__}.means:sequence_mean",
    "trajectory_mean": f"{__name__}.means:trajectory_mean",
    "constant": f"{__name__}.constant:constant",
}
"""Name -> where."""
