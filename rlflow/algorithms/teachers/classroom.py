"""What a teacher is given to work with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlflow.types import Task

if TYPE_CHECKING:
    from rlflow.rollout.tokenizer import Tokenizer
    from rlflow.trainer.base import Trainer


@dataclass(frozen=True)
class Classroom:
    """A teacher's tools. prompt_tokens: the ids that a task's episode starts with. temperature: of
    the rollout."""

    trainer: Trainer
    tokenizer: Tokenizer
    prompt_tokens: Callable[[Task], list[int]]
    temperature: float
