"""Processors and GPUs of this machine: products, who gets which GPU, memory that others open."""
