"""Forward passes over slots: what a prefill or a decode step computes, samples and writes down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.errors import RolloutError
from rlflow.rollout.embedded.adapters import Applied
from rlflow.rollout.embedded.cache import KeyValueCache
from rlflow.rollout.embedded.decoder import Decoder
from rlflow.rollout.embedded.graphs import Capture, DecodeGraphs
from rlflow.rollout.embedded.sampling import StopTable, sample, uniforms
from rlflow.rollout.embedded.sequences import Slots


class NotFiniteError(RolloutError):
    """The model gives logits that are NaN or infinite."""


NOT_FINITE = 255
"""Flag of a row whose log-prob is NaN or infinite; beside those of the stop table."""


@dataclass(frozen=True)
class PrefillChunk:
    """What a prefill computes of one slot: positions start:stop of its `tokens`; the last of them
    where complete."""

    slot: int
    start: int
    stop: int
    tokens: list[int]

    @property
    def complete(self) -> bool:
        return self.stop == len(self.tokens)


class ModelRunner:
    """Runs the model over slots and writes what it samples into them. Methods return (slot, flag)
    pairs, a flag of the stop table per sampled token.

    capture: records a decode step for replay (see rlflow.rollout.embedded.graphs); None runs every
    step anew."""

    def __init__(
        self,
        model: Decoder,
        cache: KeyValueCache,
        slots: Slots,
        stops: StopTable,
        capture: Capture | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._slots = slots
        self._stops = stops
        self._version = torch.zeros((), dtype=torch.int64, device=model.device)
        self._graphs = None if capture is None else DecodeGraphs(slots, self._decode, capture)

    @property
    def version(self) -> int:
        """Version of the weights, written beside every sampled token."""
        return int(self._version)

    @version.setter
    def version(self, version: int) -> None:
        self._version.fill_(version)

    def forget_graphs(self) -> None:
        """Records decode steps anew: the cache lies elsewhere from now on."""
        if self._graphs is not None:
            self._graphs.forget()

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[tuple[int, int]]:
        """Computes the chunks in one pass; samples for those that are complete."""
        device = self._model.device
        fed = [token for chunk in chunks for token in chunk.tokens[chunk.start : chunk.stop]]
        spans = [(chunk.start, chunk.stop) for chunk in chunks]
        positions = torch.cat([torch.arange(*span) for span in spans]).to(device)
        sizes = torch.tensor([stop - start for start, stop in spans], device=device)
        slots = torch.tensor([chunk.slot for chunk in chunks], device=device)
        tables = self._slots.block_tables[slots]
        attend = self._cache.prefilling(tables, spans)
        complete = [row for row, chunk in enumerate(chunks) if chunk.complete]
        ends = sizes.cumsum(0)[complete] - 1
        applied = None
        if self._slots.adapter:
            applied = self._adapters([(chunk.slot, chunk.stop - chunk.start) for chunk in chunks])
        tokens = torch.tensor(fed, device=device)
        logits = self._model.forward(tokens, positions, attend, ends, applied)
        by_token = tables.repeat_interleave(sizes, 0)
        self._cache.keep_routes(by_token, positions, self._model.routes, self._version)
        if not complete:
            return []
        batch = slots[complete]
        return self._outcome(
            [chunks[row].slot for row in complete], batch, *self._sample(batch, logits)
        )

    @torch.inference_mode()
    def decode(self, order: list[int]) -> list[tuple[int, int]]:
        """One token for each of the slots, the longest first."""
        applied = None
        if self._slots.adapter:
            applied = self._adapters([(slot, 1) for slot in order])
        if self._graphs is not None and applied is None:
            return self._outcome(order, *self._graphs.run(order))
        batch = torch.tensor(order, device=self._model.device)
        slots = self._slots
        lengths = [slots.length[slot] for slot in order]
        sampled = self._decode(batch, None, lengths, applied)
        return self._outcome(order, batch, *sampled)

    def _decode(
        self,
        batch: Tensor,
        blocks: int | None,
        lengths: Sequence[int] | None = None,
        applied: Sequence[Applied] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Sampled tokens (B,) and their log-probs (B,) for the slots `batch`, of that many blocks
        at most, written down. Without lengths no value is looked at on the host."""
        slots = self._slots
        positions = slots.lengths[batch] - 1
        tables = slots.block_tables[batch, :blocks]
        attend = self._cache.decoding(tables, positions, lengths)
        tokens = slots.tokens[batch, positions]
        logits = self._model.forward(tokens, positions, attend, applied=applied)
        self._cache.keep_routes(tables, positions, self._model.routes, self._version)
        return self._sample(batch, logits)

    def _adapters(self, tokens: Sequence[tuple[int, int]]) -> list[Applied] | None:
        """Which adapters a pass over so many tokens of each slot needs where; None where no request
        names one. tokens: (slot, count) pairs."""
        named = self._slots.adapter
        names = [named.get(slot, "") for slot, count in tokens for _ in range(count)]
        if not any(names):
            return None
        applied: list[Applied] = []
        for name in dict.fromkeys(names):
            if name or "" in self._model.adapters:
                rows = [row for row, other in enumerate(names) if other == name]
                placed = torch.tensor(rows, device=self._model.device)
                applied.append((self._model.adapters[name], placed))
        return applied

    def _sample(self, batch: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        slots = self._slots
        lengths, temperatures = slots.lengths[batch], slots.temperatures[batch]
        drawn = logits.is_cuda or bool((temperatures > 0).any())
        uniform = uniforms(slots.seeds[batch], lengths) if drawn else None
        tokens, logprobs = sample(logits, temperatures, uniform)
        slots.tokens[batch, lengths] = tokens
        slots.logprobs[batch, lengths] = logprobs
        slots.versions[batch, lengths] = self._version
        slots.lengths[batch] = lengths + 1
        slots.lengths[slots.spare :] = 1
        return tokens, logprobs

    def _outcome(
        self, order: Sequence[int], batch: Tensor, tokens: Tensor, logprobs: Tensor
    ) -> list[tuple[int, int]]:
        """The flags, brought to the host at once, and the host's side of the book-keeping."""
        slots = self._slots
        flags = self._stops.flags[slots.stop_rows[batch], tokens]
        outcome = list(
            zip(order, torch.where(torch.isfinite(logprobs), flags, NOT_FINITE).tolist())
        )
        if any(flag == NOT_FINITE for _, flag in outcome):
            raise NotFiniteError(
                "engine: the policy's logits are not finite; its weights diverged (lower the "
                "learning rate?)."
            )
        for slot in order:
            slots.cached[slot] = slots.length[slot]
            slots.length[slot] += 1
        return outcome
