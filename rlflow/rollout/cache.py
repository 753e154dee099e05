"""The key-value cache of the embedded engine: one row of positions per slot, and attention over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from rlflow.weights.families import Architecture

BLOCK = 32  # slots that share one padded length while decoding
PREFILL_ROWS = 16  # rows that share one padded length while prefilling
FIRST_CAPACITY = 256  # positions per slot; doubled on demand


@dataclass(frozen=True)
class Piece:
    """One attention call: which queries, which slots' keys and values, up to which position.

    slots: a range (a view of the cache) or an index (a copy). mask: (rows, 1, queries, length), 0 or -inf."""

    queries: slice | Tensor
    slots: slice | Tensor
    length: int
    mask: Tensor


class KeyValueCache:
    """Keys and values of `slots` sequences, (slots, capacity, 2 * groups * head_dim) per layer."""

    def __init__(self, model: Architecture, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.slots = slots
        self.capacity = FIRST_CAPACITY
        self._model = model
        self._width = 2 * model.groups * model.head_dim
        self._make = lambda capacity: torch.zeros(slots, capacity, self._width, dtype=dtype, device=device)
        self._layers = [self._make(self.capacity) for _ in range(model.layers)]

    @torch.inference_mode()
    def reserve(self, length: int) -> bool:
        """Makes room for sequences of `length`; True if it had to grow."""
        if length <= self.capacity:
            return False
        held = self.capacity
        while self.capacity < length:
            self.capacity *= 2
        for index, layer in enumerate(self._layers):
            self._layers[index] = self._make(self.capacity)
            self._layers[index][:, :held] = layer
        return True

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Gives slot `target` the first `length` positions of slot `source`."""
        for layer in self._layers:
            layer[target, :length] = layer[source, :length]

    @torch.inference_mode()
    def clear(self) -> None:
        """Zeroes everything. A masked key must still be finite: NaN - inf is NaN, in whichever slot it was left
        behind."""
        for layer in self._layers:
            layer.zero_()

    def decoding(self, slots: Tensor, positions: Tensor) -> Callable[[int, Tensor, Tensor], Tensor]:
        """Attention for one new token per slot. slots: (B,), ascending; positions: (B,), where the new tokens stand."""
        index = slots * self.capacity + positions
        pieces = self._decoding_pieces(slots, positions)
        groups, dim = self._model.groups, self._model.head_dim

        def attend(layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
            self._layers[layer].view(-1, self._width)[index] = keys_values
            by_group = queries.reshape(
                len(queries), groups, -1, dim
            )  # the heads of a group share keys: no copies of them
            parts = [self._attend(layer, piece, by_group) for piece in pieces]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return attend

    def _decoding_pieces(self, slots: Tensor, positions: Tensor) -> list[Piece]:
        steps = torch.arange(int(positions.max()) + 1, device=slots.device)
        allowed = steps <= positions[:, None]
        mask = torch.zeros(allowed.shape, device=slots.device, dtype=self._layers[0].dtype)
        mask.masked_fill_(~allowed, float("-inf"))
        pieces = []
        for first in range(0, len(slots), BLOCK):
            rows = slice(first, min(first + BLOCK, len(slots)))
            low, high = int(slots[rows.start]), int(slots[rows.stop - 1]) + 1
            dense = high - low == rows.stop - rows.start
            length = int(positions[rows].max()) + 1
            chosen = slice(low, high) if dense else slots[rows]
            pieces.append(Piece(rows, chosen, length, mask[rows, None, None, :length]))
        return pieces

    def _attend(self, layer: int, piece: Piece, by_group: Tensor) -> Tensor:
        """(rows, heads * head_dim) for the queries (rows, groups, heads per group, head_dim) of a piece."""
        keys, values = self._read(layer, piece)
        attended = F.scaled_dot_product_attention(by_group[piece.queries], keys, values, attn_mask=piece.mask)
        return attended.reshape(attended.shape[0], -1)

    def _read(self, layer: int, piece: Piece) -> tuple[Tensor, Tensor]:
        groups, dim = self._model.groups, self._model.head_dim
        held = self._layers[layer][piece.slots, : piece.length].view(-1, piece.length, 2 * groups, dim).transpose(1, 2)
        return held[:, :groups], held[:, groups:]

    def prefilling(
        self, slots: list[int], starts: list[int], stops: list[int]
    ) -> Callable[[int, Tensor, Tensor], Tensor]:
        """Attention for the flat tokens of several rows: row i brings positions starts[i]:stops[i] of slot slots[i]."""
        device = self._layers[0].device
        counts = [stop - start for start, stop in zip(starts, stops)]
        flat = [slot * self.capacity + start for slot, start in zip(slots, starts)]
        index = torch.cat([torch.arange(at, at + count) for at, count in zip(flat, counts)]).to(device)
        offsets = [0]
        for count in counts:
            offsets.append(offsets[-1] + count)
        by_length = sorted(range(len(slots)), key=lambda row: (stops[row], counts[row], row))
        pieces = []
        for first in range(0, len(slots), PREFILL_ROWS):
            rows = by_length[first : first + PREFILL_ROWS]
            pieces.append(self._prefilling_piece(rows, slots, starts, stops, offsets))
        heads, dim = self._model.heads, self._model.head_dim

        def attend(layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
            self._layers[layer].view(-1, self._width)[index] = keys_values
            output = torch.empty(len(queries), heads * dim, dtype=queries.dtype, device=device)
            for piece, real, places in pieces:
                keys, values = self._read(layer, piece)
                padded = queries[piece.queries].transpose(1, 2)
                attended = F.scaled_dot_product_attention(padded, keys, values, attn_mask=piece.mask, enable_gqa=True)
                output[places] = attended.transpose(1, 2).flatten(2)[real]
            return output

        return attend

    def _prefilling_piece(
        self, rows: list[int], slots: list[int], starts: list[int], stops: list[int], offsets: list[int]
    ) -> tuple[Piece, Tensor, Tensor]:
        """The piece of some rows, which of its padded queries (rows, queries) are real, and their places among the flat
        tokens. Padding repeats a row's last token, so that every query has something to attend to."""
        device = self._layers[0].device
        first = torch.tensor([starts[row] for row in rows], device=device)
        count = torch.tensor([stops[row] - starts[row] for row in rows], device=device)
        offset = torch.tensor([offsets[row] for row in rows], device=device)
        steps = torch.arange(int(count.max()), device=device)
        within = torch.minimum(steps, count[:, None] - 1)
        length = max(stops[row] for row in rows)
        allowed = torch.arange(length, device=device) <= (first[:, None] + within)[..., None]
        mask = torch.zeros(allowed.shape, device=device, dtype=self._layers[0].dtype)
        mask.masked_fill_(~allowed, float("-inf"))
        chosen = torch.tensor([slots[row] for row in rows], device=device)
        queries, real = offset[:, None] + within, steps < count[:, None]
        return Piece(queries, chosen, length, mask[:, None]), real, queries[real]
