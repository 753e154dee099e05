"""Packed rows: the real tokens of a micro-batch laid end to end, and the way back to one row each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rlflow.types import Batch


@dataclass(frozen=True)
class Packing:
    """`tokens` (1, N and the filling): the rows of a batch end to end. `real` (B, T): where they stood, in the same order.

    `segments`: where each row starts and ends, for attention and for positions that begin at 0 in every row."""

    tokens: Tensor
    real: Tensor
    segments: PackedSeqParams

    @property
    def places(self) -> Tensor:
        """(B, T) the place of each token in the packed row; of padding, that of the token before it."""
        return self.real.flatten().cumsum(0).sub_(1).view(self.real.shape)

    def gather(self, values: Tensor) -> Tensor:
        """(B, T) -> (1, N)."""
        return values[self.real].unsqueeze(0)

    def scatter(self, values: Tensor) -> Tensor:
        """(1, N) -> (B, T), 0 at padding."""
        return values.new_zeros(self.real.shape).masked_scatter(self.real, values)


def pack(batch: Batch, multiple: int = 1) -> Packing:
    """The batch's rows without their padding. An empty row keeps one token, as no segment can have none.

    A last segment of zeros fills the tokens up to a multiple of `multiple`, where they are split over ranks."""
    lengths = batch.lengths.clamp(min=1)
    real = torch.arange(batch.tokens.shape[1], device=lengths.device) < lengths.unsqueeze(1)
    tokens = batch.tokens[real]
    filling = -len(tokens) % multiple
    sizes = F.pad(lengths, (0, 1), value=filling) if filling else lengths
    bounds = F.pad(sizes.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(sizes.max())
    segments = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return Packing(F.pad(tokens, (0, filling)).unsqueeze(0), real, segments)
