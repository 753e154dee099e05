"""The contract of an Environment, as a program: random and scripted agents look for what would break a training run."""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import random
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rlflow.checks.agents import Agent, answering_agent, player_agent, random_agent, scripted_agent
from rlflow.checks.answers import observation_problem, step_problem, timed_method
from rlflow.environment import Environment
from rlflow.errors import RolloutError, described, did_you_mean, raised_at
from rlflow.report.metrics import Metric, scores
from rlflow.rollout.calls import THREADS, CallThreads, call
from rlflow.rollout.environment_calls import repeated_id
from rlflow.rollout.event_loop import LoopThread
from rlflow.types import Episode, Task

logger = logging.getLogger(__name__)

WORD_S, LIMIT_S = 10, 60
"""Seconds without the end of a single call, after which it is said, and after which the check is over."""
FOREVER_S = 1e6  # the check ends before
BLOCKED_S = 0.05
"""An async method that typically keeps the event loop for so long holds up all other episodes."""


@dataclass
class ContractReport:
    """problems: what breaks the contract. notes: what is allowed but worth knowing. facts: what was seen."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        lines = [f"  {fact}" for fact in self.facts]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  PROBLEM: {problem}" for problem in self.problems]
        count = len(self.problems)
        holds = "the contract holds" + ("; see the notes" if self.notes else "")
        verdict = holds if self.passed else f"{count} problem{'s' if count > 1 else ''}"
        return "\n".join([*lines, verdict])


@dataclass
class Play:
    """What one episode looked like: (observation, reward, terminated) per turn."""

    task: Task
    steps: list[tuple[Any, float, bool]] = field(default_factory=list)
    said: list[tuple[str, Any]] = field(default_factory=list)  # (response, observation) of each turn
    terminated: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: set[str] = field(default_factory=set)  # names of the named ones
    failed: bool = False

    @property
    def reward(self) -> float:
        return math.fsum(reward for _, reward, _ in self.steps)


def check_environment(
    environment: Environment,
    *,
    episodes: int = 32,
    max_turns: int = 16,
    seed: int = 0,
    player: Callable[..., str] | None = None,
) -> ContractReport:
    """Plays `episodes` episodes with each agent and reports every breach of the contract once, with how often it was seen.
    player: a scripted player, as of `rlflow env policy`, which plays too.

    Also works inside a running event loop (notebooks). Where nothing goes on for LIMIT_S, that is the last breach."""
    audit = _Audit(environment, episodes, max_turns, seed, player)
    loop, ended = LoopThread("rlflow-check"), threading.Event()
    try:
        running = loop.start(audit.run())
        running.on_end(ended.set)
        silent_s = seen = 0
        while not ended.wait(1.0) and silent_s < LIMIT_S:
            silent_s, seen = silent_s + 1 if audit.calls == seen else 0, audit.calls
            if silent_s and silent_s % WORD_S == 0:
                logger.warning("waiting for %s, %d s", audit.waiting(), silent_s)
        if not ended.is_set():
            blocked = "" if loop.answers(1.0) else f"; {loop.place()} blocks the event loop"
            audit.breach("hangs", f"no call has ended for {LIMIT_S} s: {audit.waiting()}{blocked}")
            return audit.finish()
        return running.result()
    finally:
        audit.close()
        loop.close()


class _Audit:
    def __init__(
        self, environment: Environment, episodes: int, max_turns: int, seed: int, player: Callable[..., str] | None
    ) -> None:
        self.environment, self.episodes, self.max_turns, self.seed = environment, episodes, max_turns, seed
        self.player = player
        self.calls = 0  # that have ended
        self.pending: Counter[str] = Counter()
        self.blocked: dict[str, list[float]] = {}
        self.sets_stop = False
        self.threads = CallThreads(THREADS, "rlflow-check")
        self.breaches: dict[str, tuple[str, int]] = {}
        self.report = ContractReport()

    async def run(self) -> ContractReport:
        if not isinstance(self.environment, Environment):
            found = type(self.environment).__name__
            self.breach("type", f"expected an instance of rlflow.Environment, found {found}: derive the class from it")
            return self.finish()
        try:
            await self.check_all()
        except Exception as error:  # noqa: BLE001 -- what others' objects do when they are compared or copied
            self.breach("check", f"the check cannot go on: {described(error)} ({raised_at(error)})")
        return self.finish()

    async def check_all(self) -> None:
        self.check_stop_strings()
        self.check_registered()
        train, val = await self.check_tasks("train"), await self.check_tasks("val")
        if train and not val:
            self.report.notes.append("tasks('val') is empty: nothing can be evaluated")
        tasks = train or val
        if tasks:
            await self.check_episodes(tasks)
            if {task.id for task in train} & {task.id for task in val}:
                self.report.notes.append("train and val have task ids in common: is the evaluation held out?")

    def breach(self, kind: str, text: str) -> None:
        first, count = self.breaches.get(kind, (text, 0))
        self.breaches[kind] = (first, count + 1)

    def close(self) -> None:
        self.threads.close()

    def finish(self) -> ContractReport:
        self.report.problems = [
            text + (f" ({count} times)" if count > 1 else "") for text, count in self.breaches.values()
        ]
        return self.report

    async def call(self, what: str, method: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
        """(worked, result) of a method called as Rollout does: async ones awaited, plain ones in a thread."""
        self.pending[what] += 1
        try:
            timed = timed_method(method, self.blocked.setdefault(what, []))
            return True, await call(self.threads, timed, arguments, FOREVER_S, what, "reset" if what == "reset" else "")
        except Exception as error:  # noqa: BLE001 -- others' code: whatever it raises is what is reported
            told = str(error) if isinstance(error, RolloutError) else f"{what} raised {described(error)}"
            given = [raised_at(error), f"the response was {arguments[1]!r:.80}" if what == "step" else ""]
            self.breach(f"{what} {type(error).__name__}", f"{told} ({'; '.join(filter(None, given))})")
            return False, None
        finally:
            self.pending[what] -= 1
            self.calls += 1

    def waiting(self) -> str:
        """What has not ended."""
        return ", ".join(f"{what} ({count} calls)" for what, count in self.pending.items() if count) or "the check itself"

    def check_stop_strings(self) -> None:
        stop = self.environment.stop
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            self.breach("stop", f"stop: expected a tuple of non-empty strings, found {stop!r}")

    def check_registered(self) -> None:
        registered = self.environment.metrics
        if not isinstance(registered, Mapping):
            self.breach("metrics", f"metrics: expected a mapping of names to rlflow.Metric, found {type(registered).__name__}")
            return
        for name, metric in registered.items():
            if not isinstance(metric, Metric):
                self.breach("metric type", f"metrics['{name}']: expected an rlflow.Metric, found {type(metric).__name__}")
            elif metric.score and "/" in name:
                self.breach("score", f"metrics['{name}']: a score is a number of an episode; give its name without a section")

    # ------------------------------------------------------------ tasks

    async def check_tasks(self, split: str) -> Sequence[Task]:
        worked, tasks = await self.call(f"tasks('{split}')", self.environment.tasks, split)
        if not worked:
            return []
        if not isinstance(tasks, Sequence) or isinstance(tasks, str):
            self.breach("tasks", f"tasks('{split}'): expected a sequence (list) of Task, found {type(tasks).__name__}")
            return []
        if not tasks and split == "train":
            self.breach("tasks", "tasks('train') is empty: nothing can be trained on")
        wrong = [task for task in tasks if not isinstance(task, Task)]
        if wrong:
            self.breach("task", f"tasks('{split}'): expected rlflow.Task, found {type(wrong[0]).__name__}")
            return []
        playable = [task for task in tasks if self.accept_task(split, task)]
        if repeated := repeated_id(playable):
            self.breach("unique", f"tasks('{split}'): {repeated}")
        worked, again = await self.call(f"tasks('{split}')", self.environment.tasks, split)
        if worked and [(task.id, task.prompt) for task in again] != [(task.id, task.prompt) for task in tasks]:
            self.breach("stable", f"tasks('{split}') called twice gives different tasks or another order: draw them once, "
                        "from a seeded generator")  # fmt: skip
        self.report.facts.append(f"{split}: {len(tasks):,} tasks")
        return playable

    def accept_task(self, split: str, task: Task) -> bool:
        if not isinstance(task.id, str) or not task.id:
            self.breach("id", f"task id in '{split}': expected a non-empty string, found {task.id!r}")
            return False
        if problem := observation_problem(task.prompt) or ("is empty" if not task.prompt else ""):
            self.breach("prompt", f"prompt of task '{task.id}' {problem}")
            return False
        return True

    # ------------------------------------------------------------ episodes

    async def check_episodes(self, tasks: Sequence[Task]) -> None:
        generator = random.Random(self.seed)
        chosen = [tasks[generator.randrange(len(tasks))] for _ in range(self.episodes)]
        before = copy.deepcopy(chosen)
        words = random_agent(self.environment, self.seed)
        agents = [words, scripted_agent(self.environment), answering_agent(self.environment)]
        await self.check_reset(chosen[0])
        plays: list[Play] = []
        for agent in agents:
            plays += await asyncio.gather(*(self.play(task, agent) for task in chosen))
        if self.player is not None:
            plays += await self.play_player(player_agent(self.player, self.seed), chosen)
        if chosen != before:
            self.breach("mutated", "playing changed a Task: keep an episode's state in episode.scratch")
        await self.check_replay(chosen[: max(2, self.episodes // 4)], words)
        self.check_blocking()
        self.describe(plays)

    async def play_player(self, agent: Agent, tasks: Sequence[Task]) -> list[Play]:
        plays: list[Play] = await asyncio.gather(*(self.play(task, agent) for task in tasks))
        rewards = [play.reward for play in plays if not play.failed]
        if rewards:
            mean, ended = statistics.fmean(rewards), sum(play.terminated for play in plays)
            self.report.facts.append(f"the player: {len(rewards)} episodes, {ended} terminated, mean return {mean:g}")
        return plays

    def check_blocking(self) -> None:
        for what, times_s in self.blocked.items():
            typical_s = statistics.median(times_s) if times_s else 0.0
            if typical_s >= BLOCKED_S:
                self.breach(f"blocks {what}", f"{what} is async and blocks: it keeps the event loop for {typical_s:.2f} s at "
                            "a time (median), in which no other episode goes on; make it plain (def), which runs in a "
                            "thread, or await what it waits for")  # fmt: skip

    async def check_reset(self, task: Task) -> None:
        """Two episodes of one task must not share state."""
        (first_worked, first), (second_worked, second) = [
            await self.call("reset", self.environment.reset, task) for _ in range(2)
        ]
        for worked, episode in ((first_worked, first), (second_worked, second)):
            if worked and self.accept_episode(episode):
                await self.call("close", self.environment.close, episode)
        if (
            isinstance(first, Episode)
            and isinstance(second, Episode)
            and (first is second or first.scratch is second.scratch)
        ):
            self.breach(
                "fresh", "reset gives two episodes the same state: return a new Episode(task, scratch={...}) each time"
            )

    def accept_episode(self, episode: Any) -> bool:
        if not isinstance(episode, Episode):
            self.breach("episode", f"reset: expected an rlflow.Episode, found {type(episode).__name__}")
            return False
        if episode.turns != 0:
            self.breach(
                "turns", f"reset: expected an episode at turn 0, found turn {episode.turns}; Rollout counts turns"
            )
        return True

    async def play(self, task: Task, agent: Agent, environment: Environment | None = None) -> Play:
        """One episode, as Rollout would drive it; `close` always follows a successful reset."""
        environment, play = environment or self.environment, Play(task)
        worked, episode = await self.call("reset", environment.reset, task)
        if not worked or not self.accept_episode(episode):
            play.failed = True
            return play
        while not play.terminated and not play.failed and len(play.steps) < self.max_turns:
            try:
                response = agent(task, episode.task, play.said)
            except Exception as error:  # noqa: BLE001 -- a scripted player is others' code too
                self.breach("player", f"the player raised {described(error)} ({raised_at(error)})")
                play.failed = True
                break
            episode.turns += 1
            worked, step = await self.call("step", environment.step, episode, response)
            if not worked or not self.accept_step(step):
                play.failed = True
                break
            play.said.append((response, step.observation))
            play.steps.append((copy.deepcopy(step.observation), float(step.reward), bool(step.terminated)))
            play.metrics.update(step.metrics)
            play.rewards.update(step.rewards)
            play.terminated = step.terminated
            self.sets_stop |= step.stop is not None
        await self.call("close", environment.close, episode)
        return play

    def accept_step(self, step: Any) -> bool:
        problem = step_problem(step)
        if problem is not None:
            self.breach(*problem)
        return problem is None

    async def check_replay(self, tasks: Sequence[Task], agent: Agent) -> None:
        """The same responses one episode after the other, again from the last to the first, and all at once: must look the
        same."""
        alone = [await self.play(task, agent) for task in tasks]
        again = [await self.play(task, agent) for task in reversed(tasks)][::-1]
        if any(play.failed for play in alone + again):
            return
        if [play.steps for play in alone] != [play.steps for play in again]:
            returns = [[play.reward for play in plays] for plays in (alone, again)]
            copies = [[play.steps for play in await self.play_copy(tasks, agent)] for _ in range(2)]
            if returns[0] != returns[1] and copies[0] == copies[1]:
                self.breach("state", "the same responses to the same task gave other rewards, by what earlier episodes left on "
                            "the environment (copies of it agree): keep state in episode.scratch, not on self, and derive "
                            "randomness from task.id")  # fmt: skip
            else:
                self.report.notes.append("the same responses to the same task gave other observations or rewards: runs of "
                                         "this environment cannot be repeated exactly")  # fmt: skip
            return
        together = await asyncio.gather(*(self.play(task, agent) for task in tasks))
        for before, after in zip(alone, together, strict=True):
            if before.steps != after.steps:
                self.breach("shared", f"task '{before.task.id}' goes differently while other episodes run: concurrent episodes "
                            "share state; keep it in episode.scratch, not on self")  # fmt: skip

    async def play_copy(self, tasks: Sequence[Task], agent: Agent) -> list[Play]:
        """Plays one episode after the other on an environment that is as this one is now, but for what cannot be copied."""
        twin = copy.copy(self.environment)
        for name, value in vars(self.environment).items():
            with suppress(Exception):  # a lock, a connection: shared
                vars(twin)[name] = copy.deepcopy(value)
        return [await self.play(task, agent, twin) for task in tasks]

    def check_metrics(self, names: Sequence[str]) -> None:
        """Metrics that are declared and that no episode reports, perhaps as they are reported under another name."""
        strange = [name for name in names if name not in self.environment.metrics]
        for name, metric in self.environment.metrics.items():
            if "/" in name or name in names:
                continue
            hint = did_you_mean(name, strange)
            told = f"metrics['{name}'] is declared, but no episode reported it"
            if strange and (metric.score or hint):
                self.breach(f"unreported {name}", f"{told}; reported and not declared: {', '.join(strange)}.{hint}")
            else:
                self.report.notes.append(told)

    def describe(self, plays: Sequence[Play]) -> None:
        done = [play for play in plays if not play.failed and play.steps]
        if not done:
            return
        rewards = [play.reward for play in done]
        ended = sum(play.terminated for play in done)
        if ended == 0:
            self.report.notes.append(
                f"no episode terminated within {self.max_turns} turns: every one would be truncated"
            )
        if min(rewards) == max(rewards):
            self.report.notes.append(f"every episode returned {rewards[0]:g}: these agents found no other reward")
        turns = sum(len(play.steps) for play in done) / len(done)
        names = sorted({name for play in done for name in play.metrics})
        self.check_metrics(names)
        if not (self.environment.stop or self.sets_stop) and isinstance(done[0].task.prompt, str):
            self.report.notes.append("stop is empty: a response to a prompt of text ends where the model ends it, or at "
                                     "rollout.max_response_tokens; set stop, or rollout.chat_template=true")  # fmt: skip
        for name in names:
            reporting = sum(name in play.metrics for play in done)
            if reporting < len(done) and name not in scores(self.environment.metrics):
                text = f"metric '{name}' is reported by {reporting} of {len(done)} episodes: its mean is over those"
                self.report.notes.append(text)
        self.report.facts += [
            f"{len(done)} episodes: {ended} terminated, {turns:.1f} turns on average",
            f"returns from {min(rewards):g} to {max(rewards):g}",
            f"metrics: {', '.join(names) or 'none'}",
        ]
        named = sorted({name for play in done for name in play.rewards})
        if named:
            self.report.facts.append(f"named rewards: {', '.join(named)}")
