"""Tasks that are seeds, and observations as text, for all adapters."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from rlflow.components import Kind
from rlflow.types import Task

FORMATTER = Kind("formatter", call=1)
"""`file.py:function` of an observation, which gives its text."""

READER = Kind("reader", call=1)
"""`file.py:function` of a response, which gives the action. Raises ValueError for none."""

VALIDATION = 1_000_000  # the first seed of the validation tasks


def formatted(name: str | None, default: Callable[[Any], str]) -> Callable[[Any], str]:
    """What makes text of an observation. Raises ConfigError."""
    return FORMATTER.resolve(name, "environment.formatter") if name else default


def bearer(api_key_variable: str | None) -> dict[str, str]:
    """The headers of requests with a token; none where the environment variable is not set."""
    token = os.environ.get(api_key_variable) if api_key_variable else None
    return {"Authorization": f"Bearer {token}"} if token else {}


def seeded_tasks(split: str, prompt: str, count: int) -> list[Task]:
    """Tasks whose answer is a seed for the library's own reset; other seeds for validation."""
    first = 0 if split == "train" else VALIDATION
    return [Task(f"{split}-{number}", prompt, first + number) for number in range(count)]


def beginning_with(task: Task, observation: str) -> Task:
    """The task with its first observation at the end of the prompt."""
    return dataclasses.replace(task, prompt=f"{task.prompt}{observation}\n")
