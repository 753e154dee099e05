"""LoRA for every trainer: the factors' start and names, and their checkpoints."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.errors import CheckpointError, ConfigError
from rlflow.models.architecture import Architecture
from rlflow.trainer.options import LoraOptions

A, B = "lora_A", "lora_B"
"""The two factors, as the package peft calls them: (rank, in) and (out, rank)."""
ARRIVAL_ROWS = 64
"""Of each layer, by which it is measured what of a change arrives."""


def first_factor(layer: str, rank: int, inputs: int, seed: int) -> Tensor:
    """(rank, in) float32: A of a HuggingFace layer before the first update, as peft draws it:
    uniform within 1 / sqrt(in). It depends on the seed and the layer's name alone, so it is the
    same in every layout. B starts as 0."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{layer}".encode()))
    return torch.nn.init.kaiming_uniform_(
        torch.empty(rank, inputs), a=math.sqrt(5), generator=generator
    )


def check_layers(options: LoraOptions | None, model: Architecture) -> None:
    """Raises ConfigError for adapters of experts, whose products have other rows in every pass, and
    of latent attention."""
    if options is None or model.experts is None:
        return
    if model.latent is not None:
        raise ConfigError(
            f"trainer.lora: latent attention (model family '{model.family}') gets no adapters; "
            "leave trainer.lora out."
        )
    possible = ("q_proj", "k_proj", "v_proj", "o_proj")
    if not set(options.targets) <= set(possible):
        raise ConfigError(
            "trainer.lora.targets: experts get no adapters; expected some of "
            f"[{', '.join(possible)}] for model family '{model.family}', found "
            f"[{', '.join(options.targets)}]."
        )


def identity(options: LoraOptions | None, base: str) -> dict[str, Any] | None:
    """What a checkpoint of adapters says of them; None for one of whole weights. base: the content
    hash of the frozen weights."""
    if options is None:
        return None
    return {
        "rank": options.rank,
        "alpha": options.alpha,
        "targets": list(options.targets),
        "base": base,
    }


def check_identity(
    path: Path, saved: Mapping[str, Any] | None, present: Mapping[str, Any] | None
) -> None:
    """Raises CheckpointError unless a checkpoint and a trainer have the same adapters over the same
    weights, or both none."""
    if saved is not None and present is not None:
        for key in ("rank", "alpha", "targets"):
            if saved.get(key) != present[key]:
                raise CheckpointError(
                    f"{path}: written with trainer.lora.{key}={saved.get(key)}, found "
                    f"{present[key]}; set it as it was."
                )
        if saved.get("base") != present["base"]:
            raise CheckpointError(
                f"{path}: holds adapters of other weights (content hash "
                f"{str(saved.get('base'))[:12]}) than those of model.path "
                f"({present['base'][:12]}); set model.path to the model that the run began with."
            )
    elif saved is not None:
        asked = ", ".join(
            f"{key}: {saved.get(key)}" for key in ("rank", "alpha", "targets")
        ).replace("'", "")
        raise CheckpointError(
            f"{path}: holds LoRA adapters alone, and trainer.lora is not set; set it to "
            f"{{{asked}}}."
        )
    elif present is not None:
        raise CheckpointError(
            f"{path}: holds whole weights, and trainer.lora is set, under which these stay as they "
            "are in model.path; leave trainer.lora out, or begin a new run from an export."
        )


def measured(weight: Tensor, added: Tensor, merged: Tensor) -> Tensor:
    """(2,) float64: of some rows, the sums of squares of what an adapter adds to a weight, and of
    what of it is not in the merged weight. added: float32."""
    step = max(1, len(added) // ARRIVAL_ROWS)
    before, asked, after = weight[::step], added[::step], merged[::step]
    lost = after.float() - before.to(merged.dtype).float() - asked
    return torch.stack([part.double().square().sum() for part in (asked, lost)])


def arrived(sums: Tensor) -> float | None:
    """The share of the change that arrives, by the summed `measured` of all layers: 1 less the norm
    of what is lost over that of what was added, 0 at the least; None where nothing was added."""
    added, lost = sums.sqrt().tolist()
    return max(0.0, 1 - lost / added) if added else None
