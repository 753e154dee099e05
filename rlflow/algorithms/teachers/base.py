"""Teachers: the log-probs of sampled tokens by another model or under another prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlflow.algorithms.teachers.classroom import Classroom
from rlflow.algorithms.teachers.prompt import PromptTemplate, moved
from rlflow.errors import ConfigError, RLFlowError
from rlflow.types import TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS, Batch, Task

NAME = "teacher"
"""Of the frozen model or the snapshot that a trainer scores with."""


class Teacher(ABC):
    """Fills `Batch.teacher_logprobs`, and with `top_k` the likeliest tokens in place of each.

    prompt: a template (`PromptTemplate`) of the prompt that the teacher sees in place of the
    policy's: a demonstration, the answer, advice."""

    room: Classroom

    frozen: bool = True
    """Whether it says the same of a row whenever it is asked, and however often."""

    def __init__(self, top_k: int, prompt: str | None) -> None:
        self.top_k = top_k
        self.template = None if prompt is None else PromptTemplate(prompt)

    def open(self, room: Classroom) -> None:
        """Called once with trainer and tokenizer. Raises ConfigError if it cannot teach them."""
        self.room = room

    @abstractmethod
    def score(self, batch: Batch) -> dict[str, Tensor]:
        """`logprobs` (B, T) of the tokens at the rows' temperatures; with `top_k` also `top_ids`
        and `top_logprobs` (B, T, k). Called once per step."""

    def fill(self, batch: Batch, tasks: Sequence[Task]) -> Batch:
        """The batch with the teacher's columns. tasks: of each trajectory.

        Raises DataError where a task lacks what the prompt template names, RLFlowError where the
        teacher cannot answer."""
        if self.template is None:
            scores = self.score(batch.replace(wanted=batch.trained))
        else:
            owners = [tasks[index] for index in batch.require("trajectory", "teacher").tolist()]
            prompts = [
                (self.room.prompt_tokens(task), self.template.tokens(task, self.room))
                for task in owners
            ]
            seen, back = moved(batch, prompts)
            scores = {name: back(values) for name, values in self.score(seen).items()}
        wrong = batch.loss_mask & ~torch.isfinite(scores["logprobs"])
        if bool(wrong.any()):
            raise RLFlowError(
                f"teacher: {int(wrong.sum())} of {int(batch.loss_mask.sum())} log-probs are not "
                "finite; it gives no probability to what the policy says, or its weights are "
                "damaged."
            )
        extras = {}
        if self.top_k:
            extras[TEACHER_TOP_IDS] = scores["top_ids"]
            extras[TEACHER_TOP_LOGPROBS] = scores["top_logprobs"]
        return batch.replace(teacher_logprobs=scores["logprobs"], extras=extras)

    def state_dict(self) -> dict[str, Any]:
        """The state to compare or restore; a frozen model itself is not in checkpoints."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`. Raises CheckpointError where the teacher is another one."""

    def close(self) -> None:
        """Frees what `open` took."""


def check_teacher(teacher: Teacher | None, needs: frozenset[str]) -> None:
    """Raises ConfigError where the parts of an algorithm and its teacher do not go together."""
    wants, where = needs & {"teacher", "top_logprobs"}, "algorithm.teacher"
    if teacher is None:
        if wants:
            raise ConfigError(
                f"{where}: a part needs a teacher, found none; set algorithm.teacher to "
                "{name: model, path: DIRECTORY}, {name: server, url: ..., model: ...} or "
                "{name: policy, prompt: TEMPLATE}."
            )
        return
    if not wants:
        raise ConfigError(
            f"{where}: no part of the algorithm learns from it; add the advantage opd, or "
            "remove it."
        )
    top, tokens = "top_logprobs" in wants, "the teacher's likeliest tokens"
    if top and not teacher.top_k:
        raise ConfigError(f"{where}.top_k: a loss needs {tokens}; set it above 0, e.g. 16.")
    if teacher.top_k and not top:
        raise ConfigError(f"{where}.top_k: no loss uses {tokens}; leave it out.")
