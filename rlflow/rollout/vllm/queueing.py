"""An engine's own side of a vLLM that runs somewhere else: requests wait here, in order of their priority."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from rlflow.errors import RolloutError
from rlflow.models.huggingface import read_config
from rlflow.rollout.engine import Completion, Engine, PauseMode, Sampling, Stop, Weights, check_sizes
from rlflow.rollout.tokenizer import Tokenizer
from rlflow.rollout.vllm.backend import CALL_S, Sent, VLLMBackend
from rlflow.rollout.vllm.buckets import Buckets, WeightNames
from rlflow.rollout.vllm.device_buckets import DeviceBuckets
from rlflow.rollout.vllm.requests import EngineRequest, RequestQueue, StopTokens, TokenCounts, take

logger = logging.getLogger(__name__)

CLOSED = "it was closed; make a new one"
COLDEST = 0.01  # vLLM takes a temperature between 0 and this as this
CLOSE_S = 10.0


class QueueingEngine(Engine):
    """Requests wait here until one of `max_concurrency` places is free; what runs is batched by vLLM. While new weights are
    loaded nothing is sampled, and what runs is computed anew before it goes on. A subclass sets `_backend`.

    max_tokens: of a prompt and its completion together; none: the model's positions."""

    max_tokens: int
    _backend: VLLMBackend
    _weights_folder: Path | None = None
    """Where new weights are handed over; none: in this machine's memory."""

    def __init__(
        self,
        path: str | Path,
        tokenizer: Tokenizer | None,
        *,
        max_concurrency: int,
        max_tokens: int | None,
        dtype: Literal["float32", "bfloat16"],
        seed: int,
        bucket_mib: int,
        start_s: float,
        answer_s: float,
    ) -> None:
        check_sizes("rollout.engine", max_concurrency=max_concurrency, bucket_mib=bucket_mib, max_tokens=max_tokens)
        self.path = Path(path).absolute()
        config = read_config(path)
        self._names = WeightNames(path)
        self._vocab = int(config.get("vocab_size") or 1 << 31)
        self.max_concurrency = max_concurrency
        self.dtype = getattr(torch, dtype)
        self.counts = TokenCounts()
        self.version = 0
        self._tokenizer = tokenizer
        self._stops: StopTokens | None = None
        self._answer_s, self._start_s, self._bucket_bytes = answer_s, start_s, bucket_mib << 20
        self._order = itertools.count()
        self._seed = seed
        self._state: Literal["open", "draining", "paused", "closed"] = "open"
        self._loading = self._asleep = False
        self._broken = ""  # why the weights cannot be used
        self._waiting = RequestQueue()
        self._running: set[EngineRequest] = set()
        self._ids: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        limits = [limit for limit in (max_tokens, config.get("max_position_embeddings")) if limit is not None]
        self._limit = int(min(limits)) if limits else None
        self.max_tokens = self._limit or 1 << 31

    def wait_until_ready(self) -> str:
        """The version of vLLM, when it has loaded the model; what is asked of it before waits for that. Raises RolloutError."""
        try:
            told = self._backend.wait_until_ready(self._start_s)
        except BaseException:
            self._backend.kill()
            raise
        self.max_tokens = min(self.max_tokens, int(told["max_tokens"]))
        if self.sleeps and not told["sleeps"]:
            logger.warning("rollout.engine.sleep: vLLM cannot sleep on this machine and keeps its memory")
        return str(told["vllm"])

    # --- the protocol ---------------------------------------------------------------------------------------------------

    async def generate(
        self, tokens: Sequence[int], sampling: Sampling, request_id: str | None = None, priority: int = 0
    ) -> Completion:
        """Continues `tokens`; see `Engine.generate`. Raises RolloutError for a request that cannot be served."""
        self._check(tokens, sampling, request_id)
        future = self._enter_loop().create_future()
        request = EngineRequest(list(tokens), sampling, request_id, priority, future)
        self._waiting.add(request)
        if request_id is not None:
            self._ids.add(request_id)
        self._admit()
        try:
            return await future
        finally:
            if future.cancelled():
                self._abandon(request)
            if request_id is not None:
                self._ids.discard(request_id)

    async def load_weights(self, weights: Weights, version: int) -> None:
        """Replaces the weights while nothing is sampled; see `Engine.load_weights`. Raises ModelError for an update that is not
        exactly the model's tensors, RolloutError where vLLM fails."""
        self._enter_loop()
        if self._state == "closed" or self._loading:
            raise RolloutError(f"engine.load_weights: {'another load is under way' if self._loading else CLOSED}.")
        self._loading = True
        buckets = self._buckets()
        try:
            await self._update(weights, version, buckets)
        except BaseException as error:
            if self._outlived:
                raise
            self._broken = "the last load_weights did not complete"
            self._fail(RolloutError(f"engine: weights of version {version} were half loaded when it failed: {error!r}"))
            with contextlib.suppress(RolloutError):
                await self._backend.ask("cancel_update")
            raise
        finally:
            self._loading = False
            buckets.close()
        self._broken = ""
        self.version = version
        await self._go_on()

    def _buckets(self) -> Buckets | DeviceBuckets:
        return Buckets(self._bucket_bytes, self._weights_folder)

    async def _update(self, weights: Weights, version: int, buckets: Buckets | DeviceBuckets) -> None:
        received: set[str] = set()
        if self.failure:
            await self._restart()
        await self._backend.ask("begin_update")
        async for message in buckets.messages(weights, self._names):
            received |= set((await self._backend.ask("update", **message))["names"])
        self._names.check_complete(received)
        await self._backend.ask("finish_update", version=version)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stops sampling; see `Engine.pause`."""
        if self._state == "closed":
            return
        self._enter_loop()
        if mode == "wait":
            self._state = "draining"
            await self._go_on()
            while self._running and self._state == "draining":
                await asyncio.wait([request.task for request in self._running if request.task is not None])
            if self._state != "draining":
                return  # somebody resumed or closed it in the meantime
        self._state = "paused"
        await self._ask("pause")
        if mode == "abort":
            self._end_waiting("paused")
            await self._end_running("paused", CLOSE_S)

    async def resume(self) -> None:
        """Continues after `pause`; a closed engine stays closed."""
        if self._state == "closed":
            return
        self._enter_loop()
        self._state = "open"
        await self._go_on()

    async def sleep(self) -> int:
        """Gives back the memory of weights, keys and values; see `Engine.sleep`. Nothing but `load_weights` fills it again."""
        if self._asleep or self._state == "closed":
            return 0
        self._enter_loop()
        self._asleep = True
        return int((await self._ask("sleep")).get("bytes", 0))

    async def wake(self) -> int:
        """Takes the memory of keys and values again, that of weights having come with them; see `Engine.wake`."""
        if not self._asleep or self._state == "closed":
            return 0
        taken = int((await self._ask("wake")).get("bytes", 0))
        self._asleep = False
        await self._go_on()
        return taken

    async def abort(self, request_id: str) -> None:
        """Ends the request with that id; see `Engine.abort`."""
        self._end_waiting("aborted", request_id)
        running = [request for request in self._running if request.id == request_id]
        for request in running:
            request.ended_as = "aborted"
        if running:
            calls = [request.call for request in running]
            self._backend.send("abort", calls=calls)  # not awaited: another one would take its place in between

    async def close(self) -> None:
        """Ends every request and vLLM's process; the engine cannot be used afterwards."""
        if self._state == "closed":
            return
        self._state = "closed"
        self._end_waiting("aborted")
        with contextlib.suppress(RolloutError):
            await self._end_running("aborted", CLOSE_S)
        await asyncio.to_thread(self._backend.close)

    def kill(self) -> None:
        """Ends vLLM's process at once, whatever it does."""
        self._state = "closed"
        self._backend.kill()

    # --- requests -------------------------------------------------------------------------------------------------------

    def _check(self, tokens: Sequence[int], sampling: Sampling, request_id: str | None) -> None:
        if self._state == "closed":
            raise RolloutError(f"engine: {CLOSED}.")
        if self._broken:
            raise RolloutError(f"engine: {self._broken}; load complete weights first.")
        if not tokens or len(tokens) >= self.max_tokens:
            raise RolloutError(
                f"engine.generate: a prompt of {len(tokens)} tokens; expected at least 1, and room in the {self.max_tokens} "
                "tokens that it and its completion may have (engine.max_tokens, or the model's positions)."
            )
        lowest, highest = (choose((*tokens, *sampling.stop_token_ids)) for choose in (min, max))
        if lowest < 0 or highest >= self._vocab:
            raise RolloutError(
                f"engine.generate: token {lowest if lowest < 0 else highest} is outside the vocabulary of {self._vocab}; is the "
                "tokenizer the model's?"
            )
        cold = 0 < sampling.temperature < COLDEST
        if sampling.max_tokens < 1 or not sampling.temperature >= 0 or cold:
            raise RolloutError(
                f"engine.generate: expected max_tokens >= 1 and a temperature of 0 or at least {COLDEST} (vLLM samples at no "
                f"lower one), found {sampling.max_tokens} and {sampling.temperature}."
            )
        self._special_stops(sampling.stop)
        if request_id in self._ids:
            raise RolloutError(f"engine.generate: request id '{request_id}' is in flight already; ids must differ.")

    def _enter_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop is not loop:
            if self._loop.is_running() and self._in_flight():
                raise RolloutError("engine: it is in use by another event loop; use one loop at a time.")
            for request in self._in_flight():  # their loop was closed under them
                self._abandon(request)
            self._running.clear()
            self._ids.clear()
        self._loop = loop
        return loop

    @property
    def failure(self) -> str:
        return self._backend.failure

    @property
    def _outlived(self) -> bool:
        """Whether vLLM has ended, and new weights will start it again."""
        return self.patient and bool(self.failure)

    async def _restart(self) -> None:
        """Starts vLLM again. Raises RolloutError where it cannot be started."""
        raise RolloutError(self.failure)

    async def _ask(self, operation: str, limit_s: float = CALL_S, **fields: Any) -> dict[str, Any]:
        """The reply of the backend; {} where it has ended and will be started again."""
        try:
            return await self._backend.ask(operation, limit_s, **fields)
        except RolloutError:
            if not self._outlived:
                raise
            return {}

    @property
    def _held(self) -> bool:
        """Whether nothing can be sampled just now, as the weights are not there."""
        return self._loading or self._asleep or self._outlived

    def _in_flight(self) -> list[EngineRequest]:
        return [*self._waiting.requests(), *self._running]

    def _admit(self) -> None:
        """Gives free places to those that wait, the lowest priority number first, then who came first."""
        while (
            self._state == "open" and not self._held and self._waiting and len(self._running) < self.max_concurrency
        ):
            request = self._waiting.next()
            self._running.add(request)
            sent = self._submit(request)
            request.task = asyncio.get_running_loop().create_task(self._finish(request, sent))

    def _submit(self, request: EngineRequest) -> Sent:
        sampling, tokens = request.sampling, request.fed
        # With the place: vLLM begins a request's random numbers anew, and those of a part before are in its tokens.
        own = sampling.seed if sampling.seed is not None else hash((self._seed, next(self._order)))
        seed = hash((own, len(tokens)))
        sent = self._backend.send(
            "generate",
            tokens=tokens,
            max_tokens=self._room(request) - len(request.sampled.tokens),
            temperature=sampling.temperature,
            stop=list(sampling.stop),
            stop_token_ids=[*sampling.stop_token_ids, *self._special_stops(sampling.stop)],
            seed=seed & 0x7FFFFFFFFFFFFFFF,
            priority=request.priority,
            salt=str(self.version),
        )
        request.call = sent.call
        return sent

    async def _finish(self, request: EngineRequest, sent: Sent) -> None:
        """Takes the answer to a request that runs."""
        try:
            done = await self._answered(request, sent)
            if not request.future.done():
                request.future.set_result(done)
        except RolloutError as error:
            if self._outlived and not request.future.done() and self._state != "closed":
                self._waiting.add(request)  # it begins anew where the engine does
            elif not request.future.done():
                request.future.set_exception(error)
        except asyncio.CancelledError:  # the loop ends
            self._backend.send("abort", calls=[request.call])
            self._running.discard(request)
            raise
        self._running.discard(request)
        self._admit()

    async def _answered(self, request: EngineRequest, sent: Sent) -> Completion:
        """The whole completion. vLLM is asked for the rest where it stopped at a stop string of the prompt."""
        sampling, stops = request.sampling, self._stops
        while True:
            prompt = request.fed
            reply = await self._backend.reply(
                "generate", sent, self._answer_s, lambda: self._held or self._state == "paused"
            )
            done = take(request, reply, self.counts)
            if done.stop != "stop" or stops is None or not stops.missing(prompt, done.tokens, sampling):
                return done
            if len(done.tokens) >= self._room(request):
                done.stop = "length"
            elif request.ended_as is not None or request.future.done():
                done.stop = request.ended_as or "aborted"
            else:
                sent = self._submit(request)
                continue
            return done

    def _room(self, request: EngineRequest) -> int:
        return min(request.sampling.max_tokens, self.max_tokens - len(request.tokens))

    def _abandon(self, request: EngineRequest) -> None:
        """Nobody waits for the request any longer."""
        self._waiting.take(lambda other: other is request)
        if request in self._running:
            self._backend.send("abort", calls=[request.call])

    def _end_waiting(self, stop: Stop, request_id: str | None = None) -> None:
        for request in self._waiting.take(lambda other: request_id in (None, other.id)):
            if not request.future.done():
                request.future.set_result(Completion([], [], [], stop))

    async def _end_running(self, stop: Stop, limit_s: float) -> None:
        """Ends what runs, and waits until it has ended."""
        running = list(self._running)
        for request in running:
            request.ended_as = stop
        if running:
            await self._ask("abort", limit_s, calls=[request.call for request in running])
            await asyncio.wait([request.task for request in running if request.task is not None], timeout=limit_s)

    def _fail(self, failure: RolloutError) -> None:
        """Hands an error to everyone who waits for a completion."""
        for request in [*self._waiting.take(lambda _: True), *self._running]:
            if not request.future.done():
                request.future.set_exception(failure)
        if self._running:
            self._backend.send("abort", calls=[request.call for request in self._running])

    async def _go_on(self) -> None:
        """Lets vLLM sample, and those that wait run, unless something forbids it."""
        if self._held or self._state in ("paused", "closed"):
            return
        await self._ask("resume")
        self._admit()

    def _special_stops(self, strings: tuple[str, ...]) -> tuple[int, ...]:
        if not strings:
            return ()
        if self._stops is None:
            self._stops = StopTokens(self._tokenizer or Tokenizer.from_pretrained(self.path), self._vocab)
        return self._stops.of(strings)
