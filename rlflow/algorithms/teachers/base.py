"""What a teacher is: the log-probs of the tokens that the policy sampled, by another model or under
another prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlflow.algorithms.teachers.prompt import PromptTemplate, moved
from rlflow.errors import ConfigError, RLFlowError
from rlflow.types import TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS, Batch, Task

if TYPE_CHECKING:
    from rlflow.rollout.tokenizer import Tokenizer
    from rlflow.trainer.base import Trainer

NAME = "teacher"
"""Of the frozen model or the snapshot that a trainer scores with."""


@dataclass(frozen=True)
class Classroom:
    """What a teacher works with. prompt_tokens: the ids that an episode of a task starts with.
    model_path: of the policy. temperature: of the rollout."""

    trainer: Trainer
    tokenizer: Tokenizer
    prompt_tokens: Callable[[Task], list[int]]
    temperature: float


class Teacher(ABC):
    """Fills `Batch.teacher_logprobs`, and with `top_k` the teacher's likeliest tokens in the place
    of each.

    prompt: a template of the prompt that the teacher sees in place of the policy's
    (`PromptTemplate`): a demonstration, the answer, advice. The policy never sees it; what the
    policy said is scored as if it had been said under that prompt."""

    room: Classroom

    frozen: bool = True
    """Whether it says the same of a row whenever it is asked, and however often."""

    def __init__(self, top_k: int, prompt: str | None) -> None:
        self.top_k = top_k
        self.prompt = None if prompt is None else PromptTemplate(prompt)

    def open(self, room: Classroom) -> None:
        """Called once, when trainer and tokenizer are there. Raises ConfigError where it cannot
        teach this policy."""
        self.room = room

    @abstractmethod
    def score(self, batch: Batch) -> dict[str, Tensor]:
        """`logprobs` (B, T) of the tokens at the rows' temperatures; with `top_k` also `top_ids`
        and `top_logprobs` (B, T, k). Called once per step."""

    def fill(self, batch: Batch, tasks: Sequence[Task]) -> Batch:
        """The batch with the teacher's columns. tasks: of each trajectory.

        Raises DataError where a task lacks what the prompt template names, RLFlowError where the
        teacher cannot answer."""
        if self.prompt is None:
            scores = self.score(batch)
        else:
            owners = [tasks[index] for index in batch.require("trajectory", "teacher").tolist()]
            prompts = [
                (self.room.prompt_tokens(task), self.prompt.tokens(task, self.room))
                for task in owners
            ]
            seen, back = moved(batch, prompts)
            scores = {name: back(values) for name, values in self.score(seen).items()}
        wrong = batch.loss_mask & ~torch.isfinite(scores["logprobs"])
        if bool(wrong.any()):
            raise RLFlowError(
                f"teacher: {int(wrong.sum())} of {int(batch.loss_mask.sum())} log-probs are not finite; it gives no probability "
                "to what the policy says, or its weights are damaged."
            )
        extras = (
            {TEACHER_TOP_IDS: scores["top_ids"], TEACHER_TOP_LOGPROBS: scores["top_logprobs"]}
            if self.top_k
            else {}
        )
        return batch.replace(teacher_logprobs=scores["logprobs"], extras=extras)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run compares or restores; a frozen model itself is no part of a
        checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`. Raises CheckpointError where the teacher is another one."""

    def close(self) -> None:
        """Frees what `open` took."""


def check_teacher(teacher: Teacher | None, needs: frozenset[str]) -> None:
    """Raises ConfigError where the parts of an algorithm and its teacher do not go together."""
    wants = needs & {"teacher", "top_logprobs"}
    if wants and teacher is None:
        raise ConfigError(
            "algorithm.teacher: a part needs a teacher, found none; set algorithm.teacher to {name: model, path: DIRECTORY}, "
            "{name: server, url: ..., model: ...} or {name: policy, prompt: TEMPLATE}."
        )
    if teacher is not None and not wants:
        raise ConfigError(
            "algorithm.teacher: no part of the algorithm learns from it; add the advantage opd, or remove it."
        )
    if teacher is not None and "top_logprobs" in wants and not teacher.top_k:
        raise ConfigError(
            "algorithm.teacher.top_k: a loss needs the teacher's likeliest tokens; set it above 0, e.g. 16."
        )
    if teacher is not None and teacher.top_k and "top_logprobs" not in wants:
        raise ConfigError(
            "algorithm.teacher.top_k: no loss uses the teacher's likeliest tokens; leave it out."
        )
