"""A teacher's own prompt, and log-probs moved between rows with it and the policy's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from rlflow.algorithms.teachers.classroom import Classroom
from rlflow.batching import token_batch
from rlflow.errors import ConfigError, DataError, RLFlowError
from rlflow.types import Batch, Task

if TYPE_CHECKING:
    from rlflow.rollout.tokenizer import Tokenizer

_FIELD = re.compile(r"\{(\w+)\}")


class PromptTemplate:
    """A text in which `{prompt}` stands for the policy's prompt, `{answer}` for `Task.answer` and
    any other `{name}` for that key of `Task.metadata`. Of a prompt of messages it replaces the last
    user message. Raises ConfigError without `{prompt}`."""

    def __init__(self, text: str) -> None:
        self._text = text
        if "{prompt}" not in text:
            raise ConfigError(
                "algorithm.teacher.prompt: expected a text with {prompt} in it, found "
                f"{text[:60]!r}."
            )

    def tokens(self, task: Task, room: Classroom) -> list[int]:
        """The ids of the teacher's prompt. Raises DataError for a task that lacks a field."""
        if isinstance(task.prompt, str):
            text = self._filled(task, task.prompt, room.tokenizer)
            return room.prompt_tokens(dataclasses.replace(task, prompt=text))
        messages = [dict(message) for message in task.prompt]
        users = [message for message in messages if message.get("role") == "user"]
        if not users:
            raise DataError(
                f"task '{task.id}': algorithm.teacher.prompt needs a user message to stand in, "
                "found none."
            )
        users[-1]["content"] = self._filled(task, users[-1]["content"], room.tokenizer)
        return room.prompt_tokens(dataclasses.replace(task, prompt=messages))

    def _filled(self, task: Task, prompt: str, tokenizer: Tokenizer) -> str:
        def value(found: re.Match[str]) -> str:
            name = found[1]
            if name == "prompt":
                return prompt
            if name != "answer" and name not in task.metadata:
                keys = ", ".join(["prompt", "answer", *task.metadata])
                told = f"algorithm.teacher.prompt names '{{{name}}}'; expected one of {keys}"
                raise DataError(f"task '{task.id}': {told}.")
            said = task.answer if name == "answer" else task.metadata[name]
            # Data may quote anybody: a control token in it stays text.
            return tokenizer.without_control(str(said))

        return _FIELD.sub(value, self._text)


def moved(
    batch: Batch, prompts: Sequence[tuple[list[int], list[int]]]
) -> tuple[Batch, Callable[[Tensor], Tensor]]:
    """The rows with another prompt in front, and a function that moves what was computed for those
    rows, (B, T', ...), back to the places of their tokens, (B, T, ...), 0 elsewhere.

    prompts: of each row the ids that it starts with, and those that are to stand there. Raises
    RLFlowError for a row that starts otherwise."""
    rows, tokens = [], batch.tokens.tolist()
    for row, (own, other) in enumerate(prompts):
        length = int(batch.lengths[row])
        if tokens[row][: len(own)] != own or len(own) > length:
            raise RLFlowError(
                f"teacher: row {row} does not start with its task's prompt, so that no other can "
                "take its place; environments that change the prompt at reset cannot be taught "
                "with algorithm.teacher.prompt."
            )
        rows.append(other + tokens[row][len(own) : length])
    seen = token_batch(rows).replace(temperatures=batch.temperatures)

    def back(values: Tensor) -> Tensor:
        whole = values.new_zeros(*batch.tokens.shape, *values.shape[2:])
        for row, (own, other) in enumerate(prompts):
            count = int(batch.lengths[row]) - len(own)
            whole[row, len(own) : len(own) + count] = values[row, len(other) : len(other) + count]
        return whole

    return seen, back
