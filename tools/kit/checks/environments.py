"""The contract of an Environment as a program: agents that look for what would break a run."""

from __future__ import annotations

import asyncio
import copy
import logging
import random
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rlflow.environment import (
    Environment,
    last_step,
    method_problems,
    metrics_problem,
    most_turns,
    note_response,
    observation_problem,
    stop_problem,
)
from rlflow.errors import PolicyError, RolloutError, described, raised_at
from rlflow.net.calls import THREADS, CallThreads, call
from rlflow.report.metrics import Metric
from rlflow.rollout.environment_calls import repeated_id
from rlflow.rollout.event_loop import LoopThread
from rlflow.types import Episode, Task

from .. import OURS
from .agents import (
    Agent,
    answering_agent,
    player_agent,
    random_agent,
    scripted_agent,
)
from .answers import answer_problem, timed_method
from .plays import Play, describe, describe_player
from .report import ContractReport

logger = logging.getLogger(__name__)

WORD_S, LIMIT_S = 10, 60
"""Seconds without the end of a call after which the check says so, and after which it ends."""
FOREVER_S = 1e6  # the check ends before
TOGETHER_S = 5.0  # for a second episode beside the first, where there is a place for it
BLOCKED_S = 0.05  # median of an async method that is said to hold up all other episodes


def check_environment(
    environment: Environment,
    *,
    episodes: int = 32,
    max_turns: int = 16,
    seed: int = 0,
    player: Callable[..., str] | None = None,
) -> ContractReport:
    """Plays `episodes` episodes with each agent; reports each kind of breach once, with its count.

    player: a scripted player, as of `rlflow env policy`, which plays too. Also works inside a
    running event loop (notebooks). Where no call ends for LIMIT_S, that is the last breach."""
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
            told = f"no call has ended for {LIMIT_S} s: {audit.waiting()}"
            if not loop.answers(1.0):
                told += f"; {loop.place()} blocks the event loop"
            audit.breach("hangs", told)
            return audit.report
        return running.result()
    finally:
        audit.threads.close()
        loop.close()


@dataclass
class _Audit:
    environment: Environment
    episodes: int
    max_turns: int
    seed: int
    player: Callable[..., str] | None
    calls: int = 0  # that have ended
    pending: Counter[str] = field(default_factory=Counter)
    blocked: dict[str, list[float]] = field(default_factory=dict)
    sets_stop: bool = False
    report: ContractReport = field(default_factory=ContractReport)

    def __post_init__(self) -> None:
        self.threads = CallThreads(THREADS, "rlflow-check")

    async def run(self) -> ContractReport:
        if not isinstance(self.environment, Environment):
            found = type(self.environment).__name__
            self.breach("type", f"expected an rlflow.Environment, found {found}: derive from it")
            return self.report
        try:
            await self.check_all()
        except Exception as error:  # noqa: BLE001 -- others' objects, compared or copied
            place = raised_at(error, OURS) or "in rlflow"
            self.breach("check", f"the check cannot go on: {described(error)} ({place})")
        return self.report

    async def check_all(self) -> None:
        if self.environment.max_turns is not None:
            self.max_turns = self.environment.max_turns
        if problem := stop_problem(self.environment.stop):
            self.breach("stop", problem)
        self.check_registered()
        if problems := method_problems(self.environment):
            for method, problem in problems.items():
                self.breach(method, problem)
            return
        train, val = await self.check_tasks("train"), await self.check_tasks("val")
        if train and not val:
            self.report.note("tasks('val') is empty: nothing can be evaluated")
        tasks = train or val
        if tasks:
            await self.check_episodes(tasks)
            if {task.id for task in train} & {task.id for task in val}:
                self.report.note(
                    "train and val have task ids in common: is the evaluation held out?"
                )

    def breach(self, kind: str, text: str) -> None:
        self.report.breach(text, kind)

    async def call(
        self, what: str, method: Callable[..., Any], *arguments: Any
    ) -> tuple[bool, Any]:
        """(worked, result) of a method, awaited or run in a thread as Rollout does."""
        self.pending[what] += 1
        kind = "reset" if what == "reset" else ""
        try:
            timed = timed_method(method, self.blocked.setdefault(what, []))
            return True, await call(self.threads, timed, arguments, FOREVER_S, what, kind)
        except Exception as error:  # noqa: BLE001 -- others' code: whatever it raises is reported
            if isinstance(error, PolicyError) and what == "step":
                return True, last_step(self.environment, error, {})
            raised = f"{what} raised {described(error)}"
            text = str(error) if isinstance(error, RolloutError) else raised
            response = f"the response was {arguments[1]!r:.80}" if what == "step" else ""
            details = "; ".join(filter(None, [raised_at(error, OURS), response]))
            self.breach(f"{what} {type(error).__name__}", f"{text} ({details})")
            return False, None
        finally:
            self.pending[what] -= 1
            self.calls += 1

    def waiting(self) -> str:
        """What has not ended."""
        left = [f"{what} ({count} calls)" for what, count in self.pending.items() if count]
        return ", ".join(left) or "the check itself"

    def check_registered(self) -> None:
        registered = self.environment.metrics
        if problem := metrics_problem(registered):
            self.breach("metrics", problem)
            return
        for name, metric in registered.items():
            place = f"metrics['{name}']"
            if not isinstance(metric, Metric):
                found = type(metric).__name__
                self.breach("metric type", f"{place}: expected an rlflow.Metric, found {found}")
            elif metric.score and "/" in name:
                text = "a score is a number of an episode; give its name without a section"
                self.breach("score", f"{place}: {text}")

    # ------------------------------------------------------------ tasks

    async def check_tasks(self, split: str) -> Sequence[Task]:
        what = f"tasks('{split}')"
        worked, tasks = await self.call(what, self.environment.tasks, split)
        if not worked:
            return []
        if not isinstance(tasks, Sequence) or isinstance(tasks, str):
            found = type(tasks).__name__
            self.breach("tasks", f"{what}: expected a sequence (list) of Task, found {found}")
            return []
        if not tasks and split == "train":
            self.breach("tasks", "tasks('train') is empty: nothing can be trained on")
        wrong = [task for task in tasks if not isinstance(task, Task)]
        if wrong:
            found = type(wrong[0]).__name__
            self.breach("task", f"{what}: expected rlflow.Task, found {found}")
            return []
        playable = [task for task in tasks if self.accept_task(split, task)]
        if repeated := repeated_id(playable):
            self.breach("unique", f"{what}: {repeated}")
        worked, again = await self.call(what, self.environment.tasks, split)
        drawn = [(task.id, task.prompt) for task in tasks]
        if worked and [(task.id, task.prompt) for task in again] != drawn:
            told = "called twice gives different tasks or another order"
            self.breach("stable", f"{what} {told}: draw them once, from a seeded generator")
        self.report.fact(f"{split}: {len(tasks):,} tasks")
        return playable

    def accept_task(self, split: str, task: Task) -> bool:
        if not isinstance(task.id, str) or not task.id:
            expected = "expected a non-empty string"
            self.breach("id", f"task id in '{split}': {expected}, found {task.id!r}")
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
        # The player first: it gets further than random words, and so to what an episode leaves
        repeated = [words] if self.player is None else [player_agent(self.player, self.seed), words]
        few = chosen[: max(2, self.episodes // 4)]
        await self.check_reset(chosen[0])
        alone = [[await self.play(task, agent) for task in few] for agent in repeated]
        plays: list[Play] = []
        for agent in agents:
            plays += await asyncio.gather(*(self.play(task, agent) for task in chosen))
        if self.player is not None:
            played = await asyncio.gather(*(self.play(task, repeated[0]) for task in chosen))
            describe_player(self.report, played, self.max_turns)
            plays += played
        if chosen != before:
            told = "playing changed a Task: keep an episode's state in episode.scratch"
            self.breach("mutated", told)
        for first, agent in zip(alone, repeated, strict=True):
            await self.check_replay(few, agent, first)
        self.check_blocking()
        describe(self.report, self.environment, plays, self.max_turns, self.sets_stop)

    def check_blocking(self) -> None:
        for what, times_s in self.blocked.items():
            typical_s = statistics.median(times_s) if times_s else 0.0
            if typical_s >= BLOCKED_S:
                self.breach(
                    f"blocks {what}",
                    f"{what} is async and blocks the event loop, and with it all other episodes, "
                    f"for {typical_s:.2f} s at a time (median); make it plain (def), which runs in "
                    "a thread, or await what it waits for",
                )

    async def check_reset(self, task: Task) -> None:
        """Two episodes of one task must not share state. The second may have to wait for the
        first's place."""
        resets = [
            asyncio.create_task(self.call("reset", self.environment.reset, task)) for _ in range(2)
        ]
        _, waiting = await asyncio.wait(resets, return_when=asyncio.FIRST_COMPLETED)
        if waiting:
            _, waiting = await asyncio.wait(waiting, timeout=TOGETHER_S)
        if waiting:
            self.report.note(
                f"a second reset waits for the first episode's end, or takes over {TOGETHER_S:g} s"
            )
        for reset in sorted(resets, key=lambda one: not one.done()):
            worked, episode = await reset
            if worked and self.accept_episode(episode):
                await self.call("close", self.environment.close, episode)
        first, second = (reset.result()[1] for reset in resets)
        both = isinstance(first, Episode) and isinstance(second, Episode)
        if both and (first is second or first.scratch is second.scratch):
            advice = "return a new Episode(task, scratch={...}) each time"
            self.breach("fresh", f"reset gives two episodes the same state: {advice}")

    def accept_episode(self, episode: Any) -> bool:
        if not isinstance(episode, Episode):
            found = type(episode).__name__
            self.breach("episode", f"reset: expected an rlflow.Episode, found {found}")
            return False
        if episode.turns != 0:
            told = f"found turn {episode.turns}; Rollout counts turns"
            self.breach("turns", f"reset: expected an episode at turn 0, {told}")
        return True

    async def play(self, task: Task, agent: Agent, environment: Environment | None = None) -> Play:
        """One episode, as Rollout would drive it; `close` always follows a successful reset."""
        environment, play = environment or self.environment, Play(task)
        worked, episode = await self.call("reset", environment.reset, task)
        if not worked or not self.accept_episode(episode):
            play.failed = True
            return play
        most = most_turns(environment, episode.task, self.max_turns)
        while not play.terminated and not play.failed and len(play.steps) < most:
            try:
                response = agent(task, episode.task, play.said)
            except Exception as error:  # noqa: BLE001 -- a scripted player is others' code too
                self.breach(
                    "player",
                    f"the player raised {described(error)} ({raised_at(error, OURS)})",
                )
                play.failed = True
                break
            note_response(episode, response, most)
            worked, step = await self.call("step", environment.step, episode, response)
            if not worked or not self.accept_step(step):
                play.failed = True
                break
            play.said.append((response, step.observation))
            observation = copy.deepcopy(step.observation)
            play.steps.append((observation, float(step.reward), bool(step.terminated)))
            play.metrics.update(step.metrics)
            play.rewards.update(step.rewards)
            play.terminated = step.terminated
            self.sets_stop |= step.stop is not None
        await self.call("close", environment.close, episode)
        return play

    def accept_step(self, step: Any) -> bool:
        problem = answer_problem(step)
        if problem is not None:
            self.breach(problem[0], f"step: {problem[1]}")
        return problem is None

    async def check_replay(
        self, tasks: Sequence[Task], agent: Agent, alone: Sequence[Play]
    ) -> None:
        """The same responses must give the same in order, in reverse order and all at once. alone:
        the plays in order, on an environment that had not been played before."""
        again = [await self.play(task, agent) for task in reversed(tasks)][::-1]
        if any(play.failed for play in [*alone, *again]):
            return
        if [play.steps for play in alone] != [play.steps for play in again]:
            returns = [[play.reward for play in plays] for plays in (alone, again)]
            copies = [[play.steps for play in await self.play_copy(tasks, agent)] for _ in range(2)]
            if returns[0] != returns[1] and copies[0] == copies[1]:
                self.breach(
                    "state",
                    "the same responses to the same task gave other rewards, by what earlier "
                    "episodes left on the environment (copies of it agree): keep state in "
                    "episode.scratch, not on self, and derive randomness from task.id",
                )
            else:
                self.report.note(
                    "the same responses to the same task gave other observations or rewards: runs "
                    "of this environment cannot be repeated exactly"
                )
            return
        together = await asyncio.gather(*(self.play(task, agent) for task in tasks))
        for before, after in zip(alone, together, strict=True):
            if before.steps != after.steps:
                self.breach(
                    "shared",
                    f"task '{before.task.id}' goes differently while other episodes run: "
                    "concurrent episodes share state; keep it in episode.scratch, not on self",
                )

    async def play_copy(self, tasks: Sequence[Task], agent: Agent) -> list[Play]:
        """Plays the tasks on a copy of the environment, which shares what cannot be copied."""
        twin = copy.copy(self.environment)
        for name, value in vars(self.environment).items():
            with suppress(Exception):  # a lock, a connection: shared
                vars(twin)[name] = copy.deepcopy(value)
        return [await self.play(task, agent, twin) for task in tasks]
