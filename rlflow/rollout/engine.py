"""The interface of an inference engine; the embedded engine and vLLM stand behind it alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Collection,
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import dataclass
from typing import ClassVar, Literal, Union

import torch
from torch import Tensor

from rlflow.devices.gpu_buckets import GpuBucket, GpuSharing
from rlflow.errors import ConfigError, ModelError, RolloutError
from rlflow.rollout.engine_facts import EngineFacts

Weights = Union[Iterable[tuple[str, Tensor]], AsyncIterable[tuple[str, Tensor]]]
"""(HuggingFace name, tensor) pairs. The asynchronous kind arrives one by one, while the trainer
makes the next."""
Pairs = list[tuple[str, Tensor]]
Sent = Union[tuple[str, Tensor], GpuBucket]
"""What a trainer gives for its engines: a pair, or a bucket in its GPUs' memory."""
PauseMode = Literal["keep", "abort", "wait"]
Stop = Literal["stop", "length", "aborted", "paused"]
"""Why a completion ended: a stop string or token; its token limit; `abort` or `close`;
`pause("abort")`."""


@dataclass(frozen=True)
class Sampling:
    """How to sample one completion. temperature 0 is greedy (log-probs are then those at
    temperature 1). `stop` strings end the completion with the token that completes them; nothing is
    cut. `seed` makes a completion reproducible whatever else is in flight. `adapter`: one that the
    engine has by that name beside its weights (`EmbeddedEngine.load_adapter`)."""

    max_tokens: int
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    adapter: str = ""


@dataclass
class Completion:
    """tokens: sampled ids, the stop token or overshoot included. logprobs: nats, of the
    distribution sampled from (after temperature). versions: weight version that sampled each
    token. routes: (N, layers with experts, experts of a token) of the first N tokens of prompt and
    completion, which are all but the last; None where the engine does not say. routes_version: the
    oldest weights that chose one of them; -1 where it does not say."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    stop: Stop
    routes: Tensor | None = None
    routes_version: int = -1

    @property
    def interrupted(self) -> bool:
        """Whether somebody ended it before it was complete."""
        return self.stop in ("aborted", "paused")


def joined_routes(first: Tensor | None, later: Tensor | None, most: int) -> Tensor | None:
    """Those of a text's first `most` tokens, each by the completion that was sampled behind it
    first. A later one has those of all tokens before it too, of the weights that were there
    then.

    One with fewer lacks some of the first, or of those in between, and the places of all others
    are wrong; the rest of the text would hide that. Nothing is left of them then, whatever comes
    later, and the check of the batch finds that."""
    if first is not None and not len(first):
        return first
    if later is None:
        return first if first is None else first[:most]
    if len(later) < most or (first is not None and first.shape[1:] != later.shape[1:]):
        return later[:0]
    joined = later if first is None else torch.cat([first, later[len(first) :]])
    return joined[:most]


class Engine(ABC):
    """An inference engine, used from one event loop at a time. What it does not say about itself
    has the value that claims least."""

    facts: ClassVar[type[EngineFacts]] = EngineFacts
    """What a run plans with before the engine is made."""

    max_tokens: int | None = None
    """Most tokens of a prompt and its completion together; None: no limit of its own."""

    max_concurrency: int = 256
    """Episodes that are worth playing at a time."""

    takes_weights: bool = True
    """Whether `load_weights` can work; an engine that keeps the weights that it has serves
    evaluation only."""

    hashes_weights: bool = False
    """Whether `weights_digest` answers. Where it does not, a weight sync is verified by a probe
    (`WeightProbe`)."""

    dtype: torch.dtype | None = None
    """What weights are kept in, for the hash; None: as they were sent."""

    weight_names: frozenset[str] | None = None
    """The tensors that are kept, for the hash (a tied model has no lm_head.weight); None: all that
    were sent."""

    takes_device_tensors: bool = False
    """Whether `load_weights` takes tensors where the trainer has them, on a GPU too, and keeps none
    of them; else they are copies on the CPU."""

    takes_adapters: bool = False
    """Whether `load_weights` takes adapters alone too (`rlflow.models.adapter.adapter_update`),
    over the weights of the directory that the engine was made with."""

    sharing: GpuSharing | None = None
    """How `load_weights` opens the trainer's GPU memory: it takes an asynchronous `Weights` of
    `GpuBucket` then, and has read one before it asks for the next."""

    sleeps: bool = False
    """Whether it gives memory back while the trainer works (`sleep`), as both take turns on one
    device."""

    may_end: bool = False
    """Whether it may end by itself, as what runs in another process does; `load_weights` starts it
    again then."""

    slow_seeds: bool = False
    """Whether a seed per request slows sampling down; requests of episodes have none then, but in
    deterministic runs."""

    patient: bool = False
    """Set by who gives it new weights when it has ended: its requests wait for them in place of
    failing."""

    @property
    def failure(self) -> str:
        """How it ended by itself; empty while it has not."""
        return ""

    @abstractmethod
    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Completion:
        """Continues `tokens`. Many calls may be in flight; they are batched. Where not all can run,
        those of the lowest `priority` number go first, then those that came first. Raises
        RolloutError for what cannot be served: no room for the prompt and a token, an id that is in
        flight already, an engine that is closed."""

    @abstractmethod
    async def load_weights(self, weights: Weights, version: int) -> None:
        """Replaces the weights in place, or the adapters over those of the engine's directory,
        where `takes_adapters` says so. Requests in flight continue with the new ones (their
        caches are recomputed), each token recording the version that sampled it. Nothing is sampled
        from half-loaded weights: where the load fails, requests in flight fail and later ones are
        refused until one succeeded."""

    @abstractmethod
    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stops sampling. keep: requests in flight stay where they are; abort: they end now with
        what they have and stop "paused"; wait: those that run are finished first. Requests that
        arrive later wait for `resume`."""

    @abstractmethod
    async def resume(self) -> None:
        """Continues after `pause`."""

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """Ends the request with that id, if it is in flight: it completes with what it has and stop
        "aborted"."""

    @abstractmethod
    async def close(self) -> None:
        """Ends every request as `abort` does; later ones are refused."""

    async def sleep(self) -> int:
        """Gives back the memory that sampling needs, until `load_weights` and then `wake`; returns
        the bytes that the device has more. Requests in flight stay where they are, and are computed
        anew. Of no effect where it sleeps."""
        return 0

    async def wake(self) -> int:
        """Takes the memory again, after `load_weights`; returns bytes. Of no effect where it is
        awake."""
        return 0

    def release(self, request_id: str) -> None:
        """The episode of that id has ended: nothing need be kept for its next turn. Unknown ids are
        no error."""

    async def weights_digest(self) -> str:
        """`rlflow.models.huggingface.digest` of what the last `load_weights` brought: weights, of
        `weight_names`, in `dtype`; or adapters, in `dtype`, with their scale.

        Raises RolloutError where the engine cannot tell (`hashes_weights` is False)."""
        raise RolloutError(
            f"{type(self).__name__}: it cannot hash its weights; verify a weight sync by a "
            "WeightProbe."
        )


class FixedEngine(Engine):
    """An engine without weights of its own, so that nothing is loaded, and nothing paused for it; a
    request that is under way ends by itself."""

    takes_weights = False

    async def load_weights(self, weights: Weights, version: int) -> None:
        raise RolloutError(f"{type(self).__name__}: it takes no weights; it is for evaluation.")

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Nobody updates it."""

    async def resume(self) -> None:
        """It was never paused."""

    async def abort(self, request_id: str) -> None:
        """The request ends by itself."""

    async def close(self) -> None:
        """Nothing is open."""


async def each_weight(weights: Weights) -> AsyncIterator[tuple[str, Tensor]]:
    """The pairs of either kind of `Weights`; those of a plain iterable without a pause in
    between."""
    if isinstance(weights, AsyncIterable):
        async for pair in weights:
            yield pair
    else:
        for pair in weights:
            yield pair


def in_portions(
    weights: Iterable[tuple[str, Tensor]], most_bytes: int, most: int | None = None
) -> Iterator[Pairs]:
    """The pairs in lists of at most so many bytes (a larger tensor is alone) and tensors."""
    held: Pairs = []
    size = 0
    for name, tensor in weights:
        if held and (size + tensor.nbytes > most_bytes or len(held) == most):
            yield held
            held, size = [], 0
        held.append((name, tensor))
        size += tensor.nbytes
    if held:
        yield held


def check_weight(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raises ModelError for a tensor of another shape, or of a type that no weights have, before
    anything is made of it."""
    if tuple(tensor.shape) != shape or not tensor.is_floating_point():
        raise ModelError(
            f"engine.load_weights: '{name}' is {tensor.dtype} of shape {tuple(tensor.shape)}, the "
            f"model's is floating point of shape {shape}. Send the weights of the model that the "
            "engine was started with."
        )


def check_request(
    tokens: Sequence[int],
    sampling: Sampling,
    max_tokens: int,
    vocab: int,
    request_id: str | None,
    in_flight: Collection[str | None],
    coldest: float = 0.0,
    adapters: Collection[str] = ("",),
) -> None:
    """Raises RolloutError for a request that an engine cannot serve. max_tokens: of a prompt and
    its completion together. in_flight: ids. coldest: the lowest temperature beside 0."""
    problem, temperature = "", sampling.temperature
    low, high = min(tokens, default=0), max((*tokens, *sampling.stop_token_ids), default=0)
    if not tokens:
        problem = "the prompt has no tokens; expected at least one"
    elif len(tokens) >= max_tokens:
        problem = (
            f"a prompt of {len(tokens)} tokens leaves no room in the {max_tokens} tokens that it "
            "and its completion may have: the least of engine.max_tokens, engine.kv_tokens and the "
            "model's positions"
        )
    elif low < 0 or high >= vocab:
        problem = (
            f"token {low if low < 0 else high} is outside the vocabulary of {vocab}; is the "
            "tokenizer the model's?"
        )
    elif sampling.max_tokens < 1 or not (temperature == 0 or temperature >= coldest):
        problem = (
            f"expected max_tokens >= 1 and a temperature of 0 or at least {coldest:g}, found "
            f"{sampling.max_tokens} and {temperature}"
        )
    elif sampling.adapter not in adapters:
        known = ", ".join(sorted(filter(None, adapters))) or "none"
        problem = f"there is no adapter '{sampling.adapter}' in this engine, which has {known}"
    elif request_id is not None and request_id in in_flight:
        problem = f"request id '{request_id}' is in flight already; ids must differ"
    if problem:
        raise RolloutError(f"engine.generate: {problem}.")


def check_sizes(where: str, least: int = 1, **values: float | None) -> None:
    """Raises ConfigError for an option of `where` below `least`; None passes."""
    for name, value in values.items():
        if value is not None and value < least:
            raise ConfigError(f"{where}.{name}: expected at least {least}, found {value}.")
