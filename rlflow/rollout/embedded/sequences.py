"""The engine's book-keeping: which sequence lies in which slot, its tokens, and the blocks of the
cache that it holds."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.rollout.embedded.block_manager import BLOCK_SIZE, SCRATCH, BlockManager, blocks_for
from rlflow.rollout.engine import Completion, Sampling


@dataclass(eq=False)
class SequenceState:
    """One call of `generate` on its way. stop_row: row of the stop table. slot: -1 while it
    waits."""

    tokens: list[int]
    sampling: Sampling
    id: str | None
    stop_row: int
    seed: int
    future: asyncio.Future[Completion]
    priority: int = 0  # lower first
    slot: int = -1
    started: bool = False  # something of it was computed


class Slots:
    """Tables with a row per slot, and one more row (`spare`) that stands in where a batch is
    padded. A slot is free, held (it keeps the tokens and blocks of an owner's last turn) or
    running.

    On the device: `tokens`, `logprobs`, `versions` (rows, width), the columns being positions (the
    latter two from a prompt's end on); `lengths`, `seeds`, `temperatures`, `stop_rows` (rows,);
    `block_tables` (rows, blocks). On the host, a list entry per slot: `length` (tokens in the
    slot), `origin` (of them prompt), `limit` (most tokens), `cached` (of the tokens, how many have
    keys and values), `blocks` (held) and `rank` (who goes first and keeps its blocks longest: lower
    priorities, then episodes that started earlier), `adapter` (the name of that by which keys and
    values were computed; only of slots that have one)."""

    def __init__(self, count: int, block_manager: BlockManager, device: torch.device) -> None:
        self.spare = count
        self.block_manager = block_manager

        def table(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(count + 1, *shape, dtype=dtype, device=device)

        self.tokens = table(torch.int64, 0)
        self.logprobs = table(torch.float32, 0)
        self.versions = table(torch.int64, 0)
        self.lengths = table(torch.int64).fill_(1)  # the spare row decodes position 0
        self.seeds = table(torch.int64)
        self.temperatures = table(torch.float32)
        self.stop_rows = table(torch.int64)
        self.block_tables = table(torch.int64, 0)
        self.length = [1] * (count + 1)
        self.origin = [0] * (count + 1)
        self.limit = [0] * (count + 1)
        self.cached = [0] * (count + 1)
        self.blocks: list[list[int]] = [[] for _ in range(count + 1)]
        self.rank = [(0, 0)] * (count + 1)
        self.adapter: dict[int, str] = {}
        self._episodes = 0
        self._free = list(range(count))
        self._held: dict[int, None] = {}  # in the order of their last use
        self._slot_of: dict[str, int] = {}
        self._owner_of: dict[int, str] = {}

    @property
    def width(self) -> int:
        """Positions that the tables have room for."""
        return self.tokens.shape[1]

    def reserve(self, width: int) -> None:
        """Widens the tables to `width` positions."""
        pad, more = torch.nn.functional.pad, (0, width - self.width)
        self.tokens = pad(self.tokens, more)
        self.logprobs = pad(self.logprobs, more)
        self.versions = pad(self.versions, more)
        self.block_tables = pad(
            self.block_tables, (0, blocks_for(width) - self.block_tables.shape[1]), value=SCRATCH
        )

    # --- whose slot it is ----------------------------------------------------------------------

    def held_by(self, owner: str | None) -> int | None:
        """The slot that holds the owner's last turn."""
        slot = None if owner is None else self._slot_of.get(owner)
        return slot if slot in self._held else None

    def held(self) -> list[int]:
        """The slots that are held, the longest unused one first."""
        return list(self._held)

    def available(self) -> bool:
        return bool(self._free or self._held)

    def take(self, owner: str | None) -> int:
        """A slot for a sequence: the owner's own, else a free one, else the one that was held
        longest without use."""
        slot = self.held_by(owner)
        if slot is None:
            slot = heapq.heappop(self._free) if self._free else next(iter(self._held))
            self._disown(slot)
            self.drop_blocks(slot)
            self._episodes += 1
            self.rank[slot] = (0, self._episodes)
        self._held.pop(slot, None)
        if owner is not None:
            self._slot_of[owner] = slot
            self._owner_of[slot] = owner
        return slot

    def put_back(self, slot: int) -> None:
        """Ends a sequence's use of its slot: held if it has an owner, else free."""
        if slot in self._owner_of:
            self._held[slot] = None
        else:
            self.drop_blocks(slot)
            heapq.heappush(self._free, slot)

    def release(self, owner: str) -> None:
        """Frees the slot that holds the owner's last turn, if there is one."""
        slot = self.held_by(owner)
        if slot is not None:
            del self._held[slot]
            self._disown(slot)
            self.put_back(slot)

    def _disown(self, slot: int) -> None:
        owner = self._owner_of.pop(slot, None)
        if owner is not None:
            del self._slot_of[owner]

    # --- what is in it -------------------------------------------------------------------------

    def fill(self, slot: int, sequence: SequenceState, limit: int) -> None:
        """Writes a sequence's prompt and sampling parameters into its slot, and keeps the blocks
        that still fit."""
        count = len(sequence.tokens)
        adapter = self.adapter.pop(slot, "")
        if adapter != sequence.sampling.adapter:
            self.drop_blocks(slot)
        if sequence.sampling.adapter:
            self.adapter[slot] = sequence.sampling.adapter
        prompt = torch.tensor(sequence.tokens, dtype=torch.int64)
        if self.cached[slot]:
            self.truncate(
                slot, min(self.cached[slot], self._common_prefix(slot, prompt), count - 1)
            )
        self.tokens[slot, :count] = prompt
        self.set_length(slot, count)
        self.origin[slot] = count
        self.limit[slot] = limit
        self.rank[slot] = (sequence.priority, self.rank[slot][1])
        self.seeds[slot] = sequence.seed
        self.temperatures[slot] = sequence.sampling.temperature
        self.stop_rows[slot] = sequence.stop_row

    def set_length(self, slot: int, length: int) -> None:
        """The number of tokens in the slot, on the host and on the device."""
        self.length[slot] = length
        self.lengths[slot] = length

    def sampled(self, slot: int) -> tuple[list[int], list[float], list[int]]:
        """Tokens, log-probs and versions sampled for the sequence in the slot."""
        where = (slot, slice(self.origin[slot], self.length[slot]))
        return (
            self.tokens[where].tolist(),
            self.logprobs[where].tolist(),
            self.versions[where].tolist(),
        )

    def _common_prefix(self, slot: int, tokens: Tensor) -> int:
        """How many leading tokens the slot shares with `tokens`, which are on the host."""
        count = min(self.length[slot], len(tokens))
        differs = (self.tokens[slot, :count].cpu() != tokens[:count]).nonzero()
        return int(differs[0]) if len(differs) else count

    # --- its blocks ----------------------------------------------------------------------------

    def append_blocks(self, slot: int, blocks: Sequence[int]) -> None:
        """Gives the slot further blocks, which it holds already."""
        held = self.blocks[slot]
        self.block_tables[slot, len(held) : len(held) + len(blocks)] = torch.tensor(
            blocks, dtype=torch.int64
        )
        held += blocks

    def truncate(self, slot: int, cached: int) -> None:
        """Keeps the first `cached` keys and values at most. A block that others read too is not
        cut: it goes."""
        blocks = self.blocks[slot]
        if cached < self.cached[slot]:
            self.block_manager.drop(blocks[blocks_for(cached) :])
            del blocks[blocks_for(cached) :]
            if cached % BLOCK_SIZE and not self.block_manager.reopen(blocks[-1]):
                cached -= cached % BLOCK_SIZE
                self.block_manager.drop([blocks.pop()])
        self.cached[slot] = cached

    def drop_blocks(self, slot: int) -> None:
        """Gives all blocks of the slot back to the pool."""
        self.block_manager.drop(self.blocks[slot])
        self.blocks[slot].clear()
        self.cached[slot] = 0
