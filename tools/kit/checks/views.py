"""The made-up step of a trial once more, where no part may see a difference: other numbers where
nothing was sampled, other rows, more padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rlflow.algorithms.trial.sample_step import FIELDS
from rlflow.types import Batch, PolicyOutput


def map_output(output: PolicyOutput, change: Callable[[Tensor], Tensor]) -> PolicyOutput:
    """Every tensor of an output put through `change`, with gradients of its own."""
    there = {name: value for name, value in vars(output).items() if value is not None}
    return PolicyOutput(
        **{name: change(value.detach()).requires_grad_() for name, value in there.items()}
    )


def disturbed(batch: Batch) -> Batch:
    """Other numbers wherever nothing was sampled: none of them may matter."""
    floating = ("logprobs", "advantages", "values", "returns", *FIELDS.values())
    changes = {
        name: torch.where(batch.loss_mask, value, value + 7.0)
        for name in floating
        if (value := getattr(batch, name)) is not None
    }
    return batch.replace(**changes)


def sample_views(
    batch: Batch,
) -> Iterator[tuple[str, Batch, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]:
    """(what was done, the batch after it, the same for any other tensor, the way back)."""
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(3))
    yield (
        "rows in another order",
        batch.map(lambda value: value[order]),
        lambda value: value[order],
        lambda value: value[order.argsort()],
    )
    width = batch.tokens.shape[1]
    padding = torch.arange(width + 3) >= width
    wide = batch.map(_wider)
    for name in ("turn", "versions"):  # where 0 would name a turn and a version
        wide = wide.replace(**{name: wide.require(name, "check").masked_fill(padding, -1)})
    yield (
        "more padding",
        wide,
        _wider,
        lambda value: value[:, :width] if value.dim() == 2 else value,
    )


def _wider(value: Tensor) -> Tensor:
    """(B, T, ...) with three places more; a (B,) as it is."""
    if value.dim() == 1:
        return value
    return torch.cat([value, value.new_zeros(len(value), 3, *value.shape[2:])], dim=1)
