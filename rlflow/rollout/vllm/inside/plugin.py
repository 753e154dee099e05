"""A plug-in of vLLM: weights from safetensors files of this machine, in memory mostly, and what a
worker knows about its memory.

vLLM loads it in every process of its own, by the entry point `vllm.general_plugins` that `launch`
writes."""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

BACKEND = "rlflow_files"


def factors_hash(tensors: Iterable[Any]) -> str:
    """A hash of adapters' factors, whatever their order and the names that they have here."""
    import torch

    hashes = [
        hashlib.sha256(
            repr(tuple(tensor.shape)).encode()
            + tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for tensor in tensors
    ]
    return hashlib.sha256("".join(sorted(hashes)).encode()).hexdigest()


class Extension:
    """Methods that vLLM's worker class gets in addition; `/collective_rpc` calls them."""

    def used_bytes(self) -> int:
        """Memory in use: of the worker's GPU, by whomever; on a CPU its resident set."""
        import torch

        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            return total - free
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    def load_adapter(self, path: str) -> str:
        """Takes the factors in a folder in place of those of the one adapter that is there; returns
        the hash of what is in use then, empty where it is not."""
        from vllm.lora.request import LoRARequest

        manager: Any = self.model_runner.lora_manager  # type: ignore[attr-defined]
        (number,) = manager.list_adapters()
        manager.add_adapter(LoRARequest("rlflow", number, path, load_inplace=True))
        inner = manager._adapter_manager
        if number not in inner.lora_index_to_id:
            return ""
        layers = inner.get_adapter(number).loras.values()
        held = [factor for layer in layers for factor in (layer.lora_a, layer.lora_b)]
        # Of fused layers a list, without what has no adapter
        flat = [one for some in held for one in (some if isinstance(some, list) else [some])]
        return factors_hash(one for one in flat if one is not None)

    def can_sleep(self) -> bool:
        """Whether sleep frees memory on this platform."""
        from vllm.platforms import current_platform

        return bool(current_platform.is_sleep_mode_available())


def register() -> None:
    """Makes the backend known to vLLM. Called by vLLM in each of its processes, more than once in
    some."""
    import torch

    # vLLM's attention in AMX tiles, which it takes in bfloat16, ends the process (0.32, without a
    # word): its vectors are used.
    torch.cpu._is_amx_tile_supported = lambda: False
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in getattr(WeightTransferEngineFactory, "_registry", {}):
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "FileTransfer")


def __getattr__(name: str) -> Any:
    # The base class is vLLM's, which must not be imported before vLLM asks for the plug-in.
    if name != "FileTransfer":
        raise AttributeError(name)
    made = globals()[name] = _make_engine()
    return made


def _make_engine() -> type:
    from safetensors.torch import load_file
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    @dataclass
    class NoInit(WeightTransferInitInfo):
        """There is nothing to set up."""

    @dataclass
    class TensorFile(WeightTransferUpdateInfo):
        """Where some of the tensors are."""

        path: str = ""

    class FileTransfer(WeightTransferEngine):
        """Loads tensors with HuggingFace names, as a checkpoint holds them. A layer takes over when
        its last tensor is there."""

        init_info_cls = NoInit
        update_info_cls = TensorFile

        def init_transfer_engine(self, init_info: Any) -> None:
            """Nothing to set up."""

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: Any, *_: Any) -> None:
            # The driver unlinks the file, which is never written again; what is mapped outlives it.
            self.model.load_weights(iter(load_file(update_info.path).items()))

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            """Nothing is open."""

        @staticmethod
        def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
            """The trainer's side is `rlflow.rollout.vllm.buckets`."""
            raise NotImplementedError

    return FileTransfer
