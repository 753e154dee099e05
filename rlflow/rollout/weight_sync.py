"""Brings the trainer's weights to the engines, and verifies that they arrived."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, Union

import torch
from torch import Tensor

from rlflow.devices.gpu_buckets import GpuBucket, GpuSharing
from rlflow.errors import ConfigError, RolloutError
from rlflow.models.adapter import is_of_adapter
from rlflow.models.huggingface import combined_hash, tensor_hash
from rlflow.models.layer_rules import dtype_of
from rlflow.rollout.engine import Completion, Engine, Pairs, Sampling, Sent, in_portions
from rlflow.rollout.event_loop import LoopThread
from rlflow.rollout.probe_rule import agree, told

PROBE_TIMEOUT_S = 600.0  # an engine that is paused never answers
T = TypeVar("T")
Portion = Union[Pairs, GpuBucket]
PORTION, PORTION_BYTES = 32, 2**23
"""Of tensors that are handed over at once: each portion costs a turn of two threads."""


class WeightSync(Protocol):
    """A way from the trainer to the engines of this process."""

    def push(self, weights: Iterable[Sent], version: int) -> None:
        """Gives every engine the (HuggingFace name, tensor) pairs, or buckets, and returns when all
        of them sample from these.

        Takes them in the caller's thread, one at a time: making them may be a collective of the
        trainer. Raises RolloutError where an engine that hashes its weights does not have what
        was sent."""


class SyncReport:
    """What a sync took, by parts: gather, the trainer makes the tensors; publish, for other
    processes; load, by the engines; verify, that they have them. engines: of this process."""

    def __init__(self, engines: int = 0) -> None:
        self._engines = engines
        self._bytes = 0
        self._seconds = defaultdict[str, float](float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Inside, seconds count for this part, but for those of parts within it."""
        began, others = time.monotonic(), sum(self._seconds.values())
        try:
            yield
        finally:
            within = sum(self._seconds.values()) - others
            self._seconds[name] += time.monotonic() - began - within

    def gathered(self, weights: Iterable[T]) -> Generator[T, None, None]:
        """The pairs, or buckets; making them is the part `gather`. Closes them with itself."""
        made = iter(weights)
        try:
            while True:
                with self.part("gather"):
                    one: Any = next(made, None)
                if one is None:
                    return
                given: object = one
                match given:
                    case (GpuBucket() as sent) | (str(), Tensor() as sent):
                        self._bytes += sent.nbytes
                    case _:
                        raise RolloutError(
                            "rollout.load_weights: expected (HuggingFace name, tensor) pairs, "
                            f"found {one!r:.60}."
                        )
                yield one
        finally:
            if isinstance(made, Generator):
                made.close()

    def metrics(self) -> dict[str, float]:
        """`sync/` and `time/sync_` metrics; those of other processes tell themselves what they
        read."""
        found = {f"time/sync_{part}_s": seconds for part, seconds in self._seconds.items()}
        if self._engines:
            found |= {"sync/mib": self._engines * self._bytes / 2**20, "sync/delta_share": 0.0}
        return found


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
    tolerance: nats, the largest difference of a token in float32, which agrees to 1e-4 on both
    sides. step: in lower precision, the spacing of log-probs (`probe_rule.spacing`); many tokens
    are compared by their mean and a high quantile then (`probe_rule.agree`), and should be 256 or
    more. A probe finds weights that are damaged, incomplete or another model's; a stale version
    only if the update moved log-probs beyond that."""

    prompts: Sequence[Sequence[int]]
    score: Callable[[Sequence[Sequence[int]]], Sequence[Sequence[float]]]
    tolerance: float = 1e-3
    max_tokens: int = 8
    temperature: float = 0.0
    step: float = 0.0

    def __post_init__(self) -> None:
        if not self.prompts or self.max_tokens < 1:
            raise ConfigError(
                "WeightProbe: it compares nothing; expected a prompt or more and max_tokens >= 1."
            )

    @property
    def questions(self) -> ProbeQuestions:
        """What engines answer, which may be elsewhere."""
        return ProbeQuestions(tuple(map(tuple, self.prompts)), self.max_tokens, self.temperature)


@dataclass(frozen=True)
class InProcessSync:
    """Hands over references, a few tensors at a time to all engines: there is never a list of all
    weights.

    What is sent is hashed on its way, as each engine keeps it (its names, its dtype), and compared
    with what the engine says it has. Engines with equal names and dtype share a hash."""

    engines: Sequence[Engine]
    thread: LoopThread
    verify: bool = True
    report: SyncReport = field(default_factory=SyncReport)

    def push(self, weights: Iterable[Sent], version: int) -> None:
        """See `WeightSync.push`. The engines' loads end, one way or another, before this returns or
        raises."""
        hashed = [engine for engine in self.engines if self.verify and engine.hashes_weights]
        hashes: dict[Kept, list[str]] = {_kept(engine): [] for engine in hashed}
        handover = Handover()
        try:
            self.thread.run(handover.start(self.engines, version))
            for portion in _portions(weights):
                giving = self.thread.start(handover.put(portion))
                pairs = [] if isinstance(portion, GpuBucket) else portion
                for (names, dtype), found in hashes.items():
                    found += [
                        tensor_hash(
                            name, tensor if dtype is None else tensor.to(dtype_of(name, dtype))
                        )
                        for name, tensor in pairs
                        if names is None or name in names or is_of_adapter(name)
                    ]
                giving.result()
            self.thread.run(handover.finish())
        except BaseException:
            self.thread.run(handover.cancel())
            raise
        with self.report.part("verify"):
            self._compare(hashed, hashes, version)

    def _compare(
        self, hashed: Sequence[Engine], hashes: Mapping[Kept, list[str]], version: int
    ) -> None:
        for engine in hashed:
            expected = combined_hash(hashes[_kept(engine)])
            found = self.thread.run(engine.weights_digest())
            if expected != found:
                raise RolloutError(
                    f"weight sync: after version {version} the engine's tensors hash to "
                    f"{found[:12]}, those sent to {expected[:12]}; it would sample from a policy "
                    "that is not the trainer's."
                )


Kept = tuple[frozenset[str] | None, torch.dtype | None]
"""What an engine keeps: names, dtype."""


class Handover:
    """One load on several engines: each takes what it gets from a queue that holds one portion of
    it. In the loop's thread."""

    def __init__(self) -> None:
        self._lanes: list[tuple[asyncio.Queue[Portion | None], asyncio.Task[None]]] = []

    async def start(self, engines: Sequence[Engine], version: int) -> None:
        """Begins the loads, which wait for the first pair."""
        for engine in engines:
            queue: asyncio.Queue[Portion | None] = asyncio.Queue(maxsize=1)
            load = engine.load_weights(_until_none(queue), version)
            self._lanes.append((queue, asyncio.ensure_future(load)))

    async def put(self, portion: Portion | None) -> None:
        """Hands a portion to every engine as soon as it took the one before; of a bucket, waits
        until all have read it. Raises what a load raised; an engine that stopped listening gets no
        more (its hash will tell)."""
        for queue, load in self._lanes:
            await _unless_ended(queue.put(portion), load)
        for queue, load in self._lanes if isinstance(portion, GpuBucket) else ():
            await _unless_ended(queue.join(), load)

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
                or f"weight sync: the engine did not answer the probe of version {version} in "
                f"{PROBE_TIMEOUT_S:.0f} s; is it paused? Resume it before the sync is verified."
            )
        await asyncio.wait({asked}, timeout=min(left_s, 1.0))
    completions = asked.result()
    for index in range(len(completions)):
        engine.release(f"weight probe {index}")
    versions = sorted({found for completion in completions for found in completion.versions})
    if versions != [version]:
        raise RolloutError(
            f"weight sync: the engine was given version {version} and sampled its probe from "
            f"{versions}."
        )
    return completions


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
    ours, theirs = list[float](), list[float]()
    for row, completion in zip(rows, completions, strict=True):
        ours += list(scores[row])[len(row) - len(completion.tokens) :]
        theirs += completion.logprobs
    gaps = (torch.tensor(ours).double() - torch.tensor(theirs).double()).abs()
    if agree(gaps, probe.step, probe.tolerance):
        return None
    return RolloutError(
        f"weight sync: after version {version} engine and trainer differ by "
        f"{told(gaps, probe.step, probe.tolerance)}; the engine would sample from a policy that is "
        "not the trainer's."
    )


def _kept(engine: Engine) -> Kept:
    return engine.weight_names, engine.dtype


def sharing_of(engines: Sequence[Engine]) -> GpuSharing | None:
    """How all of these open the trainer's GPU memory; None where they do not, and get tensors."""
    found = [engine.sharing for engine in engines if engine.sharing is not None]
    if not found or len(found) < len(engines):
        return None
    return GpuSharing(found[0].bucket_bytes, tuple(gpu for one in found for gpu in one.gpus))


def _portions(weights: Iterable[Any]) -> Iterator[Portion]:
    """A few pairs at a time; each bucket by itself, up to the empty one, behind which the memory
    would be freed."""
    there = iter(weights)
    first = next(there, None)
    every = itertools.chain([] if first is None else [first], there)
    if isinstance(first, GpuBucket):
        yield from itertools.takewhile(lambda bucket: bucket.tensors, every)
    else:
        yield from in_portions(every, PORTION_BYTES, PORTION)


async def _unless_ended(work: Coroutine[Any, Any, None], load: asyncio.Task[None]) -> None:
    """Waits for something that a load is to do, or for its end. Raises what the load raised."""
    doing = asyncio.ensure_future(work)
    await asyncio.wait((doing, load), return_when=asyncio.FIRST_COMPLETED)
    doing.cancel()  # of no effect where it is done
    if load.done():
        load.result()


async def _until_none(queue: asyncio.Queue[Portion | None]) -> AsyncIterator[Any]:
    while (portion := await queue.get()) is not None:
        for one in [portion] if isinstance(portion, GpuBucket) else portion:
            yield one
        queue.task_done()  # the engine wants the next: it has read this
