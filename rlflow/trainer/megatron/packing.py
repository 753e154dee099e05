"""Feeds a rank its share of a batch, as padded rows or rows end to end, and maps results back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlflow.trainer.megatron.context import Segments, held_positions
from rlflow.trainer.megatron.world import World
from rlflow.types import Batch


@dataclass(frozen=True)
class Feed:
    """`tokens` (rows, tokens): what the model gets. `places` (B, T): the index of each of the
    batch's tokens in the hidden states that come out, (tokens * rows, hidden), or -1 where there
    are none: padding, another context-parallel rank's.

    `segments`: where each row starts and ends on all ranks together, for attention and for
    positions that begin at 0 in every row; None for padded rows. `width`: tokens of a row, those of
    all context-parallel ranks together."""

    tokens: Tensor
    places: Tensor
    width: int
    segments: Segments | None = None

    def to(self, device: torch.device) -> Feed:
        """The same on a device: feeds are made on the host, which would wait for each size."""
        segments = self.segments
        if segments is not None:
            names = ("cu_seqlens_q", "cu_seqlens_kv")
            bounds: dict[str, Any] = dict.fromkeys(names, segments.cu_seqlens_q.to(device))
            segments = replace(segments, **bounds)
        return replace(
            self, tokens=self.tokens.to(device), places=self.places.to(device), segments=segments
        )


@dataclass(frozen=True)
class Share:
    """How tokens are split: over `ranks` context-parallel ranks, of which this is `rank`, and
    evenly over `slices` sequence-parallel ranks after that."""

    ranks: int = 1
    rank: int = 0
    slices: int = 1
    granule: int = 1  # tokens that a forward pass must come in: 16 or 32 for products in fp8

    @classmethod
    def of(cls, world: World, granule: int = 1) -> Share:
        slices = world.tensor_parallel if world.layout.sequence_parallel else 1
        return cls(world.layout.context_parallel, world.context_rank, slices, granule)

    @property
    def row_multiple(self) -> int:
        """What the length of each row is filled up to a multiple of."""
        return 2 * self.ranks if self.ranks > 1 else 1

    @property
    def multiple(self) -> int:
        """What the tokens of one forward pass are filled up to a multiple of."""
        return self.row_multiple * self.slices * self.granule


def pad(batch: Batch, share: Share = Share()) -> Feed:
    """The batch's rows as they stand, filled up with zeros to a width that can be split."""
    rows, width = batch.tokens.shape
    tokens = F.pad(batch.tokens, (0, -width % share.multiple))
    held, inverse = _split([tokens.shape[1]], share, tokens.device)
    columns = inverse[:width].unsqueeze(0)
    places = torch.where(
        columns >= 0, columns * rows + torch.arange(rows, device=tokens.device).unsqueeze(1), -1
    )
    whole = tokens.shape[1]
    return Feed(tokens if share.ranks == 1 else tokens[:, held], places.expand(rows, width), whole)


def pack(batch: Batch, share: Share = Share(), least: int = 0) -> Feed:
    """The batch's rows end to end without their padding. An empty row keeps one token, as no
    segment can have none.

    A last segment of zeros fills the tokens up to a number that can be split, at least `least`."""
    lengths = batch.lengths.clamp(min=1)
    positions = torch.arange(batch.tokens.shape[1], device=lengths.device)
    real = positions < lengths.unsqueeze(1)
    sizes = lengths + -lengths % share.row_multiple
    starts = F.pad(sizes.cumsum(0), (1, 0))
    # Places if there was one rank
    whole = torch.where(real, starts[:-1].unsqueeze(1) + positions, -1)
    used = int(starts[-1])
    width = max(used, least)
    width += -width % share.multiple
    if filling := width - used:
        sizes = F.pad(sizes, (0, 1), value=filling)
    tokens = batch.tokens.new_zeros(width)
    tokens[whole[real]] = batch.tokens[real]
    held, inverse = _split(sizes.tolist(), share, tokens.device)
    places = torch.where(real, inverse[whole.clamp(min=0)], -1)
    own = tokens if share.ranks == 1 else tokens[held]
    return Feed(own.unsqueeze(0), places, width, _segments(sizes))


def _split(lengths: Sequence[int], share: Share, device: torch.device) -> tuple[Tensor, Tensor]:
    """(places of this rank's tokens among the segments, of every token its index on this rank or
    -1)."""
    total = sum(lengths)
    if share.ranks == 1:
        everything = torch.arange(total, device=device)
        return everything, everything
    held = held_positions(lengths, share.ranks, share.rank, device)
    inverse = torch.full((total,), -1, device=device)
    inverse[held] = torch.arange(len(held), device=device)
    return held, inverse


def _segments(sizes: Tensor) -> Segments:
    bounds = F.pad(sizes.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(sizes.max())
    return Segments(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=sizes.tolist(),
    )
