"""Adapters for vLLM: one of its LoRA modules from the start on, whose factors each update replaces.

All requests name that module, so what runs goes on with the new factors. A folder in memory carries
them, in the form of the package peft."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.errors import ConfigError, ModelError
from rlflow.models.adapter import PROJECTIONS, Adapter, is_of_adapter, write_adapter
from rlflow.models.architecture import huggingface_shapes, stored_architecture
from rlflow.models.huggingface import read_config
from rlflow.rollout.engine import Weights, check_weight, each_weight
from rlflow.rollout.vllm.inside.plugin import factors_hash
from rlflow.storage.memory_folders import OwnedFolder

ADAPTER = "rlflow-adapter"
"""Its name at the server."""
FOLDER = "adapter"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM has room for (vllm/config/lora.py: MaxLoRARanks)."""


@dataclass(frozen=True)
class AdapterForm:
    """The adapters that an engine over the model at `path` takes: of one rank, for layers whose
    last name is one of `targets`."""

    path: Path
    rank: int
    targets: tuple[str, ...]

    @classmethod
    def of(cls, path: str | Path, options: Mapping[str, Any]) -> AdapterForm:
        """By the keys rank and, where not all projections have some, targets. Raises
        ConfigError."""
        unknown = sorted(set(options) - {"rank", "targets"})
        rank = options.get("rank")
        if unknown or not isinstance(rank, int) or not 1 <= rank <= RANKS[-1]:
            raise ConfigError(
                f"rollout.engine.adapters: expected a rank from 1 to {RANKS[-1]}, and targets, found "
                f"{dict(options)}; vLLM takes no others: set trainer.lora.sync=merged."
            )
        made = cls(Path(path), rank, tuple(options.get("targets") or PROJECTIONS))
        if not made.shapes():
            raise ConfigError(
                f"rollout.engine.adapters.targets: expected some of {', '.join(PROJECTIONS)}, found "
                f"{', '.join(made.targets)}, which {path} has not."
            )
        return made

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """(out, in) of every layer that can have an adapter."""
        shapes = huggingface_shapes(stored_architecture(read_config(self.path)))
        return {
            name.removesuffix(".weight"): shape
            for name, shape in shapes.items()
            if name.split(".")[-2:][0] in self.targets and len(shape) == 2
        }

    def flags(self, folder: Path) -> dict[str, Any]:
        """Of `vllm serve`, of a server that begins with the module of `write_first`."""
        return {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": next(size for size in RANKS if size >= self.rank),
            "lora_target_modules": list(self.targets),
            "lora_modules": [f"{ADAPTER}={folder / FOLDER}"],
        }

    def write_first(self, folder: Path) -> None:
        """Writes the module that a server in this folder starts with: it changes nothing."""
        layer, (outputs, inputs) = next(iter(self.shapes().items()))
        nothing = [
            (f"{layer}.lora_A.weight", torch.zeros(self.rank, inputs)),
            (f"{layer}.lora_B.weight", torch.zeros(outputs, self.rank)),
        ]
        self.write(folder / FOLDER, Adapter.of(nothing, 1.0, str(folder)))

    async def received(self, weights: Weights) -> Adapter:
        """The adapter of an update. Raises ModelError where it is none, or of another form."""
        found: dict[str, Tensor] = {}
        shapes = self.shapes()
        async for name, tensor in each_weight(weights):
            if not is_of_adapter(name):
                raise ModelError(
                    f"engine.load_weights: '{name}' is of a whole model, and the engine takes "
                    "adapters; give it trainer.adapters(), or leave rollout.engine.adapters out."
                )
            if name in found:
                raise ModelError(f"engine.load_weights: tensor '{name}' came twice.")
            layer, _, factor = name.removesuffix(".weight").rpartition(".")
            if factor in ("lora_A", "lora_B"):
                outputs, inputs = shapes.get(layer, (0, 0))
                shape = (self.rank, inputs) if factor == "lora_A" else (outputs, self.rank)
                check_weight(name, tensor, shape)
            found[name] = tensor
        return Adapter.of_update(found, "engine.load_weights")

    @contextmanager
    def handed_over(self, adapter: Adapter) -> Iterator[Path]:
        """A folder in memory with the adapter, for as long as this is open."""
        owned = OwnedFolder(FOLDER)
        try:
            self.write(owned.path / FOLDER, adapter)
            yield owned.path / FOLDER
        finally:
            owned.close()

    def write(self, folder: Path, adapter: Adapter) -> None:
        """Writes the folder that vLLM reads."""
        write_adapter(
            folder,
            adapter.named_factors(),
            base=self.path,
            rank=self.rank,
            alpha=adapter.scale * self.rank,
            targets=self.targets,
        )

    def expected_hash(self, adapter: Adapter, dtype: torch.dtype) -> str:
        """`factors_hash` of what vLLM has once it took the adapter: in its dtype, B by the
        scale."""
        scale = adapter.scale * self.rank / self.rank  # as it computes it from alpha
        return factors_hash(
            factor
            for a, b in adapter.factors.values()
            for factor in (a.to(dtype), b.to(dtype) if scale == 1 else b.to(dtype) * scale)
        )
