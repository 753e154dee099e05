"""The generated problems of reasoning_gym, scored by their own rules."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any

from rlflow.environment import Environment
from rlflow.errors import ConfigError, described, did_you_mean, needing
from rlflow.report.metrics import Metric
from rlflow.types import Episode, Step, Task
from rlflow.values import PositiveInt
from rlflow_environments.common.blocks import blocks

LONGEST = 2_000  # characters of an answer that is code to its rule
_FUNCTIONS = "C|E|pi|exp|log|ln|sqrt|a?(?:sin|cos|tan)h?|erf|Si|Ci|Ei|li|fresnel[sc]"
_POWER = r"\*\*\s*(?:\d{1,2}|\(-?\d{1,2}(?:/\d)?\))(?!\d|\s*\*\*)"
_NUMBERS, _LIST = r"(?:[-+/().\s\d]|\*(?!\*))*", r"[-\d,\s\[\]]*"
_ALGEBRA = rf"(?:[-+/()\s]|\d++(?:\.\d++)?|\*(?!\*)|{_POWER}|\b(?:[a-zX]|{_FUNCTIONS})\b)*+"
HARMLESS = {
    "binary_matrix": _LIST,
    "spiral_matrix": _LIST,
    "n_queens": r"""[Q_,\s'"\[\]]*""",
    "string_insertion": r"""[A-E,\s'"\[\]]*""",
    "countdown": _NUMBERS,
    "puzzle24": _NUMBERS,
    "polynomial_multiplication": _ALGEBRA,
    "simple_integration": _ALGEBRA,
    "intermediate_integration": _ALGEBRA,
}
"""Data sets whose rules run an answer as Python: what it may consist of, so that it is neither a
call of anything else nor a number without end. Any other answer but the data set's own scores 0."""


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
        if "seed" in keywords:
            raise ConfigError("environment.options: 'seed' is environment.seed.")
        try:
            self._data = {
                split: library.create_dataset(dataset, seed=seeds[split], **keywords)
                for split in seeds
            }
        except Exception as error:  # noqa: BLE001 -- theirs share no other parent
            raise ConfigError(
                f"environment.options: reasoning_gym cannot make '{dataset}': {described(error)}"
            ) from None
        self._prompt, self._harmless = prompt, HARMLESS.get(dataset)

    def tasks(self, split: str) -> Sequence[Task]:
        return [
            Task(
                f"{split}-{number}",
                self._prompt.replace("{question}", entry["question"]),
                entry["answer"],
                {"split": split, "number": number},
            )
            for number, entry in enumerate(self._data[split])
        ]

    def step(self, episode: Episode, response: str) -> Step:
        data, number = self._data[episode.task.metadata["split"]], episode.task.metadata["number"]
        answers = blocks(self._tag, response) if self._tag else [response]
        answer = answers[-1].strip() if answers else None  # which the rules know as no answer
        score = self._score(data, answer, data[number])
        return Step(
            reward=score, terminated=True, metrics={"score": score, "solved": float(score >= 1)}
        )

    def _score(self, data: Any, answer: str | None, entry: dict[str, Any]) -> float:
        """What the rule gives; 0 for an answer that it cannot read, or must not."""
        if self._harmless and answer not in (None, entry["answer"]):
            towers = len(re.findall(r"\)\s*\*\*", answer)) > 2  # ((9**99)**99)**99
            if len(answer) > LONGEST or towers or not re.fullmatch(self._harmless, answer, re.A):
                return 0.0
        try:
            return float(data.score_answer(answer, entry))
        except Exception:  # noqa: BLE001 -- rules raise anything on what they cannot read
            return 0.0
