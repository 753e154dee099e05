"""Conversion of checkpoints between Megatron and HuggingFace, on the command line."""
