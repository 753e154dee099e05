"""Rollout: episodes of an environment by one or several engines. The only place where text becomes
tokens."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import count, islice
from pathlib import Path
from typing import Any
from weakref import WeakSet

from rlflow.components import ENGINE
from rlflow.devices.matmul import PRODUCTS
from rlflow.environment import Environment, check_form
from rlflow.errors import DataError, RolloutError
from rlflow.net.calls import THREADS, CallThreads
from rlflow.rollout.codec import Transcripts
from rlflow.rollout.deterministic import TurnSeeds
from rlflow.rollout.engine import Completion, Engine, PauseMode, Sent, check_sizes
from rlflow.rollout.environment_calls import SHUTDOWN_S, reported, shut_down
from rlflow.rollout.episodes import CALL_S, EPISODE_S, Attempt, EpisodeLimits, EpisodePlayer
from rlflow.rollout.event_loop import LoopThread, LoopWatch, all_of
from rlflow.rollout.groups import Admit, Groups, OnEpisode, Terms
from rlflow.rollout.issued import GroupNames
from rlflow.rollout.pacing import ANY_AGE, Pacing
from rlflow.rollout.players import LocalPlayer, Player
from rlflow.rollout.replay import replay
from rlflow.rollout.tasks import TaskSource
from rlflow.rollout.tokenizer import Tokenizer, check_frame
from rlflow.rollout.weight_sync import (
    InProcessSync,
    ProbeQuestions,
    SyncReport,
    WeightProbe,
    WeightSync,
    compare_probes,
    run_probe,
)
from rlflow.types import Group, Task

logger = logging.getLogger(__name__)


class Rollout:
    """Drives engines through episodes; every episode proceeds on its own, none waits for a batch.
    Methods are synchronous and may be called from any thread, also where an event loop is running
    (a notebook).

    engine: one, or several over which the groups are spread; an episode stays on its engine.
    deterministic: equal seeds and weights give equal bits whatever the timing (episodes wait for
    each other's turns; use one engine thread count). weight_sync: how weights reach the engines;
    None: by reference, within this process. verify_weights: False takes it on trust that they did.
    The other keywords are those of the `rollout` section of the configuration and of its `faults`.

    `report`: what the environment reported about the last collection. `on_episode`: told (ended,
    all in flight or ended, trajectory) of each episode that ends; for displays. `on_group`: given
    each group of a step as it ends. Both are called in the thread that waits for groups."""

    recorded = False
    """Whether what tasks hold is imitated, and nothing is sampled."""

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
        chat_template_options: Mapping[str, Any] | None = None,
        history: str = "template",
        seed: int = 0,
        deterministic: bool = False,
        verify_weights: bool = True,
        weight_sync: WeightSync | None = None,
    ) -> None:
        self.engines: list[Engine] = list(engine) if isinstance(engine, Sequence) else [engine]
        self.environment = environment
        if chat_template_options:
            tokenizer = tokenizer.with_options(chat_template_options)
        self.tokenizer = tokenizer.with_tools(environment.tools) if environment.tools else tokenizer
        max_turns = max_turns if environment.max_turns is None else environment.max_turns
        self.samples_per_prompt, self.max_aborted_share = samples_per_prompt, max_aborted_share
        self.seed, self.deterministic = seed, deterministic
        self.verify_weights, self.weight_sync = verify_weights, weight_sync
        self.call_s, self.version = call_s, 0
        held = [one.max_tokens for one in self.engines if one.max_tokens is not None]
        limits = max_turns, max_response_tokens, min([max_total_tokens, *held])
        self._limits = EpisodeLimits(
            *limits, max_observation_tokens, temperature, chat_template, call_s, episode_s, history
        )
        sizes = {"max_response_tokens": max_response_tokens, "max_total_tokens": max_total_tokens}
        check_sizes("rollout", samples_per_prompt=samples_per_prompt, max_turns=max_turns, **sizes)
        check_sizes("rollout", least=0, temperature=temperature)
        check_form(environment)
        check_frame(environment.frame, tokenizer, max_observation_tokens)
        environment.sampled_at(temperature)
        self.report: dict[str, float] = {}
        self.synced = SyncReport()  # the last `load_weights`
        self.memory_taken = 0  # bytes that engines took again after it
        self.on_episode: OnEpisode | None = None
        self.on_group: Callable[[Group], object] | None = None
        self._collections = 0
        self._names = GroupNames()
        self._players: WeakSet[Player] = WeakSet()
        self._paused = self._closed = False
        self._turn = asyncio.Lock()  # deterministic collections take turns
        self._lock = threading.Lock()  # any thread may collect
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
        """A Rollout over an engine and the tokenizer of a HuggingFace directory. engine: its name,
        or its keywords, the name left out for the embedded one; options: keywords of `Rollout`."""
        if options.get("deterministic"):
            PRODUCTS.fix()  # a measurement may come out otherwise in the process that resumes
        tokenizer = Tokenizer.from_pretrained(path, trust_remote_code)
        shared = {key: options[key] for key in ("seed", "deterministic") if key in options}
        component = engine if isinstance(engine, str) else {"name": "embedded", **engine}
        made = ENGINE.build(component, path=path, tokenizer=tokenizer, **shared)
        try:
            return cls(made, environment, tokenizer, **options)
        except BaseException:
            engines = made if isinstance(made, Sequence) else [made]
            with closing(LoopThread("rlflow-rollout")) as thread:
                thread.run(all_of(one.close() for one in engines))
            raise

    @property
    def max_total_tokens(self) -> int:
        """The token budget of an episode: the option of that name, or what the engines can hold if
        that is less."""
        return self._limits.max_total_tokens

    @property
    def response_budget(self) -> int:
        """The most tokens that an attempt may generate, if its context allows."""
        return self._limits.max_turns * self._limits.max_response_tokens

    def prompt_tokens(self, task: Task) -> list[int]:
        """The ids that an episode of the task starts with."""
        return self.tokenizer.encode_prompt(task.prompt, self._limits.chat_template)

    def fitting(self, split: str, tasks: Sequence[Task], max_prompt_tokens: int) -> list[Task]:
        """The tasks of a split whose prompts fit; the others are a warning. Raises DataError where
        none is left."""
        limit = min(max_prompt_tokens, self.max_total_tokens - 1)
        kept = [task for task in tasks if len(self.prompt_tokens(task)) <= limit]
        dropped = len(tasks) - len(kept)
        if not kept:
            raise DataError(
                f"split '{split}': all {len(tasks)} prompts are longer than {limit} tokens; raise "
                "data.max_prompt_tokens and rollout.max_total_tokens."
            )
        if dropped:
            told = "split '%s': %d of %d prompts over %d tokens dropped"
            logger.warning(told, split, dropped, len(tasks), limit)
        return kept

    def collect(
        self,
        tasks: Iterable[Task],
        step: int = 0,
        samples_per_prompt: int | None = None,
        temperature: float | None = None,
        max_aborted_share: float | None = None,
    ) -> list[Group]:
        """A group of finished attempts per task, in the order of the tasks. The keywords replace
        those of the Rollout.

        Attempts are seeded by (seed, step, task, attempt). A task that comes again in the same step
        gets seeds (and a group id) of its own; evaluations, whose steps are below 0, give the same
        samples each time.

        Raises RolloutError where the share of aborted episodes exceeds max_aborted_share; it names
        the first error."""
        tasks = list(tasks)
        if strange := [task for task in tasks if not isinstance(task, Task)]:
            raise RolloutError(f"rollout.collect: expected tasks, found {strange[0]!r:.60}.")
        left = iter(tasks)
        terms = self._terms(samples_per_prompt, max_aborted_share)
        pacing = Pacing(max(1, len(tasks)), ANY_AGE)
        found = self.groups(lambda n: [*islice(left, n)], pacing, terms, temperature=temperature)
        try:
            with closing(found) as groups:
                groups.on_group = None
                return groups.step(step)
        finally:
            self.take_report()

    def take_report(self) -> None:
        """Makes `report` what the environment says about the time since the last call."""
        self.report = reported(self.environment, self.call_s)

    def counts(self) -> dict[str, float]:
        """How rollout workers fared since the last call; {} where there are none."""
        return {}

    def replay(self, transcripts: Mapping[str, Transcripts]) -> list[Group]:
        """Groups, by their ids, of what was said elsewhere, scored by this environment; see
        `rlflow.rollout.replay.replay`."""
        groups = replay(transcripts, self.tokenizer, self._episodes(), self._thread())
        # What these episodes did is none of the next collection's
        reported(self.environment, self.call_s)
        return groups

    def player(self, wake: Callable[[], object] = lambda: None) -> Player:
        """Plays attempts, beside what others play; see `Player`. wake: called when there are
        events."""
        player = LocalPlayer(
            self._thread(),
            self.engines,
            self._episodes(),
            version=lambda: self.version,
            decode=self.tokenizer.decode,
            turn=self._turn if self.deterministic else None,
            wake=wake,
        )
        self._players.add(player)
        return player

    def groups(
        self,
        take: Callable[[int], Sequence[Task]],
        pacing: Pacing,
        terms: Terms,
        *,
        tasks: Iterable[Task] = (),
        temperature: float | None = None,
    ) -> Groups:
        """The groups of one step after another; see `Groups`. The caller closes it."""
        with self._lock:
            self._collections += 1
            collection = self._collections
        priority = None if pacing.run_ahead else 0

        def attempt(task: Task, group_id: str, number: int, request: str) -> Attempt:
            name, seeds = f"{group_id}/{number}", TurnSeeds(self.seed, group_id, number)
            # Evaluations come again under the same group ids, for the same samples.
            unique = f"{collection}/{name}" if group_id.startswith("-") else name
            request = f"{collection}/{request}/{name}"
            return Attempt(task, group_id, request, seeds, number, unique, temperature, priority)

        names = self._names.of_collection()
        groups = Groups(self.player(), attempt, names, take, pacing, terms, tasks=tasks)
        groups.on_episode = lambda *told: self.on_episode and self.on_episode(*told)
        groups.on_group = lambda group: self.on_group and self.on_group(group)
        return groups

    def watch(self) -> LoopWatch:
        """Whether the thread that plays still answers."""
        return self._thread().watch(self.call_s)

    def _episodes(self) -> EpisodePlayer:
        return EpisodePlayer(self.environment, self.tokenizer, self._limits, self._threads)

    def _terms(self, samples: int | None, max_aborted_share: float | None, **others: int) -> Terms:
        if self._closed:
            raise RolloutError("rollout: the Rollout is closed; make another one to play episodes.")
        samples = self.samples_per_prompt if samples is None else samples
        check_sizes("rollout", samples_per_prompt=samples)
        share = self.max_aborted_share if max_aborted_share is None else max_aborted_share
        return Terms(samples, share, self._limits.episode_s + self.call_s, **others)

    def pause(self, mode: PauseMode) -> None:
        """Stops the engines from sampling; environments go on. `load_weights` ends it, as `resume`
        does. See `Engine.pause`."""
        if not self._paused:
            self._paused = True
            self._thread().run(all_of(engine.pause(mode) for engine in self.engines))

    def resume(self) -> None:
        """Continues after `pause`; of no effect where nothing is paused."""
        if self._paused:
            self._paused = False
            self._thread().run(all_of(engine.resume() for engine in self.engines))

    @property
    def failure(self) -> str:
        """How an engine ended by itself; "" while none has. `load_weights` starts it again."""
        return next((engine.failure for engine in self.engines if engine.failure), "")

    def outlive(self, restart: Callable[[], object]) -> None:
        """Lets requests wait for engines that ended. Who waits for episodes calls `restart`, which
        loads the present weights."""
        for engine in self.engines:
            engine.patient = True
        self._thread().on_wait = lambda: restart() if self.failure else None

    def sleep(self) -> int:
        """Engines that take turns with a trainer (`Engine.sleeps`) give their memory back until
        `load_weights`; returns bytes."""
        return sum(self._thread().run(all_of(one.sleep() for one in self.engines if one.sleeps)))

    def stream(
        self,
        source: TaskSource,
        prompts: int,
        *,
        start: int = 0,
        admit: Admit | None = None,
        max_rounds: int = 10,
    ) -> Iterator[list[Group]]:
        """The groups of one step after another, `prompts` each, until the source ends. A step is
        sampled when it is asked for, so with the newest weights. The first one has the number
        `start`.

        admit: what of some groups goes into the step (filters). As many tasks as are missing are
        then taken from the source, in at most max_rounds rounds. Raises RolloutError where these
        admit nothing."""
        check_sizes("rollout", prompts=prompts, max_rounds=max_rounds)
        terms = self._terms(None, None, max_rounds=max_rounds)
        with closing(self.groups(source.take, Pacing(prompts, ANY_AGE), terms)) as groups:
            for step in count(start):
                try:
                    found = groups.step(step, admit or list)
                finally:
                    self.take_report()
                if not found:
                    return
                yield found

    def load_weights(
        self, weights: Iterable[Sent], version: int, probe: WeightProbe | None = None
    ) -> None:
        """Gives the engines new weights, (HuggingFace name, tensor) pairs taken one at a time in
        this thread (or buckets, for engines with `sharing`), and verifies them. probe: for engines
        that cannot hash theirs.

        Raises RolloutError where an engine's content hash or probe is not that of what was sent, or
        where there is neither."""
        answers = self.load_and_ask(weights, version, None if probe is None else probe.questions)
        if probe is not None:
            with self.synced.part("verify"):
                for error in filter(None, compare_probes(probe, answers, version)):
                    raise error

    def load_and_ask(
        self, weights: Iterable[Sent], version: int, questions: ProbeQuestions | None
    ) -> list[list[Completion]]:
        """As `load_weights`; returns the answers of engines that cannot hash their weights."""
        unhashed = [one for one in self.engines if self.verify_weights and not one.hashes_weights]
        if unhashed and questions is None:
            raise RolloutError(
                f"weight sync: {type(unhashed[0]).__name__} cannot hash its weights, so nothing "
                "would tell whether it samples from the trainer's policy; give load_weights a "
                "WeightProbe."
            )
        report, thread = SyncReport(len(self.engines)), self._thread()
        own = InProcessSync(self.engines, thread, self.verify_weights, report)
        self.synced, sync = report, self.weight_sync or own
        with report.part("load"):
            with closing(report.gathered(weights)) as sent:
                sync.push(sent, version)
            waking = all_of(engine.wake() for engine in self.engines if engine.sleeps)
            self.memory_taken = sum(thread.run(waking))
        self.resume()  # before the probe, which a paused engine never answers
        with report.part("verify"):
            asked = (run_probe(one, questions, version) for one in unhashed) if questions else ()
            answers = thread.run(all_of(asked))
        self.version = version
        return answers

    @property
    def weights_device(self) -> str | None:
        """The device on which `load_weights` wants the trainer's tensors; None: where they are."""
        return None if all(engine.takes_device_tensors for engine in self.engines) else "cpu"

    @property
    def hashes_weights(self) -> bool:
        """Whether all engines do; where not, `load_weights` needs a probe."""
        return all(engine.hashes_weights for engine in self.engines)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the weights."""
        named = self._names.since(self.version)
        return {"collections": self._collections, "version": self.version, "named": named}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`; the weights come by `load_weights`."""
        self._collections = int(state["collections"])
        self.version = int(state["version"])
        self._names = GroupNames(state["named"])

    def close(self) -> None:
        """Ends what is in flight, closes the engines and shuts the environment down."""
        self._closed, self._loop, thread = True, None, self._thread()
        with ExitStack() as steps:  # from the last to the first, whatever one raises
            steps.callback(thread.close)
            steps.callback(self._threads.close)
            steps.callback(shut_down, self.environment, min(self.call_s, SHUTDOWN_S))
            ending = (one.close() for one in self.engines)
            steps.callback(lambda: thread.answers() and thread.run(all_of(ending)))
            for player in self._players:
                steps.callback(player.close)

    def __enter__(self) -> Rollout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _thread(self) -> LoopThread:
        with self._lock:
            self._loop = self._loop or LoopThread("rlflow-rollout")
            return self._loop
