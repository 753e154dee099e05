"""A vLLM server, asked over HTTP: token ids in, token ids out. It is a child of this process, on a
socket, or somebody else's, at a URL.

The routes are those of `vllm serve --enable-scale-out` 0.32: `/inference/v1/generate` and
`.../abort_requests`, and with VLLM_SERVER_DEV_MODE=1 `/pause`, `/resume`, `/sleep`, `/wake_up`,
`/reset_prefix_cache`, `/collective_rpc` and those of weights."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeVar

from rlflow.errors import RolloutError
from rlflow.models.entries import Experts
from rlflow.net.calls import deadline
from rlflow.net.http import CONNECT_S, HttpClient, Retryable, backoff_s
from rlflow.rollout.vllm.completions import Sampled, Sent, answered
from rlflow.rollout.vllm.inside.start import WINDOW
from rlflow.rollout.vllm.launch import Launch, Served
from rlflow.rollout.vllm.routes import CALL_S, GENERATE, Refused, Routes
from rlflow.rollout.vllm.server_facts import HOW_TO, ServerFacts, facts_of, of_workers
from rlflow.storage.child import STOP_S

logger = logging.getLogger(__name__)

ABORT = "/inference/v1/abort_requests"
ID_PREFIX = "generate-tokens-"  # that the server puts before a request's id
ABORT_AGAIN_S = 0.1
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
END_S = 15.0  # for a process to end whose engine has
KEEP, DISCARD = 1, 2
"""vLLM's levels of sleep: with a copy of the weights in the host's memory, and without."""
POLL_S, REPORT_EVERY_S = 0.3, 20.0
SILENT_S = 5.0  # between looks at whether a server is silent
BESIDE = 8  # connections for what goes past the requests that run: pauses, aborts
EXPECTED = f"expected {WINDOW}, started as `{HOW_TO}`"
AMX = "; on a CPU with AMX vLLM 0.32 ends so in bfloat16: start it with --dtype float32"

T = TypeVar("T")
Work = Callable[..., Coroutine[Any, Any, T]]


class VLLMServer:
    """One server, used from any thread and loop. launch: how it is started, as a child that ends
    with this; without, it is somebody else's, who goes on when this is closed.

    takes: new weights, `buckets` by its transfer engine, which init_info sets up, or at the end a
    `folder` that this machine sees under the same path; `adapters` over those that it has; none: it
    keeps those. model: its name there; none: the only one. retry_s: how long a request that
    generates is sent again while nobody answers; what changes the server's state is sent once.
    experts: those it names."""

    def __init__(
        self,
        takes: Literal["buckets", "folder", "adapters"] | None,
        *,
        connections: int,
        init_info: Mapping[str, Any] | None = None,
        launch: Launch | None = None,
        url: str = "",
        key: str | None = None,
        model: str | None = None,
        retry_s: float = 0.0,
        experts: Experts | None = None,
    ) -> None:
        self._takes, self._init_info, self._experts = takes, dict(init_info or {}), experts
        self._model, self._retry_s = model, retry_s
        self._launch, self._connections = launch, connections + BESIDE
        self._numbers = itertools.count()
        self._own = uuid.uuid4().hex[:12]  # apart from those of others at the same server
        self._closed = False
        self.served: Served | None = None
        self._begin(url, {"Authorization": f"Bearer {key}"} if key else {})

    def _begin(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        """Starts the child, if it is one; nothing is known about the server then."""
        socket = None
        if self._launch is not None:
            self.served = self._launch.start()
            socket, url = str(self.served.socket), "http://vllm"
        size = self._connections
        self._http = HttpClient(headers=headers, connections=size, socket_path=socket)
        self._routes = Routes(url, self._http.session)
        name = f"the vLLM server at {self._routes.url}"
        self.name = name if self._launch is None else "vLLM: its process"
        self._calls: set[Sent] = set()
        self._turn = asyncio.Lock()
        self._versions: dict[str, int] = {}  # the server's name of a version -> ours
        self._paused = False
        self._development = False  # whether it can be paused
        self._used = 0  # bytes, before it slept
        self._reason = ""  # why its child was ended

    # --- for engines --------------------------------------------------------------------------

    @property
    def failure(self) -> str:
        """How it ended by itself, where it did and can be started again; else empty."""
        if self.served is None or self._closed or not self.served.child.ended.done():
            return ""
        return self._reason or f"{self.name} {self.served.child.how_it_ended()}"

    def restart(self) -> None:
        """Starts the child again; `wait_until_ready` comes next."""
        assert self.served is not None
        self._http.close()
        self.served.stop(0.0)
        self._begin("")

    def generate(
        self, tokens: Sequence[int], sampling: Mapping[str, Any], version: int, priority: int
    ) -> Sent:
        """Sends a request. sampling: vLLM's SamplingParams. version: of the weights, or later."""
        name = f"{self._own}-{next(self._numbers)}"
        body: dict[str, Any] = {
            "request_id": name,
            "model": self._model,
            "token_ids": tokens,
            "sampling_params": sampling,
            "cache_salt": f"rlflow-{version}",
        }
        if self.served is not None:
            body["priority"] = priority  # somebody else's may not go by it
        call = Sent(ID_PREFIX + name, self._start(self._generate, body, version))
        self._calls.add(call)
        call.reply.add_done_callback(lambda _: self._calls.discard(call))
        return call

    def abort(self, calls: Sequence[Sent]) -> None:
        """Ends requests, which answer with what they have."""
        if calls:
            self._start(self._abort, calls)

    async def ask(self, change: Work[T], *arguments: Any) -> T:
        """What one of the methods below answers, of which one runs after the other. Raises
        RolloutError: the server has ended, has failed at this, or was silent for CALL_S."""
        answer = self._start(change, *arguments, turn=self._turn)
        return await self.reply(answer, change.__name__)

    async def reply(
        self,
        answer: Future[T],
        what: str = "generate",
        limit_s: float = CALL_S,
        may_be_silent: Callable[[], bool] = lambda: False,
    ) -> T:
        """The reply to what was sent; see `ask`. may_be_silent: whether the server has nothing to
        do now; a silence counts only where it has."""
        since = time.monotonic()
        waited = asyncio.wrap_future(answer)
        while True:
            done, _ = await asyncio.wait({waited}, timeout=min(limit_s, SILENT_S))
            if waited.cancelled():
                raise RolloutError(f"{self.name}: the connection was closed.")
            if done:
                return waited.result()
            if may_be_silent():
                since = time.monotonic()
            silent_s = time.monotonic() - max(since, self._routes.heard)
            if silent_s >= limit_s:
                raise RolloutError(
                    f"{self.name} has been silent for {silent_s:.0f} s, with '{what}' unanswered; "
                    f"{self._last_words()}"
                )

    def wait_until_ready(self, limit_s: float) -> ServerFacts:
        """What it says of itself, once it serves. Raises RolloutError where it ends, is not ready
        in time, or is none that can be used."""
        try:
            return self._http.call(self._check, limit_s)
        except RolloutError as error:
            self._end(str(error))
            raise

    def _end(self, reason: str) -> None:
        """Ends a child that is of no use any longer; it may be started again."""
        if self.served is not None and not self.served.child.ended.done():
            self._reason = reason
            self.served.child.stop(0.0)

    def close(self, limit_s: float = STOP_S) -> None:
        """Ends a child, at once where it takes longer than `limit_s`, and the connection to
        somebody else's server."""
        if not self._closed:
            self._closed = True
            if self.served is None:
                with contextlib.suppress(Exception):
                    self._http.call(self._hang_up)
            self._http.close()
            if self.served is not None:
                self.served.stop(limit_s)

    # --- what it is ---------------------------------------------------------------------------

    async def _wait_for_health(self, limit_s: float) -> None:
        start = said = time.monotonic()
        while True:
            try:
                await self._routes.ask("GET", "/health", limit_s=min(CALL_S, limit_s))
                return
            except Retryable as error:
                now = time.monotonic()
                if self.failure or now - start >= limit_s:
                    late = f"{self.name} did not answer in {limit_s:g} s (rollout.engine.start_s)"
                    told = f"{late}: {error}; {self._last_words()}"
                    raise RolloutError(self.failure or told) from None
                if now - said >= REPORT_EVERY_S:
                    said = now
                    logger.warning("waiting for %s (%.0f s)", self.name, now - start)
            await asyncio.sleep(min(POLL_S, limit_s))

    async def _check(self, limit_s: float) -> ServerFacts:
        """Waits for the server, and finds out whether it is one that can be used."""
        ours = self.served is not None
        try:
            await self._wait_for_health(limit_s)
            facts = await facts_of(self._routes, self.name, self._model, ours, self._experts)
            if self._takes == "buckets" and facts.development:
                body = {"init_info": self._init_info}
                await self._routes.ask("POST", "/init_weight_transfer_engine", body)
        except (Refused, Retryable, KeyError, TypeError) as error:
            raise RolloutError(await self._told(f"{self.name}: {error}; {EXPECTED}.")) from None
        if self._takes is not None and not facts.development:
            raise RolloutError(
                f"{self.name} takes no weights: set VLLM_SERVER_DEV_MODE=1, or no weights_folder."
            )
        self._model, self._development = facts.model, facts.development
        self._versions[facts.weights] = 0
        return facts

    # --- what it is asked, in the connections' loop -----------------------------------------------

    def _start(self, work: Work[T], *arguments: Any, turn: asyncio.Lock | None = None) -> Future[T]:
        """What a coroutine returns, to come. It raises RolloutError for whatever goes wrong."""
        if not self._closed:
            return self._http.submit(self._guarded, work, arguments, turn)
        nothing = Future[T]()
        nothing.cancel()
        return nothing

    async def _guarded(
        self, work: Work[T], arguments: Sequence[Any], turn: asyncio.Lock | None
    ) -> T:
        what = f"{self.name}: {work.__name__.strip('_').replace('_', ' ')}"
        try:
            async with turn or contextlib.nullcontext():
                return await work(*arguments)
        except RolloutError:
            raise
        except (Refused, Retryable) as error:
            raise RolloutError(await self._told(f"{what} failed: {error}")) from None
        except Exception as error:  # noqa: BLE001 -- whoever waits must hear of it
            told = f"{what}: {type(error).__name__} {error}"
            raise RolloutError(told.rstrip()) from None

    async def _told(self, what: str) -> str:
        """What went wrong: how the child ended, where that is why. It ends soon after its engine,
        and after its connections; where it does not, it is ended, and may be started again."""
        if self.served is None:
            return what + (AMX if "EngineCore" in what else "")
        if "status" not in what or "Engine" in what:
            ended = asyncio.wrap_future(self.served.child.ended)
            done, _ = await asyncio.wait([ended], timeout=END_S)
            if not done:
                await asyncio.to_thread(self._end, f"{what}; {self._last_words()}")
        return self.failure or f"{what}; {self._last_words()}"

    def _last_words(self) -> str:
        if self.served is None:
            return f"it may hang, or be paused by somebody else; {EXPECTED}"
        return f"it said last: {self.served.child.last_words()}"

    async def _generate(self, body: Mapping[str, Any], version: int) -> Sampled:
        """A completion. It is asked for again while nobody answers: each token says which weights
        it is of."""
        generator, failures, since = random.Random(body["request_id"]), 0, 0.0
        while True:
            try:
                answer = await self._routes.ask("POST", GENERATE, body, limit_s=None)
                routed = self._experts, len(body["token_ids"])
                return answered(answer, self._versions, version, self.name, *routed)
            except Retryable as failure:
                if self.served is not None:
                    raise
                since = since or time.monotonic()
                failures += 1
                bound_s = backoff_s(FIRST_PAUSE_S, LONGEST_PAUSE_S, failures)
                pause_s = failure.retry_after_s + generator.uniform(0, bound_s)
                if time.monotonic() + pause_s - since > self._retry_s:
                    raise RolloutError(
                        f"{self.name}: no answer in {failures} attempts over {self._retry_s:g} s "
                        f"(rollout.engine.retry_s); last: {failure}."
                    ) from None
            await asyncio.sleep(pause_s)

    async def _abort(self, calls: Sequence[Sent]) -> None:
        """Ends requests; again while the server does not know one that has only just come."""
        async with deadline(CALL_S, "ending requests"):
            while left := [call for call in calls if not call.reply.done()]:
                with contextlib.suppress(Retryable):
                    body = {"request_ids": [call.name for call in left]}
                    await self._routes.ask("POST", ABORT, body)
                await asyncio.sleep(ABORT_AGAIN_S)

    # --- changes of its state, for `ask` ----------------------------------------------------------

    async def pause(self) -> None:
        """It keeps what runs, and samples nothing."""
        if not self._development:
            raise RolloutError(f"{self.name} cannot be paused: set VLLM_SERVER_DEV_MODE=1.")
        self._paused = True
        await self._routes.ask("POST", "/pause?mode=keep&clear_cache=false")

    async def resume(self) -> None:
        """It goes on, where it is paused."""
        if self._paused:
            await self._routes.ask("POST", "/resume")
            self._paused = False

    async def sleep(self) -> int:
        """Frees weights, keys and values; what runs is computed anew afterwards. Returns bytes."""
        self._used = await self._used_bytes()
        level = KEEP if self._takes == "adapters" else DISCARD  # nobody sends the weights again
        await self._routes.ask("POST", f"/sleep?level={level}&mode=keep")
        self._paused = True
        before, self._used = self._used, await self._used_bytes()
        return before - self._used

    async def wake(self, paused: bool) -> int:
        """Takes the memory of keys and values again; new weights are there by then. Returns the
        bytes that both took. vLLM goes on by itself then; paused: not where that is asked for."""
        await self._routes.ask("POST", "/wake_up?tags=kv_cache")
        self._paused = False
        if paused:
            await self.pause()
        return await self._used_bytes() - self._used

    async def _used_bytes(self) -> int:
        """Of every device that the server computes on."""
        return sum(map(int, await of_workers(self._routes, "used_bytes")))

    async def begin_update(self, asleep: bool) -> None:
        """Nothing is sampled from here on, and nothing computed with the old weights is kept."""
        if self._takes is None:
            raise RolloutError(
                f"{self.name} keeps the weights that it has: name a folder that it and rlflow see, "
                "in rollout.engine.weights_folder."
            )
        if asleep:  # keys and values come when the trainer has sent the last of its own
            await self._routes.ask("POST", "/wake_up?tags=weights")
        else:
            await self._routes.ask("POST", "/pause?mode=keep&clear_cache=true")
        self._paused = True
        if self._takes == "buckets":
            await self._routes.ask("POST", "/start_weight_update")

    async def take_adapter(self, folder: Path, expected: str) -> None:
        """Puts the adapter in a folder in the place of the one before. expected: the hash of what
        it has then. Raises RolloutError where it has anything else."""
        found = await of_workers(self._routes, "load_adapter", path=str(folder))
        if set(found) != {expected}:
            raise RolloutError(
                f"weight sync: {self.name} was given an adapter with the hash {expected[:12]}, and "
                f"has {', '.join(sorted({one[:12] or 'none' for one in found}))}; it would sample "
                "from a policy that is not the trainer's."
            )

    async def update(self, info: Mapping[str, Any]) -> None:
        """Hands over a bucket, which a carrier has told about."""
        if self._takes == "buckets":
            await self._routes.ask("POST", "/update_weights", {"update_info": info})
        else:
            self._folder = str(Path(info["path"]).parent)

    async def finish_update(self, version: int) -> None:
        """Takes the new weights into use under their version; the server stays paused. Raises
        RolloutError where keys and values of the old ones are left: vLLM frees its cache only where
        no request holds a block of it."""
        name = f"{self._own}-{version}"
        if self._takes == "buckets":
            await self._routes.ask("POST", "/finish_weight_update", {"weight_version": name})
        else:
            if self._takes == "folder":
                await self._reload()
            await self._routes.ask("POST", "/update_weight_version", {"new_version": name})
        if not (await self._routes.ask("POST", "/reset_prefix_cache"))["success"]:
            raise RolloutError(
                f"{self.name}: the cache was not cleared: requests in flight hold keys and values "
                "that the old weights computed, and would go on from them."
            )
        self._versions[name] = version

    async def _reload(self) -> None:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": self._folder}}
        await self._routes.ask("POST", "/collective_rpc", reload)

    async def cancel_update(self) -> None:
        """Closes an update that was not completed. What the weights are then, nobody knows."""
        if self._takes == "buckets":
            await self._routes.ask("POST", "/finish_weight_update", {"weight_version": None})

    async def _hang_up(self) -> None:
        """Lets somebody else's server go on as it was found: not paused, without requests of
        this."""
        if names := [call.name for call in list(self._calls)]:
            await self._routes.ask("POST", ABORT, {"request_ids": names}, limit_s=CONNECT_S)
        if self._paused:
            await self._routes.ask("POST", "/resume", limit_s=CONNECT_S)
