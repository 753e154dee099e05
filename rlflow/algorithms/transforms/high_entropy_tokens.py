"""Only the tokens at which the policy is least certain carry a policy gradient."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from rlflow.algorithms.base import Transform
from rlflow.types import Batch
from rlflow.values import Range


class HighEntropyTokens(Transform):
    """Keeps the `share` of the minibatch's trained tokens with the highest entropy, ties at its
    border too (arXiv 2506.01939, section 5: 0.2). The others' kernels get coefficient 0; every
    token keeps its weight, so the mean is still over all."""

    needs = frozenset({"current_entropy"})
    level = "token"

    def __init__(self, share: Annotated[float, Range(above=0, high=1)] = 0.2) -> None:
        self._share = share
        self._kept: list[float] = []

    def __call__(self, batch: Batch) -> Batch:
        entropy, mask = (
            batch.require("current_entropy", "high_entropy_tokens"),
            batch.loss_mask,
        )
        if not bool(mask.any()):
            return batch
        kept = mask & (entropy >= quantile(entropy[mask], 1 - self._share))
        self._kept.append(float(kept.sum() / mask.sum()))
        return with_kept(batch, kept)

    def report(self) -> dict[str, float]:
        """Share of trained tokens that were kept, mean over minibatches."""
        kept, self._kept = self._kept, []
        return {"tokens_kept": sum(kept) / len(kept)} if kept else {}


def with_kept(batch: Batch, kept: Tensor) -> Batch:
    """The batch with coefficient 0 where `kept` (B, T) is False."""
    present = (
        torch.ones_like(batch.weights)
        if batch.coefficients is None
        else batch.coefficients
    )
    return batch.replace(coefficients=present * kept)


def quantile(values: Tensor, share: float) -> Tensor:
    """Scalar: the quantile of (N,) values, linear between neighbours as numpy has it.
    torch.quantile ends at 16 million."""
    ordered = values.double().sort().values
    place = share * (len(ordered) - 1)
    low = min(int(place), len(ordered) - 1)
    high = min(low + 1, len(ordered) - 1)
    return torch.lerp(ordered[low], ordered[high], place - low)
