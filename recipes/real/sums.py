"""Sums and differences of two numbers: a first task for a pretrained chat model."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from rlflow import Environment, Episode, Metric, Step, Task
from rlflow.types import Message

EXAMPLE = (
    {"role": "system", "content": "Calculate."},
    {"role": "user", "content": "16 + 3"},
    {"role": "assistant", "content": "16 + 3 = 19"},
)
"""What is in front of every question. To repeat it first is worth more than anything that training
does: of sums up to 10, SmolLM2-135M-Instruct gets none right with the number alone, most of them
behind `=`."""
VALIDATION_SHARE = 3  # every third pair of numbers is for validation


class Sums(Environment):
    """`17 + 25`, `25 - 17`: right where the last number of the response is the result. No pair of
    numbers is in both splits, in whatever order and with either sign."""

    metrics = {
        "exact_match": Metric("share", "of sums", score=True, shown="EM {:.2f}"),
        "equation": Metric("share", "of responses that repeat the question as `a + b = c`"),
    }

    def __init__(self, highest: int = 20) -> None:
        pairs = [(a, b) for a in range(1, highest + 1) for b in range(1, a + 1)]
        random.Random(0).shuffle(pairs)
        validation = len(pairs) // VALIDATION_SHARE
        self._pairs = {"val": pairs[:validation], "train": pairs[validation:]}

    def tasks(self, split: str) -> Sequence[Task]:
        tasks = []
        for larger, smaller in self._pairs[split]:
            tasks.append(_task(f"{smaller} + {larger}", larger + smaller))
            tasks.append(_task(f"{larger} - {smaller}", larger - smaller))
        return tasks

    async def step(self, episode: Episode, response: str) -> Step:
        numbers = re.findall(r"-?\d+", response)
        question = episode.task.metadata["question"]
        right = float(bool(numbers) and numbers[-1] == str(episode.task.answer))
        repeated = float(response.strip().startswith(f"{question} = "))
        metrics = {"exact_match": right, "equation": repeated}
        return Step(reward=right, terminated=True, metrics=metrics)


def _task(question: str, result: int) -> Task:
    prompt: list[Message] = [*EXAMPLE, {"role": "user", "content": question}]
    return Task(question.replace(" ", ""), prompt, result, {"question": question})
