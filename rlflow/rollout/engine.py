"""What Rollout asks of an inference engine. The embedded engine and vLLM are equal citizens behind it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How to sample one completion. temperature 0 is greedy (log-probs are then those at temperature 1). `stop`
    strings end the completion with the token that completes them; nothing is cut. `seed` makes a completion
    reproducible whatever else is in flight."""

    max_tokens: int
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass
class Completion:
    """tokens: sampled ids, the stop token or overshoot included. logprobs: nats, of the distribution sampled from
    (after temperature). versions: weight version that sampled each token."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    stop: Literal["stop", "length", "aborted"]


@runtime_checkable
class Engine(Protocol):
    """Beside these methods an engine may have, and Rollout then uses: `max_tokens` (of a prompt and its completion),
    `max_concurrency`, `release(request_id)` (the episode of that id has ended), and, to verify a weight sync,
    `weights_digest()` (see rlflow.models.huggingface.digest) with `dtype` and `weight_names`."""

    async def generate(self, tokens: Sequence[int], sampling: Sampling, request_id: str | None = None) -> Completion:
        """Continues `tokens`. Many calls may be in flight; they are batched."""

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replaces the weights in place from (HuggingFace name, tensor) pairs. Requests in flight continue with the
        new ones (their caches are recomputed), each token recording the version that sampled it."""

    async def pause(self, mode: Literal["keep", "abort", "wait"] = "keep") -> None: ...

    async def resume(self) -> None: ...

    async def abort(self, request_id: str) -> None: ...

    async def close(self) -> None: ...
