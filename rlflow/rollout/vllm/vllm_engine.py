"""The vLLM engine: requests wait here, in order of their priority, and run in a vLLM server."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from rlflow.devices.gpu_buckets import GpuSharing
from rlflow.errors import RolloutError
from rlflow.models.huggingface import read_config
from rlflow.rollout.engine import (
    Completion,
    Engine,
    PauseMode,
    Sampling,
    Stop,
    Weights,
    check_request,
)
from rlflow.rollout.tokenizer import Tokenizer
from rlflow.rollout.vllm.adapters import AdapterForm
from rlflow.rollout.vllm.buckets import Carrier, WeightNames
from rlflow.rollout.vllm.completions import sampling_arguments, unknown_ids
from rlflow.rollout.vllm.engine_requests import (
    COLDEST,
    EngineRequest,
    StopTokens,
    TokenCounts,
    most_tokens,
)
from rlflow.rollout.vllm.server import VLLMServer, Work

logger = logging.getLogger(__name__)

T = TypeVar("T")
CLOSED = "it was closed; make a new one"
CLOSE_S = 20.0


class VLLMEngine(Engine):
    """vLLM over a HuggingFace directory, in a server.

    Requests wait here until one of `max_concurrency` places is free; what runs is batched by vLLM,
    whose prefix cache keeps the history of an episode between its turns. While new weights are
    loaded nothing is sampled, and what runs is computed anew before it goes on.

    carrier: makes what carries an update to the server, by its version; none: the server keeps the
    weights that it has. max_concurrency: requests that run at a time. max_tokens: of a prompt and
    its completion together; none: the model's positions. bucket_mib: of weights that are on their
    way at a time. start_s: until vLLM must be ready. answer_s: how long it may be silent while
    requests run. sleeps: its memory is given back while the trainer works. sharing: new weights
    stay on the GPU, in memory that it opens. adapters: that it takes in place of whole weights."""

    max_tokens: int
    dtype: torch.dtype
    slow_seeds = True  # vLLM draws for each request with a seed in a Python loop

    def __init__(
        self,
        path: str | Path,
        tokenizer: Tokenizer | None,
        server: VLLMServer,
        carrier: Callable[[int], Carrier] | None,
        *,
        max_concurrency: int,
        max_tokens: int | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        bucket_mib: int = 256,
        start_s: float = 900.0,
        answer_s: float = 1800.0,
        sleeps: bool = False,
        sharing: GpuSharing | None = None,
        adapters: AdapterForm | None = None,
    ) -> None:
        self.path = Path(path).absolute()
        config = read_config(path)
        self._names = WeightNames(path)
        self.server, self._carrier = server, carrier
        self._adapters, self.takes_adapters = adapters, adapters is not None
        self.may_end = server.served is not None
        self.takes_weights = carrier is not None or adapters is not None
        self.max_concurrency, self.sleeps = max_concurrency, sleeps
        self.sharing = sharing
        self.dtype = getattr(torch, dtype)
        self._bucket_bytes, self._start_s, self._answer_s = bucket_mib << 20, start_s, answer_s
        self.counts = TokenCounts()
        self.version = 0
        self._stops = StopTokens(self.path, tokenizer, int(config.get("vocab_size") or 1 << 31))
        self._unknown = unknown_ids(path, config.get("vocab_size"))
        self._state: Literal["open", "draining", "paused", "closed"] = "open"
        self._loading = self._asleep = False
        self._broken = False  # the weights cannot be used
        self._waiting: list[EngineRequest] = []  # by priority, then by their coming
        self._running: set[EngineRequest] = set()
        self._ids: set[str | None] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.max_tokens = most_tokens(path, max_tokens) or 1 << 31

    def wait_until_ready(self) -> None:
        """Returns when vLLM has loaded the model. Raises RolloutError."""
        self.server_facts = facts = self.server.wait_until_ready(self._start_s)
        self.max_tokens = min(self.max_tokens, facts.max_tokens)
        if self.sleeps and not facts.sleeps:
            logger.warning(
                "rollout.engine.sleep: vLLM cannot sleep on this machine and keeps its memory"
            )

    # --- the protocol --------------------------------------------------------------------------

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Completion:
        """See `Engine.generate`. Raises RolloutError for a request that cannot be served."""
        self._check(tokens, sampling, request_id)
        future = self._enter_loop().create_future()
        request = EngineRequest(list(tokens), sampling, request_id, priority, future)
        self._ids.add(request_id)
        self._wait(request)
        self._admit()
        try:
            return await future
        finally:
            self._ids.discard(request_id)
            if future.cancelled():
                self._end([request], "aborted")

    async def load_weights(self, weights: Weights, version: int) -> None:
        """Replaces the weights while nothing is sampled; see `Engine.load_weights`. Raises
        ModelError for an update that is not exactly the model's tensors, RolloutError where vLLM
        fails."""
        self._enter_loop()
        if self._state == "closed" or self._loading:
            why = "another load is under way" if self._loading else CLOSED
            raise RolloutError(f"engine.load_weights: {why}.")
        self._loading = True
        try:
            if self.failure:
                await self._restart()
            await self._update(weights, version)
        except BaseException as error:
            if self._outlived:
                raise
            self._broken = True
            what = f"weights of version {version} were half loaded when it failed"
            self._end(self._in_flight(), RolloutError(f"engine: {what}: {error!r}"))
            with contextlib.suppress(RolloutError):
                await self.server.ask(self.server.cancel_update)
            raise
        finally:
            self._loading = False
        self._broken = False
        self.version = version
        await self._go_on()

    async def _update(self, weights: Weights, version: int) -> None:
        server = self.server
        await server.ask(server.begin_update, self._asleep)
        if self._adapters is not None:
            adapter = await self._adapters.received(weights)
            expected = self._adapters.expected_hash(adapter, self.dtype)
            with self._adapters.handed_over(adapter) as folder:
                await server.ask(server.take_adapter, folder, expected)
            await server.ask(server.finish_update, version)
            return
        assert self._carrier is not None  # or the server has refused
        carrier = self._carrier(version)
        try:
            async for info in carrier.updates(weights, self._names, self._bucket_bytes):
                await server.ask(server.update, info)
            await server.ask(server.finish_update, version)
        finally:
            carrier.close()

    async def _restart(self) -> None:
        """Starts vLLM again. Raises RolloutError where it cannot be started."""
        if not self.may_end:
            raise RolloutError(self.failure)
        await self._ended(CLOSE_S)  # what runs fails now, and waits for the new server
        self._asleep = False
        await asyncio.to_thread(self.server.restart)
        await asyncio.to_thread(self.server.wait_until_ready, self._start_s)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stops sampling; see `Engine.pause`."""
        if self._state == "closed":
            return
        self._enter_loop()
        if mode == "wait":
            self._state = "draining"
            await self._go_on()
            while self._running and self._state == "draining":
                await self._ended()
            if self._state != "draining":
                return  # somebody resumed or closed it in the meantime
        self._state = "paused"
        await self._ask(self.server.pause)
        if mode == "abort":
            self._end(self._in_flight(), "paused")
            await self._ended(CLOSE_S)

    async def resume(self) -> None:
        """Continues after `pause`; a closed engine stays closed."""
        if self._state == "closed":
            return
        self._enter_loop()
        self._state = "open"
        await self._go_on()

    async def sleep(self) -> int:
        """Gives back the memory of weights, keys and values; see `Engine.sleep`. Nothing but
        `load_weights` fills it again."""
        if self._asleep or self._state == "closed":
            return 0
        self._enter_loop()
        self._asleep = True
        return await self._ask(self.server.sleep) or 0

    async def wake(self) -> int:
        """Takes the memory of keys and values again, that of weights having come with them; see
        `Engine.wake`."""
        if not self._asleep or self._state == "closed":
            return 0
        taken = await self._ask(self.server.wake, self._state == "paused")
        self._asleep = False
        await self._go_on()
        return taken or 0

    async def abort(self, request_id: str) -> None:
        """Ends the request with that id; see `Engine.abort`."""
        self._end([one for one in self._in_flight() if one.id == request_id], "aborted")

    async def close(self) -> None:
        """Ends every request and vLLM's process; the engine cannot be used afterwards."""
        if self._state == "closed":
            return
        self._state = "closed"
        self._end(self._in_flight(), "aborted")
        await self._ended(CLOSE_S)
        await asyncio.to_thread(self.server.close)

    def kill(self) -> None:
        """Ends vLLM's process at once, whatever it does."""
        self._state = "closed"
        self.server.close(0.0)

    # --- requests --------------------------------------------------------------------------------

    def _check(self, tokens: Sequence[int], sampling: Sampling, request_id: str | None) -> None:
        if self._state == "closed":
            raise RolloutError(f"engine: {CLOSED}.")
        if self._broken:
            why = "the last load_weights did not complete"
            raise RolloutError(f"engine: {why}; load complete weights first.")
        limits = self.max_tokens, self._stops.vocab
        check_request(tokens, sampling, *limits, request_id, self._ids, COLDEST)
        self._stops.of(sampling.stop)

    def _enter_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop is not loop:
            if self._loop.is_running() and self._in_flight():
                raise RolloutError(
                    "engine: it is in use by another event loop; use one loop at a time."
                )
            # Their loop was closed under them
            self.server.abort([one.call for one in self._running])
            self._waiting.clear()
            self._running.clear()
            self._ids.clear()
        self._loop = loop
        return loop

    @property
    def failure(self) -> str:
        return self.server.failure

    @property
    def _outlived(self) -> bool:
        """Whether vLLM has ended, and new weights will start it again."""
        return self.patient and bool(self.failure)

    async def _ask(self, change: Work[T], *arguments: Any) -> T | None:
        """What the server answers; None where it has ended and will be started again."""
        try:
            return await self.server.ask(change, *arguments)
        except RolloutError:
            if not self._outlived:
                raise
            return None

    @property
    def _held(self) -> bool:
        """Whether nothing can be sampled just now, as the weights are not there."""
        return self._loading or self._asleep or self._outlived

    def _in_flight(self) -> list[EngineRequest]:
        return [*self._waiting, *self._running]

    async def _ended(self, limit_s: float | None = None) -> None:
        """Waits until what runs has ended."""
        if self._running:
            await asyncio.wait([request.task for request in self._running], timeout=limit_s)

    def _wait(self, request: EngineRequest) -> None:
        bisect.insort(self._waiting, request, key=lambda other: other.priority)

    def _admit(self) -> None:
        """Gives free places to those that wait."""
        if self._state != "open" or self._held:
            return
        while self._waiting and len(self._running) < self.max_concurrency:
            request = self._waiting.pop(0)
            self._running.add(request)
            self._submit(request)
            request.task = asyncio.get_running_loop().create_task(self._finish(request))

    def _submit(self, request: EngineRequest) -> None:
        fed, sampling = request.fed, request.sampling
        room = self._room(request) - len(request.sampled.tokens)
        asked = sampling_arguments(
            sampling, room, self._stops.of(sampling.stop), len(fed), self._unknown
        )
        request.call = self.server.generate(fed, asked, self.version, request.priority)

    async def _finish(self, request: EngineRequest) -> None:
        """Takes the answer to a request that runs."""
        try:
            request.end(await self._answered(request))
        except RolloutError as error:
            if self._outlived and not request.future.done() and self._state != "closed":
                self._wait(request)  # it begins anew where the engine does
            else:
                request.end(error)
        except asyncio.CancelledError:  # the loop ends
            self._end([request], "aborted")
            raise
        finally:
            self._running.discard(request)
        self._admit()

    async def _answered(self, request: EngineRequest) -> Completion:
        """The whole completion. vLLM is asked for the rest where it stopped at a stop string of the
        prompt."""

        def may_be_silent() -> bool:
            return self._held or self._state == "paused"

        while True:
            prompt, limit_s = request.fed, self._answer_s
            answer = await self.server.reply(
                request.call.reply, limit_s=limit_s, may_be_silent=may_be_silent
            )
            self.counts.prefilled += len(prompt) - answer.cached
            self.counts.reused += answer.cached
            self.counts.decoded += len(answer.completion.tokens)
            done = request.take(answer.completion)
            missing = self._stops.missing(prompt, done.tokens, request.sampling)
            if done.stop != "stop" or not missing:
                return done
            if len(done.tokens) >= self._room(request):
                done.stop = "length"
            elif request.ended_as is not None or request.future.done():
                done.stop = request.ended_as or "aborted"
            else:
                self._submit(request)
                continue
            return done

    def _room(self, request: EngineRequest) -> int:
        return min(request.sampling.max_tokens, self.max_tokens - len(request.tokens))

    def _end(self, requests: Iterable[EngineRequest], how: Stop | RolloutError) -> None:
        """Ends requests with what they have, those that wait at once; or all at once, by an
        error."""
        ended = set(requests)
        for request in ended:
            if isinstance(how, RolloutError):
                request.end(how)
            elif request in self._running:
                request.ended_as = how
            else:
                request.end(Completion([], [], [], how))
        self._waiting = [request for request in self._waiting if request not in ended]
        self.server.abort([request.call for request in ended & self._running])

    async def _go_on(self) -> None:
        """Lets vLLM sample, and those that wait run, unless something forbids it."""
        if self._held or self._state in ("paused", "closed"):
            return
        await self._ask(self.server.resume)
        self._admit()
