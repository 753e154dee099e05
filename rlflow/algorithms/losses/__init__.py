"""Loss terms: (PolicyOutput, Batch) -> per-token loss (B, T). One small file per term."""
