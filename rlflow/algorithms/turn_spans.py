"""The turns of a batch: which tokens are one response, across rows and trajectories."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.algorithms.statistics import first_rows, totals
from rlflow.types import Batch


@dataclass(frozen=True)
class Turns:
    """The U turns with trained tokens, trajectory by trajectory in order. unit: (B, T) the turn of
    each trained token, as a place among them, -1 off the mask. owner: (U,) its trajectory's place,
    as of `first_rows`. number: (U,) which of its turns it is."""

    unit: Tensor
    owner: Tensor
    number: Tensor

    def spread(self, values: Tensor) -> Tensor:
        """(B, T) float32: a turn's value (U,) on each of its tokens, 0 off the mask."""
        spread = torch.zeros(self.unit.shape, device=values.device)
        on = self.unit >= 0
        spread[on] = values[self.unit[on]].float()
        return spread

    def total(self, values: Tensor) -> Tensor:
        """(U,) float64: the sums of (B, T) values over the tokens of each turn."""
        on = self.unit >= 0
        return totals(values[on], self.unit[on], len(self.owner))


def turns_of(batch: Batch, who: str) -> Turns:
    """The turns of a batch. A response that a rewritten observation repeats as context is no turn
    of that row."""
    number = batch.require("turn", who)
    place = first_rows(batch)[1][:, None].expand(number.shape)
    on = batch.loss_mask & (number >= 0)
    most = int(number.max()) + 1 if number.numel() else 1
    # Sorted: by trajectory, then by turn
    names, found = (place[on] * most + number[on]).unique(return_inverse=True)
    unit = torch.full(number.shape, -1, device=number.device)
    unit[on] = found
    return Turns(unit, names // most, names % most)
