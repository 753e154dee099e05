"""`--verify full`: what was written and what it was written from, compared through another mapping.

HuggingFace tensors are mapped to Megatron's by the trainer's own `models.sharding.shard`, not by
the plan that wrote the result, whichever of the two that was."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.models.sharding import shard

from .mapping.plan import View
from .mapping.to_huggingface import Export
from .problems import damaged
from .readers.source import TensorSource
from .stream import Reader, check_records


def check_inverse(
    checkpoint: TensorSource, export: Export, model: TensorSource, written: TensorSource
) -> None:
    """Raises ConversionError (4) unless the tensors of a model directory, mapped to Megatron's, are
    the checkpoint's bytes, and those are what the checkpoint's own checksums say.

    written: which of the two is the result, and of its dtype both are read. Memory: a few times
    the largest tensor."""
    check_records(checkpoint, [view.stored for _, _, view in export.sources])
    with Reader(checkpoint) as stored, Reader(model) as given:
        for rule, layer, view in export.sources:
            names = rule.names(layer)
            sources = [View(model.tensors[name]) for name in names]
            dtype = (view if written is checkpoint else sources[0]).stored.dtype
            tensors = [given.tensor(source, dtype) for source in sources]
            expected = shard(rule, tensors, export.model, 0, 1)
            found = stored.tensor(view, dtype)[: len(expected)]  # without rows of padding
            if not torch.equal(_bits(expected), _bits(found)):
                raise damaged(
                    f"{written.path}: '{names[0]}' and '{view.stored.name}' do not map to each "
                    "other; what was read changed meanwhile, or this is a bug."
                )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)
