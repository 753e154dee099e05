"""Only the tokens at which the policy is least certain carry a policy gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from rlflow.algorithms.base import Transform
from rlflow.algorithms.transforms.importance import multiplied
from rlflow.types import Batch
from rlflow.values import Range


@dataclass(frozen=True)
class HighEntropyTokens(Transform):
    """Keeps the `share` of the minibatch's trained tokens with the highest entropy, ties at its
    border too (arXiv 2506.01939, section 5: 0.2). The others' kernels get coefficient 0; every
    token keeps its weight, so the mean is still over all."""

    needs = frozenset({"current_entropy"})
    level = "token"

    share: Annotated[float, Range(above=0, high=1)] = 0.2

    def __call__(self, batch: Batch) -> Batch:
        entropy = batch.require("current_entropy", "high_entropy_tokens")
        mask = batch.loss_mask
        if not bool(mask.any()):
            return batch
        return multiplied(batch, mask & (entropy >= quantile(entropy[mask], 1 - self.share)))


def quantile(values: Tensor, share: float) -> Tensor:
    """Scalar: the quantile of (N,) values, linear between neighbours as numpy has it.
    torch.quantile ends at 16 million."""
    ordered = values.double().sort().values
    place = share * (len(ordered) - 1)
    low = min(int(place), len(ordered) - 1)
    high = min(low + 1, len(ordered) - 1)
    return torch.lerp(ordered[low], ordered[high], place - low)
