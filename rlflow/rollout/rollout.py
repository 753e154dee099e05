"""Rollout: episodes of an environment by one or several engines. The only place where text becomes tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from rlflow.environment import Environment
from rlflow.errors import ConfigError, RolloutError
from rlflow.models.huggingface import digest
from rlflow.rollout.deterministic import Rounds
from rlflow.rollout.engine import Engine
from rlflow.rollout.episodes import Attempt, EpisodeLimits, EpisodePlayer, Generate
from rlflow.rollout.event_loop import LoopThread
from rlflow.rollout.tokenizer import Tokenizer
from rlflow.types import Group, Task, Trajectory

logger = logging.getLogger(__name__)

DEFAULT_LANES = 256  # episodes at a time on an engine that names no `max_concurrency`
THREADS = 16  # for environments with plain (not async) methods


class Rollout:
    """Drives engines through episodes; every episode proceeds on its own, none waits for a batch. `report`: what the environment
    reported about the last collection.

    engine: one, or several over which the groups are spread; an episode stays on its engine. deterministic: equal
    seeds and weights give equal bits whatever the timing (episodes wait for each other's turns; use one engine thread
    count). The other keywords are those of the `rollout` section of the configuration. Methods are synchronous and
    may be called from any thread, also where an event loop is running (a notebook).
    """

    def __init__(
        self,
        engine: Engine | Sequence[Engine],
        environment: Environment,
        tokenizer: Tokenizer,
        *,
        samples_per_prompt: int = 8,
        max_turns: int = 4,
        max_response_tokens: int = 512,
        max_total_tokens: int = 4096,
        max_observation_tokens: int | None = None,
        temperature: float = 1.0,
        max_aborted_share: float = 0.25,
        chat_template: bool = False,
        seed: int = 0,
        deterministic: bool = False,
        verify_weights: bool = True,
    ) -> None:
        self.engines: list[Engine] = list(engine) if isinstance(engine, Sequence) else [engine]
        self.environment = environment
        self.tokenizer = tokenizer.with_tools(environment.tools) if environment.tools else tokenizer
        max_turns = max_turns if environment.max_turns is None else environment.max_turns
        self.samples_per_prompt = samples_per_prompt
        self.max_aborted_share = max_aborted_share
        self.seed = seed
        self.deterministic = deterministic
        self.verify_weights = verify_weights
        self.version = 0
        self._limits = EpisodeLimits(
            max_turns,
            max_response_tokens,
            min([max_total_tokens, *(getattr(engine, "max_tokens", max_total_tokens) for engine in self.engines)]),
            max_observation_tokens,
            temperature,
            chat_template,
        )
        _check_positive(samples_per_prompt=samples_per_prompt, max_turns=max_turns)
        _check_positive(max_response_tokens=max_response_tokens, max_total_tokens=max_total_tokens)
        _check_frame(environment.frame, tokenizer, max_observation_tokens)
        self.report: dict[str, float] = {}
        self._collections = 0
        self._loop: LoopThread | None = None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="rlflow-environment")

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        environment: Environment,
        *,
        engine: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> Rollout:
        """A Rollout over the embedded engine and the tokenizer of a HuggingFace directory. engine: keywords of
        `EmbeddedEngine`; options: keywords of `Rollout`."""
        from rlflow.rollout.embedded.engine import EmbeddedEngine

        tokenizer = Tokenizer.from_pretrained(path, trust_remote_code)
        shared: dict[str, Any] = {key: options[key] for key in ("seed", "deterministic") if key in options}
        keywords: dict[str, Any] = {**shared, **(engine or {})}
        name = keywords.pop("name", "embedded")
        if name != "embedded":
            raise ConfigError(f"rollout.engine.name: unknown engine '{name}'; expected 'embedded'.")
        return cls(EmbeddedEngine(path, tokenizer, **keywords), environment, tokenizer, **options)

    @property
    def max_total_tokens(self) -> int:
        """The token budget of an episode: the option of that name, or what the engines can hold if that is less."""
        return self._limits.max_total_tokens

    @property
    def response_budget(self) -> int:
        """The most tokens that an attempt may generate, if its context allows."""
        return self._limits.max_turns * self._limits.max_response_tokens

    def prompt_tokens(self, task: Task) -> list[int]:
        """The ids that an episode of the task starts with."""
        return self.tokenizer.encode_prompt(task.prompt, self._limits.chat_template)

    def collect(
        self,
        tasks: Sequence[Task],
        step: int = 0,
        samples_per_prompt: int | None = None,
        temperature: float | None = None,
        max_aborted_share: float | None = None,
    ) -> list[Group]:
        """A group of finished attempts per task, in the order of the tasks. The keywords replace those of the Rollout.
        Attempts are seeded by (seed, step, task, attempt): give each collection its own step, below 0 for evaluations.

        Raises RolloutError where the share of aborted episodes exceeds max_aborted_share; it names the first error."""
        samples = self.samples_per_prompt if samples_per_prompt is None else samples_per_prompt
        limits = self._limits
        if temperature is not None:
            limits = dataclasses.replace(limits, temperature=temperature)
        attempts = self._attempts(tasks, step, samples)
        trajectories = self._run(self._play(attempts, limits, len(tasks)))
        self.report = self.environment.report()
        share = self.max_aborted_share if max_aborted_share is None else max_aborted_share
        _check_aborted(trajectories, share)
        groups = []
        for index, task in enumerate(tasks):
            members = trajectories[index * samples : (index + 1) * samples]
            _stamp(members)
            groups.append(Group(attempts[index * samples].group_id, task, members))
        return groups

    def stream(self, batches: Iterable[Sequence[Task]], start: int = 0) -> Iterator[list[Group]]:
        """Groups of one batch of tasks after another, each sampled with the newest weights when it is asked for. The
        first batch has step `start`."""
        for step, tasks in enumerate(batches, start):
            yield self.collect(tasks, step)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Gives the engines new weights, (HuggingFace name, tensor) pairs, and verifies that they have them.

        Raises RolloutError where an engine's content hash is not that of what was sent."""
        sent = list(weights)  # here, not in the engine's thread: making them may be a collective of the trainer
        for engine in self.engines:
            self._run(engine.load_weights(iter(sent), version))
            if self.verify_weights and hasattr(engine, "weights_digest"):
                _verify(engine, sent, version)
        self.version = version

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the weights."""
        return {"collections": self._collections, "version": self.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`; the weights come by `load_weights`."""
        self._collections = int(state["collections"])
        self.version = int(state["version"])

    def close(self) -> None:
        """Ends what is in flight and frees threads; the engines are closed and the environment is shut down too."""
        for engine in self.engines:
            self._run(engine.close())
        self.environment.shutdown()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def __enter__(self) -> Rollout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, coroutine: Any) -> Any:
        if self._loop is None:
            self._loop = LoopThread("rlflow-rollout")
        return self._loop.run(coroutine)

    def _attempts(self, tasks: Sequence[Task], step: int, samples: int) -> list[Attempt]:
        self._collections += 1
        seen: dict[str, int] = {}
        attempts: list[Attempt] = []
        for task in tasks:
            repeated = seen[task.id] = seen.get(task.id, -1) + 1
            group_id = f"{step}:{task.id}" + (f":{repeated}" if repeated else "")
            for number in range(samples):
                request_id = f"{self._collections}/{len(attempts):06d}/{group_id}/{number}"
                attempts.append(Attempt(task, group_id, request_id, _seeds(self.seed, group_id, number)))
        return attempts

    async def _play(self, attempts: list[Attempt], limits: EpisodeLimits, groups: int) -> list[Trajectory]:
        """All trajectories, in the order of the attempts: lanes on every engine take one attempt after another."""
        player = EpisodePlayer(self.environment, self.tokenizer, limits, self._threads)
        finished: list[Trajectory | None] = [None] * len(attempts)
        samples = len(attempts) // max(groups, 1)
        whole_groups = groups >= len(self.engines)  # attempts at one task share their prompt's cache
        queues: list[list[int]] = [[] for _ in self.engines]
        for index in range(len(attempts)):
            queues[(index // samples if whole_groups else index) % len(queues)].append(index)

        async def lane(queue: Iterator[int], engine: Engine, generate: Generate, rounds: Rounds | None) -> None:
            for index in queue:
                finished[index] = await player.play(attempts[index], generate)
                if hasattr(engine, "release"):
                    engine.release(attempts[index].request_id)
            if rounds is not None:
                rounds.leave()

        lanes = []
        for engine, indices in zip(self.engines, queues):
            count = min(len(indices), getattr(engine, "max_concurrency", DEFAULT_LANES))
            rounds = Rounds(engine, count) if self.deterministic else None
            queue = iter(indices)
            generate = rounds.generate if rounds is not None else engine.generate
            lanes += [lane(queue, engine, generate, rounds) for _ in range(count)]
        await _all(lanes)
        return [trajectory for trajectory in finished if trajectory is not None]


async def _all(coroutines: Sequence[Any]) -> None:
    """Runs them together; the first failure cancels the others and is raised when they have ended."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _seeds(seed: int, group_id: str, attempt: int) -> Any:
    """A function from the turn to a seed of 63 bits; group ids hold step and task."""

    def of_turn(turn: int) -> int:
        text = f"{seed}/{group_id}/{attempt}/{turn}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    return of_turn


def _stamp(trajectories: Sequence[Trajectory]) -> None:
    """Writes (size, mean, std with Bessel's correction) of the usable attempts on each of them."""
    usable = [trajectory for trajectory in trajectories if trajectory.usable]
    rewards = [trajectory.reward for trajectory in usable]
    if not rewards:
        return
    stats = (len(rewards), statistics.fmean(rewards), statistics.stdev(rewards) if len(rewards) > 1 else 0.0)
    for trajectory in usable:
        trajectory.group_stats = stats


def _check_aborted(trajectories: Sequence[Trajectory], share: float) -> None:
    aborted = [trajectory for trajectory in trajectories if not trajectory.usable]
    if not aborted:
        return
    first = f"task '{aborted[0].task_id}': {aborted[0].error}"
    logger.warning("%d of %d episodes aborted; first: %s", len(aborted), len(trajectories), first)
    if len(aborted) > share * len(trajectories):
        raise RolloutError(
            f"rollout: {len(aborted)} of {len(trajectories)} episodes were aborted, more than "
            f"max_aborted_share={share}; first: {first}"
        )


def _verify(engine: Any, sent: Sequence[tuple[str, Tensor]], version: int) -> None:
    names = getattr(engine, "weight_names", None)
    dtype = getattr(engine, "dtype", None)
    kept = [
        (name, tensor if dtype is None else tensor.to(dtype)) for name, tensor in sent if names is None or name in names
    ]
    expected, found = digest(kept), engine.weights_digest()
    if expected != found:
        raise RolloutError(
            f"weight sync: after version {version} the engine's weights hash to {found[:12]}, those sent to "
            f"{expected[:12]}; it would sample from a policy that is not the trainer's."
        )


def _check_frame(frame: tuple[str, str], tokenizer: Tokenizer, limit: int | None) -> None:
    """Raises ConfigError if an observation of the smallest size would be cut to less than its frame."""
    needed = len(tokenizer.encode(frame[0])) + len(tokenizer.encode(frame[1])) if limit is not None else 0
    if limit is not None and needed >= limit and any(frame):
        raise ConfigError(
            f"rollout.max_observation_tokens: {limit} tokens hold no content: what stands around it in an observation alone "
            f"takes {needed}. Raise it, or remove it."
        )


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"rollout.{name}: expected at least 1, found {value}.")
