"""The embedded engine: continuous batching in this process, on a CPU or one GPU, for models that fit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rlflow.errors import ConfigError, RolloutError, did_you_mean
from rlflow.rollout.cache import KeyValueCache
from rlflow.rollout.engine import Completion, Sampling
from rlflow.rollout.model import Decoder
from rlflow.rollout.sampling import END_TOKEN, Decoding, StopTable, sample, uniforms
from rlflow.rollout.slots import Request, Slots
from rlflow.rollout.tokenizer import Tokenizer
from rlflow.weights.families import architecture
from rlflow.weights.hf import digest, iterate_weights, read_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Statistics:
    """Counts since the start. Tokens: `prefilled` computed in prompts, `reused` found in the cache, `decoded` sampled."""

    steps: int = 0
    prefilled: int = 0
    reused: int = 0
    decoded: int = 0


class EmbeddedEngine:
    """Implements `rlflow.rollout.engine.Engine` over a HuggingFace directory of a Qwen2, Qwen3 or Llama model.

    One step admits waiting requests, prefills them (at most `prefill_tokens`), and decodes one token for all that run;
    between steps the event loop gets its turn. All of it happens in the caller's event loop, one loop at a time, so there
    is nothing to lock. A request with an id keeps its slot when it ends: the next one with that id (the next turn of an
    episode) computes only what is new. `release(id)` gives the slot back; without it the longest unused one is taken when
    slots run out. Requests with the same prompt compute it once.

    max_concurrency: slots. max_tokens: of a prompt and its completion together; None: the model's positions.
    deterministic: requests that wait are admitted in the order of their ids, not of their arrival.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: Decoding | None = None,
        *,
        max_concurrency: int = 128,
        max_tokens: int | None = None,
        prefill_tokens: int = 8192,
        dtype: str = "float32",
        device: str | None = None,
        deterministic: bool = False,
        seed: int = 0,
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"engine.dtype: expected one of {', '.join(DTYPES)}, found '{dtype}'.{did_you_mean(dtype, DTYPES)}")
        for name, value in (("max_concurrency", max_concurrency), ("prefill_tokens", prefill_tokens)):
            if value < 1:
                raise ConfigError(f"engine.{name}: expected at least 1, found {value}.")
        self.path = Path(path)
        self.dtype = DTYPES[dtype]
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.max_concurrency = max_concurrency
        self.deterministic = deterministic
        self.version = 0
        self.statistics = Statistics()
        shape = architecture(read_config(path))
        self.max_tokens = min(max_tokens or shape.max_positions, shape.max_positions)
        self._model = Decoder(shape, self.dtype, self.device)
        self._model.load(iterate_weights(path))
        self._cache = KeyValueCache(shape, max_concurrency, self.dtype, self.device)
        self._slots = Slots(max_concurrency, self.device)
        self._slots.reserve(self._cache.capacity)
        self._stops = StopTable(shape.vocab, self._load_tokenizer, self.device)
        self._tokenizer = tokenizer
        self._vocab = shape.vocab
        self._prefill_tokens = prefill_tokens
        self._seed = seed
        self._arrivals = 0
        self._waiting: list[Request] = []
        self._running: dict[int, Request] = {}
        self._prefilling: list[int] = []  # running slots whose cache lacks more than the last token, oldest first
        self._decoding: set[int] = set()  # running slots whose cache lacks the last token only
        self._batch: Tensor | None = None  # the decoding slots, ascending; None where they changed
        self._donors: dict[tuple[int, ...], int] = {}  # prompt -> slot that computed it
        self._state: Literal["open", "draining", "paused", "closed"] = "open"
        self._broken = ""  # why the weights cannot be used
        self._driver: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- the protocol -------------------------------------------------------------------------------------------------

    async def generate(self, tokens: Sequence[int], sampling: Sampling, request_id: str | None = None) -> Completion:
        """Continues `tokens`; see `Engine.generate`. Raises RolloutError for a request that cannot be served."""
        self._check(tokens, sampling, request_id)
        seed = sampling.seed if sampling.seed is not None else hash((self._seed, self._arrivals))
        self._arrivals += 1
        request = Request(
            tokens=list(tokens),
            sampling=sampling,
            id=request_id,
            stop_row=self._stops.row(sampling.stop, sampling.stop_token_ids),
            seed=_as_int64(seed),
            future=self._enter_loop().create_future(),
        )
        self._waiting.append(request)
        self._ensure_driver()
        try:
            return await request.future
        finally:
            if request.future.cancelled():
                self._remove(request)

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replaces the weights between two steps; see `Engine.load_weights`. After a failure the engine refuses to
        generate until a complete load succeeded, so that half-loaded weights are never sampled from."""
        self._broken = "the last load_weights did not complete"
        self._model.load(weights)
        self._broken = ""
        self.version = version
        self._forget_cache()

    def weights_digest(self) -> str:
        """Content hash of the weights in use; equals `rlflow.weights.hf.digest` of what was loaded, in this dtype."""
        return digest(self._model.named_weights())

    @property
    def weight_names(self) -> frozenset[str]:
        """HuggingFace names of the tensors that the engine keeps (a tied model has no lm_head.weight)."""
        return frozenset(self._model.parameters)

    async def pause(self, mode: Literal["keep", "abort", "wait"] = "keep") -> None:
        """Stops stepping. keep: requests in flight stay where they are; abort: they end now with what they have; wait:
        those that run are finished first. Requests that arrive later wait for `resume`."""
        if mode == "wait":
            self._state = "draining"
            while self._running:
                await asyncio.sleep(0)
        self._state = "paused"
        if mode == "abort":
            for request in [*self._waiting, *self._running.values()]:
                self._end(request, "aborted")

    async def resume(self) -> None:
        """Continues after `pause`."""
        self._state = "open"
        self._enter_loop()
        self._ensure_driver()

    async def abort(self, request_id: str) -> None:
        """Ends the request with that id, if it is in flight: it completes with what it has and stop "aborted"."""
        for request in [*self._waiting, *self._running.values()]:
            if request.id == request_id:
                self._end(request, "aborted")

    def release(self, request_id: str) -> None:
        """Forgets what is kept for the next turn of that id."""
        self._slots.release(request_id)

    async def close(self) -> None:
        """Ends every request; the engine cannot be used afterwards."""
        await self.pause("abort")
        self._state = "closed"

    # --- requests -----------------------------------------------------------------------------------------------------

    def _check(self, tokens: Sequence[int], sampling: Sampling, request_id: str | None) -> None:
        if self._state == "closed":
            raise RolloutError("engine: it was closed; make a new one.")
        if self._broken:
            raise RolloutError(f"engine: {self._broken}; load complete weights first.")
        if not tokens:
            raise RolloutError("engine.generate: the prompt has no tokens; expected at least one.")
        if len(tokens) >= self.max_tokens:
            raise RolloutError(
                f"engine.generate: a prompt of {len(tokens)} tokens leaves no room in the {self.max_tokens} of max_tokens."
            )
        if min(tokens) < 0 or max(tokens) >= self._vocab:
            raise RolloutError(f"engine.generate: a token is outside the vocabulary of {self._vocab}; is the tokenizer the model's?")
        if sampling.max_tokens < 1 or not sampling.temperature >= 0:
            raise RolloutError(
                "engine.generate: expected max_tokens >= 1 and temperature >= 0, "
                f"found {sampling.max_tokens} and {sampling.temperature}."
            )
        in_flight = (request.id for request in [*self._waiting, *self._running.values()])
        if request_id is not None and request_id in in_flight:
            raise RolloutError(f"engine.generate: request id '{request_id}' is in flight already; ids must differ.")

    def _enter_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop is not loop:
            if self._loop.is_running() and (self._waiting or self._running):
                raise RolloutError("engine: it is in use by another event loop; use one loop at a time.")
            for request in [*self._waiting, *self._running.values()]:  # their loop was closed under them
                self._remove(request)
            self._driver = None
        self._loop = loop
        return loop

    def _ensure_driver(self) -> None:
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())
            self._driver.add_done_callback(self._fail_all)

    async def _drive(self) -> None:
        while self._state in ("open", "draining") and (self._running or (self._waiting and self._state == "open")):
            self._step()
            await asyncio.sleep(0)

    def _fail_all(self, driver: asyncio.Task[None]) -> None:
        """Hands an error of a step to everyone who waits for one."""
        error = None if driver.cancelled() else driver.exception()
        if error is None:
            return
        self._cache.clear()
        for request in [*self._waiting, *self._running.values()]:
            failure = error if isinstance(error, RolloutError) else RolloutError(f"engine: a step failed: {error!r}")
            if not request.future.done():
                request.future.set_exception(failure)
            self._remove(request)

    def _end(self, request: Request, stop: Literal["stop", "length", "aborted"]) -> None:
        """Completes a request, wherever it is, with what it has."""
        tokens, logprobs, versions = self._slots.sampled(request.slot) if request.slot >= 0 else ([], [], [])
        if not request.future.done():
            request.future.set_result(Completion(tokens, logprobs, versions, stop))
        self._remove(request)

    def _remove(self, request: Request) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
        slot = request.slot
        if self._running.get(slot) is not request:
            return
        del self._running[slot]
        self._slots.put_back(slot, self._cached(slot))
        if slot in self._decoding:
            self._decoding.remove(slot)
            self._batch = None
        else:
            self._prefilling.remove(slot)

    def _cached(self, slot: int) -> int:
        return int(self._slots.lengths[slot]) - 1 if slot in self._decoding else self._slots.cached[slot]

    def _forget_cache(self) -> None:
        self._slots.forget_cache()
        self._donors.clear()
        self._prefilling += sorted(self._decoding)
        self._decoding.clear()
        self._batch = None

    # --- a step -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _step(self) -> None:
        if self._state == "open":
            self._admit()
        if self._prefilling:
            self._prefill()
        if self._decoding:
            self._decode()
        self.statistics.steps += 1

    def _admit(self) -> None:
        """Gives slots to waiting requests: first to those that continue an episode, since theirs is there already."""
        if self.deterministic:
            self._waiting.sort(key=lambda request: request.id or "")
        continuing = [request for request in self._waiting if self._slots.held_by(request.id) is not None]
        for request in [*continuing, *(other for other in self._waiting if other not in continuing)]:
            if not self._slots.available():
                break
            self._place(request)
        self._waiting = [request for request in self._waiting if request.slot < 0]

    def _place(self, request: Request) -> None:
        count = len(request.tokens)
        known = self._slots.held_by(request.id)
        slot = request.slot = self._slots.take(request.id)
        shared = 0
        if known is None:
            self._forget_donor(slot)
        else:
            shared = min(self._slots.cached[slot], self._slots.common_prefix(slot, request.tokens), count - 1)
        limit = min(count + request.sampling.max_tokens, self.max_tokens)
        if self._cache.reserve(count + 1):
            self._slots.reserve(self._cache.capacity)
        self._slots.fill(slot, request, limit)
        self._slots.cached[slot] = shared
        self.statistics.reused += shared
        self._running[slot] = request
        self._prefilling.append(slot)

    def _prefill(self) -> None:
        """Computes what the cache lacks of the newest requests, oldest first, and samples their first token."""
        leaders, budget = [], self._prefill_tokens
        chosen: set[tuple[int, ...]] = set()
        for slot in self._prefilling:
            if budget <= 0:
                break
            prompt = self._borrow(slot)
            start, length = self._slots.cached[slot], int(self._slots.lengths[slot])
            if prompt in chosen and start == 0:
                continue  # another one computes the same prompt in this step; it is copied in the next
            chosen.add(prompt)
            stop = min(length, start + budget)
            budget -= stop - start
            leaders.append((slot, start, stop, stop == length))
            if start == 0:
                self._donors[prompt] = slot
        self._feed(leaders)

    def _borrow(self, slot: int) -> tuple[int, ...]:
        """Copies the slot's prompt from another slot that holds it, if one does. Returns the prompt."""
        prompt = tuple(self._running[slot].tokens)
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
        positions = torch.cat([torch.arange(start, stop, device=self.device) for _, start, stop, _ in parts])
        attend = self._cache.prefilling(slots, [start for _, start, _, _ in parts], [stop for _, _, stop, _ in parts])
        ends = torch.tensor([stop - start for _, start, stop, _ in parts]).cumsum(0) - 1
        complete = [row for row, part in enumerate(parts) if part[3]]
        logits = self._model.forward(tokens, positions, attend, ends[complete].to(self.device))
        self.statistics.prefilled += len(tokens)
        for slot, _, stop, done in parts:
            self._slots.cached[slot] = stop
            if done:
                self._prefilling.remove(slot)
                self._decoding.add(slot)
        self._batch = None
        if complete:
            self._record(torch.tensor([slots[row] for row in complete], device=self.device), logits)

    def _decode(self) -> None:
        """One token for every request that decodes."""
        if self._batch is None:
            self._batch = torch.tensor(sorted(self._decoding), device=self.device)
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
        uniform = uniforms(slots.seeds[batch], lengths - slots.origins[batch]) if sampled else None
        tokens, logprobs = sample(logits, temperatures, uniform)
        if not bool(torch.isfinite(logprobs).all()):
            raise RolloutError("engine: the policy's logits are not finite; its weights diverged (lower the learning rate?).")
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
        request = self._running[slot]
        strings = request.sampling.stop
        if flag == END_TOKEN or (flag and self._stops.completes(self._slots.sampled(slot)[0], strings)):
            self._end(request, "stop")
        elif full:
            self._end(request, "length")

    def _load_tokenizer(self) -> Decoding:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_pretrained(self.path)
        return self._tokenizer


def _as_int64(value: int) -> int:
    """The value modulo 2**64, as a signed 64-bit integer."""
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >= 1 << 63 else value
