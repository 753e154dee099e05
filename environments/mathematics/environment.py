"""Problems of mathematics with an answer in a box, which is checked."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, Literal

from rlflow.environment import Environment
from rlflow.errors import ConfigError, DataError
from rlflow.report.metrics import Metric
from rlflow.types import Episode, Step, Task
from rlflow.values import PositiveFloat, PositiveInt
from rlflow_environments.common.choices import chosen
from rlflow_environments.mathematics.answers import boxed, number, on_last_line
from rlflow_environments.mathematics.files import read_tasks
from rlflow_environments.mathematics.problems import FAMILIES, made_tasks
from rlflow_environments.mathematics.verifier import Verifier, VerifierError

logger = logging.getLogger(__name__)

NO_ANSWER = "No \\boxed{} with an answer.\n"
SHARE_OF_VAL = 10  # every tenth problem of a file without one for validation
PROMPTS = {
    "made": "Find {question}. Answer in \\boxed{}.\n",
    "file": "{question}\nReason step by step, and put the final answer in \\boxed{}.\n",
}


class Mathematics(Environment):
    r"""One response per problem; the reward is 1 where the last `\boxed{}` holds an answer that
    equals the problem's, else 0. An answer that cannot be checked (too long, or its check takes too
    much time or memory) aborts the episode, or counts as wrong.

    Plain numbers are compared exactly; whatever else by math-verify, in processes of their own."""

    harmless_options = ("families", "highest", "tasks_per_split", "seed", "unchecked")
    metrics = {
        "solved": Metric("share", "of problems answered right", score=True, shown="solved {:.2f}"),
        "answered": Metric("share", "of responses with an answer in a box"),
        "mathematics/checks": Metric("count", "of answers by math-verify", "sum"),
        "mathematics/unchecked": Metric(
            "count",
            "of answers that could not be checked",
            "sum",
        ),
    }

    def __init__(
        self,
        train: str | None = None,
        val: str | None = None,
        families: Sequence[str] = ("sum", "difference", "product", "equation", "sequence"),
        highest: PositiveInt = 9,
        tasks_per_split: PositiveInt = 512,
        *,
        prompt: str | None = None,
        stop: Sequence[str] | None = None,
        checks: Literal["numbers", "math-verify"] | None = None,
        unchecked: Literal["abort", "wrong"] = "abort",
        timeout_s: PositiveFloat = 5.0,
        memory_mb: PositiveInt = 2048,
        at_once: PositiveInt | None = None,
        seed: int = 0,
    ) -> None:
        """train, val: files of problems; without val every tenth of train's; without both, problems
        are made. families, highest, tasks_per_split, seed: of made ones. prompt: around {question}.
        stop: stop strings; none: a line break where problems are made. checks: none: `numbers`
        where they are made, which takes no other answer. unchecked: what an answer is that cannot
        be checked. timeout_s, memory_mb: of a check. at_once: checks at the same time; none: one
        per processor. Raises ConfigError, DataError, MissingPackageError."""
        known = [family.name for family in FAMILIES]
        families = chosen(families, known, "environment.families", "family")
        made = train is None and val is None
        self.stop = tuple(stop) if stop is not None else (("\n",) if made else ())
        self._prompt = prompt or PROMPTS["made" if made else "file"]
        if "{question}" not in self._prompt:
            raise ConfigError(
                f"environment.prompt: expected a text with {{question}}, found '{self._prompt}'."
            )
        if made:
            options = (families, highest, seed, self._prompt)
            self._tasks = {
                split: made_tasks(split, tasks_per_split, *options) for split in ("train", "val")
            }
        else:
            self._tasks = _out_of_files(train, val, self._prompt)
        at_once = at_once or len(os.sched_getaffinity(0))
        numbers = checks == "numbers" or (made and checks is None)
        self._verifier = None if numbers else Verifier(at_once, timeout_s, memory_mb)
        self._unchecked = unchecked

    @classmethod
    def evaluation_options(cls, path: str) -> dict[str, Any]:
        return {"val": path}

    def tasks(self, split: str) -> Sequence[Task]:
        return self._tasks.get(split, [])

    def task_from_text(self, text: str) -> Task:
        return Task("asked", self._prompt.replace("{question}", text))

    def step(self, episode: Episode, response: str) -> Step:
        task = episode.task
        found = boxed(response)
        if found is None and (task.metadata or {}).get("line"):
            found = on_last_line(response)
        if not found:
            return Step(NO_ANSWER, terminated=True, metrics={"solved": 0.0, "answered": 0.0})
        solved = task.answer is not None and self._equal(str(task.answer), found)
        said = "Right.\n" if solved else f"Wrong: it is {task.answer}.\n"
        return Step(said, float(solved), True, {"solved": float(solved), "answered": 1.0})

    def report(self) -> dict[str, float]:
        return {} if self._verifier is None else self._verifier.report()

    def shutdown(self) -> None:
        if self._verifier is not None:
            self._verifier.close()

    def _equal(self, wanted: str, found: str) -> bool:
        if wanted == found:
            return True
        values = number(wanted), number(found)
        if None not in values or self._verifier is None:
            return None not in values and values[0] == values[1]
        try:
            return self._verifier.same(wanted, found)
        except VerifierError:
            if self._unchecked == "abort":
                raise
            return False


def _out_of_files(train: str | None, val: str | None, prompt: str) -> dict[str, list[Task]]:
    tasks = {
        split: read_tasks(path, split, prompt)
        for split, path in (("train", train), ("val", val))
        if path is not None
    }
    every = tasks.get("train", [])
    if val is None:
        if len(every) < 2:
            raise DataError(
                f"{train}: expected two problems or more, of which some are held out, found "
                f"{len(every)}; or name a file of others in environment.val."
            )
        tasks["val"] = every[::SHARE_OF_VAL]
    held_out = {str(task.prompt) for task in tasks["val"]}
    tasks["train"] = [task for task in every if str(task.prompt) not in held_out]
    both = len(every) - len(tasks["train"])
    if both and val is not None:
        logger.warning("%s: left out %d problems that %s holds too", train, both, val)
    return tasks
