"""An episode as a reward reads it: one text, the policy's parts told from the environment's."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from rlflow.types import Observation, Task


@dataclass(frozen=True)
class Transcript:
    """An episode. responses: the policy's own text, turn by turn, as `step` gets it;
    observations: what it was shown after each of them ("" after the last)."""

    task: Task
    responses: tuple[str, ...]
    observations: tuple[str, ...] = ()

    @property
    def golds(self) -> list[str]:
        """The gold answers."""
        answer = self.task.answer
        return [answer] if isinstance(answer, str) else list(answer)

    @property
    def model_text(self) -> str:
        """Everything that the policy wrote, and nothing else: the only text that answers are read
        from."""
        return "".join(self.responses)

    @property
    def prompt_text(self) -> str:
        """The prompt as text, whoever's turn it is."""
        return as_text(self.task.prompt)

    @property
    def question(self) -> str:
        """The question alone where the row of the file has it, else the prompt."""
        question = self.task.metadata.get("question")
        return question if isinstance(question, str) else self.prompt_text

    @property
    def whole_text(self) -> str:
        """Responses and observations in their order."""
        turns = zip(self.responses, itertools.chain(self.observations, itertools.repeat("")))
        return "".join(text for turn in turns for text in turn)


def as_text(observation: Observation) -> str:
    """What a prompt or an observation says, without the roles of its messages."""
    if isinstance(observation, str):
        return observation
    return "\n".join(message["content"] for message in observation)
