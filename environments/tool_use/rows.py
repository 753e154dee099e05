"""Tasks of JSON Lines, and the rules by which their episodes are scored."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rlflow.components import Kind
from rlflow.errors import RolloutError, described
from rlflow.net.calls import THREADS, CallThreads, call
from rlflow.types import Message, Task
from rlflow_environments.common.blocks import blocks
from rlflow_environments.common.jsonl import (
    BadRow,
    are_messages,
    held_out,
    kind_of,
    number_text,
    read_each,
    text_of,
)
from rlflow_environments.tool_use.environment import as_messages

BUILT_IN = {"match": "rlflow_environments.tool_use.rows:match"}
TASK_REWARD = Kind("task_reward", "rlflow_environments.tool_use.rows", call=2)
"""A rule, (task, messages, **options) -> number; plain or async."""
Rule = Callable[[Task, Sequence[Message]], Awaitable[float]]


def make_rule(component: Any) -> Rule:
    """A rule by name: `match`, `file.py:reward`, or a mapping with its options. A plain function
    runs in a thread; the episode's deadlines are its own. Raises ConfigError."""
    made = TASK_REWARD.build(component, "environment.reward")
    threads = CallThreads(THREADS, "rlflow-reward")

    async def rule(task: Task, messages: Sequence[Message]) -> float:
        value = await call(threads, made, (task, messages), math.inf, "environment.reward")
        try:
            return float(value)
        except (TypeError, ValueError) as problem:
            told = f"expected a number, found {described(problem)}"
            raise RolloutError(f"environment.reward: {told} ({component}).") from None

    return rule


def match(task: Task, messages: Sequence[Message]) -> float:
    """1 where the last response is the task's answer, or one of its answers: what stands in its
    last `<answer>` block, else what follows its thinking; case and white space do not count."""
    said = messages[-1]["content"].rpartition("</think>")[2]
    said = (blocks("answer", said) or [said])[-1]
    answers = task.answer if isinstance(task.answer, list) else [task.answer]
    texts = [number_text(answer) or str(answer) for answer in answers]
    return float(_normal(said) in map(_normal, texts))


FORMERLY = {"data": "train", "val_data": "val"}
"""Names that these keywords had, which are still taken."""


def read_tasks(
    train: str, val: str | None, needed: Sequence[str] = (), system: str | None = None
) -> dict[str, list[Task]]:
    """Split -> tasks of rows {"prompt": text or messages, "id", "answer", ...}; the rest of a row
    is the task's metadata. Without `val` every tenth is for validation. needed: what each row
    must have. Raises DataError."""

    def read(path: str, split: str) -> list[Task]:
        return read_each(
            path, "tasks", lambda row, line: _task(row, f"{split}-{line}", needed, system)
        )

    training = read(train, "train")
    if val is None:
        return held_out(training)
    return {"train": training, "val": read(val, "val")}


def _task(row: dict[str, Any], name: str, needed: Sequence[str], system: str | None) -> Task:
    prompt = row.pop("prompt", None)
    if not isinstance(prompt, list):
        prompt = text_of({"prompt": prompt}, "prompt")
    elif not are_messages(prompt):
        raise BadRow("'prompt': expected text, or messages with a role and a content")
    if missing := [key for key in needed if row.get(key) is None]:
        raise BadRow(f"'{missing[0]}': expected a value, found {kind_of(None)}")
    answer, name = row.pop("answer", None), str(row.pop("id", name))
    return Task(name, as_messages(prompt, system), answer, row)


def _normal(text: str) -> str:
    return " ".join(text.casefold().split())
