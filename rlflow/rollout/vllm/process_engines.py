"""The vLLM engine, and the component `vllm`: requests wait here, and run in vLLM's process."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, Literal

import torch

from rlflow.components import takes
from rlflow.errors import ConfigError, RolloutError
from rlflow.rollout.engine import Engine, check_sizes
from rlflow.rollout.tokenizer import Tokenizer
from rlflow.rollout.vllm.buckets import Buckets
from rlflow.rollout.vllm.device_buckets import DeviceBuckets, check_device_transfer
from rlflow.rollout.vllm.process import VLLMProcess, find_python
from rlflow.rollout.vllm.queueing import QueueingEngine
from rlflow.rollout.vllm.start import all_ready, check_deterministic

logger = logging.getLogger(__name__)

RESERVED = frozenset({"model", "dtype", "seed", "max_model_len", "max_num_seqs", "tensor_parallel_size", "trust_remote_code",
                      "enable_prefix_caching", "scheduling_policy", "logprobs_mode", "weight_transfer_config",
                      "enable_sleep_mode", "worker_extension_cls"})  # fmt: skip
"""Arguments of vLLM that this engine gives itself."""


class VLLMEngine(QueueingEngine):
    """vLLM's AsyncLLM over a HuggingFace directory, in a process of its own, under an interpreter of its own.

    Requests wait here until one of `max_concurrency` places is free; what runs is batched by vLLM, whose prefix cache keeps the
    history of an episode between its turns. New weights go through files in memory; while they are loaded nothing is sampled, and
    what runs is computed anew before it goes on.

    python: interpreter of an environment with vLLM; none: RLFLOW_VLLM_PYTHON, or this one if vLLM is installed here. max_tokens:
    of a prompt and its completion together; none: the model's positions. tensor_parallel: devices of one engine. kv_gib: of keys
    and values on a CPU. bucket_mib: of weights that are in a file at a time. start_s: until vLLM must be ready. answer_s: how
    long it may be silent while requests run. eager: no compilation and no CUDA graphs. sleep: its memory is given back while
    the trainer works; none: where this process sees a GPU, which is then the one that vLLM takes. transfer: of new
    weights, by files in memory or on the GPU that trainer and vLLM share. arguments: further ones of vLLM's AsyncEngineArgs.
    """

    may_end = True

    def __init__(
        self,
        path: str | Path,
        tokenizer: Tokenizer | None = None,
        *,
        python: str | None = None,
        max_concurrency: int = 128,
        max_tokens: int | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        seed: int = 0,
        deterministic: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel: int = 1,
        kv_gib: int = 1,
        bucket_mib: int = 256,
        start_s: float = 900.0,
        answer_s: float = 1800.0,
        eager: bool | None = None,
        sleep: bool | None = None,
        transfer: Literal["files", "ipc"] = "files",
        arguments: dict[str, Any] | None = None,
    ) -> None:
        check_deterministic(deterministic)
        if reserved := sorted(RESERVED & set(arguments or {})):
            raise ConfigError(f"rollout.engine.arguments: {', '.join(reserved)}: rlflow sets it itself; leave it out.")
        check_sizes("rollout.engine", tensor_parallel=tensor_parallel, kv_gib=kv_gib)
        super().__init__(
            path, tokenizer, max_concurrency=max_concurrency, max_tokens=max_tokens, dtype=dtype, seed=seed,
            bucket_mib=bucket_mib, start_s=start_s, answer_s=answer_s,
        )  # fmt: skip
        if transfer == "ipc":
            check_device_transfer()
        self._transfer = transfer
        self.sleeps = torch.cuda.is_available() if sleep is None else sleep
        job = {
            "model": str(self.path),
            "dtype": dtype,
            "seed": seed % (1 << 32),
            "max_tokens": self._limit,
            "max_concurrency": max_concurrency,
            "tensor_parallel": tensor_parallel,
            "trust_remote_code": trust_remote_code,
            "enforce_eager": not torch.cuda.is_available() if eager is None else eager,
            "sleep": self.sleeps,
            "transfer": transfer,
            "arguments": arguments or {},
        }
        self._job = find_python(python), job, kv_gib
        self._process = self._backend = self._start(*self._job)

    def _start(self, python: str, job: dict[str, Any], kv_gib: int) -> VLLMProcess:
        return VLLMProcess(python, job, kv_gib=kv_gib)

    async def _restart(self) -> None:
        await asyncio.to_thread(self._process.kill)
        self._asleep = False
        self._process = self._backend = self._start(*self._job)
        try:
            await asyncio.to_thread(self.wait_until_ready)
        except RolloutError as error:
            self._process.failure = str(error)
            raise

    def _buckets(self) -> Buckets | DeviceBuckets:
        return DeviceBuckets(self._bucket_bytes) if self._transfer == "ipc" else super()._buckets()

    @property
    def pid(self) -> int:
        """Of vLLM's process, the parent of its others."""
        return self._process.pid


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
    """`engines` engines over the same model; options: further keywords of VLLMEngine. They start side by side.

    Raises RolloutError where one of them does not start; no process is left then."""
    check_sizes("rollout.engine", engines=engines)
    logger.info("starting vLLM for %s, %d process(es); this takes half a minute or more", path, engines)
    # By name: a run offers them to the parameters of this function.
    options |= {"max_tokens": max_tokens, "dtype": dtype, "deterministic": deterministic, "trust_remote_code": trust_remote_code}
    return all_ready(VLLMEngine(path, tokenizer, seed=seed + number, **options) for number in range(engines))
