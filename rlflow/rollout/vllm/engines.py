"""The component `vllm`: as many engines as are asked for, ready for use."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

from rlflow.components import takes
from rlflow.rollout.engine import Engine, check_sizes
from rlflow.rollout.tokenizer import Tokenizer
from rlflow.rollout.vllm.engine import VLLMEngine

logger = logging.getLogger(__name__)


@takes(VLLMEngine)
def make_vllm_engines(
    path: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    engines: int = 1,
    max_tokens: int | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    seed: int = 0,
    deterministic: bool = False,
    trust_remote_code: bool = False,
    **options: Any,
) -> list[Engine]:
    """`engines` engines over the same model; options: keywords of VLLMEngine. They start side by side.

    Raises RolloutError where one of them does not start; no process is left then."""
    check_sizes("rollout.engine", engines=engines)
    shared: dict[str, Any] = {"max_tokens": max_tokens, "dtype": dtype, "trust_remote_code": trust_remote_code}
    made: list[VLLMEngine] = []
    try:
        for number in range(engines):
            made.append(
                VLLMEngine(path, tokenizer, seed=seed + number, deterministic=deterministic, **shared, **options)
            )
        logger.info("starting vLLM for %s, %d process(es); this takes half a minute or more", path, engines)
        for engine in made:
            engine.wait_until_ready()
    except BaseException:
        for engine in made:
            engine.kill()
        raise
    return list(made)
