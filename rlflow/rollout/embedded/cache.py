"""The key-value cache of the embedded engine: a pool of blocks, and attention over the blocks of
several sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from rlflow.models.architecture import Architecture
from rlflow.rollout.embedded.block_manager import BLOCK_SIZE, blocks_for
from rlflow.rollout.embedded.decoder import Attend

CALL_ROWS = 4  # sequences in one attention call at the most
CALL_PADDING = 1.25  # a call's padded keys and values, in shares of the real ones, at the most
MASK_ELEMENTS = 1 << 22  # of one attention call while prefilling


class PrefillPart(NamedTuple):
    """Positions start:stop of a row; the first of them is the flat token `offset`."""

    row: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class AttentionCall:
    """Sequences of similar length that one attention call serves.

    queries: which of the batch, one query each; or (rows, queries), places among the flat tokens.
    blocks: (rows * n,), of each row the first n. masks: by window of a layer (None: without), (rows,
    1, 1 or queries, n * BLOCK_SIZE), 0 or -inf. Padding repeats a row's last query; `real` (rows, queries) tells which are not
    padding."""

    queries: slice | Tensor
    blocks: Tensor
    masks: dict[int | None, Tensor]
    real: Tensor | None = None


class KeyValueCache:
    """Keys and values of `blocks` blocks, (layers, blocks, BLOCK_SIZE * width) with width = groups
    * (key_dim + value_dim): latent ones too are kept as attention takes them."""

    def __init__(
        self, model: Architecture, blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._model = model
        self._width = model.groups * (model.key_dim + model.value_dim)
        self._windows = [model.window_at(layer) for layer in range(model.layers)]
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

    def decoding(
        self, tables: Tensor, positions: Tensor, lengths: Sequence[int] | None = None
    ) -> Attend:
        """Attention for one new token per sequence. tables: (B, n) blocks; positions: (B,), where
        the new tokens stand, that is lengths - 1; longest first, so that neighbours need little
        padding. Without lengths it is one call over all blocks of `tables`, with no look at a value
        on the host: fit for a CUDA graph."""
        runs = [(slice(0, len(tables)), tables.shape[1])]
        if lengths is not None:
            runs = [(rows, blocks_for(lengths[rows.start])) for rows in _similar(lengths)]
        reach = torch.arange(runs[0][1] * BLOCK_SIZE, device=tables.device)
        masks = self._masks(reach, positions[:, None])
        calls = [
            AttentionCall(
                rows,
                tables[rows, :count].reshape(-1),
                {
                    window: mask[rows, None, ..., : count * BLOCK_SIZE]
                    for window, mask in masks.items()
                },
            )
            for rows, count in runs
        ]
        index, groups, dim = _places(tables, positions), self._model.groups, self._model.key_dim

        def attend(layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
            self._write(layer, index, keys_values)
            # The heads of a group share its keys: no copies
            by_group = queries.reshape(len(queries), groups, -1, dim)
            parts = []
            for call in calls:
                keys, values = self._read(layer, call)
                attended = F.scaled_dot_product_attention(
                    by_group[call.queries],
                    keys,
                    values,
                    attn_mask=call.masks[self._windows[layer]],
                    scale=self._model.own_scale,
                )
                parts.append(attended.reshape(len(attended), -1))
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return attend

    def prefilling(self, tables: Tensor, spans: Sequence[tuple[int, int]]) -> Attend:
        """Attention for the flat tokens of several sequences: i brings the positions of spans[i],
        (start, stop), of the one whose blocks are tables[i]."""
        device = tables.device
        parts = sorted(_cut(spans), key=lambda part: (-part.stop, part.start))
        lengths = [part.stop for part in parts]
        counts = [part.stop - part.start for part in parts]
        calls = [self._prefilling_call(tables, parts[rows]) for rows in _similar(lengths, counts)]
        sizes = torch.tensor([stop - start for start, stop in spans], device=device)
        positions = torch.cat([torch.arange(*span, device=device) for span in spans])
        index = _places(tables.repeat_interleave(sizes, 0), positions)
        width = self._model.heads * self._model.value_dim

        def attend(layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
            self._write(layer, index, keys_values)
            output = torch.empty(len(queries), width, dtype=queries.dtype, device=device)
            for call in calls:
                keys, values = self._read(layer, call)
                wanted, real = cast(Tensor, call.queries), cast(Tensor, call.real)
                padded = queries[wanted].transpose(1, 2)
                attended = F.scaled_dot_product_attention(
                    padded,
                    keys,
                    values,
                    attn_mask=call.masks[self._windows[layer]],
                    scale=self._model.own_scale,
                    enable_gqa=True,
                )
                output[wanted[real]] = attended.transpose(1, 2).flatten(2)[real]
            return output

        return attend

    def _prefilling_call(self, tables: Tensor, parts: Sequence[PrefillPart]) -> AttentionCall:
        rows, start, stop, offset = torch.tensor(parts, device=tables.device).unbind(1)
        count = (stop - start)[:, None]
        steps = torch.arange(max(part.stop - part.start for part in parts), device=tables.device)
        within = torch.minimum(steps, count - 1)
        blocks = blocks_for(parts[0].stop)
        reach = torch.arange(blocks * BLOCK_SIZE, device=tables.device)
        masks = self._masks(reach, (start[:, None] + within)[..., None])
        queries = offset[:, None] + within
        return AttentionCall(queries, tables[rows, :blocks].reshape(-1), masks, steps < count)

    def _masks(self, reach: Tensor, positions: Tensor) -> dict[int | None, Tensor]:
        """By window of a layer (None: without), what queries at `positions` (rows, ..., 1) see of
        the keys at `reach` (n,): (rows, 1, ..., n)."""
        seen = reach <= positions
        masks = {}
        for window in set(self._windows):
            near = seen if window is None else seen & (reach > positions - window)
            masks[window] = _as_mask(near, self._pool.dtype)[:, None]
        return masks

    def _write(self, layer: int, index: Tensor, keys_values: Tensor) -> None:
        self._pool[layer].view(-1, self._width)[index] = keys_values

    def _read(self, layer: int, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Keys and values (rows, groups, positions, key_dim or value_dim) of a call: a copy, small
        enough to stay in the cache of the processor until it is attended to."""
        groups = self._model.groups
        copied = self._pool[layer].index_select(0, call.blocks)
        rows = len(next(iter(call.masks.values())))
        held = copied.view(rows, -1, self._width)
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


def _cut(spans: Sequence[tuple[int, int]]) -> list[PrefillPart]:
    """Every row's span, those cut whose masks would be large."""
    parts, offset = [], 0
    for row, (start, stop) in enumerate(spans):
        step = max(1, MASK_ELEMENTS // (CALL_ROWS * stop))
        for at in range(start, stop, step):
            parts.append(PrefillPart(row, at, min(at + step, stop), offset + at - start))
        offset += stop - start
    return parts
