"""Checkpoints of every format as tensors by name: which bytes of which file hold what."""
