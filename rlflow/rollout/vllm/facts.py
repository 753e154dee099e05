"""What vLLM in processes of the run's own takes of memory and GPUs, before it is started.

On a GPU vLLM takes a share of it whatever the model needs: for weights, keys and values, a step's
activations and, from 0.21 on, CUDA graphs; the context of its process comes beside it. Asleep it
keeps that context, its CUDA graphs and the buffers of its libraries."""

from __future__ import annotations

import torch

from rlflow.rollout.engine_facts import EngineFacts, EngineLoad
from rlflow.rollout.vllm.devices import UTILIZATION, check_engine_devices
from rlflow.rollout.vllm.launch import check_python, find_python

BUCKET_MIB = 256
START_S = 900.0
GIB = 2**30
FRONT, CORE = 900 * 2**20, 800 * 2**20
"""Resident bytes of the API server with the engine core, and of each worker, from imports and
threads alone."""
STEP_TOKENS = 8192
"""Of prompts in a step at the least; see `rlflow.rollout.vllm.launch.Launch.flags`."""
CONTEXT = 6 * GIB // 10
"""The CUDA context, there before vLLM counts its share (gpu_worker.py: init_device). Assumed."""
ASLEEP, ASLEEP_SPLIT = 25 * GIB // 10, 17 * GIB // 10
"""What stays on a GPU asleep, context included, and NCCL's buffers where an engine has several
GPUs: 0.8 and 2.4 GiB were seen of a 1B model without graphs (NVIDIA-NeMo/RL issue 223); graphs are
assumed."""


class VLLMFacts(EngineFacts):
    """Processes of their own, with a share of a GPU each, or with memory of the host."""

    own_gpus = True
    gpu_share_key = "rollout.engine.arguments.gpu_memory_utilization"
    memory_known = True
    takes_adapters = True
    process = "vLLM"
    start_s = START_S

    def sleeps(self, on_gpus: bool) -> bool:
        asked = self.options.get("sleep")
        return on_gpus if asked is None else bool(asked)

    def server_memory(self, load: EngineLoad) -> dict[str, int]:
        """What the processes share counted once. Keys and values are allotted whole at the start.
        A step of prompts and an update, which holds two files of new weights in memory, do not
        happen at the same time."""
        model, width = load.model, load.width
        weights = load.parameters * width
        head = model.vocab * model.hidden * width if model.tied else 0  # packed: a copy
        longest = int(self.options.get("max_tokens") or load.max_total_tokens)
        # Of a layer: residual, normed and result; gate, up and their product
        step = max(STEP_TOKENS, longest) * 3 * (model.hidden + model.active_ffn) * width
        update = min(weights + head, 2 * self._bucket_bytes)
        return {
            "libraries": FRONT + self.gpus_each * CORE,
            "engine's weights": weights + head,
            "keys and values": self.gpus_each * int(self.options.get("kv_gib", 1)) * GIB,
            "a step of prompts, or files of new weights": max(step, update),
        }

    def gpu_memory(self, size: int) -> tuple[dict[str, int], dict[str, int]]:
        arguments = self.options.get("arguments") or {}
        share = float(arguments.get("gpu_memory_utilization", UTILIZATION))
        split = ASLEEP_SPLIT if self.gpus_each > 1 else 0
        awake = {"vLLM's share": round(share * size), "vLLM's context": CONTEXT + split}
        return awake, {"vLLM asleep": ASLEEP + split}

    def transfer_buffer(self, largest_weight: int) -> int:
        """A bucket, or the largest weight where that is larger."""
        if self.options.get("transfer") != "ipc":
            return 0
        return max(self._bucket_bytes, largest_weight)

    def check_installed(self, routes: bool) -> None:
        on_cpu = not torch.cuda.is_available()
        check_python(find_python(self.options.get("python")), triton=routes and on_cpu)

    def check_devices(self, ranks: int, gpus_per_rank: float) -> None:
        check_engine_devices(self.options, ranks, gpus_per_rank)

    @property
    def _bucket_bytes(self) -> int:
        return int(self.options.get("bucket_mib") or BUCKET_MIB) << 20
