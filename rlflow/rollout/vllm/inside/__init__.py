"""Code that runs under vLLM's interpreter, as the package `rlflow_vllm`: it imports the standard
library, vLLM and what vLLM depends on, and nothing of rlflow."""
