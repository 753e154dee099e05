"""HuggingFace <-> Megatron weights: reading and writing directories, mapping tables per family, splitting over ranks."""
