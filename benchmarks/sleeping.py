"""An engine and a trainer without a model that take as long as they are told: to tune a rollout,
and to try a schedule in seconds. Named in a configuration as any other part of one's own:

    rollout.engine={name: 'benchmarks/sleeping.py:FakeEngine', token_s: 0.01, sigma: 0.8}
    trainer.backend=benchmarks/sleeping.py:FakeTrainer
    trainer.optimizer={name: 'benchmarks/sleeping.py:Sleep', update_s: 2.0}
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.errors import CheckpointError, ConfigError, RolloutError
from rlflow.models.huggingface import digest, iterate_weights, read_config
from rlflow.rollout.engine import (
    Completion,
    Engine,
    PauseMode,
    Sampling,
    Stop,
    Weights,
    check_weight,
    each_weight,
)
from rlflow.rollout.tokenizer import Tokenizer
from rlflow.storage.files import read_json, write_json
from rlflow.trainer.base import LossFunction, Trainer, check_wanted
from rlflow.trainer.optimizers import OPTIMIZER
from rlflow.trainer.options import TrainerOptions
from rlflow.types import Batch, Loss
from rlflow.values import NonNegativeFloat

STATE = "fake_trainer.json"
FIRST_WEIGHTS = {"scale": torch.ones(3), "shift": torch.zeros(2)}


def fake_logprob(token: int, weights: dict[str, Tensor]) -> float:
    """Nats; what a trainer of this "model" would score a token with."""
    if "scale" not in weights:
        return -1 - token / 1000
    return -float(weights["scale"].mean()) * (1 + token / 1000) - float(weights["shift"].sum())


@dataclass(eq=False)
class FakeRequest:
    """token_s: seconds until its next token. text: what it is going to say; None: a random token each time."""

    id: str | None
    priority: int
    token_s: float = 0.0
    text: list[int] | None = None
    stop: Stop | None = None


class FakeEngine(Engine):
    """Implements the whole protocol: places, priorities, pauses in all three ways, weights that are hashed.

    token_s: seconds per token of a request that has a place, times lognormal(sigma), drawn per request. responses: what it says,
    one of them per request, by its seed; none: random tokens. path: of the model whose weights it is given; None: FIRST_WEIGHTS.
    hashes_weights False: an engine that cannot hash them."""

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        path: str | Path | None = None,
        *,
        max_concurrency: int = 128,
        max_tokens: int | None = None,
        token_s: float = 0.0,
        sigma: float = 0.0,
        responses: Sequence[str] = (),
        hashes_weights: bool = True,
        vocab: int | None = None,
    ) -> None:
        if max_concurrency < 1 or not token_s >= 0 or not sigma >= 0:
            raise ConfigError(
                "engine 'fake': expected max_concurrency of at least 1 and token_s and sigma of at least 0, found "
                f"{max_concurrency}, {token_s} and {sigma}."
            )
        self.tokenizer = tokenizer
        self.max_concurrency = max_concurrency
        self.max_tokens = max_tokens
        self.hashes_weights = hashes_weights
        self.token_s, self.sigma = token_s, sigma
        self.weights = dict(FIRST_WEIGHTS if path is None else iterate_weights(path))
        self.version = 0
        self.steps = 0  # tokens sampled
        self.busy_s = 0.0  # of all places together
        self.released: list[str] = []
        self._vocab = vocab or (300 if path is None else int(read_config(path)["vocab_size"]))
        self._responses = [
            [] if tokenizer is None else tokenizer.encode_text(text) for text in responses
        ]
        self._state = "open"
        self._loading = False
        self._broken = False
        self._waiting: list[FakeRequest] = []
        self._running: list[FakeRequest] = []

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Completion:
        self._check(tokens, request_id)
        request = self._request(request_id, priority, sampling.seed)
        completion = Completion([], [], [], "length")
        room = (
            sampling.max_tokens
            if self.max_tokens is None
            else min(sampling.max_tokens, self.max_tokens - len(tokens))
        )
        self._waiting.append(request)
        try:
            while request.stop is None and not self._admit(request):
                await asyncio.sleep(0)
                self._check_weights()
            while request.stop is None:
                self._check_weights()
                await asyncio.sleep(request.token_s)
                if (
                    self._state in ("open", "draining")
                    and not self._loading
                    and request.stop is None
                ):
                    self._sample(request, completion, tokens, sampling, room)
        finally:
            self._waiting = [other for other in self._waiting if other is not request]
            self._running = [other for other in self._running if other is not request]
        completion.stop = request.stop
        return completion

    async def load_weights(self, weights: Weights, version: int) -> None:
        if self._state == "closed" or self._loading:
            raise RolloutError("fake engine: it is closed, or another load is under way.")
        self._loading = True
        try:
            loaded: dict[str, Tensor] = {}
            async for name, tensor in each_weight(weights):
                if name in loaded:
                    raise RolloutError(f"fake engine: '{name}' came twice.")
                if name in self.weights:
                    check_weight(name, tensor, tuple(self.weights[name].shape))
                loaded[name] = tensor.clone()
            if set(loaded) != set(self.weights):
                raise RolloutError(
                    f"fake engine: expected {sorted(self.weights)}, found {sorted(loaded)}."
                )
        except BaseException:
            self._broken = True
            raise
        finally:
            self._loading = False
        self.weights, self.version, self._broken = loaded, version, False

    async def pause(self, mode: PauseMode = "keep") -> None:
        if self._state == "closed":
            return
        if mode == "wait":
            self._state = "draining"
            while self._running and self._state == "draining":
                await asyncio.sleep(0)
        self._state = "paused"
        if mode == "abort":
            self._end("paused")

    async def resume(self) -> None:
        self._state = "closed" if self._state == "closed" else "open"

    async def abort(self, request_id: str) -> None:
        self._end("aborted", request_id)

    async def close(self) -> None:
        self._state = "closed"
        self._end("aborted")

    def release(self, request_id: str) -> None:
        self.released.append(request_id)

    async def weights_digest(self) -> str:
        return (
            digest(self.weights.items()) if self.hashes_weights else await super().weights_digest()
        )

    def _request(self, request_id: str | None, priority: int, seed: int | None) -> FakeRequest:
        draw = random.Random(f"{seed}/request")
        text = draw.choice(self._responses) if self._responses else None
        return FakeRequest(
            request_id, priority, self.token_s * draw.lognormvariate(0, self.sigma), text
        )

    def _check(self, tokens: Sequence[int], request_id: str | None) -> None:
        if self._state == "closed" or self._broken:
            raise RolloutError("fake engine: it is closed, or its weights are half loaded.")
        if not tokens or (self.max_tokens is not None and len(tokens) >= self.max_tokens):
            raise RolloutError(
                f"fake engine: a prompt of {len(tokens)} tokens; the limit is {self.max_tokens}."
            )
        if request_id is not None and request_id in {
            other.id for other in (*self._waiting, *self._running)
        }:
            raise RolloutError(f"fake engine: request id '{request_id}' is in flight already.")

    def _check_weights(self) -> None:
        if self._broken:
            raise RolloutError("fake engine: weights were half loaded.")

    def _admit(self, request: FakeRequest) -> bool:
        """Whether it runs now: its turn came and there is a place."""
        first = min(self._waiting, key=lambda other: other.priority)  # the first of equals
        if (
            self._state != "open"
            or self._loading
            or first is not request
            or len(self._running) >= self.max_concurrency
        ):
            return False
        self._waiting.remove(request)
        self._running.append(request)
        return True

    def _sample(
        self,
        request: FakeRequest,
        completion: Completion,
        prompt: Sequence[int],
        sampling: Sampling,
        room: int,
    ) -> None:
        place = len(prompt) + len(completion.tokens)
        key = f"{prompt[0]}" if sampling.temperature == 0 else f"{sampling.seed}"
        token = random.Random(f"{key}/{place}").randrange(3, self._vocab)
        if request.text is not None:
            rest = request.text[len(completion.tokens) :]
            token = rest[0] if rest else next(iter(sampling.stop_token_ids), token)
        completion.tokens.append(token)
        completion.logprobs.append(fake_logprob(token, self.weights))
        completion.versions.append(self.version)
        self.steps += 1
        self.busy_s += request.token_s
        text = (
            self.tokenizer.decode(completion.tokens)
            if self.tokenizer is not None and sampling.stop
            else ""
        )
        if token in sampling.stop_token_ids or any(stop in text for stop in sampling.stop):
            request.stop = "stop"
        elif len(completion.tokens) >= room:
            request.stop = "length"

    def _end(self, stop: Stop, request_id: str | None = None) -> None:
        for request in (*self._waiting, *self._running):
            if request_id is None or request.id == request_id:
                request.stop = request.stop or stop


@dataclass(frozen=True)
class Sleep:
    """What takes an optimizer's place (`trainer.optimizer`): seconds of an update, and per token of its rows; score_token_s: per
    token of rows that are scored."""

    update_s: NonNegativeFloat = 0.0
    token_s: NonNegativeFloat = 0.0
    score_token_s: NonNegativeFloat = 0.0


class FakeTrainer(Trainer):
    """Takes the keywords of every trainer, and learns nothing: `update` sleeps as its `Sleep` says,
    `weights` gives those of the directory under every version, scores are the log-probs that the rows came with.

    So everything but the training is real: what is sampled, how old it is, weight syncs, checkpoints, metrics."""

    exports = False

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: str = "float32",
        seed: int = 0,
        trust_remote_code: bool = False,
        values: bool = False,
        **options: Any,
    ) -> None:
        given = TrainerOptions.of(options)
        self.check_options(given)
        self.path, self.values = Path(path), values
        self.sleep: Sleep = OPTIMIZER.build(given.optimizer)
        self.rate = given.learning_rate()
        self.updates = 0

    @classmethod
    def check_options(cls, options: TrainerOptions, ranks: int = 0) -> None:
        if ranks:
            raise ConfigError(
                f"cluster.ranks: the fake trainer sleeps in the run's own process; expected 0, found {ranks}."
            )
        made = OPTIMIZER.build(options.optimizer, "trainer.optimizer")
        if not isinstance(made, Sleep):
            raise ConfigError(
                "trainer.optimizer: the fake trainer has no optimizer; expected the Sleep beside it, "
                f"found '{options.optimizer['name']}'."
            )

    def score(
        self,
        batch: Batch,
        model: str = "policy",
        want: Sequence[str] = ("logprobs",),
        top_k: int = 0,
    ) -> dict[str, Tensor]:
        if top_k:
            raise ConfigError(
                "trainer.score: the fake trainer has no likeliest tokens; use trainer.backend=megatron."
            )
        check_wanted(want, self.values)
        time.sleep(self.sleep.score_token_s * float(batch.lengths.sum()))
        return {
            name: batch.logprobs.clone() if name == "logprobs" else torch.zeros_like(batch.logprobs)
            for name in want
        }

    def update(self, batch: Batch, loss: Loss | LossFunction) -> dict[str, float]:
        time.sleep(self.sleep.update_s + self.sleep.token_s * float(batch.lengths.sum()))
        rate = self.rate(self.updates)
        self.updates += 1
        return {
            "loss": 0.0,
            "gradient_norm": 0.0,
            "lr": rate,
            "tokens": float(batch.lengths.sum()),
            "microbatches": 1.0,
        }

    def snapshot(self, name: str) -> None:
        """Of weights that never change."""

    def load_frozen(self, name: str, path: str | Path) -> None:
        """Scores as the policy does."""

    def weights(self, device: str | None = "cpu") -> Iterator[tuple[str, Tensor]]:
        return iterate_weights(self.path)

    def save(self, path: str | Path, step: int) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)
        write_json(Path(path) / STATE, {"step": step, "updates": self.updates})

    def load(self, path: str | Path) -> int:
        if not (Path(path) / STATE).is_file():
            raise CheckpointError(
                f"{path}: not a checkpoint of the fake trainer; set trainer.backend as it was."
            )
        state = read_json(Path(path) / STATE)
        self.updates = int(state["updates"])
        return int(state["step"])
