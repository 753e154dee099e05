"""The embedded engine: continuous batching in this process, on a CPU or one GPU."""
