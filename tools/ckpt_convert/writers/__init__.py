"""Checkpoints and model directories laid out before the first byte is copied, complete or
absent."""
