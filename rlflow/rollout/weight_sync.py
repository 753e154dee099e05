"""How the trainer's weights reach the engines, and how it is known that they did."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rlflow.errors import ConfigError, RolloutError
from rlflow.models.huggingface import Digest
from rlflow.rollout.engine import Completion, Engine, Sampling
from rlflow.rollout.event_loop import LoopThread

PROBE_TIMEOUT_S = 600.0  # an engine that is paused never answers


class WeightSync(Protocol):
    """A way from the trainer to the engines. Within this process, or by shared memory, TCP,
    NCCL."""

    def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Gives every engine the (HuggingFace name, tensor) pairs and returns when all of them
        sample from these.

        Takes the pairs in the caller's thread, one at a time: making them may be a collective of
        the trainer. Raises RolloutError where an engine that hashes its weights does not have what
        was sent."""


@dataclass(frozen=True)
class ProbeQuestions:
    """What an engine is asked for a `WeightProbe`. prompts: token ids; a completion of max_tokens
    at the temperature of each."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    temperature: float


@dataclass(frozen=True)
class WeightProbe:
    """What stands in for a content hash: engine and trainer tell the log-probs of the same few
    completions.

    prompts: token ids. score: the trainer's log-probs of every token of some sequences (position t
    describes token t, in nats, at the probe's temperature, or 1 where that is 0), called in the
    thread that syncs, so it may be a collective. temperature: 0 is greedy; at another one than 1 an
    engine is found out that tells log-probs of another distribution than the one it samples from.
    tolerance: nats, the largest difference of a token; float32 on both sides agrees to 1e-4,
    bfloat16 to about 0.1. A probe finds weights that are damaged, incomplete or another model's; a
    stale version only if the update moved some log-prob beyond the tolerance."""

    prompts: Sequence[Sequence[int]]
    score: Callable[[Sequence[Sequence[int]]], Sequence[Sequence[float]]]
    tolerance: float = 1e-3
    max_tokens: int = 8
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if not self.prompts or self.max_tokens < 1:
            raise ConfigError(
                "WeightProbe: it compares nothing; expected a prompt or more and max_tokens >= 1."
            )

    @property
    def questions(self) -> ProbeQuestions:
        """What engines answer, which may be elsewhere."""
        return ProbeQuestions(tuple(map(tuple, self.prompts)), self.max_tokens, self.temperature)


class InProcessSync:
    """Hands over references, one tensor at a time to all engines: there is never a list of all
    weights.

    What is sent is hashed on its way, as each engine keeps it (its names, its dtype), and compared
    with what the engine says it has. Engines with equal names and dtype share a hash."""

    def __init__(self, engines: Sequence[Engine], thread: LoopThread, verify: bool = True) -> None:
        self._engines = engines
        self._thread = thread
        self._verify = verify

    def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `WeightSync.push`. The engines' loads end, one way or another, before this returns or
        raises."""
        hashed = [engine for engine in self._engines if self._verify and engine.hashes_weights]
        digests = {_kept(engine): Digest() for engine in hashed}
        handover = Handover(self._engines, version)
        try:
            self._thread.run(handover.start())
            for name, tensor in weights:
                for (names, dtype), digest in digests.items():
                    if names is None or name in names:
                        digest.add(name, tensor if dtype is None else tensor.to(dtype))
                self._thread.run(handover.put((name, tensor)))
            self._thread.run(handover.finish())
        except BaseException:
            self._thread.run(handover.cancel())
            raise
        for engine in hashed:
            expected, found = (
                digests[_kept(engine)].hexdigest(),
                self._thread.run(engine.weights_digest()),
            )
            if expected != found:
                raise RolloutError(
                    f"weight sync: after version {version} the engine's weights hash to {found[:12]}, those sent to "
                    f"{expected[:12]}; it would sample from a policy that is not the trainer's."
                )


class Handover:
    """One load on several engines: each takes its pairs from a queue that holds a single one. In
    the loop's thread."""

    def __init__(self, engines: Sequence[Engine], version: int) -> None:
        self._engines = engines
        self._version = version
        self._lanes: list[tuple[asyncio.Queue[tuple[str, Tensor] | None], asyncio.Task[None]]] = []

    async def start(self) -> None:
        """Begins the loads, which wait for the first pair."""
        for engine in self._engines:
            queue: asyncio.Queue[tuple[str, Tensor] | None] = asyncio.Queue(maxsize=1)
            self._lanes.append(
                (
                    queue,
                    asyncio.ensure_future(engine.load_weights(_until_none(queue), self._version)),
                )
            )

    async def put(self, pair: tuple[str, Tensor] | None) -> None:
        """Hands a pair to every engine as soon as it took the one before. Raises what a load
        raised; an engine that stopped listening gets no more (its hash will tell)."""
        for queue, load in self._lanes:
            putting = asyncio.ensure_future(queue.put(pair))
            await asyncio.wait((putting, load), return_when=asyncio.FIRST_COMPLETED)
            putting.cancel()  # of no effect where it is done
            if load.done():
                load.result()

    async def finish(self) -> None:
        """Tells the engines that these were all, and waits for them."""
        await self.put(None)
        await asyncio.gather(*(load for _, load in self._lanes))

    async def cancel(self) -> None:
        """Ends what is under way."""
        for _, load in self._lanes:
            load.cancel()
        await asyncio.gather(*(load for _, load in self._lanes), return_exceptions=True)


async def run_probe(engine: Engine, probe: ProbeQuestions, version: int) -> list[Completion]:
    """The engine's completions of the probe's prompts. Raises RolloutError where it does not
    answer, or says that another version sampled them."""
    answers = [
        engine.generate(
            list(prompt), Sampling(probe.max_tokens, probe.temperature, seed=i), f"weight probe {i}"
        )
        for i, prompt in enumerate(probe.prompts)
    ]
    asked, until = asyncio.gather(*answers), time.monotonic() + PROBE_TIMEOUT_S
    while not asked.done():
        left_s = until - time.monotonic()
        # Where it has ended, its requests may wait for another load
        if engine.failure or left_s <= 0:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            raise RolloutError(
                engine.failure
                or f"weight sync: the engine did not answer the probe of version {version} in {PROBE_TIMEOUT_S:.0f} s; is it "
                "paused? Resume it before the sync is verified."
            )
        await asyncio.wait({asked}, timeout=min(left_s, 1.0))
    completions = asked.result()
    for index in range(len(completions)):
        engine.release(f"weight probe {index}")
    versions = sorted({found for completion in completions for found in completion.versions})
    if versions != [version]:
        raise RolloutError(
            f"weight sync: the engine was given version {version} and sampled its probe from {versions}."
        )
    return completions


def check_answers(
    probe: WeightProbe, answers: Sequence[Sequence[Completion]], version: int
) -> None:
    """Raises RolloutError unless the trainer gives the tokens of every engine the log-probs that
    the engine gave them."""
    for error in compare_probes(probe, answers, version):
        if error is not None:
            raise error


def compare_probes(
    probe: WeightProbe, answers: Sequence[Sequence[Completion]], version: int
) -> list[RolloutError | None]:
    """For the completions of each of several engines None, or what is wrong with them. One call of
    the trainer scores all, equal ones once."""
    if not answers:
        return []
    rows = [
        [(*prompt, *one.tokens) for prompt, one in zip(probe.prompts, given, strict=True)]
        for given in answers
    ]
    different = list(dict.fromkeys(row for engine in rows for row in engine))
    scores = dict(zip(different, probe.score([list(row) for row in different]), strict=True))
    return [
        _difference(probe, engine, scores, given, version)
        for engine, given in zip(rows, answers, strict=True)
    ]


def _difference(
    probe: WeightProbe,
    rows: Sequence[tuple[int, ...]],
    scores: Mapping[tuple[int, ...], Sequence[float]],
    completions: Sequence[Completion],
    version: int,
) -> RolloutError | None:
    for row, completion in zip(rows, completions, strict=True):
        trainer = list(scores[row])[len(row) - len(completion.tokens) :]
        gap = max(
            abs(ours - theirs) for ours, theirs in zip(trainer, completion.logprobs, strict=True)
        )
        if not gap <= probe.tolerance:  # also where it is NaN
            return RolloutError(
                f"weight sync: after version {version} engine and trainer differ by {gap:.3g} nats on a token of the probe, "
                f"more than its tolerance of {probe.tolerance:g}; the engine would sample from a policy that is not the "
                "trainer's."
            )
    return None


def _kept(engine: Engine) -> tuple[frozenset[str] | None, torch.dtype | None]:
    return engine.weight_names, engine.dtype


async def _until_none(
    queue: asyncio.Queue[tuple[str, Tensor] | None],
) -> AsyncIterator[tuple[str, Tensor]]:
    while (pair := await queue.get()) is not None:
        yield pair
