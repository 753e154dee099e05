"""Rollout: episodes of an environment by one or several engines. The only place where text becomes tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from rlflow.codec import Transcripts
from rlflow.components import ENGINE
from rlflow.environment import Environment
from rlflow.errors import RolloutError
from rlflow.rollout.calls import THREADS, CallThreads
from rlflow.rollout.engine import Completion, Engine, PauseMode, check_sizes
from rlflow.rollout.environment_calls import SHUTDOWN_S, reported, shut_down
from rlflow.rollout.episodes import CALL_S, EPISODE_S, Attempt, EpisodeLimits, EpisodePlayer, TurnSeeds
from rlflow.rollout.event_loop import LoopThread, LoopWatch
from rlflow.rollout.flow import EpisodeFlow, Flow
from rlflow.rollout.replay import replay
from rlflow.rollout.source import TaskSource
from rlflow.rollout.submission import OnEpisode, Submission
from rlflow.rollout.tokenizer import Tokenizer, check_frame
from rlflow.rollout.weight_sync import InProcessSync, ProbeQuestions, WeightProbe, WeightSync, check_answers, run_probe
from rlflow.types import Group, Task

T = TypeVar("T")
STEPS_REMEMBERED = 64  # of which a task that comes again is recognised


class Rollout:
    """Drives engines through episodes; every episode proceeds on its own, none waits for a batch. `report`: what the environment
    reported about the last collection. `on_episode`: told (ended, all of the submission, trajectory) of each episode that ends,
    in the thread that plays them, so it must be quick; for displays. `on_group`: given each group of a step as it ends, in the
    caller's thread, while the others go on.

    engine: one, or several over which the groups are spread; an episode stays on its engine. deterministic: equal
    seeds and weights give equal bits whatever the timing (episodes wait for each other's turns; use one engine thread
    count). The other keywords are those of the `rollout` section of the configuration and of its `faults`. Methods are
    synchronous and may be called from any thread, also where an event loop is running (a notebook). weight_sync: how weights
    reach the engines; None: by reference, within this process. verify_weights: False takes it on trust that they did.
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
        call_s: float = CALL_S,
        episode_s: float = EPISODE_S,
        chat_template: bool = False,
        seed: int = 0,
        deterministic: bool = False,
        verify_weights: bool = True,
        weight_sync: WeightSync | None = None,
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
        self.weight_sync = weight_sync
        self.call_s = call_s
        self.version = 0
        self._limits = EpisodeLimits(
            max_turns,
            max_response_tokens,
            min([max_total_tokens, *(engine.max_tokens for engine in self.engines if engine.max_tokens is not None)]),
            max_observation_tokens,
            temperature,
            chat_template,
            call_s,
            episode_s,
        )
        sizes = {"max_response_tokens": max_response_tokens, "max_total_tokens": max_total_tokens}
        check_sizes("rollout", samples_per_prompt=samples_per_prompt, max_turns=max_turns, **sizes)
        check_frame(environment.frame, tokenizer, max_observation_tokens)
        self.report: dict[str, float] = {}
        self.memory_taken = 0  # bytes that engines took again after the last `load_weights`
        self.on_episode: OnEpisode | None = None
        self.on_group: Callable[[Group], object] | None = None
        self._collections = 0
        self._repetitions: dict[int, Counter[str]] = {}  # of tasks, by step
        self._in_flight: list[Submission] = []
        self._paused = False
        self._turn = asyncio.Lock()  # deterministic collections take turns
        self._lock = threading.Lock()  # any thread may submit
        self._loop: LoopThread | None = None
        self._threads = CallThreads(THREADS, "rlflow-environment")

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        environment: Environment,
        *,
        engine: str | Mapping[str, Any] = "embedded",
        trust_remote_code: bool = False,
        **options: Any,
    ) -> Rollout:
        """A Rollout over an engine and the tokenizer of a HuggingFace directory. engine: its name, or its keywords, the name
        left out for the embedded one; options: keywords of `Rollout`."""
        tokenizer = Tokenizer.from_pretrained(path, trust_remote_code)
        shared: dict[str, Any] = {key: options[key] for key in ("seed", "deterministic") if key in options}
        component = engine if isinstance(engine, str) else {"name": "embedded", **engine}
        made = ENGINE.build(component, path=path, tokenizer=tokenizer, **shared)
        return cls(made, environment, tokenizer, **options)

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

    def submit(
        self,
        tasks: Sequence[Task],
        step: int = 0,
        *,
        samples_per_prompt: int | None = None,
        temperature: float | None = None,
        max_aborted_share: float | None = None,
        priority: int = 0,
    ) -> Submission:
        """Starts a group of attempts per task and returns at once; `Submission.completed` hands the groups out as they
        end. Several may be in flight; where the engines cannot run all, those of a lower `priority` number go first.
        The other keywords replace those of the Rollout.

        Attempts are seeded by (seed, step, task, attempt). A task that comes again in the same step gets seeds (and a
        group id) of its own; evaluations, whose steps are below 0, give the same samples each time."""
        samples = self.samples_per_prompt if samples_per_prompt is None else samples_per_prompt
        check_sizes("rollout", samples_per_prompt=samples)
        share = self.max_aborted_share if max_aborted_share is None else max_aborted_share
        with self._lock:
            submission = self.play(self._attempts(tasks, step, samples), share, priority, temperature, self.on_episode)
            self._in_flight = [*(earlier for earlier in self._in_flight if not earlier.ended), submission]
        return submission

    def play(
        self,
        attempts: Sequence[Attempt],
        max_aborted_share: float | None,
        priority: int = 0,
        temperature: float | None = None,
        on_episode: OnEpisode | None = None,
    ) -> Submission:
        """Starts attempts together; see `submit`."""
        submission = Submission(attempts, max_aborted_share, on_episode)
        turn = self._turn if self.deterministic else None
        submission.start(self._thread(), self.engines, self._player(temperature), priority=priority, turn=turn)
        return submission

    def collect(
        self,
        tasks: Sequence[Task],
        step: int = 0,
        samples_per_prompt: int | None = None,
        temperature: float | None = None,
        max_aborted_share: float | None = None,
    ) -> list[Group]:
        """A group of finished attempts per task, in the order of the tasks; see `submit` for the keywords and the seeds.

        Raises RolloutError where the share of aborted episodes exceeds max_aborted_share; it names the first error."""
        try:
            return self._collect(tasks, step, samples_per_prompt=samples_per_prompt, temperature=temperature,
                                 max_aborted_share=max_aborted_share)  # fmt: skip
        finally:
            self.take_report()

    def take_report(self) -> None:
        """Makes `report` what the environment says about the time since the last call."""
        self.report = reported(self.environment, self.call_s)

    def replay(self, transcripts: Mapping[str, Transcripts]) -> list[Group]:
        """Groups, by their ids, of what was said elsewhere, scored by this environment; see `rlflow.rollout.replay.replay`."""
        groups = replay(transcripts, self.tokenizer, self._player(), self._thread())
        reported(self.environment, self.call_s)  # what these episodes did is none of the next collection's
        return groups

    def flow(
        self, temperature: float | None = None, priority: int | None = None, wake: Callable[[], object] = lambda: None
    ) -> Flow:
        """Plays attempts that are given one by one, beside what else is in flight; see `EpisodeFlow`. The caller closes it."""
        player, decode = self._player(temperature), self.tokenizer.decode
        return EpisodeFlow(self._thread(), self.engines, player, lambda: self.version, decode, priority, wake)

    def watch(self) -> LoopWatch:
        """Whether the thread that plays still answers."""
        return self._thread().watch(self.call_s)

    def _player(self, temperature: float | None = None) -> EpisodePlayer:
        limits = self._limits if temperature is None else dataclasses.replace(self._limits, temperature=temperature)
        return EpisodePlayer(self.environment, self.tokenizer, limits, self._threads)

    def attempt(self, task: Task, group_id: str, number: int, request_id: str) -> Attempt:
        """An attempt of a group for a flow, with the seeds that it has in any collection. request_id: of no other in flight."""
        return Attempt(task, group_id, request_id, TurnSeeds(self.seed, group_id, number), number, f"{group_id}/{number}")

    def pause(self, mode: PauseMode) -> None:
        """Stops the engines from sampling; environments go on. `load_weights` ends it, as `resume` does. See `Engine.pause`."""
        if not self._paused:
            self._paused = True
            self._thread().run(_all_of(engine.pause(mode) for engine in self.engines))

    def resume(self) -> None:
        """Continues after `pause`; of no effect where nothing is paused."""
        if self._paused:
            self._paused = False
            self._thread().run(_all_of(engine.resume() for engine in self.engines))

    @property
    def failure(self) -> str:
        """How an engine ended by itself; "" while none has. `load_weights` starts it again."""
        return next((engine.failure for engine in self.engines if engine.failure), "")

    def outlive(self, restart: Callable[[], object]) -> None:
        """Lets requests wait for engines that ended. Who waits for episodes calls `restart`, which loads the present weights."""
        for engine in self.engines:
            engine.patient = True
        self._thread().on_wait = lambda: restart() if self.failure else None

    def sleep(self) -> int:
        """Engines that take turns with a trainer (`Engine.sleeps`) give their memory back until `load_weights`; returns bytes."""
        return sum(self._thread().run(_all_of(one.sleep() for one in self.engines if one.sleeps)))

    def stream(
        self,
        source: TaskSource,
        prompts: int,
        *,
        start: int = 0,
        admit: Callable[[list[Group]], list[Group]] | None = None,
        max_rounds: int = 10,
    ) -> Iterator[list[Group]]:
        """The groups of one step after another, `prompts` each, until the source ends. A step is sampled when it is asked
        for, so with the newest weights. The first one has the number `start`.

        admit: what of some groups goes into the step (filters). As many tasks as are missing are then taken from the
        source, in at most max_rounds rounds. Raises RolloutError where these admit nothing."""
        check_sizes("rollout", prompts=prompts, max_rounds=max_rounds)
        for step in itertools.count(start):
            try:
                groups = self._admitted(source, prompts, step, admit, max_rounds)
            finally:
                self.take_report()
            if not groups:
                return
            yield groups

    def load_weights(
        self, weights: Iterable[tuple[str, Tensor]], version: int, probe: WeightProbe | None = None
    ) -> None:
        """Gives the engines new weights, (HuggingFace name, tensor) pairs taken one at a time in this thread, and verifies them.
        probe: for engines that cannot hash theirs.

        Raises RolloutError where an engine's content hash or probe is not that of what was sent, or where there is neither."""
        answers = self.load_and_ask(weights, version, None if probe is None else probe.questions)
        if probe is not None:
            check_answers(probe, answers, version)

    def load_and_ask(
        self, weights: Iterable[tuple[str, Tensor]], version: int, questions: ProbeQuestions | None
    ) -> list[list[Completion]]:
        """As `load_weights`; returns what engines that cannot hash their weights answered, for the trainer to compare."""
        unhashed = [engine for engine in self.engines if not engine.hashes_weights] if self.verify_weights else []
        if unhashed and questions is None:
            raise RolloutError(f"weight sync: {type(unhashed[0]).__name__} cannot hash its weights, so nothing would tell "
                               "whether it samples from the trainer's policy; give load_weights a WeightProbe.")  # fmt: skip
        (self.weight_sync or InProcessSync(self.engines, self._thread(), self.verify_weights)).push(weights, version)
        self.memory_taken = sum(self._thread().run(_all_of(one.wake() for one in self.engines if one.sleeps)))
        self.resume()  # before the probe, which a paused engine never answers
        asked = [] if questions is None else [self._thread().run(run_probe(one, questions, version)) for one in unhashed]
        self.version = version
        return asked

    @property
    def hashes_weights(self) -> bool:
        """Whether all engines do; where not, `load_weights` needs a probe."""
        return all(engine.hashes_weights for engine in self.engines)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the weights."""
        return {"collections": self._collections, "version": self.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`; the weights come by `load_weights`."""
        self._collections = int(state["collections"])
        self.version = int(state["version"])

    def close(self) -> None:
        """Ends what is in flight and frees threads; the engines are closed and the environment is shut down too."""
        for submission in self._in_flight:
            submission.cancel()
        if self._thread().answers():
            for engine in self.engines:
                self._thread().run(engine.close())
        shut_down(self.environment, min(self.call_s, SHUTDOWN_S))
        self._threads.close()
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def __enter__(self) -> Rollout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _thread(self) -> LoopThread:
        self._loop = self._loop or LoopThread("rlflow-rollout")
        return self._loop

    def _collect(
        self, tasks: Sequence[Task], step: int, on_group: Callable[[Group], object] | None = None, **options: Any
    ) -> list[Group]:
        submission = self.submit(tasks, step, **options)
        groups: dict[str, Group] = {}
        for group in submission.completed():
            groups[group.id] = group
            if on_group is not None:
                on_group(group)
        return [groups[group_id] for group_id in submission.group_ids]

    def _admitted(
        self,
        source: TaskSource,
        prompts: int,
        step: int,
        admit: Callable[[list[Group]], list[Group]] | None,
        max_rounds: int,
    ) -> list[Group]:
        admitted: list[Group] = []
        collected = 0
        for _ in range(max_rounds):
            tasks = source.take(prompts - len(admitted))
            groups = self._collect(tasks, step, self.on_group)
            collected += len(groups)
            admitted += groups if admit is None else admit(groups)
            if len(admitted) >= prompts or not tasks:
                break
        if collected and not admitted:
            raise RolloutError(
                f"step {step}: not one of {collected} groups was admitted, in {max_rounds} rounds at most; the filters let "
                "nothing through (do all attempts get the same reward?)."
            )
        return admitted

    def _attempts(self, tasks: Sequence[Task], step: int, samples: int) -> list[Attempt]:
        self._collections += 1
        repetitions = self._repetitions.setdefault(step, Counter()) if step >= 0 else Counter[str]()
        if len(self._repetitions) > STEPS_REMEMBERED:
            del self._repetitions[next(iter(self._repetitions))]
        attempts: list[Attempt] = []
        for task in tasks:
            repeated = repetitions[task.id]
            repetitions[task.id] += 1
            group_id = group_name(step, repeated, task.id)
            for number in range(task.attempts(samples)):
                name = f"{group_id}/{number}"
                request_id = f"{self._collections}/{len(attempts):06d}/{name}"
                # Evaluations come again under the same group ids, for the same samples.
                unique = name if step >= 0 else f"{self._collections}/{name}"
                seeds = TurnSeeds(self.seed, group_id, number)
                attempts.append(Attempt(task, group_id, request_id, seeds, number, unique))
        return attempts


def group_name(step: int, repeated: int, task: str) -> str:
    """The id of the group of a task that comes for the step the first time, or after `repeated` others."""
    # The repetition stands before the colon, where a task's id cannot look like it.
    return f"{step}.{repeated}:{task}" if repeated else f"{step}:{task}"


async def _all_of(awaitables: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    return await asyncio.gather(*awaitables)
