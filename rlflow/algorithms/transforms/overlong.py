"""A soft penalty on long responses."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlflow.algorithms.base import RewardTerm
from rlflow.algorithms.rewards import per_trajectory
from rlflow.algorithms.statistics import first_rows
from rlflow.errors import ConfigError
from rlflow.types import Batch
from rlflow.values import NonNegativeFloat, PositiveInt


@dataclass(frozen=True)
class Overlong(RewardTerm):
    """(B,) float64: 0 up to tokens - buffer sampled tokens of a trajectory, falling linearly to
    -factor at `tokens`, and -factor above.

    DAPO, arXiv 2503.14476 equation 13 (factor 1; tokens 20480, buffer 4096). tokens: by default the
    most that an attempt may generate. Raises ConfigError for a buffer that is longer than that."""

    buffer: PositiveInt
    tokens: PositiveInt
    factor: NonNegativeFloat = 1.0

    def __post_init__(self) -> None:
        if self.buffer > self.tokens:
            raise ConfigError(
                f"transform overlong: expected a buffer of at most the {self.tokens} tokens, found "
                f"{self.buffer}"
            )

    def term(self, batch: Batch) -> Tensor:
        length = per_trajectory(batch, batch.loss_mask)[first_rows(batch)[1]]
        return -self.factor * ((length - (self.tokens - self.buffer)) / self.buffer).clamp(0, 1)
