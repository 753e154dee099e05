"""Which request runs when: admission to slots, prefill, decode steps, and the end of a request. No event loop here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlflow.errors import RolloutError
from rlflow.rollout.cache import KeyValueCache
from rlflow.rollout.engine import Completion
from rlflow.rollout.model import Decoder
from rlflow.rollout.sampling import END_TOKEN, StopTable, sample, uniforms
from rlflow.rollout.slots import Request, Slots


@dataclass
class Statistics:
    """Counts since the start. Tokens: `prefilled` computed in prompts, `reused` found in the cache, `decoded` sampled."""

    steps: int = 0
    prefilled: int = 0
    reused: int = 0
    decoded: int = 0


class Scheduler:
    """Requests wait, then run in a slot: first they prefill, then they decode, one token a step.

    max_tokens: of a prompt and its completion. prefill_tokens: most prompt tokens in a step. by_id: admission in the order
    of the ids, not of the arrival."""

    def __init__(
        self, model: Decoder, stops: StopTable, slots: int, *, max_tokens: int, prefill_tokens: int, by_id: bool
    ) -> None:
        self.version = 0
        self.statistics = Statistics()
        self.waiting: list[Request] = []
        self.running: dict[int, Request] = {}
        self.ids: set[str] = set()  # of requests in flight
        self._model = model
        self._stops = stops
        self._cache = KeyValueCache(model.architecture, slots, model.dtype, model.device)
        self._slots = Slots(slots, model.device)
        self._slots.reserve(self._cache.capacity)
        self._max_tokens = max_tokens
        self._prefill_tokens = prefill_tokens
        self._by_id = by_id
        self._prefilling: list[int] = []  # running slots whose cache lacks more than the last token, oldest first
        self._decoding: set[int] = set()  # running slots whose cache lacks the last token only
        self._batch: Tensor | None = None  # the decoding slots, ascending; None where they changed
        self._donors: dict[tuple[int, ...], int] = {}  # prompt -> slot that computed it

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
        slot = self._slots.held_by(owner)
        if slot is not None:
            self._forget_donor(slot)
            self._slots.release(owner)

    @torch.inference_mode()
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
        if self.running.get(slot) is not request:
            return
        del self.running[slot]
        self._slots.put_back(slot, self._cached(slot))
        if slot in self._decoding:
            self._decoding.remove(slot)
            self._batch = None
        else:
            self._prefilling.remove(slot)

    def _cached(self, slot: int) -> int:
        return int(self._slots.lengths[slot]) - 1 if slot in self._decoding else self._slots.cached[slot]

    def forget_cache(self) -> None:
        """Nothing that is cached is valid any more: what runs is prefilled again before it goes on."""
        self._slots.forget_cache()
        self._donors.clear()
        self._prefilling += sorted(self._decoding)
        self._decoding.clear()
        self._batch = None

    def clear_cache(self) -> None:
        """Zeroes the cache, which may hold NaN. Nothing may be in flight."""
        self._cache.clear()
        self.forget_cache()

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
        known = self._slots.held_by(request.id)
        slot = request.slot = self._slots.take(request.id)
        shared = 0
        if known is None:
            self._forget_donor(slot)
        else:
            shared = min(self._slots.cached[slot], self._slots.common_prefix(slot, request.tokens), count - 1)
        limit = min(count + request.sampling.max_tokens, self._max_tokens)
        if self._cache.reserve(count + 1):
            self._slots.reserve(self._cache.capacity)
        self._slots.fill(slot, request, limit)
        self._slots.cached[slot] = shared
        self.statistics.reused += shared
        self.running[slot] = request
        self._prefilling.append(slot)

    def _prefill(self) -> None:
        """Computes what the cache lacks of the newest requests, oldest first, and samples their first token. Of requests
        with the same prompt one computes it, the others copy it in a second pass."""
        budget = self._prefill_tokens
        leaders: set[tuple[int, ...]] = set()
        for _ in range(2):
            parts = self._prefill_parts(budget, leaders)
            budget -= sum(stop - start for _, start, stop, _ in parts)
            if parts:
                self._feed(parts)

    def _prefill_parts(self, budget: int, leaders: set[tuple[int, ...]]) -> list[tuple[int, int, int, bool]]:
        """(slot, start, stop, complete) spans to compute now, `budget` tokens at most. Adds to the prompts of `leaders`."""
        parts = []
        for slot in self._prefilling:
            if budget <= 0:
                break
            prompt = self._borrow(slot)
            start, length = self._slots.cached[slot], int(self._slots.lengths[slot])
            if prompt in leaders and 0 == start < len(prompt) - 1:
                continue
            if start == 0:
                leaders.add(prompt)
                self._donors[prompt] = slot
            stop = min(length, start + budget)
            budget -= stop - start
            parts.append((slot, start, stop, stop == length))
        return parts

    def _borrow(self, slot: int) -> tuple[int, ...]:
        """Copies the slot's prompt from another slot that holds it, if one does. Returns the prompt."""
        prompt = tuple(self.running[slot].tokens)
        donor = self._donors.get(prompt)
        wanted = len(prompt) - 1
        if donor is None or donor == slot or self._slots.cached[slot] >= wanted:
            return prompt
        if self._cached(donor) >= wanted and self._slots.common_prefix(donor, prompt) >= wanted:
            self._cache.copy(donor, slot, wanted)
            self.statistics.reused += wanted - self._slots.cached[slot]
            self._slots.cached[slot] = wanted
        return prompt

    def _forget_donor(self, slot: int) -> None:
        """The slot starts another sequence, so it no longer holds the prompt that it computed."""
        for prompt in [prompt for prompt, donor in self._donors.items() if donor == slot]:
            del self._donors[prompt]

    def _feed(self, parts: list[tuple[int, int, int, bool]]) -> None:
        """Runs (slot, start, stop, complete) spans through the model; samples for those that are complete."""
        slots = [slot for slot, _, _, _ in parts]
        tokens = torch.cat([self._slots.tokens[slot, start:stop] for slot, start, stop, _ in parts])
        positions = torch.cat([torch.arange(start, stop, device=self._model.device) for _, start, stop, _ in parts])
        attend = self._cache.prefilling(slots, [start for _, start, _, _ in parts], [stop for _, _, stop, _ in parts])
        ends = torch.tensor([stop - start for _, start, stop, _ in parts]).cumsum(0) - 1
        complete = [row for row, part in enumerate(parts) if part[3]]
        logits = self._model.forward(tokens, positions, attend, ends[complete].to(self._model.device))
        self.statistics.prefilled += len(tokens)
        for slot, _, stop, done in parts:
            self._slots.cached[slot] = stop
            if done:
                self._prefilling.remove(slot)
                self._decoding.add(slot)
        self._batch = None
        if complete:
            self._record(torch.tensor([slots[row] for row in complete], device=self._model.device), logits)

    def _decode(self) -> None:
        """One token for every request that decodes."""
        if self._batch is None:
            self._batch = torch.tensor(sorted(self._decoding), device=self._model.device)
        slots, batch = self._slots, self._batch
        positions = slots.lengths[batch] - 1
        if self._cache.reserve(int(positions.max()) + 2):
            slots.reserve(self._cache.capacity)
        logits = self._model.forward(slots.tokens[batch, positions], positions, self._cache.decoding(batch, positions))
        self._record(batch, logits)

    def _record(self, batch: Tensor, logits: Tensor) -> None:
        """Samples a token per slot of the batch, writes it down, and ends the requests that are done."""
        slots = self._slots
        lengths, temperatures = slots.lengths[batch], slots.temperatures[batch]
        sampled = bool((temperatures > 0).any())
        uniform = uniforms(slots.seeds[batch], lengths) if sampled else None
        tokens, logprobs = sample(logits, temperatures, uniform)
        if not bool(torch.isfinite(logprobs).all()):
            raise RolloutError(
                "engine: the policy's logits are not finite; its weights diverged (lower the learning rate?)."
            )
        slots.tokens[batch, lengths] = tokens
        slots.logprobs[batch, lengths] = logprobs
        slots.versions[batch, lengths] = self.version
        slots.lengths[batch] = lengths + 1
        self.statistics.decoded += len(batch)
        flags = self._stops.flags[slots.stop_rows[batch], tokens]
        full = lengths + 1 >= slots.limits[batch]
        for row in (full | (flags > 0)).nonzero()[:, 0].tolist():
            self._maybe_end(int(batch[row]), int(flags[row]), bool(full[row]))

    def _maybe_end(self, slot: int, flag: int, full: bool) -> None:
        request = self.running[slot]
        strings = request.sampling.stop
        if flag == END_TOKEN or (flag and self._stops.completes(self._slots.sampled(slot)[0], strings)):
            self.end(request, "stop")
        elif full:
            self.end(request, "length")
