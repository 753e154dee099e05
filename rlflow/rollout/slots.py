"""The engine's book-keeping: which sequence lies in which slot, its tokens, and how much of it is in the cache."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.rollout.engine import Completion, Sampling


@dataclass(eq=False)
class Request:
    """One call of `generate` on its way. stop_row: row of the stop table. slot: -1 while it waits."""

    tokens: list[int]
    sampling: Sampling
    id: str | None
    stop_row: int
    seed: int
    future: asyncio.Future[Completion]
    slot: int = -1


class Slots:
    """Tables with a row per slot. A slot is free, held (it keeps the tokens of an owner's last turn) or running.

    lengths: tokens in the slot; cached[slot]: how many of them have keys and values. Columns of `tokens`, `logprobs`
    and `versions` are positions; the latter two are filled from `origins` (the prompt's length) on."""

    def __init__(self, count: int, device: torch.device) -> None:
        def table(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(count, *shape, dtype=dtype, device=device)

        self.tokens = table(torch.int64, 0)
        self.logprobs = table(torch.float32, 0)
        self.versions = table(torch.int64, 0)
        self.lengths = table(torch.int64)
        self.origins = table(torch.int64)
        self.limits = table(torch.int64)
        self.seeds = table(torch.int64)
        self.stop_rows = table(torch.int64)
        self.temperatures = table(torch.float32)
        self.cached = [0] * count
        self._free = list(range(count))
        self._held: dict[int, None] = {}  # in the order of their last use
        self._slot_of: dict[str, int] = {}
        self._owner_of: dict[int, str] = {}

    def reserve(self, capacity: int) -> None:
        """Widens the tables to `capacity` positions."""
        extra = capacity - self.tokens.shape[1]
        if extra > 0:
            self.tokens = torch.nn.functional.pad(self.tokens, (0, extra))
            self.logprobs = torch.nn.functional.pad(self.logprobs, (0, extra))
            self.versions = torch.nn.functional.pad(self.versions, (0, extra))

    def held_by(self, owner: str | None) -> int | None:
        """The slot that holds the owner's last turn."""
        slot = None if owner is None else self._slot_of.get(owner)
        return slot if slot in self._held else None

    def available(self) -> bool:
        return bool(self._free or self._held)

    def take(self, owner: str | None) -> int:
        """A slot for a request: the owner's own, else a free one, else the one that was held longest without use."""
        slot = self.held_by(owner)
        if slot is None and self._free:
            slot = heapq.heappop(self._free)
        elif slot is None:
            slot = next(iter(self._held))
            self._disown(slot)
        self._held.pop(slot, None)
        if owner is not None:
            self._slot_of[owner] = slot
            self._owner_of[slot] = owner
        return slot

    def put_back(self, slot: int, cached: int) -> None:
        """Ends a request's use of its slot: held if it has an owner, else free."""
        self.cached[slot] = cached
        if slot in self._owner_of:
            self._held[slot] = None
        else:
            heapq.heappush(self._free, slot)

    def release(self, owner: str) -> None:
        """Frees the slot that holds the owner's last turn, if there is one."""
        slot = self.held_by(owner)
        if slot is not None:
            del self._held[slot]
            self._disown(slot)
            heapq.heappush(self._free, slot)

    def forget_cache(self) -> None:
        """Nothing that is cached is valid any more (the weights changed)."""
        self.cached = [0] * len(self.cached)

    def common_prefix(self, slot: int, tokens: Sequence[int]) -> int:
        """How many leading tokens the slot shares with `tokens`."""
        count = min(int(self.lengths[slot]), len(tokens))
        differs = (self.tokens[slot, :count].cpu() != torch.tensor(tokens[:count], dtype=torch.int64)).nonzero()
        return int(differs[0]) if len(differs) else count

    def fill(self, slot: int, request: Request, limit: int) -> None:
        """Writes a request's prompt and sampling parameters into its slot."""
        count = len(request.tokens)
        self.tokens[slot, :count] = torch.tensor(request.tokens, dtype=torch.int64)
        self.lengths[slot] = self.origins[slot] = count
        self.limits[slot] = limit
        self.seeds[slot] = request.seed
        self.stop_rows[slot] = request.stop_row
        self.temperatures[slot] = request.sampling.temperature

    def sampled(self, slot: int) -> tuple[list[int], list[float], list[int]]:
        """Tokens, log-probs and versions sampled for the request in the slot."""
        where = (slot, slice(int(self.origins[slot]), int(self.lengths[slot])))
        return self.tokens[where].tolist(), self.logprobs[where].tolist(), self.versions[where].tolist()

    def _disown(self, slot: int) -> None:
        owner = self._owner_of.pop(slot)
        del self._slot_of[owner]
