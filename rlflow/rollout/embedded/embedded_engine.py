"""The embedded engine: continuous batching in this process, on a CPU or one GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch

from rlflow.errors import ConfigError, ModelError, RolloutError, did_you_mean
from rlflow.models.adapter import Adapter, is_of_adapter
from rlflow.models.architecture import Architecture, architecture
from rlflow.models.huggingface import digest, find_not_finite, iterate_weights, read_config
from rlflow.models.vocabulary import known_vocab
from rlflow.rollout.embedded.block_manager import BLOCK_SIZE, blocks_for
from rlflow.rollout.embedded.cache import KeyValueCache
from rlflow.rollout.embedded.decoder import Decoder, check_complete
from rlflow.rollout.embedded.devices import device_of
from rlflow.rollout.embedded.facts import EmbeddedFacts
from rlflow.rollout.embedded.graphs import CudaCapture
from rlflow.rollout.embedded.model_runner import NotFiniteError
from rlflow.rollout.embedded.sampling import StopTable
from rlflow.rollout.embedded.scheduler import Scheduler
from rlflow.rollout.embedded.sequences import SequenceState
from rlflow.rollout.engine import (
    Completion,
    Engine,
    PauseMode,
    Sampling,
    Weights,
    check_request,
    check_sizes,
    each_weight,
)
from rlflow.rollout.event_loop import settle
from rlflow.rollout.tokenizer import Tokenizer
from rlflow.values import PositiveInt, Range

MOST_SEED = 2**63 - 1
CLOSED = "it was closed; make a new one"
MIXED = "came in one update of weights and of adapters; send the one or the other"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _dtype(name: str) -> torch.dtype:
    """Raises ConfigError."""
    if name not in DTYPES:
        raise ConfigError(
            f"engine.dtype: expected one of {', '.join(DTYPES)}, found '{name}'."
            f"{did_you_mean(name, DTYPES)}"
        )
    return DTYPES[name]


def _recorded(cuda_graphs: bool | None, shape: Architecture) -> bool:
    """Whether decode steps are recorded. Raises ConfigError where they differ in shape."""
    if cuda_graphs and shape.experts is not None:
        raise ConfigError(
            "engine.cuda_graphs: a step of a model with experts has shapes that its tokens choose; "
            "expected false, found true."
        )
    return cuda_graphs is not False and shape.experts is None


class EmbeddedEngine(Engine):
    """An engine over a HuggingFace directory of a model of any family in `rlflow.models.families`.

    One step admits waiting requests, prefills them (at most `prefill_tokens`), and decodes one
    token for all that run; between steps the event loop turns until nothing is ready. All of it
    happens in the caller's event loop, one loop at a time, so there is nothing to lock. A request
    with an id keeps its slot when it ends: the next one with that id (the next turn of an episode)
    computes only what is new. `release(id)` gives the slot back; without it the longest unused one
    is taken when slots run out. What the prompts of several requests have in common is computed and
    stored once.

    max_concurrency: slots. max_tokens: of a prompt and its completion together; None: the model's
    positions. kv_tokens: tokens whose keys and values are kept, all sequences together; None: what
    all slots could need, in half of the free memory at the most. When it is used up, the youngest
    requests wait and are computed again. prefill_tokens: most tokens of prompts in a step.
    deterministic: requests that wait are admitted in the order of their ids, not of their arrival.
    cuda_graphs: replay recorded decode steps; None: on a GPU. sleep: keys and values are given back
    while the trainer works; None: on a GPU. routes: completions say which experts their tokens went
    to."""

    facts = EmbeddedFacts
    hashes_weights = True
    takes_device_tensors = True
    takes_adapters = True
    max_tokens: int
    dtype: torch.dtype
    weight_names: frozenset[str]

    def __init__(
        self,
        path: str | Path,
        tokenizer: Tokenizer | None = None,
        *,
        max_concurrency: PositiveInt = 128,
        max_tokens: PositiveInt | None = None,
        kv_tokens: Annotated[int, Range(BLOCK_SIZE)] | None = None,
        prefill_tokens: PositiveInt = 8192,
        dtype: Literal["float32", "bfloat16"] = "float32",
        device: str | None = None,
        deterministic: bool = False,
        seed: int = 0,
        cuda_graphs: bool | None = None,
        sleep: bool | None = None,
        routes: bool = False,
    ) -> None:
        check_sizes(
            "engine",
            max_concurrency=max_concurrency,
            prefill_tokens=prefill_tokens,
            max_tokens=max_tokens,
        )
        check_sizes("engine", BLOCK_SIZE, kv_tokens=kv_tokens)
        self.path = Path(path)
        self.dtype = _dtype(dtype)
        self.device = device_of(device, cuda_graphs)
        self.max_concurrency = max_concurrency
        on_gpu = self.device.type == "cuda"
        self.sleeps = on_gpu if sleep is None else sleep
        self.deterministic = deterministic
        shape = architecture(read_config(path))
        known = known_vocab(path, shape.vocab)
        self._model = Decoder(shape, self.dtype, self.device, known)
        self._model.load(iterate_weights(path))
        self.weight_names = frozenset(self._model.parameters)
        self.max_tokens = min(max_tokens or shape.max_positions, shape.max_positions)
        free = _free_bytes(self.device) // KeyValueCache.block_bytes(shape, self.dtype)
        room = free // 2 if kv_tokens is None else kv_tokens // BLOCK_SIZE
        blocks = min(max_concurrency * blocks_for(self.max_tokens), room)
        self.max_tokens = min(self.max_tokens, blocks * BLOCK_SIZE)
        self._tokenizer, self._vocab = tokenizer, shape.vocab
        self._stops = StopTable(shape.vocab, self._load_tokenizer, self.device)
        self._scheduler = Scheduler(
            self._model,
            self._stops,
            max_concurrency,
            blocks=blocks,
            max_tokens=self.max_tokens,
            prefill_tokens=prefill_tokens,
            by_id=deterministic,
            routes=routes,
            capture=CudaCapture() if on_gpu and _recorded(cuda_graphs, shape) else None,
        )
        self.statistics = self._scheduler.statistics
        self._seed, self._arrivals = seed, 0
        self._state: Literal["open", "draining", "paused", "closed"] = "open"
        self._loading = self._asleep = False
        self._own_weights = True  # those of `path`
        self._broken = ""  # why the weights cannot be used
        self._driver: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- the protocol

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Completion:
        """Continues `tokens`; see `Engine.generate`. Raises RolloutError for a request that cannot
        be served."""
        self._check(tokens, sampling, request_id)
        seed = sampling.seed if sampling.seed is not None else hash((self._seed, self._arrivals))
        self._arrivals += 1
        sequence = SequenceState(
            tokens=list(tokens),
            sampling=sampling,
            id=request_id,
            stop_row=self._stops.row(
                sampling.stop,
                sampling.stop_token_ids,
                lambda: {other.stop_row for other in self._scheduler.in_flight()},
            ),
            seed=seed & MOST_SEED,
            future=self._enter_loop().create_future(),
            priority=priority,
        )
        self._scheduler.submit(sequence)
        self._ensure_driver()
        try:
            return await sequence.future
        finally:
            if sequence.future.cancelled():
                self._scheduler.remove(sequence)

    async def load_weights(self, weights: Weights, version: int) -> None:
        """Replaces the weights, or the adapters over those of `path`, between two steps; none is
        made until the last tensor is there. See `Engine.load_weights`."""
        self._enter_loop()
        if self._state == "closed" or self._loading:
            raise RolloutError(
                f"engine.load_weights: {'another load is under way' if self._loading else CLOSED}."
            )
        self._loading = True
        try:
            missing = set(self._model.parameters)
            factors: dict[str, torch.Tensor] = {}
            async for name, tensor in each_weight(weights):
                if name in self._model.parameters or not is_of_adapter(name):
                    if factors:
                        raise ModelError(f"engine.load_weights: '{name}' {MIXED}.")
                    if self._model.adapters:
                        self._drop_adapter(name)
                    self._own_weights = False
                    self._model.copy_in(name, tensor, missing)
                elif name in factors or len(missing) < len(self._model.parameters):
                    problem = "came twice" if name in factors else MIXED
                    raise ModelError(f"engine.load_weights: '{name}' {problem}.")
                else:
                    factors[name] = tensor.clone()  # the trainer's own may change
            if factors:
                self._adapt(factors)
            else:
                check_complete(missing)
        except BaseException as error:
            self._broken = "the last load_weights did not complete"
            told = f"weights of version {version} were half loaded when it failed: {error!r}"
            self._fail(RolloutError(f"engine: {told}"))
            raise
        finally:
            self._loading = False
        self._broken = ""
        self._scheduler.runner.version = version
        self._scheduler.forget_cache()
        self._ensure_driver()

    def _drop_adapter(self, name: str) -> None:
        """Forgets the adapter of `load_weights`, as whole weights come, `name` first. Raises
        ModelError where there are others, which would be over other weights than theirs."""
        named = sorted(filter(None, self._model.adapters))
        if named:
            raise ModelError(
                f"engine.load_weights: '{name}' is of other weights than the adapters "
                f"{', '.join(named)} are for; unload_adapter first."
            )
        self._model.adapters.clear()
        self._scheduler.runner.forget_graphs()

    def _adapt(self, factors: dict[str, torch.Tensor]) -> None:
        """Puts the adapter of an update over the weights of `path`."""
        adapter = Adapter.of_update(factors, "engine.load_weights")
        if not self._own_weights:
            self._model.load(iterate_weights(self.path))
            self._own_weights = True
        if not self._model.adapt(adapter):
            self._scheduler.runner.forget_graphs()

    async def load_adapter(self, name: str, weights: Weights) -> None:
        """Adds an adapter for the requests that name it (`Sampling.adapter`), or replaces it. It is
        over the weights of `path`, in place of the one that `load_weights` may have brought.
        weights: as of `rlflow.models.adapter.adapter_update`. Raises ModelError."""
        if not name or not self._own_weights:
            raise ModelError(
                f"engine.load_adapter: expected a name, and the weights of {self.path}, which the "
                f"adapter is over; found {name!r}, "
                f"{'these' if self._own_weights else 'whole weights of load_weights'}."
            )
        factors = {key: tensor.clone() async for key, tensor in each_weight(weights)}
        self._model.adapt(Adapter.of_update(factors, "engine.load_adapter"), name)
        self._scheduler.forget_cache()

    async def unload_adapter(self, name: str) -> None:
        """Forgets an adapter. Raises RolloutError while a request names it."""
        if any(one.sampling.adapter == name for one in self._scheduler.in_flight()):
            raise RolloutError(f"engine.unload_adapter: requests in flight name '{name}'.")
        self._model.adapters.pop(name, None)
        self._scheduler.forget_cache()

    async def sleep(self) -> int:
        """Gives the memory of keys and values back; see `Engine.sleep`."""
        if self._asleep or self._state == "closed":
            return 0
        self._asleep, before = True, used_bytes(self.device)
        self._scheduler.free_cache()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return before - used_bytes(self.device)

    async def wake(self) -> int:
        """Takes the memory of keys and values again; see `Engine.wake`. On a CPU it is used as it
        is filled."""
        if not self._asleep or self._state == "closed":
            return 0
        before = used_bytes(self.device)
        self._scheduler.allocate_cache()
        self._asleep = False
        self._enter_loop()
        self._ensure_driver()
        return used_bytes(self.device) - before

    async def weights_digest(self) -> str:
        """Content hash of the adapter in use, else of the weights; see `Engine.weights_digest`."""
        adapter = self._model.adapters.get("")
        return digest(self._model.named_weights() if adapter is None else adapter.named_tensors())

    @property
    def version(self) -> int:
        """Version of the weights in use; 0 for those of the directory."""
        return self._scheduler.runner.version

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stops stepping; see `Engine.pause`."""
        if self._state == "closed":
            return
        if mode == "wait":
            self._state = "draining"
            self._enter_loop()
            self._ensure_driver()
            while self._scheduler.running and self._state == "draining":
                await asyncio.sleep(0)
            if self._state != "draining":
                return  # somebody resumed or closed it in the meantime
        self._state = "paused"
        if mode == "abort":
            for sequence in self._scheduler.in_flight():
                self._scheduler.end(sequence, "paused")

    async def resume(self) -> None:
        """Continues after `pause`; a closed engine stays closed."""
        if self._state == "closed":
            return
        self._state = "open"
        self._enter_loop()
        self._ensure_driver()

    async def abort(self, request_id: str) -> None:
        """Ends the request with that id; see `Engine.abort`."""
        for sequence in self._scheduler.in_flight():
            if sequence.id == request_id:
                self._scheduler.end(sequence, "aborted")

    def release(self, request_id: str) -> None:
        """Forgets what is kept for the next turn of that id."""
        self._scheduler.release(request_id)

    async def close(self) -> None:
        """Ends every request; the engine cannot be used afterwards."""
        self._state = "closed"
        for sequence in self._scheduler.in_flight():
            self._scheduler.end(sequence, "aborted")

    # --- requests

    def _check(self, tokens: Sequence[int], sampling: Sampling, request_id: str | None) -> None:
        if self._state == "closed":
            raise RolloutError(f"engine: {CLOSED}.")
        if self._broken:
            raise RolloutError(f"engine: {self._broken}; load complete weights first.")
        check_request(
            tokens,
            sampling,
            self.max_tokens,
            self._vocab,
            request_id,
            self._scheduler.ids,
            adapters={"", *self._model.adapters},
        )

    def _enter_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop is not loop:
            if self._loop.is_running() and self._scheduler.in_flight():
                raise RolloutError(
                    "engine: it is in use by another event loop; use one loop at a time."
                )
            for sequence in self._scheduler.in_flight():  # their loop was closed under them
                self._scheduler.remove(sequence)
            self._driver = None
        self._loop = loop
        return loop

    def _ensure_driver(self) -> None:
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())
            self._driver.add_done_callback(self._fail_if_driver_did)

    async def _drive(self) -> None:
        while self._has_work():
            self._scheduler.step(admit=self._state == "open")
            await settle()

    def _has_work(self) -> bool:
        if self._loading or self._asleep or self._state in ("paused", "closed"):
            return False
        admits = self._state == "open"
        return bool(self._scheduler.running or (admits and self._scheduler.waiting))

    def _fail_if_driver_did(self, driver: asyncio.Task[None]) -> None:
        if not driver.cancelled() and (error := driver.exception()):
            if isinstance(error, NotFiniteError):
                file = find_not_finite(self.path)
                error = error if file is None else RolloutError(f"engine: {file}")
            self._fail(
                error
                if isinstance(error, RolloutError)
                else RolloutError(f"engine: a step failed: {error!r}")
            )

    def _fail(self, failure: RolloutError) -> None:
        """Hands an error to everyone who waits for a completion."""
        for sequence in self._scheduler.in_flight():
            if not sequence.future.done():
                sequence.future.set_exception(failure)
            self._scheduler.remove(sequence)
        self._scheduler.clear_cache()

    def _load_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_pretrained(self.path)
        return self._tokenizer


def _free_bytes(device: torch.device) -> int:
    """Memory of the device that nobody uses now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return psutil.virtual_memory().available


def used_bytes(device: torch.device) -> int:
    """Memory that is in use: of a GPU, by whomever; else this process's resident set."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    import psutil

    return psutil.Process().memory_info().rss
