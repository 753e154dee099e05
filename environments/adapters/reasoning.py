"""The generated problems of reasoning_gym, scored by their own rules."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from rlflow.environment import Environment
from rlflow.errors import ConfigError, did_you_mean, needing
from rlflow.report.metrics import Metric
from rlflow.types import Episode, Step, Task
from rlflow.values import PositiveInt
from rlflow_environments.common.blocks import blocks


class ReasoningGym(Environment):
    """dataset: its name in reasoning_gym, options: its further keywords. prompt: around {question};
    the answer is the response, up to a line break; with `tag` what the last such tags hold, after
    whatever reasoning. tasks_per_split: problems of each split, from other seeds."""

    shorthand = "dataset"
    harmless_options = ("dataset", "tasks_per_split", "seed")
    metrics = {
        "score": Metric("share", "what the data set's own rule gives", score=True),
        "solved": Metric("share", "of answers with the full score"),
    }

    def __init__(
        self,
        dataset: str,
        prompt: str = "{question}\nAnswer: ",
        tasks_per_split: PositiveInt = 512,
        seed: int = 0,
        options: dict[str, Any] | None = None,
        tag: str | None = None,
    ) -> None:
        self.stop, self._tag = ((f"</{tag}>",) if tag else ("\n",)), tag
        with needing("environment reasoning_gym", "pip install reasoning-gym"):
            library = importlib.import_module("reasoning_gym")
            factory = importlib.import_module("reasoning_gym.factory")
        if dataset not in factory.DATASETS:
            raise ConfigError(
                "environment.dataset: unknown "
                f"'{dataset}'.{did_you_mean(dataset, factory.DATASETS)}"
            )
        seeds = {"train": 2 * seed, "val": 2 * seed + 1}
        keywords = {**(options or {}), "size": tasks_per_split}
        self._data = {
            split: library.create_dataset(dataset, seed=seeds[split], **keywords) for split in seeds
        }
        self._prompt = prompt

    def tasks(self, split: str) -> Sequence[Task]:
        found = []
        for number, entry in enumerate(self._data[split]):
            prompt = self._prompt.replace("{question}", entry["question"])
            found.append(
                Task(
                    f"{split}-{number}", prompt, entry["answer"], {"split": split, "number": number}
                )
            )
        return found

    def step(self, episode: Episode, response: str) -> Step:
        data, number = self._data[episode.task.metadata["split"]], episode.task.metadata["number"]
        answers = blocks(self._tag, response) if self._tag else [response]
        answer = answers[-1].strip() if answers else None  # which the rules know as no answer
        score = float(data.score_answer(answer, data[number]))
        return Step(
            reward=score, terminated=True, metrics={"score": score, "solved": float(score >= 1)}
        )
