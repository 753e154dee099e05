"""The key-value cache of the embedded engine: a pool of blocks, and attention over the blocks of
several sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from rlflow.models.architecture import Architecture
from rlflow.rollout.embedded.block_manager import BLOCK_SIZE, blocks_for

CALL_ROWS = 4  # sequences in one attention call at the most
CALL_PADDING = 1.25  # a call's padded keys and values, in shares of the real ones, at the most
MASK_ELEMENTS = 1 << 22  # of one attention call while prefilling

Attend = Callable[[int, Tensor, Tensor], Tensor]
"""See rlflow.rollout.embedded.decoder.Attend."""


@dataclass(frozen=True)
class AttentionCall:
    """Sequences of similar length that one attention call serves.

    rows: which of the batch. blocks: (rows * n,), of each row the first n. mask: (rows, 1, 1 or
    queries, n * BLOCK_SIZE), 0 or -inf. queries: (rows, queries), places among the flat tokens;
    None where row i of the batch has query i. Padding repeats a row's last query; `real` (rows,
    queries) tells which are not padding."""

    rows: slice
    blocks: Tensor
    mask: Tensor
    queries: Tensor | None = None
    real: Tensor | None = None


class KeyValueCache:
    """Keys and values of `blocks` blocks, (layers, blocks, BLOCK_SIZE * width) with width = groups
    * (key_dim + value_dim): latent ones too are kept as attention takes them."""

    def __init__(
        self, model: Architecture, blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._model = model
        self._width = model.groups * (model.key_dim + model.value_dim)
        self._scale = model.softmax_scale if model.yarn else None  # None: torch's own
        self._make = partial(
            _zeros, (model.layers, blocks, BLOCK_SIZE * self._width), dtype, device
        )
        self._pool = self._make()
        shape, kind = (0, 0), torch.uint8
        if (experts := model.experts) is not None:
            shape = (sum(experts.sparse), experts.top_k)
            kind = torch.uint8 if experts.count <= 256 else torch.int16
        self._routes = _zeros((blocks * BLOCK_SIZE, *shape), kind, device)
        self._route_versions = _zeros((blocks * BLOCK_SIZE,), torch.int64, device)

    def free(self) -> None:
        """Gives the memory back, and forgets what is in it."""
        self._pool = self._pool.new_empty(len(self._pool), 0, 1)

    def allocate(self) -> None:
        """Takes the memory again after `free`."""
        self._pool = self._make()

    @staticmethod
    def block_bytes(model: Architecture, dtype: torch.dtype) -> int:
        """Memory of a block, all layers together."""
        width = model.groups * (model.key_dim + model.value_dim)
        return model.layers * BLOCK_SIZE * width * dtype.itemsize

    @torch.inference_mode()
    def copy(self, source: int, target: int) -> None:
        """Copies a block."""
        self._pool[:, target] = self._pool[:, source]
        for kept in (self._routes, self._route_versions):
            both = kept.unflatten(0, (-1, BLOCK_SIZE))
            both[target] = both[source]

    @torch.inference_mode()
    def clear(self, blocks: int) -> None:
        """Zeroes the first `blocks` blocks. A masked key must still be finite: NaN - inf is NaN, in
        whichever block it was left behind."""
        self._pool[:, :blocks] = 0

    @torch.inference_mode()
    def keep_routes(
        self, tables: Tensor, positions: Tensor, routes: Tensor | None, version: Tensor
    ) -> None:
        """Keeps which experts the tokens (N,) at `positions` went to, beside their keys and values,
        so that who finds those finds these. tables: (N, n) blocks of each token's sequence.
        version: of the weights."""
        if routes is not None:
            places = _places(tables, positions)
            self._routes[places] = routes.to(self._routes.dtype)
            self._route_versions[places] = version

    def routes(self, table: Tensor, count: int) -> tuple[Tensor | None, int]:
        """(count, layers, k) of the first tokens of a sequence, whose blocks are table (n,), and
        the oldest version among them; None, -1 of a model without experts."""
        if self._model.experts is None or not count:
            return None, -1
        positions = torch.arange(count, device=table.device)
        places = _places(table.expand(count, -1), positions)
        return self._routes[places].cpu(), int(self._route_versions[places].min())

    def decoding(self, tables: Tensor, positions: Tensor, lengths: Sequence[int]) -> Attend:
        """Attention for one new token per sequence. tables: (B, n) blocks; positions: (B,), where
        the new tokens stand, that is lengths - 1; longest first, so that neighbours need little
        padding."""
        index = _places(tables, positions)
        allowed = (
            torch.arange(blocks_for(lengths[0]) * BLOCK_SIZE, device=tables.device)
            <= positions[:, None]
        )
        mask = _as_mask(allowed, self._pool.dtype)[:, None, None]
        calls = []
        for rows in _similar(lengths):
            count = blocks_for(lengths[rows.start])
            calls.append(
                AttentionCall(
                    rows, tables[rows, :count].reshape(-1), mask[rows, ..., : count * BLOCK_SIZE]
                )
            )
        return self._decoding_attention(index, calls)

    def decoding_static(self, tables: Tensor, positions: Tensor) -> Attend:
        """The same in one call over all blocks of `tables`, with no look at a value on the host:
        fit for a CUDA graph."""
        allowed = (
            torch.arange(tables.shape[1] * BLOCK_SIZE, device=tables.device) <= positions[:, None]
        )
        mask = _as_mask(allowed, self._pool.dtype)[:, None, None]
        call = AttentionCall(slice(0, len(positions)), tables.reshape(-1), mask)
        return self._decoding_attention(_places(tables, positions), [call])

    def prefilling(self, tables: Tensor, starts: Sequence[int], stops: Sequence[int]) -> Attend:
        """Attention for the flat tokens of several sequences: i brings positions starts[i]:stops[i]
        of the one whose blocks are tables[i]."""
        device = tables.device
        parts = _cut(starts, stops)
        offsets = [0]
        for _, start, stop in parts:
            offsets.append(offsets[-1] + stop - start)
        places = [
            _places(
                tables[row, None].expand(stop - start, -1), torch.arange(start, stop, device=device)
            )
            for row, start, stop in parts
        ]
        order = sorted(range(len(parts)), key=lambda part: (-parts[part][2], parts[part][1]))
        lengths = [parts[part][2] for part in order]
        counts = [parts[part][2] - parts[part][1] for part in order]
        calls = []
        for rows in _similar(lengths, counts):
            chosen = order[rows]
            calls.append(
                self._prefilling_call(
                    rows, tables, [parts[i] for i in chosen], [offsets[i] for i in chosen]
                )
            )
        index = torch.cat(places)
        width = self._model.heads * self._model.value_dim

        def attend(layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
            self._write(layer, index, keys_values)
            output = torch.empty(len(queries), width, dtype=queries.dtype, device=device)
            for call in calls:
                keys, values = self._read(layer, call)
                wanted, real = cast(Tensor, call.queries), cast(Tensor, call.real)
                padded = queries[wanted].transpose(1, 2)
                attended = F.scaled_dot_product_attention(
                    padded, keys, values, attn_mask=call.mask, scale=self._scale, enable_gqa=True
                )
                output[wanted[real]] = attended.transpose(1, 2).flatten(2)[real]
            return output

        return attend

    def _decoding_attention(self, index: Tensor, calls: list[AttentionCall]) -> Attend:
        groups, dim = self._model.groups, self._model.key_dim

        def attend(layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
            self._write(layer, index, keys_values)
            # The heads of a group share its keys: no copies
            by_group = queries.reshape(len(queries), groups, -1, dim)
            parts = []
            for call in calls:
                keys, values = self._read(layer, call)
                attended = F.scaled_dot_product_attention(
                    by_group[call.rows], keys, values, attn_mask=call.mask, scale=self._scale
                )
                parts.append(attended.reshape(len(attended), -1))
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return attend

    def _prefilling_call(
        self, rows: slice, tables: Tensor, parts: list[tuple[int, int, int]], offsets: list[int]
    ) -> AttentionCall:
        device = tables.device
        first = torch.tensor([start for _, start, _ in parts], device=device)
        count = torch.tensor([stop - start for _, start, stop in parts], device=device)
        steps = torch.arange(max(stop - start for _, start, stop in parts), device=device)
        within = torch.minimum(steps, count[:, None] - 1)
        blocks = blocks_for(max(stop for _, _, stop in parts))
        allowed = (
            torch.arange(blocks * BLOCK_SIZE, device=device) <= (first[:, None] + within)[..., None]
        )
        chosen = tables[torch.tensor([row for row, _, _ in parts], device=device), :blocks]
        queries = torch.tensor(offsets, device=device)[:, None] + within
        mask = _as_mask(allowed, self._pool.dtype)[:, None]
        return AttentionCall(rows, chosen.reshape(-1), mask, queries, steps < count[:, None])

    def _write(self, layer: int, index: Tensor, keys_values: Tensor) -> None:
        self._pool[layer].view(-1, self._width)[index] = keys_values

    def _read(self, layer: int, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Keys and values (rows, groups, positions, key_dim or value_dim) of a call: a copy, small
        enough to stay in the cache of the processor until it is attended to."""
        groups = self._model.groups
        copied = self._pool[layer].index_select(0, call.blocks)
        held = copied.view(len(call.mask), -1, self._width)
        keys, values = held.tensor_split([groups * self._model.key_dim], dim=-1)
        keys, values = (part.unflatten(-1, (groups, -1)).transpose(1, 2) for part in (keys, values))
        return keys, values


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU the memory is not touched before it is used, so that a large pool costs what
    it holds."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    import numpy as np

    return torch.from_numpy(np.zeros((*shape, dtype.itemsize), dtype=np.uint8)).view(dtype)[..., 0]


def _places(tables: Tensor, positions: Tensor) -> Tensor:
    """(B,) where in the flat pool the position of each sequence lies."""
    block = tables.gather(1, (positions // BLOCK_SIZE)[:, None])[:, 0]
    return block * BLOCK_SIZE + positions % BLOCK_SIZE


def _as_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(allowed.shape, device=allowed.device, dtype=dtype).masked_fill_(
        ~allowed, float("-inf")
    )


def _similar(lengths: Sequence[int], counts: Sequence[int] | None = None) -> Iterator[slice]:
    """Runs of sequences, given longest first, that may share a padded length and (counts; None: 1)
    number of queries."""
    first, real, most = 0, 0, 0
    for row, length in enumerate(lengths):
        count = 1 if counts is None else counts[row]
        padded = (row - first + 1) * lengths[first] * max(most, count)
        if row > first and (
            row - first == CALL_ROWS or padded > CALL_PADDING * (real + length * count)
        ):
            yield slice(first, row)
            first, real, most = row, 0, 0
        real += length * count
        most = max(most, count)
    yield slice(first, len(lengths))


def _cut(starts: Sequence[int], stops: Sequence[int]) -> list[tuple[int, int, int]]:
    """(row, start, stop) of every row, those cut whose masks would be large."""
    parts = []
    for row, (start, stop) in enumerate(zip(starts, stops)):
        step = max(1, MASK_ELEMENTS // (CALL_ROWS * stop))
        parts += [(row, at, min(at + step, stop)) for at in range(start, stop, step)]
    return parts
