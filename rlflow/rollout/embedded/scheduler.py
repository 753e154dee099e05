"""Schedules sequences: admission to slots, prefill, decode steps, preemption, and their end."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from rlflow.rollout.embedded.block_manager import BLOCK_SIZE, BlockManager, blocks_for, prefix_keys
from rlflow.rollout.embedded.cache import KeyValueCache
from rlflow.rollout.embedded.decoder import Decoder
from rlflow.rollout.embedded.graphs import Capture
from rlflow.rollout.embedded.model_runner import ModelRunner, PrefillChunk
from rlflow.rollout.embedded.sampling import END_TOKEN, StopTable
from rlflow.rollout.embedded.sequences import SequenceState, Slots
from rlflow.rollout.engine import Completion, Stop

logger = logging.getLogger(__name__)

FIRST_WIDTH = 256  # positions that the tables have room for at first; doubled on demand


@dataclass
class EngineStatistics:
    """Counts since the start. Tokens: `prefilled` computed in prompts (again after a preemption),
    `reused` found in the cache, `decoded` sampled. `largest_prefill`: most tokens of prompts in one
    forward pass. `preempted`: sequences that gave their blocks to older ones, `evicted`: histories
    of waiting episodes that did."""

    steps: int = 0
    prefilled: int = 0
    reused: int = 0
    decoded: int = 0
    largest_prefill: int = 0
    preempted: int = 0
    evicted: int = 0


class Scheduler:
    """Sequences wait, then run in a slot: first they prefill, then they decode, one token a step.

    When the pool of blocks is full, the younger gives way: a slot that is held for an episode's
    next turn, or a running sequence, loses its blocks and computes them again later. The oldest
    always finds room, so all of them finish. A lower priority number goes before age.

    blocks: size of the pool. max_tokens: of a prompt and its completion, no more than the pool
    holds. prefill_tokens: most prompt tokens in a step. by_id: admission in the order of the ids,
    not of the arrival. routes: completions have them. capture: of decode steps, see ModelRunner;
    the tables then have their full width from the start."""

    def __init__(
        self,
        model: Decoder,
        stops: StopTable,
        slots: int,
        *,
        blocks: int,
        max_tokens: int,
        prefill_tokens: int,
        by_id: bool,
        routes: bool = False,
        capture: Capture | None = None,
    ) -> None:
        self.statistics = EngineStatistics()
        self.waiting: list[SequenceState] = []
        self.running: dict[int, SequenceState] = {}
        self.ids: set[str] = set()  # of sequences in flight
        self._released: list[str] = []  # owners whose slots are still to be freed
        self.block_manager = BlockManager(blocks)
        self._model = model
        self._stops = stops
        # With the scratch block
        self._cache = KeyValueCache(model.architecture, blocks + 1, model.dtype, model.device)
        self._slots = Slots(slots, self.block_manager, model.device)
        self._max_tokens = max_tokens
        self._prefill_tokens = prefill_tokens
        self._by_id, self._says_routes = by_id, routes
        self.runner = ModelRunner(model, self._cache, self._slots, stops, capture)
        self._decoding: set[int] = set()  # running slots whose cache lacks the last token only
        self._widen(max_tokens if capture is not None else min(FIRST_WIDTH, max_tokens))

    @property
    def _prefilling(self) -> set[int]:
        """Running slots whose cache lacks more than the last token."""
        return self.running.keys() - self._decoding

    def submit(self, sequence: SequenceState) -> None:
        """Puts a sequence at the end of those that wait."""
        self.waiting.append(sequence)
        if sequence.id is not None:
            self.ids.add(sequence.id)

    def in_flight(self) -> list[SequenceState]:
        """The sequences that wait or run."""
        return [*self.waiting, *self.running.values()]

    def release(self, owner: str) -> None:
        """Frees the slot that is held for the owner's next sequence. By ids only when others are
        admitted: what they find there must not depend on the time at which an episode ends."""
        if self._by_id:
            self._released.append(owner)
        else:
            self._slots.release(owner)

    def step(self, admit: bool) -> None:
        """Admits (if it may), prefills, and decodes one token for all that run. Ended sequences get
        their completions."""
        if admit and self.waiting:
            self._admit()
        if self._prefilling:
            self._prefill()
        if self._decoding:
            self._decode()
        self.statistics.steps += 1

    def end(self, sequence: SequenceState, stop: Stop) -> None:
        """Completes a sequence, wherever it is, with what it has."""
        done, slots, slot = Completion([], [], [], stop), self._slots, sequence.slot
        if slot >= 0:
            done.tokens, done.logprobs, done.versions = slots.sampled(slot)
        # Tokens with keys and values have routes: all but the last, unless it was interrupted while
        # they were computed, or computed anew
        if slot >= 0 and self._says_routes and slots.cached[slot] >= slots.length[slot] - 1:
            known = self._cache.routes(slots.block_tables[slot], slots.cached[slot])
            done.routes, done.routes_version = known
        if not sequence.future.done():
            sequence.future.set_result(done)
        self.remove(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Forgets a sequence; what its slot holds stays for its owner's next one."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence.id is not None:
            self.ids.discard(sequence.id)
        slot = sequence.slot
        if self.running.get(slot) is sequence:
            del self.running[slot]
            self._decoding.discard(slot)
            self._slots.put_back(slot)

    def forget_cache(self) -> None:
        """Nothing that is cached is valid any more: what runs is prefilled again before it goes
        on."""
        for slot in [*self.running, *self._slots.held()]:
            self._slots.drop_blocks(slot)
        self.block_manager.forget()
        self._decoding.clear()

    def free_cache(self) -> None:
        """Gives the cache's memory back; `allocate_cache` before the next step. What runs is
        prefilled again then."""
        self.forget_cache()
        self.runner.forget_graphs()
        self._cache.free()

    def allocate_cache(self) -> None:
        """Takes the cache's memory again."""
        self._cache.allocate()

    def clear_cache(self) -> None:
        """Zeroes the cache, which may hold NaN. Nothing may be in flight."""
        self._cache.clear(self.block_manager.touched)
        self.forget_cache()

    # --- admission -----------------------------------------------------------------------------
    def _admit(self) -> None:
        """Gives slots to waiting sequences by priority; among equals first to those that continue
        an episode, since theirs is there already, then in the order of their arrival (or ids)."""
        if self._by_id:
            for owner in sorted(self._released):
                self._slots.release(owner)
            self._released.clear()
            self.waiting.sort(key=lambda sequence: sequence.id or "")
        fresh = {sequence: self._slots.held_by(sequence.id) is None for sequence in self.waiting}
        for sequence in sorted(
            self.waiting, key=lambda sequence: (sequence.priority, fresh[sequence])
        ):
            if not self._slots.available():
                break
            self._place(sequence)
        self.waiting = [sequence for sequence in self.waiting if sequence.slot < 0]

    def _place(self, sequence: SequenceState) -> None:
        count = len(sequence.tokens)
        slot = sequence.slot = self._slots.take(sequence.id)
        self._widen(count + 1)
        self._slots.fill(
            slot, sequence, min(count + sequence.sampling.max_tokens, self._max_tokens)
        )
        self.running[slot] = sequence

    def _widen(self, length: int) -> None:
        """Makes room for sequences of `length` in the tables."""
        if length > self._slots.width:
            width = min(max(length, 2 * self._slots.width), max(length, self._max_tokens))
            self._slots.reserve(width)
            self._model.reserve(width)

    # --- prefill -------------------------------------------------------------------------------
    def _prefill(self) -> None:
        """Computes what the cache lacks, in passes: what several slots share is computed in one
        pass for the first of them and found in the cache by the others in the next; until then
        nobody leaves."""
        budget = self._prefill_tokens
        outcome: list[tuple[int, int]] = []
        while budget > 0 and self._prefilling:
            chunks = self._prefill_chunks(budget)
            if not chunks:
                break
            size = sum(chunk.stop - chunk.start for chunk in chunks)
            budget -= size
            self.statistics.prefilled += size
            self.statistics.largest_prefill = max(self.statistics.largest_prefill, size)
            outcome += self._feed(chunks)
        self._finish(outcome)

    def _prefill_chunks(self, budget: int) -> list[PrefillChunk]:
        """What to compute now, `budget` tokens at most, the oldest episodes first; none passes one
        that finds no room."""
        chunks: list[PrefillChunk] = []
        coming: set[int] = set()  # keys of the prefixes that the chunks compute
        for slot in self._by_rank(self._prefilling):
            if budget <= 0:
                break
            tokens = self._tokens(slot)
            adapter = self._slots.adapter.get(slot, "")
            found = self.block_manager.find(tokens[:-1], adapter)
            known = max(self._slots.cached[slot], len(found[0]) * BLOCK_SIZE + found[2])
            keys = prefix_keys(tokens[:-1], adapter)
            if known < len(tokens) - 1 and keys[known // BLOCK_SIZE] in coming:
                continue
            if not self._equip(slot, found):
                break
            start = self._slots.cached[slot]
            chunk = PrefillChunk(slot, start, min(len(tokens), start + budget), tokens)
            # The tokens of a second prefill may fill the tables, and one more is sampled
            self._widen(len(tokens) + 1)
            coming.update(keys[start // BLOCK_SIZE : blocks_for(chunk.stop)])
            budget -= chunk.stop - start
            chunks.append(chunk)
            if not self.running[slot].started:
                self.running[slot].started = True
                self.statistics.reused += start
        return chunks

    def _tokens(self, slot: int) -> list[int]:
        """All tokens in the slot: the prompt, and what was sampled before a preemption."""
        if self._slots.length[slot] == self._slots.origin[slot]:
            return self.running[slot].tokens
        return self._slots.tokens[slot, : self._slots.length[slot]].tolist()

    def _equip(self, slot: int, found: tuple[list[int], int, int]) -> bool:
        """Gives the slot a block for each of its tokens, those that were found among them; False
        where there is no room."""
        slots, pool = self._slots, self.block_manager
        shared, source, extra = found
        to_copy: list[int] = []
        if len(shared) * BLOCK_SIZE + extra > slots.cached[slot]:
            to_copy = [source] if extra else []
            pool.hold([*shared, *to_copy])  # before anything is evicted
            slots.drop_blocks(slot)
            slots.append_blocks(slot, shared)
            slots.cached[slot] = len(shared) * BLOCK_SIZE
        need = blocks_for(slots.length[slot]) - len(slots.blocks[slot])
        room = self._make_room(need, slot)
        if room:
            slots.append_blocks(slot, pool.take(need))
        if room and to_copy:
            self._cache.copy(source, slots.blocks[slot][len(shared)])
            slots.cached[slot] += extra
        pool.drop(to_copy)
        return room

    def _feed(self, chunks: list[PrefillChunk]) -> list[tuple[int, int]]:
        """Computes the chunks; (slot, flag of the stop table) of the tokens sampled after those
        that are complete."""
        outcome = self.runner.prefill(chunks)
        for chunk in chunks:
            if chunk.complete:
                self._decoding.add(chunk.slot)
            else:
                self._slots.cached[chunk.slot] = chunk.stop
            blocks = self._slots.blocks[chunk.slot][: blocks_for(chunk.stop)]
            adapter = self._slots.adapter.get(chunk.slot, "")
            self.block_manager.publish(chunk.tokens[: chunk.stop], blocks, adapter)
        return outcome

    # --- decode --------------------------------------------------------------------------------
    def _decode(self) -> None:
        """One token for every sequence that decodes and finds room."""
        slots = self._slots
        for slot in self._by_rank(self._decoding):
            if slot not in self._decoding:
                continue  # it gave way to an older one
            if blocks_for(slots.length[slot]) > len(slots.blocks[slot]):
                if self._make_room(1, slot):
                    slots.append_blocks(slot, self.block_manager.take(1))
                else:
                    self._preempt(slot)
        if not self._decoding:
            return
        order = sorted(self._decoding, key=lambda slot: (-slots.length[slot], slot))
        self._widen(slots.length[order[0]] + 1)
        self._finish(self.runner.decode(order))

    def _finish(self, outcome: list[tuple[int, int]]) -> None:
        """Ends the sequences that are done with the tokens just sampled: (slot, flag of the stop
        table)."""
        self.statistics.decoded += len(outcome)
        for slot, flag in outcome:
            full = self._slots.length[slot] >= self._slots.limit[slot]
            if not flag and not full:
                continue
            sequence = self.running[slot]
            strings = sequence.sampling.stop
            if flag == END_TOKEN or (
                flag and self._stops.completes(self._slots.sampled(slot)[0], strings)
            ):
                self.end(sequence, "stop")
            elif full:
                self.end(sequence, "length")

    # --- room ----------------------------------------------------------------------------------
    def _by_rank(self, slots: set[int]) -> list[int]:
        return sorted(slots, key=lambda slot: self._slots.rank[slot])

    def _make_room(self, count: int, slot: int) -> bool:
        """Whether there are `count` free blocks for the slot, after others gave way where they
        must: see `_victim`."""
        if count <= 0:
            return True
        starting = slot not in self._decoding
        # Blocks that those who decode will want soon: without them they would be preempted at once.
        while self.block_manager.free < count + (len(self._decoding) if starting else 0):
            victim = self._victim(slot, starting and bool(self._decoding))
            if victim is None:
                return False
            if victim in self.running:
                self._preempt(victim)
            else:
                self.statistics.evicted += 1
                self._slots.drop_blocks(victim)
        return True

    def _victim(self, slot: int, patient: bool) -> int | None:
        """The slot that gives its blocks to another one: one that is held and longest unused, else
        the youngest that runs and is younger. The patient, for whom others will make room in time,
        take from younger held ones and from the less urgent only."""
        slots = self._slots
        rank = slots.rank[slot]
        held = [
            other
            for other in slots.held()
            if slots.blocks[other] and (not patient or slots.rank[other] > rank)
        ]
        if held:
            return held[0]
        running = [
            other for other in self.running if slots.blocks[other] and slots.rank[other] > rank
        ]
        last = max(running, key=lambda other: slots.rank[other], default=None)
        return None if last is None or (patient and slots.rank[last][0] == rank[0]) else last

    def _preempt(self, slot: int) -> None:
        """Takes the blocks of a running sequence, which goes on when it has computed them again."""
        if not self.statistics.preempted:
            logger.warning(
                "the key-value pool of %d tokens is full: the youngest requests give way and are "
                "computed again later. A larger engine.kv_tokens, or a smaller max_concurrency, is "
                "faster.",
                self.block_manager.count * BLOCK_SIZE,
            )
        self.statistics.preempted += 1
        self._slots.drop_blocks(slot)
        self._decoding.discard(slot)
