"""Context parallelism: every row is cut into 2R chunks, of which rank r of R holds chunks r and 2R
- 1 - r.

In that order (zigzag; megatron-core, utils.py, get_batch_on_this_cp_rank) causal attention costs
every rank the same. Megatron's rotary embedding and Transformer Engine's attention expect it; both
cut packed rows one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class HeldChunk:
    """Successive tokens of a segment: `here`: where they lie on this rank; `first` to `stop`: their
    places among the segments end to end; `start`: of their segment. A token attends to `start` up
    to itself."""

    here: slice
    start: int
    first: int
    stop: int


def held_positions(
    lengths: Sequence[int], ranks: int, rank: int, device: torch.device | None = None
) -> Tensor:
    """(N / ranks,) the places of a rank's tokens among segments laid end to end, in the rank's
    order.

    lengths: of the segments, N in sum; multiples of 2 * ranks."""
    chunks = held_chunks(lengths, ranks, rank)
    return torch.cat([torch.arange(chunk.first, chunk.stop, device=device) for chunk in chunks])


def held_chunks(lengths: Sequence[int], ranks: int, rank: int) -> Iterator[HeldChunk]:
    """A rank's two chunks of each segment, in the rank's order."""
    start, here = 0, 0
    for length in lengths:
        size = length // (2 * ranks)
        for chunk in (rank, 2 * ranks - 1 - rank):
            first = start + chunk * size
            yield HeldChunk(slice(here, here + size), start, first, first + size)
            here += size
        start += length


def gather_tokens(values: Tensor, lengths: Sequence[int], group: ProcessGroup) -> Tensor:
    """(N / ranks, ...) on each rank -> (N, ...) in the order of the text; the gradient comes back
    summed over ranks."""
    gathered = gather_from_sequence_parallel_region(
        values, tensor_parallel_output_grad=True, group=group
    )
    ranks = group.size()
    order = torch.cat(
        [held_positions(lengths, ranks, rank, values.device) for rank in range(ranks)]
    )
    return gathered.index_select(0, order.argsort())
