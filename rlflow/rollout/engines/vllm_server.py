"""vLLM at the URLs of servers that run already."""

from __future__ import annotations

from rlflow.rollout.vllm.engines import make_vllm_server_engines

ENGINE = make_vllm_server_engines
