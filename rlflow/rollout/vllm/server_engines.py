"""The component `vllm_server`: engines over servers that somebody runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rlflow.errors import ConfigError
from rlflow.models.huggingface import iterate_weights
from rlflow.rollout.engine import Engine
from rlflow.rollout.event_loop import LoopThread
from rlflow.rollout.tokenizer import Tokenizer
from rlflow.rollout.vllm.queueing import QueueingEngine
from rlflow.rollout.vllm.served_model import check_served_model
from rlflow.rollout.vllm.server import ServedVLLM, check_folder
from rlflow.rollout.vllm.start import all_ready, check_deterministic


class VLLMServerEngine(QueueingEngine):
    """The model of `vllm serve` at a URL, with exact tokens. See `make_vllm_server_engines`."""

    def __init__(self, path: str | Path, tokenizer: Tokenizer | None, url: str, *, model: str | None = None,
                 api_key_variable: str = "VLLM_API_KEY", weights_folder: str | None = None, retry_s: float = 60.0,
                 max_concurrency: int = 128, max_tokens: int | None = None, **options: Any) -> None:  # fmt: skip
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"rollout.engine.url: expected an address such as http://localhost:8000, found '{url}'.")
        super().__init__(path, tokenizer, max_concurrency=max_concurrency, max_tokens=max_tokens, **options)
        self.takes_weights = weights_folder is not None
        self._weights_folder = folder = check_folder(weights_folder)
        self._backend = self.server = ServedVLLM(
            url, model=model, key=os.environ.get(api_key_variable), weights_folder=folder, connections=max_concurrency,
            retry_s=retry_s,
        )  # fmt: skip


def make_vllm_server_engines(
    path: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    url: str | Sequence[str],
    model: str | None = None,
    api_key_variable: str = "VLLM_API_KEY",
    weights_folder: str | None = None,
    max_concurrency: int = 128,
    max_tokens: int | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    seed: int = 0,
    deterministic: bool = False,
    bucket_mib: int = 256,
    start_s: float = 60.0,
    answer_s: float = 1800.0,
    retry_s: float = 60.0,
) -> list[Engine]:
    """An engine for each URL, over the model directory `path`, which the servers serve: its config and tokenizer are read here.

    model: its name at the servers; none: the only one. api_key_variable: environment variable with their key; none is sent where
    it is not set. weights_folder: a folder that rlflow and the servers see under the same path, for new weights; they begin with
    those of `path` then. None: they keep those that they have, which are compared with `path`, and cannot be trained with.
    retry_s: how long a request is sent again while nobody answers.

    Raises ConfigError, RolloutError where a server does not answer, is none that can be used, or serves another model."""
    check_deterministic(deterministic)
    urls = [url] if isinstance(url, str) else list(url)
    if not urls:
        raise ConfigError("rollout.engine.url: expected an address or more, found none.")
    making = (
        VLLMServerEngine(
            path, tokenizer, one, model=model, api_key_variable=api_key_variable, weights_folder=weights_folder,
            retry_s=retry_s, max_concurrency=max_concurrency, max_tokens=max_tokens, dtype=dtype, seed=seed + number,
            bucket_mib=bucket_mib, start_s=start_s, answer_s=answer_s,
        )
        for number, one in enumerate(urls)
    )  # fmt: skip
    return all_ready(making, _begin)


def _begin(engine: VLLMServerEngine) -> None:
    """Gives the server the weights of the model directory, or looks whether it has them."""
    thread = LoopThread("rlflow-first-weights")  # who makes engines may be in an event loop
    try:
        if engine.takes_weights:
            thread.run(engine.load_weights(iterate_weights(engine.path), 0))
        else:
            server = engine.server
            thread.run(check_served_model(engine, engine.path, server.name, server.serves))
    finally:
        thread.close()
