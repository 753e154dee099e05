"""The contract of an Environment, as a program: random and scripted agents look for what would break a training run."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rlflow.environment import MAX_REWARD, Environment, awaited
from rlflow.errors import described
from rlflow.metrics.names import Metric, scores
from rlflow.types import Episode, Step, Task

Agent = Callable[[Task, int], str]
"""(task, turn) -> response. Pure, so that an episode can be played again."""
_ODD_TEXTS = ("", " \n", "ü漢字🙂 \u202e\x00", "<answer></answer><tool>", "x" * 5000)


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
        verdict = "the contract holds" if self.passed else f"{count} problem{'s' if count > 1 else ''}"
        return "\n".join([*lines, verdict])


@dataclass
class Play:
    """What one episode looked like: (observation, reward, terminated) per turn."""

    task: Task
    steps: list[tuple[Any, float, bool]] = field(default_factory=list)
    terminated: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: set[str] = field(default_factory=set)  # names of the named ones
    failed: bool = False


def check_environment(environment: Environment, *, episodes: int = 32, max_turns: int = 16, seed: int = 0) -> ContractReport:
    """Plays `episodes` episodes with each agent and reports every breach of the contract once, with how often it was seen.

    Also works inside a running event loop (notebooks): then in a thread of its own.
    """
    audit = _Audit(environment, episodes, max_turns, seed)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(audit.run())
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, audit.run()).result()


class _Audit:
    def __init__(self, environment: Environment, episodes: int, max_turns: int, seed: int) -> None:
        self.environment, self.episodes, self.max_turns, self.seed = environment, episodes, max_turns, seed
        self.breaches: dict[str, tuple[str, int]] = {}
        self.report = ContractReport()

    async def run(self) -> ContractReport:
        if not isinstance(self.environment, Environment):
            found = type(self.environment).__name__
            self.breach("type", f"expected an instance of rlflow.Environment, found {found}: derive the class from it")
            return self.finish()
        self.check_stop_strings()
        self.check_registered()
        train, val = await self.check_tasks("train"), await self.check_tasks("val")
        if train and not val:
            self.report.notes.append("tasks('val') is empty: nothing can be evaluated")
        tasks = train or val
        if tasks:
            await self.check_episodes(tasks)
            if [task.id for task in train] and {task.id for task in train} & {task.id for task in val}:
                self.report.notes.append("train and val have task ids in common: is the evaluation held out?")
        return self.finish()

    def breach(self, kind: str, text: str) -> None:
        first, count = self.breaches.get(kind, (text, 0))
        self.breaches[kind] = (first, count + 1)

    def finish(self) -> ContractReport:
        self.report.problems = [
            text + (f" ({count} times)" if count > 1 else "") for text, count in self.breaches.values()
        ]
        return self.report

    async def call(self, what: str, method: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
        """(worked, result) of a method called as Rollout does: async ones awaited, plain ones in a thread."""
        task = asyncio.ensure_future(_invoke(method, arguments))
        await asyncio.wait({task})
        error = task.exception()
        if error is None:
            return True, task.result()
        if not isinstance(error, Exception):
            raise error
        self.breach(f"{what} {type(error).__name__}", f"{what} raised {described(error)}")
        return False, None

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
        self.check_ids(split, tasks)
        for task in tasks:
            if problem := _observation_problem(task.prompt) or ("is empty" if not task.prompt else ""):
                self.breach("prompt", f"prompt of task '{task.id}' {problem}")
        worked, again = await self.call(f"tasks('{split}')", self.environment.tasks, split)
        if worked and [(task.id, task.prompt) for task in again] != [(task.id, task.prompt) for task in tasks]:
            self.breach("stable", f"tasks('{split}') called twice gives different tasks or another order: draw them once, "
                        "from a seeded generator")  # fmt: skip
        self.report.facts.append(f"{split}: {len(tasks):,} tasks")
        return tasks

    def check_ids(self, split: str, tasks: Sequence[Task]) -> None:
        seen: set[str] = set()
        for task in tasks:
            if not isinstance(task.id, str) or not task.id:
                self.breach("id", f"task id in '{split}': expected a non-empty string, found {task.id!r}")
            elif task.id in seen:
                self.breach("unique", f"two tasks of '{split}' have the id '{task.id}': ids must be unique")
            seen.add(task.id)

    # ------------------------------------------------------------ episodes

    async def check_episodes(self, tasks: Sequence[Task]) -> None:
        generator = random.Random(self.seed)
        chosen = [tasks[generator.randrange(len(tasks))] for _ in range(self.episodes)]
        before = copy.deepcopy(chosen)
        random_agent, scripted = _random_agent(self.environment, self.seed), _scripted_agent(self.environment)
        await self.check_reset(chosen[0])
        plays: list[Play] = []
        for agent in (random_agent, scripted, _answering_agent(self.environment)):
            plays += await asyncio.gather(*(self.play(task, agent) for task in chosen))
        if chosen != before:
            self.breach("mutated", "playing changed a Task: keep an episode's state in episode.scratch")
        await self.check_replay(chosen[: max(2, self.episodes // 4)], random_agent)
        self.describe(plays)

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

    async def play(self, task: Task, agent: Agent) -> Play:
        """One episode, as Rollout would drive it; `close` always follows a successful reset."""
        play = Play(task)
        worked, episode = await self.call("reset", self.environment.reset, task)
        if not worked or not self.accept_episode(episode):
            play.failed = True
            return play
        while not play.terminated and not play.failed and len(play.steps) < self.max_turns:
            episode.turns += 1
            worked, step = await self.call("step", self.environment.step, episode, agent(task, episode.turns - 1))
            if not worked or not self.accept_step(step):
                play.failed = True
                break
            play.steps.append((copy.deepcopy(step.observation), float(step.reward), bool(step.terminated)))
            play.metrics.update(step.metrics)
            play.rewards.update(step.rewards)
            play.terminated = step.terminated
        await self.call("close", self.environment.close, episode)
        return play

    def accept_step(self, step: Any) -> bool:
        if not isinstance(step, Step):
            hint = " (is an `await` or a `return` missing?)" if step is None else ""
            self.breach("step type", f"step: expected an rlflow.Step, found {type(step).__name__}{hint}")
            return False
        if not _finite_number(step.reward):
            self.breach("reward", f"step: reward: expected a finite number, found {step.reward!r}")
        elif abs(step.reward) > MAX_REWARD:
            self.breach("reward", f"step: reward: expected at most {MAX_REWARD:g} either way, found {step.reward!r}")
            return False
        if not isinstance(step.rewards, Mapping):
            self.breach("rewards", f"step: rewards: expected a mapping of names to numbers, found {step.rewards!r}")
            return False
        for name, value in step.rewards.items():
            if not isinstance(name, str) or not _finite_number(value) or abs(value) > MAX_REWARD:
                expected = f"names with finite numbers, at most {MAX_REWARD:g} either way"
                self.breach("rewards", f"step: rewards: expected {expected}, found {name!r}: {value!r}")
                return False
        if not isinstance(step.terminated, bool):
            self.breach("terminated", f"step: terminated: expected True or False, found {step.terminated!r}")
        if problem := _observation_problem(step.observation):
            self.breach("observation", f"step: observation {problem}")
        for name, value in step.metrics.items():
            if not isinstance(name, str) or not _finite_number(value):
                self.breach("metric", f"step: metrics: expected names with finite numbers, found {name!r}: {value!r}")
                return False
        return True

    async def check_replay(self, tasks: Sequence[Task], agent: Agent) -> None:
        """The same responses one episode after the other, again, and all at once: must look the same."""
        alone = [await self.play(task, agent) for task in tasks]
        again = [await self.play(task, agent) for task in tasks]
        if any(play.failed for play in alone + again):
            return
        if [play.steps for play in alone] != [play.steps for play in again]:
            self.report.notes.append("the same responses to the same task gave other observations or rewards: runs of this "
                                     "environment cannot be repeated exactly")  # fmt: skip
            return
        together = await asyncio.gather(*(self.play(task, agent) for task in tasks))
        for before, after in zip(alone, together, strict=True):
            if before.steps != after.steps:
                self.breach("shared", f"task '{before.task.id}' goes differently while other episodes run: concurrent episodes "
                            "share state; keep it in episode.scratch, not on self")  # fmt: skip

    def describe(self, plays: Sequence[Play]) -> None:
        done = [play for play in plays if not play.failed and play.steps]
        if not done:
            return
        rewards = [math.fsum(reward for _, reward, _ in play.steps) for play in done]
        ended = sum(play.terminated for play in done)
        if ended == 0:
            self.report.notes.append(
                f"no episode terminated within {self.max_turns} turns: every one would be truncated"
            )
        if min(rewards) == max(rewards):
            self.report.notes.append(f"every episode returned {rewards[0]:g}: these agents found no other reward")
        turns = sum(len(play.steps) for play in done) / len(done)
        names = sorted({name for play in done for name in play.metrics})
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


async def _invoke(method: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    return await awaited(await asyncio.to_thread(method, *arguments))


def _finite_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _observation_problem(observation: Any) -> str:
    """What is wrong with a prompt or observation, or ""."""
    if isinstance(observation, str):
        return ""
    if not isinstance(observation, list):
        return f"must be text or a list of messages, found {type(observation).__name__}"
    for message in observation:
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            return f"has a message without role and content: {message!r}"
    return ""


def _prompt_text(task: Task) -> str:
    prompt = task.prompt
    return prompt if isinstance(prompt, str) else " ".join(str(message.get("content", "")) for message in prompt)


def _random_agent(environment: Environment, seed: int) -> Agent:
    """Random words of the prompt, digits and odd characters, now and then with a stop string."""

    def respond(task: Task, turn: int) -> str:
        generator = random.Random(f"{seed}/{task.id}/{turn}")
        words = [*_prompt_text(task).split(), *"0123456789", "yes", "no", "é"]
        text = " ".join(generator.choices(words, k=generator.randint(1, 8)))
        ends = [*environment.stop, ""]
        return text + generator.choice(ends)

    return respond


def _scripted_agent(environment: Environment) -> Agent:
    """Texts that programs forget: empty, blank, odd characters, half-open tags, very long, a bare stop string."""
    texts = [*_ODD_TEXTS, *environment.stop]
    return lambda task, turn: texts[(turn + sum(task.id.encode())) % len(texts)]


def _answering_agent(environment: Environment) -> Agent:
    """The task's own answer: bare, then between the tags of each stop string that closes one."""

    def respond(task: Task, turn: int) -> str:
        answer = task.answer[0] if isinstance(task.answer, (list, tuple)) and task.answer else task.answer
        tags = [stop[2:-1] for stop in reversed(environment.stop) if stop.startswith("</") and stop.endswith(">")]
        forms = [*(f"<{tag}>{answer}</{tag}>" for tag in tags), str(answer)]
        return forms[turn % len(forms)]

    return respond
