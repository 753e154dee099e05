"""`--verify logits`: transformers computes from a model directory what Megatron computes from the
checkpoint.

Both run on the CPU in float32 on fixed tokens. Megatron's model is built and loaded by
megatron-core, a legacy checkpoint in as many processes as it has ranks, so nothing of the
converter's mapping is used: an error in it shows here, where a round trip would repeat it in both
directions."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.errors import needing
from rlflow.models.huggingface import quiet_transformers, read_config
from rlflow.models.layer_rules import EMBEDDING

from ..dtypes import OPTIONS
from ..mapping.layout import CheckpointLayout
from ..problems import damaged
from ..readers.formats import open_source
from ..readers.source import TensorSource

ROWS, WIDTH = 2, 32
TOLERANCE = 1e-4
"""Largest difference, in units of the largest logit (at least 1). A mapping error makes a
difference of about 1."""


def check_logits(checkpoint: Path, model: Path, dtype: str = "keep") -> float:
    """The largest difference between the two sides' logits. dtype: what the converted side was cast
    to.

    Raises ConversionError (4) where it exceeds TOLERANCE, MissingPackageError without megatron-core
    or transformers."""
    config = read_config(model)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config["vocab_size"], (ROWS, WIDTH), generator=draw)
    kind = OPTIONS[dtype]
    rounded = None if kind is None else getattr(torch, kind.name)
    expected = _transformers(model, tokens, rounded)
    found = _megatron(checkpoint, config, tokens, rounded)
    difference = (found - expected).abs().max().item()
    limit = TOLERANCE * max(1.0, expected.abs().max().item())
    if not difference <= limit:
        raise damaged(
            f"{model}: transformers and Megatron do not compute the same; logits differ by "
            f"{difference:.2g}, at most {limit:.2g} expected."
        )
    return difference


def _transformers(path: Path, tokens: Tensor, dtype: torch.dtype | None) -> Tensor:
    with needing("--verify logits", "pip install 'transformers>=5'"):
        from transformers import AutoModelForCausalLM
    try:
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(
                str(path), dtype=torch.float32, local_files_only=True
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise damaged(
            f"{path}: transformers cannot load it ({str(error).splitlines()[0]})."
        ) from error
    _round_weights(model, dtype)
    with torch.no_grad():
        return model(tokens).logits.float()


@torch.no_grad()
def _round_weights(model: torch.nn.Module, dtype: torch.dtype | None) -> None:
    """As a conversion with `--dtype` does; routers' biases, which are no parameters, excepted."""
    for parameter in model.parameters() if dtype is not None else ():
        parameter.copy_(parameter.to(dtype))


def _megatron(
    checkpoint: Path, config: dict[str, Any], tokens: Tensor, dtype: torch.dtype | None
) -> Tensor:
    """Runs the checkpoint's ranks in processes of their own, without a GPU."""
    import torch.multiprocessing as mp

    ranks = _layout(open_source(checkpoint)).ranks
    with tempfile.TemporaryDirectory() as folder:
        args = (ranks, folder, str(checkpoint), config, tokens, dtype)
        try:
            mp.spawn(_rank_main, args=args, nprocs=ranks)
        except mp.ProcessRaisedException as error:
            reason = [line for line in str(error).splitlines() if line.strip()][-1]
            raise damaged(f"{checkpoint}: Megatron's model cannot be run ({reason}).") from error
        return torch.load(Path(folder) / "logits.pt", weights_only=True)


def _layout(source: TensorSource) -> CheckpointLayout:
    """That of legacy files; torch_dist is loaded by one rank."""
    if source.format == "torch_dist":
        return CheckpointLayout()
    kinds = ("tensor", "pipeline", "virtual_pipeline", "expert")
    return CheckpointLayout(*(source.layout.get(f"{kind}_parallel", 1) for kind in kinds))


def _rank_main(
    rank: int,
    ranks: int,
    folder: str,
    checkpoint: str,
    config: dict[str, Any],
    tokens: Tensor,
    dtype: torch.dtype | None,
) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch.distributed as dist

    from rlflow.trainer.megatron.cpu import adapted

    from . import load as oracle_load
    from . import model as oracle

    source = open_source(checkpoint)
    layout, rows = _layout(source), source.tensors[EMBEDDING.megatron].shape[0]
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks)
    with adapted():
        oracle.initialize_ranks(layout)
        chunks = oracle.build(config, layout, rows)
        if source.format == "torch_dist":
            oracle_load.load_torch_dist(chunks, source.path, source.tensors.keys())
        else:
            oracle_load.load_rank(chunks, source.path)
        for chunk in chunks:
            _round_weights(chunk, dtype)
        found = oracle.logits(chunks, tokens, config["vocab_size"])
    if rank == 0:
        torch.save(found, Path(folder) / "logits.pt")
    dist.destroy_process_group()
