"""Advantages: how much better an attempt was than its group. One small file per method."""
