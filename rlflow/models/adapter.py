"""LoRA adapters as the package peft reads and writes them: a folder with adapter_config.json and
adapter_model.safetensors.

LoRA: Hu et al. 2021, arXiv 2106.09685. A layer of the base computes W x + alpha / rank * B (A x).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.errors import ModelError, StorageError
from rlflow.models.architecture import huggingface_shapes, stored_architecture
from rlflow.models.huggingface import (
    ADAPTER_CONFIG,
    WeightFiles,
    read_config,
    read_object,
    why_occupied,
)
from rlflow.models.layer_rules import ADAPTER_SCALE, dtype_of
from rlflow.models.weight_files import write_model
from rlflow.storage.files import replacing_directory

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a transformer's layer that can have adapters."""
PREFIX = "base_model.model."
"""What peft puts before the names of the base's layers."""
_A, _B = ".lora_A.weight", ".lora_B.weight"
_PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "use_rslora": False,
    "use_dora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}
"""Entries of adapter_config.json by which B A alone is what is added; another value means another
computation."""
_LATER: dict[str, Any] = {
    "lora_bias": False,
    "layer_replication": None,
    "use_qalora": False,
    "use_bdlora": None,
    "alora_invocation_tokens": None,
    "target_parameters": None,
    "arrow_config": None,
    "kasa_config": None,
    "monteclora_config": None,
}
"""The same, which not every version of peft knows."""
_SAME_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base as it is; PiSSA, OLoRA and others change it."""


@dataclass(frozen=True)
class Adapter:
    """The factors over a base model, {layer: (A (rank, in), B (out, rank))}, by HuggingFace names.
    scale: alpha / rank."""

    factors: Mapping[str, tuple[Tensor, Tensor]]
    scale: float

    @classmethod
    def of(cls, named: Iterable[tuple[str, Tensor]], scale: float, where: str) -> Adapter:
        """From (`LAYER.lora_A.weight` or `LAYER.lora_B.weight`, factor) pairs. Raises ModelError
        for half a pair, or shapes that do not go together."""
        found = dict(named)
        layers = sorted({name.removesuffix(_A).removesuffix(_B) for name in found})
        factors = {}
        for layer in layers:
            a, b = found.get(layer + _A), found.get(layer + _B)
            if a is None or b is None:
                raise ModelError(
                    f"{where}: '{layer}' has not both of lora_A.weight and lora_B.weight."
                )
            if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
                raise ModelError(
                    f"{where}: '{layer}{_A}' {tuple(a.shape)} and '{layer}{_B}' {tuple(b.shape)} "
                    "do not fit."
                )
            factors[layer] = (a, b)
        return cls(factors, scale)

    @classmethod
    def of_update(cls, named: Mapping[str, Tensor], where: str) -> Adapter:
        """From the tensors of `adapter_update`. Raises ModelError where they are no adapter."""
        factors = dict(named)
        scale = factors.pop(ADAPTER_SCALE, None)
        if scale is None or scale.numel() != 1 or not factors:
            raise ModelError(
                f"{where}: expected '{ADAPTER_SCALE}' and the factors of some layers, found "
                f"{len(factors)} factors {'without' if scale is None else 'with'} it; give "
                "trainer.adapters()."
            )
        return cls.of(factors.items(), float(scale), where)

    def named_factors(self) -> Iterator[tuple[str, Tensor]]:
        """What `of` was made from."""
        for layer, (a, b) in self.factors.items():
            yield layer + _A, a
            yield layer + _B, b

    def change(self, layer: str) -> Tensor:
        """(out, in) float32: what is added to the weight of a layer."""
        a, b = self.factors[layer]
        return self.scale * (b.float() @ a.float())


def adapter_update(
    scale: float, factors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that engines take of adapters alone: the scale, then the factors as of
    `Adapter.of`."""
    import torch

    yield ADAPTER_SCALE, torch.tensor(scale, dtype=torch.float32)
    yield from factors


def is_of_adapter(name: str) -> bool:
    """Whether a tensor is one of `adapter_update`; else it is a weight of the model."""
    return name == ADAPTER_SCALE or name.endswith((_A, _B))


def write_adapter(
    path: str | Path,
    factors: Iterable[tuple[str, Tensor]],
    *,
    base: str | Path,
    rank: int,
    alpha: float,
    targets: Sequence[str],
) -> None:
    """Writes the folder, in place of an adapter that is there. factors: as of `Adapter.of`. base:
    where the frozen weights are.

    Raises ModelError for factors that are not finite or not whole pairs, StorageError where the
    folder cannot be written or holds something else. On failure `path` is as it was."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = Path(path)
    if path.exists() and (
        not path.is_dir() or (any(path.iterdir()) and not (path / ADAPTER_CONFIG).is_file())
    ):
        raise StorageError(
            f"{path}: is not an adapter's folder (no {ADAPTER_CONFIG}), so it is not replaced; "
            "choose another."
        )
    tensors = {PREFIX + name: factor.contiguous() for name, factor in factors}
    if not tensors:
        raise ModelError(f"{path}: there are no adapters to write.")
    Adapter.of(tensors.items(), alpha / rank, str(path))
    for name, factor in tensors.items():
        if not bool(torch.isfinite(factor).all()):
            raise ModelError(f"{path}: '{name}' holds NaN or Inf.")
    config = {
        **_PLAIN,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(Path(base).absolute()),
        "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": 0.0,
        "target_modules": list(targets),
        "init_lora_weights": True,
        "inference_mode": True,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing_directory(path) as partial:
            save_file(tensors, partial / ADAPTER_WEIGHTS, metadata={"format": "pt"})
            (partial / ADAPTER_CONFIG).write_text(
                json.dumps(config, indent=2) + "\n", encoding="utf-8"
            )
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StorageError(
            f"{path}: the adapter cannot be written ({reason}); make room or choose another place."
        ) from error


def read_adapter(path: str | Path) -> tuple[Adapter, dict[str, Any]]:
    """The adapter in a folder, and its adapter_config.json.

    Raises ModelError where there is none, it is damaged, or it is of a kind that is more than B A:
    DoRA, biases, other ranks for some layers, embeddings."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(path)
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ModelError(
            f"{folder}: no adapter here; expected {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}, as peft "
            "writes them."
        )
    config = read_object(folder / ADAPTER_CONFIG)
    plain = {**_PLAIN, **_LATER}.items()
    other = [key for key, value in plain if (config.get(key) or None) != (value or None)]
    if config.get("init_lora_weights") not in _SAME_BASE:
        other.append("init_lora_weights")
    if other:
        key = other[0]
        raise ModelError(
            f"{folder / ADAPTER_CONFIG}: {key} is {str(config.get(key))[:60]}, which is not "
            "supported; merge it with peft: AutoPeftModelForCausalLM.from_pretrained(FOLDER)"
            ".merge_and_unload().save_pretrained(OUT)."
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if (
        not isinstance(rank, int)
        or not isinstance(alpha, (int, float))
        or isinstance(rank, bool)  # an int too
        or isinstance(alpha, bool)
        or rank < 1
        or not math.isfinite(alpha)
    ):
        raise ModelError(
            f"{folder / ADAPTER_CONFIG}: expected r of at least 1 and a number as lora_alpha, "
            f"found {rank!r:.60} and {alpha!r:.60}."
        )
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ModelError(
            f"{folder / ADAPTER_WEIGHTS}: missing; only safetensors are read (pickled *.bin can "
            "run code)."
        )
    try:
        tensors = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder / ADAPTER_WEIGHTS}: cannot be read ({error}).") from None
    named = ((name.removeprefix(PREFIX), tensor) for name, tensor in tensors.items())
    return Adapter.of(named, alpha / rank, str(folder)), config


def merge_adapter(
    folder: str | Path, out: str | Path, base: str | Path | None = None, *, overwrite: bool = False
) -> dict[str, Any]:
    """Writes the model directory that an adapter's folder and its base are together, as
    `write_model` does; returns its manifest.

    base: a model directory; None: the one that adapter_config.json names. Raises ModelError,
    StorageError."""
    if (reason := why_occupied(Path(out), overwrite, adapter=Path(folder))) is not None:
        raise StorageError(reason)
    adapter, _ = read_adapter(folder)
    place = adapter_base(folder, "--base") if base is None else Path(base)
    weights = merged_model(adapter, place)
    return write_model(out, weights, place, overwrite=overwrite, mixed=True)


def adapter_base(folder: str | Path, option: str = "--hf") -> Path:
    """The model directory that an adapter's folder names. option: what names another one. Raises
    ModelError where it is not here."""
    config = Path(folder) / ADAPTER_CONFIG
    named = str(read_object(config).get("base_model_name_or_path") or "")
    if not Path(named, "config.json").is_file():
        raise ModelError(
            f"{config}: names the base '{named[:200]}', and there is no model directory of that "
            f"name here; give it with {option} DIR."
        )
    return Path(named)


def merged_model(
    adapter: Adapter, base: str | Path, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model directory with the adapter added in float32, one tensor at a time; all
    in `dtype`, or in the dtypes of the base; a router's bias in float32. Raises ModelError where a
    layer of the base has another shape."""
    known = huggingface_shapes(stored_architecture(read_config(base)))
    for layer, (a, b) in adapter.factors.items():
        found, expected = (len(b), a.shape[1]), known.get(f"{layer}.weight")
        if expected is None:
            raise ModelError(
                f"{base}: has no '{layer}.weight' of its own, which the adapter changes; it "
                "belongs to another base, or one whose lm_head is tied to its embedding."
            )
        if found != expected:
            raise ModelError(
                f"{base}: '{layer}.weight' is {expected}, the adapter's {found}; it belongs to "
                "another base."
            )
    weights = WeightFiles(base)

    def merged(name: str) -> tuple[str, Tensor]:
        weight, layer = weights[name], name.removesuffix(".weight")
        weight = weight.to(dtype_of(name, dtype or weight.dtype))
        if layer in adapter.factors:
            weight = (weight.float() + adapter.change(layer)).to(weight.dtype)
        return name, weight

    # Files of a tied model may repeat the embedding.
    return (merged(name) for name in weights if name in known)
