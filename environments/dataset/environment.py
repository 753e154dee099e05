"""One response per prompt of a file, judged by functions of the user's own."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlflow.environment import Environment, awaited
from rlflow.errors import ConfigError
from rlflow.report.metrics import Metric
from rlflow.types import Episode, Observation, Step, Task
from rlflow_environments.common.jsonl import (
    BadRow,
    are_messages,
    held_out,
    kind_of,
    refuse,
)
from rlflow_environments.common.rows import read_rows
from rlflow_environments.dataset.rewards import NoVerdictError, reward_function

logger = logging.getLogger(__name__)

PROMPT = "{prompt}"
_COLUMN = re.compile(r"\{(\w+)\}")


class DatasetEnvironment(Environment):
    """Prompts out of files and a reward function: no class to write.

    A row is a JSON object with a `prompt` (text, or chat messages) and any other columns, which the
    functions get by name and the policy never sees. A response ends the episode. Several functions:
    the reward is their sum, and each is a named reward too. Where none of them gives a number the
    episode is aborted; one of several that gives none counts 0."""

    max_turns = 1
    shorthand = "train"
    metrics = {"score": Metric("reward", "of the response", score=True)}

    def __init__(
        self,
        train: str | Path | None = None,
        val: str | Path | None = None,
        reward: str | Sequence[str] = (),
        *,
        prompt: str = PROMPT,
        system: str | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        """train, val: files of rows (JSON Lines, a JSON array, parquet); without val every tenth of
        train's. reward: `file.py:function`, or several. prompt: a text around columns of the row,
        such as "{question} Answer: ". system: the text of a system message; prompts are chat
        messages then. stop: stop strings.

        Raises ConfigError, DataError, MissingPackageError."""
        references = [reward] if isinstance(reward, str) else list(reward)
        if not references or (train is None and val is None):
            raise ConfigError(
                "environment dataset: expected train=ROWS.jsonl (or val) and "
                "reward=file.py:function, the function being "
                "`def reward(prompt, completion, **row)`."
            )
        self.stop = tuple(stop)
        self._rewards = [reward_function(reference) for reference in references]
        self._prompt = prompt
        self._system = system
        files = {"train": train, "val": val}
        tasks = {
            split: self._read(split, path) for split, path in files.items() if path is not None
        }
        self._tasks = tasks if "val" in tasks else held_out(tasks["train"])
        if train is not None and val is not None:
            self._leave_out_what_validates(str(train), str(val))

    @classmethod
    def evaluation_options(cls, path: str) -> dict[str, Any]:
        return {"val": path, "train": None}

    def tasks(self, split: str) -> Sequence[Task]:
        return self._tasks.get(split, [])

    def task_from_text(self, text: str) -> Task:
        """The text in the place of the one column that prompts are made of."""
        if len(columns := set(_COLUMN.findall(self._prompt))) != 1:
            raise ConfigError(
                f"environment dataset: a prompt is made of {len(columns)} columns "
                f"({self._prompt!r:.60}), so no task can be made of a text."
            )
        return Task("asked", self._with_system(_COLUMN.sub(lambda name: text, self._prompt)))

    def step(self, episode: Episode, response: str) -> Step | Awaitable[Step]:
        """Judges the response: an awaitable where a function is async."""
        row = episode.task.metadata.get("row")
        if row is None:  # a question that somebody typed
            return Step(terminated=True)
        prompt = episode.task.prompt
        returned = [one.call(prompt, response, row) for one in self._rewards]
        if any(one.is_async for one in self._rewards):
            return self._judged_later(episode.task, returned)
        return self._judged(episode.task, returned)

    async def _judged_later(self, task: Task, returned: Sequence[Any]) -> Step:
        return self._judged(task, [await awaited(one) for one in returned])

    def _judged(self, task: Task, returned: Sequence[Any]) -> Step:
        verdicts = {
            one.name: one.verdict(value) for one, value in zip(self._rewards, returned, strict=True)
        }
        rewards = {name: value for name, value in verdicts.items() if value is not None}
        if not rewards:
            raise NoVerdictError(
                f"environment.reward: {', '.join(verdicts)} returned None for task '{task.id}': no "
                "verdict, so the episode is left out"
            )
        total = sum(rewards.values())
        named = rewards if len(self._rewards) > 1 else {}
        return Step(reward=total, terminated=True, metrics={"score": total}, rewards=named)

    def _read(self, split: str, path: str | Path) -> list[Task]:
        tasks: list[Task] = []
        bad: list[tuple[str, str]] = []
        for number, (name, row) in enumerate(read_rows(path, "prompts")):
            try:
                if isinstance(row, BadRow):
                    raise row
                tasks.append(self._task(f"{split}-{number}", row))
            except BadRow as problem:
                bad.append((name, str(problem)))
        refuse(Path(path), "prompts", bad, len(tasks))
        return tasks

    def _task(self, name: str, row: Mapping[str, Any]) -> Task:
        """Raises BadRow."""
        for function in self._rewards:
            if missing := function.missing(row):
                raise BadRow(f"{function.name} needs {', '.join(missing)}, found no such column")
        metadata: dict[str, Any] = {"row": dict(row)}
        columns = set(_COLUMN.findall(self._prompt))
        question = row.get(*columns) if len(columns) == 1 else None
        if isinstance(question, str):
            metadata["question"] = question  # of displays, and for `rlflow ask`
        prompt = self._with_system(self._shown(row))
        return Task(name, prompt, row.get("answer"), metadata)

    def _shown(self, row: Mapping[str, Any]) -> Observation:
        """The row's prompt. Raises BadRow."""
        if self._prompt == PROMPT and are_messages(row.get("prompt")):
            return [dict(message) for message in row["prompt"]]

        def column(name: re.Match[str]) -> str:
            value = row.get(name[1])
            if isinstance(value, (str, int, float)) and not isinstance(value, bool):
                return str(value)
            raise BadRow(f"'{name[1]}': expected text, found {kind_of(value)}")

        text = _COLUMN.sub(column, self._prompt)
        if not text.strip():
            raise BadRow("the prompt is empty")
        return text

    def _with_system(self, prompt: Observation) -> Observation:
        if self._system is None:
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self._system}, *messages]

    def _leave_out_what_validates(self, train: str, val: str) -> None:
        """No prompt for validation is trained on."""
        held = {str(task.prompt) for task in self._tasks["val"]}
        kept = [task for task in self._tasks["train"] if str(task.prompt) not in held]
        both = len(self._tasks["train"]) - len(kept)
        if both and kept:
            logger.warning("%s: left out %d prompts that %s holds too", train, both, val)
            self._tasks["train"] = kept
        elif both:
            logger.warning("%s: every prompt is in %s too: validation shows no more", train, val)
