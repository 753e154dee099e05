"""Context parallelism: every row is cut into 2R chunks, of which rank r of R holds chunks r and 2R
- 1 - r.

In that order (zigzag; megatron-core, utils.py, get_batch_on_this_cp_rank) causal attention costs
every rank the same. Megatron's rotary embedding and Transformer Engine's attention expect it; both
cut packed rows one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass
class Segments(PackedSeqParams):
    """Megatron's bounds of packed rows, and their lengths on the host: reading them off the bounds
    would make it wait for the GPU in every layer."""

    lengths: list[int] = field(default_factory=list)


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


def packed_positions(bounds: Tensor, tokens: int, ranks: int = 1, rank: int = 0) -> Tensor:
    """(tokens,) the position in its segment of each of a rank's tokens, which lie as `HeldChunk`
    says. bounds (segments + 1,): of whole segments. Nothing is read on the host."""
    here = torch.arange(tokens, device=bounds.device)
    starts = bounds.long() // ranks
    segment = torch.searchsorted(starts[1:], here, right=True)
    place = here - starts[segment]
    if ranks == 1:
        return place
    size = (starts[segment + 1] - starts[segment]) // 2
    late = place >= size
    return place + torch.where(late, (2 * ranks - 2 - rank) * size, rank * size)


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
