"""`rlflow env play`: a person is the policy."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from rlflow.commands.paint import Paint
from rlflow.environment import (
    Environment,
    answered,
    awaited,
    check_fields,
    most_turns,
    note_response,
)
from rlflow.errors import ConfigError, did_you_mean
from rlflow.report.records import text_of
from rlflow.rollout.environment_calls import tasks_of
from rlflow.texts import one_line, printable
from rlflow.types import Observation, Task

from .checks.agents import Agent


def play(
    environment: Environment,
    *,
    split: str = "train",
    task: str = "0",
    max_turns: int = 16,
    source: TextIO | None = None,
    color: str = "auto",
    agent: Agent | None = None,
) -> None:
    """Plays one episode with responses read from the terminal (or `source`), or the agent's.

    A response ends with an empty line, with the first stop string, or with the end of the input.
    """
    tasks = tasks_of(environment, split)
    chosen = find_task(tasks, task, split)
    paint = Paint(color)
    typed = source or sys.stdin
    asyncio.run(_episode(environment, chosen, max_turns, typed, paint, agent))


def find_task(tasks: Sequence[Task], wanted: str, split: str) -> Task:
    """The task with that id, else at that position.

    Raises:
        ConfigError: neither, or there are no tasks.
    """
    for task in tasks:
        if task.id == wanted:
            return task
    if not tasks:
        raise ConfigError(f"env play: tasks('{split}') is empty; try the other split with --split.")
    if wanted.isdecimal() and int(wanted) < len(tasks):
        return tasks[int(wanted)]
    hint = did_you_mean(wanted, [task.id for task in tasks[:1000]])
    expected = f"expected a task id or a position below {len(tasks)}"
    raise ConfigError(f"env play: {expected}, found '{wanted}'.{hint}")


async def _episode(
    environment: Environment,
    task: Task,
    max_turns: int,
    source: TextIO,
    paint: Paint,
    agent: Agent | None,
) -> None:
    # asyncio's own handler waits for a coroutine to yield, which one that reads a line never does.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    episode = await awaited(environment.reset(task))
    opening = episode.opening
    own = None if opening is None else opening.stop
    stop = tuple(environment.stop if own is None else own)
    ends = " or ".join(["an empty line", *map(_shown_stop, stop)]) if "\n" not in stop else "Enter"
    told = f"You are the policy: a response ends with {ends}; Ctrl-D leaves."
    told = told if agent is None else "The player is the policy."
    print(paint(f"task {one_line(task.id, 200)}. {told}", "dim"))
    total, turn = 0.0, 0
    most = most_turns(environment, episode.task, max_turns)
    said: list[tuple[str, Observation]] = []
    try:
        print(shown(episode.task.prompt))
        for turn in range(1, most + 1):
            caret = paint("> ", "policy", "bold")
            if agent is None:
                response = read_response(source, stop, prompt=caret)
            else:
                response = agent(task, episode.task, said)
                print(f"{caret}{printable(response)}")
            if response is None:
                print(paint(f"\nleft after {turn - 1} turns, return {total:g}", "dim"))
                return
            note_response(episode, response, most)
            step = await answered(environment, episode, response, {})
            check_fields(environment, "step", step)
            total += step.reward
            said.append((response, step.observation))
            stop = step.stop if step.stop is not None else tuple(environment.stop)
            print(paint(shown(step.observation), "dim"))
            others = {
                name: value
                for name, value in step.metrics.items()
                if name != "reward" or value != step.reward
            }
            numbers = "  ".join(f"{name} {value:g}" for name, value in others.items())
            reward = paint(f"reward {step.reward:g}", "good" if step.reward > 0 else "dim")
            print(f"{reward}  {numbers}".rstrip())
            if step.terminated:
                print(paint(f"terminated after {turn} turns, return {total:g}", "bold"))
                return
        print(paint(f"turn limit ({most}) reached, return {total:g}", "bold"))
    finally:
        await awaited(environment.close(episode))


def read_response(source: Iterable[str], stop: Sequence[str], prompt: str = "> ") -> str | None:
    """What was typed up to the first stop string (text after it is not sent) or an empty line.

    None at the end of the input. With a line break as stop string each line is a response."""
    said = ""
    print(prompt, end="", flush=True)
    for line in source:
        line = line.rstrip("\r\n") + "\n"
        begin = len(said)
        said += line
        # What this line completes: a stop string may begin in the one before
        found = {text: said.find(text, max(0, begin - len(text) + 1)) for text in stop}
        ends = [at + len(text) for text, at in found.items() if at >= 0]
        if ends:
            return said[: min(ends)]
        if line == "\n":
            return said[:begin].removesuffix("\n")
    return said.removesuffix("\n") if said else None


def _shown_stop(stop: str) -> str:
    """A stop string in a sentence: quoted where it cannot be printed or would not be seen."""
    return stop if stop.isprintable() and stop.strip() == stop else repr(stop)


def shown(observation: Observation) -> str:
    """What the policy is shown, for the terminal; messages with their roles."""
    return printable(text_of(observation, roles=True).strip("\n"))
