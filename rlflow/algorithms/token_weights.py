"""Token weights: the whole difference between token-mean, sequence-mean and Dr.GRPO's constant."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.errors import ConfigError, did_you_mean
from rlflow.types import Batch

AGGREGATES = ("token_mean", "sequence_mean", "trajectory_mean", "constant")


def token_weights(batch: Batch, how: str = "token_mean", constant: float | None = None) -> Tensor:
    """(B, T) float32, each token's share in the loss of one optimizer step; 0 off the loss mask.

    token_mean (DAPO, arXiv 2503.14476): every trained token counts alike. sequence_mean (GRPO): every row alike, its
    tokens share equally. trajectory_mean (Search-R1 in RLinf): every trajectory alike, its rows joined. These three
    sum to 1, rows and trajectories without a trained token left out; a batch without any gives zeros. constant
    (Dr.GRPO, arXiv 2503.20783): 1 / (trajectories * constant) for every token, so that length earns nothing;
    `constant` is the most tokens an attempt may generate. The sum is the mean use of that budget, at most 1.
    """
    if how not in AGGREGATES:
        raise ConfigError(
            f"algorithm.aggregate: expected one of {', '.join(AGGREGATES)}, found '{how}'."
            f"{did_you_mean(str(how), AGGREGATES)}"
        )
    mask = batch.loss_mask.double()
    if how == "constant":
        if not constant or constant <= 0:
            raise ConfigError(
                f"algorithm.aggregate: 'constant' needs the most tokens that an attempt may generate, found {constant}"
            )
        return (mask / (max(1, len(_owners(batch).unique())) * constant)).float()
    if how == "token_mean":
        return (mask / mask.sum().clamp(min=1)).float()
    units = torch.arange(len(batch), device=mask.device) if how == "sequence_mean" else _owners(batch)
    _, unit = units.unique(return_inverse=True)
    tokens = torch.zeros(len(batch), dtype=mask.dtype, device=mask.device).index_add_(0, unit, mask.sum(dim=1))
    trained_units = (tokens > 0).sum().clamp(min=1)
    return (mask / (tokens.clamp(min=1)[unit, None] * trained_units)).float()


def _owners(batch: Batch) -> Tensor:
    """(B,) the trajectory of each row; without the column, each row is its own."""
    rows = torch.arange(len(batch), device=batch.tokens.device)
    return batch.columns.get("trajectory", rows)
