"""A small batch and a loss for the trainers' tests."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.types import Batch, PolicyOutput

VOCAB = 101


def make_batch(rows: int = 6, width: int = 20, seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(width // 2, width + 1, (rows,), generator=draw)
    lengths[0] = width
    positions = torch.arange(width)
    mask = (positions < lengths[:, None]) & (positions >= width // 3)
    return Batch(
        # Never 0 within a row: transformers gives the padding token's input embedding no gradient.
        tokens=torch.randint(1, VOCAB, (rows, width), generator=draw)
        * (positions < lengths[:, None]),
        loss_mask=mask,
        logprobs=torch.zeros(rows, width),
        advantages=torch.randn(rows, width, generator=draw),
        weights=mask / mask.sum(),
        lengths=lengths,
        temperatures=torch.full((rows,), 0.8),
    )


def policy_gradient(output: PolicyOutput, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    return -batch.advantages * output.logprobs, {"logprob": output.logprobs}
