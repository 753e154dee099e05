"""Which request runs when: admission to slots, prefill, decode steps, preemption, and the end of a request. No event
loop here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rlflow.rollout.embedded.cache import KeyValueCache
from rlflow.rollout.embedded.decoder import Decoder
from rlflow.rollout.embedded.model_runner import ModelRunner, Part
from rlflow.rollout.embedded.pages import PAGE, PagePool, pages_for, prefix_keys
from rlflow.rollout.embedded.sampling import END_TOKEN, StopTable
from rlflow.rollout.embedded.slots import Request, Slots
from rlflow.rollout.engine import Completion

logger = logging.getLogger(__name__)

FIRST_WIDTH = 256  # positions that the tables have room for at first; doubled on demand


@dataclass
class Statistics:
    """Counts since the start. Tokens: `prefilled` computed in prompts (again after a preemption), `reused` found in the
    cache, `decoded` sampled. `largest_prefill`: most tokens of prompts in one forward pass. `preempted`: requests that
    gave their pages to older ones, `evicted`: histories of waiting episodes that did."""

    steps: int = 0
    prefilled: int = 0
    reused: int = 0
    decoded: int = 0
    largest_prefill: int = 0
    preempted: int = 0
    evicted: int = 0


class Scheduler:
    """Requests wait, then run in a slot: first they prefill, then they decode, one token a step.

    When the pool of pages is full, the younger gives way: a slot that is held for an episode's next turn, or a running
    request, loses its pages and computes them again later. The oldest always finds room, so all of them finish.

    pages: size of the pool. max_tokens: of a prompt and its completion, no more than the pool holds. prefill_tokens: most
    prompt tokens in a step. by_id: admission in the order of the ids, not of the arrival. capture: of decode steps, see
    ModelRunner; the tables then have their full width from the start."""

    def __init__(
        self,
        model: Decoder,
        stops: StopTable,
        slots: int,
        *,
        pages: int,
        max_tokens: int,
        prefill_tokens: int,
        by_id: bool,
        capture: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
    ) -> None:
        self.statistics = Statistics()
        self.waiting: list[Request] = []
        self.running: dict[int, Request] = {}
        self.ids: set[str] = set()  # of requests in flight
        self.pool = PagePool(pages)
        self._model = model
        self._stops = stops
        self._cache = KeyValueCache(model.architecture, pages + 1, model.dtype, model.device)  # with the scratch page
        self._slots = Slots(slots, self.pool, model.device)
        self._max_tokens = max_tokens
        self._prefill_tokens = prefill_tokens
        self._by_id = by_id
        self._runner = ModelRunner(model, self._cache, self._slots, stops, capture)
        self._prefilling: set[int] = set()  # running slots whose cache lacks more than the last token
        self._decoding: set[int] = set()  # running slots whose cache lacks the last token only
        self._order: list[int] | None = None  # the decoding slots, longest first; None where they changed
        self._widen(max_tokens if capture is not None else min(FIRST_WIDTH, max_tokens))

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self._runner.version

    @version.setter
    def version(self, version: int) -> None:
        self._runner.version = version

    def submit(self, request: Request) -> None:
        """Puts a request at the end of those that wait."""
        self.waiting.append(request)
        if request.id is not None:
            self.ids.add(request.id)

    def in_flight(self) -> list[Request]:
        """The requests that wait or run."""
        return [*self.waiting, *self.running.values()]

    def release(self, owner: str) -> None:
        """Frees the slot that is held for the owner's next request."""
        self._slots.release(owner)

    def step(self, admit: bool) -> None:
        """Admits (if it may), prefills, and decodes one token for all that run. Ended requests get their completions."""
        if admit and self.waiting:
            self._admit()
        if self._prefilling:
            self._prefill()
        if self._decoding:
            self._decode()
        self.statistics.steps += 1

    def end(self, request: Request, stop: Literal["stop", "length", "aborted"]) -> None:
        """Completes a request, wherever it is, with what it has."""
        tokens, logprobs, versions = self._slots.sampled(request.slot) if request.slot >= 0 else ([], [], [])
        if not request.future.done():
            request.future.set_result(Completion(tokens, logprobs, versions, stop))
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Forgets a request; what its slot holds stays for its owner's next one."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request.id is not None:
            self.ids.discard(request.id)
        slot = request.slot
        if self.running.get(slot) is request:
            del self.running[slot]
            self._prefilling.discard(slot)
            self._decoding.discard(slot)
            self._order = None
            self._slots.put_back(slot)

    def forget_cache(self) -> None:
        """Nothing that is cached is valid any more: what runs is prefilled again before it goes on."""
        for slot in [*self.running, *self._slots.held()]:
            self._slots.drop_pages(slot)
        self.pool.forget()
        self._prefilling |= self._decoding
        self._decoding.clear()
        self._order = None

    def clear_cache(self) -> None:
        """Zeroes the cache, which may hold NaN. Nothing may be in flight."""
        self._cache.clear(self.pool.touched)
        self.forget_cache()

    # --- admission ----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Gives slots to waiting requests: first to those that continue an episode, since theirs is there already."""
        if self._by_id:
            self.waiting.sort(key=lambda request: request.id or "")
        continuing = [request for request in self.waiting if self._slots.held_by(request.id) is not None]
        fresh = [request for request in self.waiting if self._slots.held_by(request.id) is None]
        for request in continuing + fresh:
            if not self._slots.available():
                break
            self._place(request)
        self.waiting = [request for request in self.waiting if request.slot < 0]

    def _place(self, request: Request) -> None:
        count = len(request.tokens)
        slot = request.slot = self._slots.take(request.id)
        self._widen(count + 1)
        self._slots.fill(slot, request, min(count + request.sampling.max_tokens, self._max_tokens))
        self.running[slot] = request
        self._prefilling.add(slot)

    def _widen(self, length: int) -> None:
        """Makes room for sequences of `length` in the tables."""
        if length > self._slots.width:
            width = min(max(length, 2 * self._slots.width), max(length, self._max_tokens))
            self._slots.reserve(width)
            self._model.reserve(width)

    # --- prefill ------------------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Computes what the cache lacks, in passes: what several slots share is computed in one pass for the first of them
        and found in the cache by the others in the next; until then nobody leaves."""
        budget = self._prefill_tokens
        outcome: list[tuple[int, int]] = []
        while budget > 0 and self._prefilling:
            parts = self._prefill_parts(budget)
            if not parts:
                break
            size = sum(part.stop - part.start for part in parts)
            budget -= size
            self.statistics.prefilled += size
            self.statistics.largest_prefill = max(self.statistics.largest_prefill, size)
            outcome += self._feed(parts)
        self._finish(outcome)

    def _prefill_parts(self, budget: int) -> list[Part]:
        """What to compute now, `budget` tokens at most, the oldest episodes first; none passes one that finds no room."""
        parts: list[Part] = []
        coming: set[int] = set()  # keys of the prefixes that the parts compute
        for slot in self._by_age(self._prefilling):
            if budget <= 0:
                break
            tokens = self._tokens(slot)
            found = self.pool.find(tokens[:-1])
            known = max(self._slots.cached[slot], len(found[0]) * PAGE + found[2])
            keys = prefix_keys(tokens[:-1])
            if known < len(tokens) - 1 and keys[known // PAGE] in coming:
                continue
            if not self._equip(slot, found):
                break
            start = self._slots.cached[slot]
            part = Part(slot, start, min(len(tokens), start + budget), tokens)
            coming.update(keys[start // PAGE : pages_for(part.stop)])
            budget -= part.stop - start
            parts.append(part)
            self._count_reused(self.running[slot], start)
        return parts

    def _tokens(self, slot: int) -> list[int]:
        """All tokens in the slot: the prompt, and what was sampled before a preemption."""
        if self._slots.length[slot] == self._slots.origin[slot]:
            return self.running[slot].tokens
        return self._slots.tokens[slot, : self._slots.length[slot]].tolist()

    def _equip(self, slot: int, found: tuple[list[int], int, int]) -> bool:
        """Gives the slot a page for each of its tokens, those that were found among them; False where there is no room."""
        slots, pool = self._slots, self.pool
        shared, source, extra = found
        lent: list[int] = []
        if len(shared) * PAGE + extra > slots.cached[slot]:
            lent = [source] if extra else []
            pool.hold([*shared, *lent])  # before anything is evicted
            slots.drop_pages(slot)
            slots.append_pages(slot, shared)
            slots.cached[slot] = len(shared) * PAGE
        need = pages_for(slots.length[slot]) - len(slots.pages[slot])
        room = self._make_room(need, slot)
        if room:
            slots.append_pages(slot, pool.take(need))
        if room and lent:
            self._cache.copy(source, slots.pages[slot][len(shared)])
            slots.cached[slot] += extra
        pool.drop(lent)
        return room

    def _count_reused(self, request: Request, count: int) -> None:
        if not request.begun:
            self.statistics.reused += count
            request.begun = True

    def _feed(self, parts: list[Part]) -> list[tuple[int, int]]:
        """Computes the parts; (slot, flag of the stop table) of the tokens sampled after those that are complete."""
        outcome = self._runner.prefill(parts)
        for part in parts:
            if part.complete:
                self._prefilling.remove(part.slot)
                self._decoding.add(part.slot)
            else:
                self._slots.cached[part.slot] = part.stop
            self.pool.publish(part.tokens[: part.stop], self._slots.pages[part.slot][: pages_for(part.stop)])
        self._order = None
        return outcome

    # --- decode -------------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """One token for every request that decodes and finds room."""
        slots = self._slots
        for slot in self._by_age(self._decoding):
            if slot not in self._decoding:
                continue  # it gave way to an older one
            if pages_for(slots.length[slot]) > len(slots.pages[slot]):
                if self._make_room(1, slot):
                    slots.append_pages(slot, self.pool.take(1))
                else:
                    self._preempt(slot)
        if not self._decoding:
            return
        if self._order is None:
            self._order = sorted(self._decoding, key=lambda slot: (-slots.length[slot], slot))
        self._widen(slots.length[self._order[0]] + 1)
        self._finish(self._runner.decode(self._order))

    def _finish(self, outcome: list[tuple[int, int]]) -> None:
        """Ends the requests that are done with the tokens just sampled: (slot, flag of the stop table)."""
        self.statistics.decoded += len(outcome)
        for slot, flag in outcome:
            full = self._slots.length[slot] >= self._slots.limit[slot]
            if not flag and not full:
                continue
            request = self.running[slot]
            strings = request.sampling.stop
            if flag == END_TOKEN or (flag and self._stops.completes(self._slots.sampled(slot)[0], strings)):
                self.end(request, "stop")
            elif full:
                self.end(request, "length")

    # --- room ---------------------------------------------------------------------------------------------------------

    def _by_age(self, slots: set[int]) -> list[int]:
        return sorted(slots, key=lambda slot: self._slots.age[slot])

    def _make_room(self, count: int, slot: int) -> bool:
        """Whether there are `count` free pages for the slot, after others gave way where they must: see `_victim`."""
        if count <= 0:
            return True
        starting = slot in self._prefilling
        spared = (
            len(self._decoding) if starting else 0
        )  # pages that those will want soon: else they are preempted at once
        while self.pool.free < count + spared:
            victim = self._victim(slot, starting and bool(self._decoding))
            if victim is None:
                return False
            if victim in self.running:
                self._preempt(victim)
            else:
                self.statistics.evicted += 1
                self._slots.drop_pages(victim)
            spared = len(self._decoding) if starting else 0
        return True

    def _victim(self, slot: int, patient: bool) -> int | None:
        """The slot that gives its pages to another one: one that is held and longest unused, else the youngest that runs
        and is younger. The patient, for whom others will make room in time, take from younger held ones only."""
        slots = self._slots
        age = slots.age[slot]
        held = [one for one in slots.held() if slots.pages[one] and (not patient or slots.age[one] > age)]
        if held:
            return held[0]
        running = [one for one in self.running if slots.pages[one] and slots.age[one] > age]
        return None if patient or not running else max(running, key=lambda one: slots.age[one])

    def _preempt(self, slot: int) -> None:
        """Takes the pages of a running request, which goes on when it has computed them again."""
        if not self.statistics.preempted:
            logger.warning(
                "the key-value pool of %d tokens is full: the youngest requests give way and are computed again later. A "
                "larger engine.kv_tokens, or a smaller max_concurrency, is faster.",
                self.pool.count * PAGE,
            )
        self.statistics.preempted += 1
        self._slots.drop_pages(slot)
        self._decoding.discard(slot)
        self._prefilling.add(slot)
        self._order = None
