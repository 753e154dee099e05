"""Recorded episodes as a source of experience beside a run's own."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rlflow.algorithms.base import Filter
from rlflow.algorithms.filters.earlier_groups import again
from rlflow.errors import CheckpointError, DataError
from rlflow.rollout.codec import Response, Transcripts
from rlflow.rollout.rollout import Rollout
from rlflow.storage.files import read_json_lines
from rlflow.types import Group
from rlflow.values import PositiveInt

logger = logging.getLogger(__name__)


@dataclass
class Demonstrations(Filter):
    """Adds `episodes` random ones of a file to every step, each a group of its own with source
    `demonstration` (arXiv 2509.15937, demonstration replay).

    path: JSON lines with `task_id`, one of this run's `split`, and `turns`, each with its
    `response`, as runs and evaluations write them. The episodes are played through this run's
    environment once, which scores them, and come without log-probs: kernels need `anchor:
    proximal`. What learns from them by likelihood is `sft` with `source: demonstration`; the
    transform `only_sources` keeps the policy gradient to the others. An episode that does not end
    with its last response here is told of and left out. Raises DataError for a file that is not
    such."""

    whole_step = True
    unscored = True
    needs = frozenset({"proximal"})
    remembers = ("steps",)

    rollout: Rollout
    seed: int
    path: str
    episodes: PositiveInt = 4
    split: str = "train"
    _steps = 0

    def __post_init__(self) -> None:
        self._rows = _rows(Path(self.path))

    def __call__(self, groups: list[Group]) -> list[Group]:
        draw = random.Random(f"{self.seed}/demonstrations/{self._steps}")
        chosen = draw.sample(self._played, min(self.episodes, len(self._played)))
        self._steps += 1
        suffix = f"/{self._steps}"
        return [*groups, *(again(group, suffix, "demonstration") for group in chosen)]

    @cached_property
    def _played(self) -> list[Group]:
        environment = self.rollout.environment
        tasks = {task.id: task for task in environment.tasks(self.split)}
        transcripts = {}
        for number, (name, responses) in enumerate(self._rows, 1):
            if name not in tasks:
                raise DataError(
                    f"{self.path}:{number}: expected a task of the split '{self.split}', found "
                    f"'{name}'."
                )
            said = tuple(
                Response(text, "stop" if text.endswith(tuple(environment.stop)) else "eos")
                for text in responses
            )
            transcripts[f"demonstration.{number}:{name}"] = Transcripts(tasks[name], (said,))
        groups = self.rollout.replay(transcripts)
        played = [group for group in groups if group.trajectories]
        if len(played) < len(groups):
            lost = [number for number, group in enumerate(groups, 1) if not group.trajectories]
            told = (
                f"{self.path}:{lost[0]}: the episode does not end with its last response, or the "
                "tokenizer or the limits of the "
                f"rollout do not allow it; so it is with {len(lost)} of {len(groups)}"
            )
            if not played:
                raise DataError(f"{told}. Record them with this environment.")
            logger.warning("%s; going on without", told)
        return played


def _rows(path: Path) -> list[tuple[str, list[str]]]:
    """(task id, responses) of every line. Raises DataError."""
    try:
        rows = read_json_lines(path)
    except CheckpointError as error:
        raise DataError(f"filter demonstrations: path: {error}") from None
    found = []
    for number, row in enumerate(rows, 1):
        try:
            name, responses = row["task_id"], [turn["response"] for turn in row["turns"]]
        except (KeyError, TypeError):
            name, responses = None, []
        if (
            not isinstance(name, str)
            or not responses
            or not all(isinstance(text, str) for text in responses)
        ):
            raise DataError(
                f'{path}:{number}: expected {{"task_id": ..., "turns": [{{"response": ...}}, '
                f"...]}}, found {str(row)[:80]!r}."
            )
        found.append((name, responses))
    if not found:
        raise DataError(
            f"filter demonstrations: path: {path} holds no episode, expected one or more."
        )
    return found
