"""How much memory vLLM's processes take at the most, on a CPU.

A closed form of the configuration and the shapes, but for what the processes hold by themselves, which is measured
(`benchmarks/memory_estimate.py`). On a GPU vLLM takes the share that `gpu_memory_utilization` says."""

from __future__ import annotations

import torch

from rlflow.components import ENGINE
from rlflow.config.schema import RunConfig
from rlflow.errors import RLFlowError
from rlflow.models.architecture import Architecture
from rlflow.run.memory_estimate import DTYPE_BYTES, PhaseMemory, stage_parameters
from rlflow.trainer.layout import ParallelLayout

FRONT = 900 * 2**20
"""Of vLLM's two processes that do not compute: the front end and the one that vLLM starts beside it, 450 MiB each."""
CORE = 800 * 2**20
"""Of a process that computes: its imports, threads, and what the C library keeps of freed memory."""
STEP_TOKENS = 8192
"""Of prompts in a step at the least; see `rlflow.rollout.vllm.worker.whole_prompts`."""


def vllm_memory(config: RunConfig, model: Architecture) -> list[PhaseMemory]:
    """vLLM's processes of one engine, all together, what they share counted once; none for another engine or on a GPU.

    Keys and values are allotted whole at the start. A step of prompts and an update, which holds a file of new weights in
    memory, do not happen at the same time."""
    if torch.cuda.is_available() or not is_vllm(config):
        return []
    options = dict(config.rollout.engine)
    width = DTYPE_BYTES[options.get("dtype") or config.model.dtype]
    tensor = int(options.get("tensor_parallel") or 1)
    weights = stage_parameters(model, ParallelLayout())[0] * width
    head = model.vocab * model.hidden * width if model.tied else 0  # vLLM packs it: a copy of the embedding then
    tokens = max(STEP_TOKENS, int(options.get("max_tokens") or config.rollout.max_total_tokens))
    step = tokens * 3 * (model.hidden + model.ffn) * width  # residual, normed and result; gate, up and their product
    update = min(weights + head, int(options.get("bucket_mib", 256)) * 2**20)
    parts = {
        "libraries": FRONT + tensor * CORE,
        "engine's weights": weights + head,
        "keys and values": tensor * int(options.get("kv_gib", 1)) * 2**30,
        "a step of prompts, or a file of new weights": max(step, update),
    }
    count = int(options.get("engines", 1))
    return [PhaseMemory("vLLM" if count == 1 else f"vLLM, each of {count} engines", "rollout", parts)]


def is_vllm(config: RunConfig) -> bool:
    """Whether the engine is vLLM in processes of the run's own."""
    try:
        return ENGINE.locate(config.rollout.engine["name"]).endswith(":make_vllm_engines")
    except RLFlowError:
        return False
