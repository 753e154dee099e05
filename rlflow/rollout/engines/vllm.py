"""vLLM in processes that rlflow starts."""

from __future__ import annotations

from rlflow.rollout.vllm.engines import make_vllm_engines

ENGINE = make_vllm_engines
