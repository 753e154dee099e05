"""Problems of mathematics with an answer in a box, which is checked."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rlflow.environment import Environment
from rlflow.errors import ConfigError, DataError, PolicyError
from rlflow.report.metrics import Metric
from rlflow.types import Episode, Step, Task
from rlflow.values import PositiveFloat, PositiveInt
from rlflow_environments.common.choices import chosen
from rlflow_environments.common.transcript import as_text
from rlflow_environments.mathematics.answers import BOX, answer_in, asked_form, forms_of, number
from rlflow_environments.mathematics.files import read_tasks
from rlflow_environments.mathematics.problems import FAMILIES, made_tasks
from rlflow_environments.mathematics.verifier import UncheckableAnswerError, Verifier

logger = logging.getLogger(__name__)

NO_ANSWER = "No answer in the form that is asked for.\n"
FORMS_READ = "\\boxed{}, ####, <answer>, Answer:"
SHARE_OF_VAL = 10  # every tenth problem of a file without one for validation
PROMPTS = {
    "made": "Find {question}. Answer in \\boxed{}.\n",
    "file": "{question}\nReason step by step, and put the final answer in \\boxed{}.\n",
}


class Mathematics(Environment):
    r"""One response per problem; the reward is 1 where the last `\boxed{}` holds an answer that
    equals the problem's, else 0; where a prompt asks for `#### ...`, `<answer>...</answer>` or a
    last line `Answer: ...`, that counts too. An answer that cannot be checked (too long, or its
    check takes too much time or memory) is wrong; a check that fails for another reason aborts the
    episode.

    Plain numbers are compared exactly; whatever else by math-verify, in processes of their own."""

    harmless_options = ("families", "highest", "tasks_per_split", "seed")
    metrics = {
        "solved": Metric("share", "of problems answered right", score=True, shown="solved {:.2f}"),
        "answered": Metric(
            "share",
            "of responses with an answer in the form that is asked for",
        ),
        "mathematics/checks": Metric("count", "of answers by math-verify", "sum"),
        "mathematics/unchecked": Metric(
            "count",
            "of answers that could not be checked: too long, or a check failed",
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
        timeout_s: PositiveFloat = 5.0,
        memory_mb: PositiveInt = 2048,
        at_once: PositiveInt | None = None,
        seed: int = 0,
    ) -> None:
        """train, val: files of problems; without val every tenth of train's; without both, problems
        are made. families, highest, tasks_per_split, seed: of made ones. prompt: around {question}.
        stop: stop strings; none: a line break where problems are made. checks: none: `numbers`
        where they are made, which takes no other answer. timeout_s, memory_mb: of a check, in
        seconds of a processor. at_once: checks at the same time; none: one per processor. Raises
        ConfigError, DataError, MissingPackageError."""
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
        _warn_of_forms(self._tasks)
        at_once = at_once or len(os.sched_getaffinity(0))
        numbers = checks == "numbers" or (made and checks is None)
        self._verifier = None if numbers else Verifier(at_once, timeout_s, memory_mb)

    @classmethod
    def evaluation_options(cls, path: str) -> dict[str, Any]:
        return {"val": path}

    def tasks(self, split: str) -> Sequence[Task]:
        return self._tasks.get(split, [])

    def task_from_text(self, text: str) -> Task:
        return Task("asked", self._prompt.replace("{question}", text))

    def step(self, episode: Episode, response: str) -> Step:
        task = episode.task
        found = answer_in(response, forms_of(as_text(task.prompt)))
        if not found:
            return Step(NO_ANSWER, terminated=True, metrics={"solved": 0.0, "answered": 0.0})
        try:
            solved = task.answer is not None and self._equal(str(task.answer), found)
        except UncheckableAnswerError as fault:
            metrics = {"solved": 0.0, "answered": 1.0}
            raise PolicyError(str(fault), metrics=metrics) from None
        said = "Right.\n" if solved else f"Wrong: it is {task.answer}.\n"
        return Step(said, float(solved), True, {"solved": float(solved), "answered": 1.0})

    def task_problem(self, task: Task) -> str:
        """See Environment."""
        prompt, answer = as_text(task.prompt), str(task.answer)
        said = (asked_form(prompt) or BOX).written.format(answer)
        found = answer_in(said, forms_of(prompt))
        if found is not None and (found == answer or self._plainly_equal(answer, found)):
            return ""
        if found is not None and self._verifier and found.strip("$*. ") == answer.strip("$*. "):
            return ""  # math-verify does not mind
        return f"its own answer in {said[:60]!r} is read as {found!r:.60}"

    def report(self) -> dict[str, float]:
        return {} if self._verifier is None else self._verifier.report()

    def shutdown(self) -> None:
        if self._verifier is not None:
            self._verifier.close()

    @staticmethod
    def _plainly_equal(wanted: str, found: str) -> bool | None:
        """Whether two plain numbers are equal; None where one is none."""
        values = number(wanted), number(found)
        return None if None in values else values[0] == values[1]

    def _equal(self, wanted: str, found: str) -> bool:
        if wanted == found:
            return True
        plain = self._plainly_equal(wanted, found)
        if plain is not None or self._verifier is None:
            return bool(plain)
        return self._verifier.same(wanted, found)


def _warn_of_forms(tasks: Mapping[str, Sequence[Task]]) -> None:
    """Says which tasks ask for no form of answer that is read."""
    for split, own in tasks.items():
        silent = sum(asked_form(as_text(task.prompt)) is None for task in own)
        if silent:
            logger.warning(
                "split '%s': %d of %d prompts ask for no form of answer that is read (%s): a right "
                "answer in another form is worth 0",
                split, silent, len(own), FORMS_READ,
            )  # fmt: skip


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
