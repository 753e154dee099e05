"""Small batches for the tests of kernels and corrections, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.components import AGGREGATE
from rlflow.types import Batch


def batch_of(
    rollout: Any, advantages: Any, mask: Any = None, aggregate: str = "token_mean", **fields: Any
) -> Batch:
    """(B, T) rollout log-probs and advantages; a flat list is one row. Without a mask every token is trained. Other fields of
    the batch by name."""
    rollout, advantages = matrix(rollout), matrix(advantages)
    mask = torch.ones(rollout.shape, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
    batch = Batch(
        tokens=torch.zeros(rollout.shape, dtype=torch.int64),
        loss_mask=mask,
        logprobs=rollout,
        advantages=advantages.expand(rollout.shape),
        weights=torch.zeros(rollout.shape),
        lengths=torch.full((len(rollout),), rollout.shape[1]),
        temperatures=torch.ones(len(rollout)),
        **{name: matrix(value) for name, value in fields.items()},
    )
    return batch.replace(weights=AGGREGATE.build(aggregate)(batch).double())


def matrix(values: Any) -> Tensor:
    """The values as they are if they are a tensor, else in float64, a flat list as one row."""
    if isinstance(values, Tensor):
        return values
    made = torch.tensor(values, dtype=torch.float64)
    return made[None] if made.dim() == 1 else made


def random_batch(
    seed: int = 0, rows: int = 6, width: int = 7, spread: float = 0.5, **options: Any
) -> Batch:
    """Rows with holes in their masks, the last one without any trained token; rollout, proximal and current log-probs that
    differ by about `spread` nats, one advantage per row."""
    draw = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(rows, width, generator=draw, dtype=torch.float64) - spread
    proximal, current = (
        rollout + spread * torch.randn(rows, width, generator=draw, dtype=torch.float64)
        for _ in range(2)
    )
    mask = torch.rand(rows, width, generator=draw) < 0.7
    mask[-1] = False
    return batch_of(
        rollout,
        torch.randn(rows, 1, generator=draw, dtype=torch.float64),
        mask,
        proximal_logprobs=proximal,
        current_logprobs=current,
        versions=torch.randint(0, 5, (rows, width), generator=draw).masked_fill(~mask, -1),
        trainer_version=torch.full((rows,), 4),
        **options,
    )
