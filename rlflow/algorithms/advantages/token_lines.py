"""The trained tokens of every trajectory as one line: what temporal differences are taken along."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.algorithms.statistics import first_rows, sampled_order
from rlflow.types import Batch, StopReason

TRUNCATED = (StopReason.MAX_TURNS, StopReason.MAX_TOKENS)


@dataclass(frozen=True)
class TokenLines:
    """N trajectories of up to L trained tokens each, in the order in which they were sampled.
    Observations are skipped, and a turn goes on where the one before it ended, in whatever segment:
    the successor of a token is the next one that the policy sampled."""

    # (N, L) int64: where the token stands among the batch's rows end to end; 0 behind the last one
    place: Tensor
    real: Tensor  # (N, L) bool
    last_row: Tensor  # (N,) int64: the row of the trajectory's last token
    shape: torch.Size  # of the batch's tokens, (B, T)

    @classmethod
    def of(cls, batch: Batch, who: str) -> TokenLines:
        """Raises RLFlowError where the batch does not say which trajectory and segment a row is."""
        batch.require("trajectory", who)
        order = batch.require("segment", who).argsort(stable=True)
        first, owner = first_rows(batch)
        last_row = first.scatter(0, owner[order], order)
        rows, columns, lines = sampled_order(batch)
        counts = torch.bincount(lines, minlength=len(last_row))
        number = torch.arange(len(lines)) - (counts.cumsum(0) - counts)[lines]
        longest = int(counts.max()) if len(counts) else 0
        place = torch.zeros(len(last_row), longest, dtype=torch.int64)
        place[lines, number] = rows * batch.tokens.shape[1] + columns
        ends = lines != torch.nn.functional.pad(lines, (0, 1), value=-1)[1:]
        last_row[lines[ends]] = rows[ends]
        real = torch.arange(place.shape[1]) < counts[:, None]
        return cls(place, real, last_row, batch.tokens.shape)

    def take(self, values: Tensor) -> Tensor:
        """(B, T) -> (N, L) float64, 0 behind the last token."""
        return torch.where(self.real, values.flatten()[self.place].double(), 0.0)

    def put(self, lines: Tensor) -> Tensor:
        """(N, L) -> (B, T) float32, 0 on tokens that are not trained."""
        rows = torch.zeros(self.shape.numel(), dtype=torch.float32)
        rows[self.place[self.real]] = lines[self.real].float()
        return rows.view(self.shape)

    @property
    def last(self) -> Tensor:
        """(N, L) bool: the last token of its trajectory."""
        return self.real & ~self.ahead(self.real)

    def ahead(self, lines: Tensor) -> Tensor:
        """(N, L): the successor's entry, 0 (False) behind the last one."""
        return torch.cat([lines[:, 1:], torch.zeros_like(lines[:, :1])], dim=1)

    def next_values(self, values: Tensor, batch: Batch, bootstrap: bool, who: str) -> Tensor:
        """(N, L) of `values` (N, L): the successor's. After the last token 0, or with `bootstrap`,
        where the episode was cut, the critic's value of what came out."""
        after = torch.zeros(len(self.last_row), dtype=torch.float64)
        if bootstrap:
            reasons = tuple(StopReason)
            stops = batch.require("stop", who)[self.last_row]
            cut = torch.tensor([reasons[number] in TRUNCATED for number in stops])
            final = batch.require("final_values", who)[self.last_row].double()
            after = torch.where(cut, final, 0.0)
        return torch.where(self.last, after[:, None], self.ahead(values))


def accumulate(deltas: Tensor, decay: Tensor | float) -> Tensor:
    """(N, L) x_t = delta_t + decay_t x_{t+1}, x = 0 behind the last; decay (N, L) or one number."""
    decays = torch.as_tensor(decay, dtype=deltas.dtype).expand(deltas.shape)
    sums, total = torch.empty_like(deltas), deltas.new_zeros(len(deltas))
    for step in reversed(range(deltas.shape[1])):
        total = deltas[:, step] + decays[:, step] * total
        sums[:, step] = total
    return sums


def whiten(lines: Tensor, real: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over the real entries of all lines, with Bessel's
    correction; 0 elsewhere, and where there is only one."""
    kept = lines[real]
    if len(kept) < 2:
        return torch.zeros_like(lines)
    return torch.where(real, (lines - kept.mean()) / (kept.var() + 1e-8).sqrt(), 0.0)
