"""Dr.GRPO's constant: no length in the denominator."""

from __future__ import annotations

from torch import Tensor

from rlflow.algorithms.statistics import first_rows
from rlflow.errors import ConfigError
from rlflow.types import Batch


def constant(batch: Batch, tokens: int) -> Tensor:
    """(B, T) 1 / (trajectories * tokens) for every trained token, so that length earns nothing
    (arXiv 2503.20783).

    tokens: the most that an attempt may generate; a run gives its own limit. The sum is the mean
    use of that budget, at most 1. Raises ConfigError for a budget below 1."""
    if tokens < 1:
        raise ConfigError(
            "algorithm.aggregate: constant needs the most tokens that an attempt may generate, "
            f"found {tokens}"
        )
    return (batch.loss_mask.double() / (max(1, len(first_rows(batch)[0])) * tokens)).float()
