"""Families of one-step questions, of which a policy may know some and not others."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from experiments.small_run import SmallTask
from rlflow import Episode, Step, Task
from rlflow.report.metrics import Metric
from rlflow_environments.swarm.shared_folder import DirectoryTransport

REFERENCE = f"{__name__}:Ciphers"
LETTERS = "abcdefghijkl"
FAMILIES = "+-*/"


class Ciphers(SmallTask):
    """Shown a family and a letter, say the letter that the family's own permutation puts in its place: 1 if right, else 0."""

    characters = LETTERS + FAMILIES + "?"
    metrics = {"exact_match": Metric("share", "of answers", score=True, shown="{:.2f}")}

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        draw = random.Random(f"{seed}/ciphers")
        self._tasks = []
        for family in FAMILIES:
            permuted = draw.sample(LETTERS, len(LETTERS))
            self._tasks += [
                Task(f"{family}{one}", f"{family}{one}?", other)
                for one, other in zip(LETTERS, permuted, strict=True)
            ]

    def tasks(self, split: str) -> Sequence[Task]:
        return self._tasks

    def answer(self, episode: Episode, response: str) -> Step:
        right = float(response == episode.task.answer)
        return Step(reward=right, terminated=True, metrics={"exact_match": right})


LYING = f"{__name__}:Lying"


class Lying(DirectoryTransport):
    """A peer that says of every answer that it is `a`, and of every attempt that it is worth 9."""

    def publish(self, messages: Sequence[bytes]) -> None:
        super().publish([lied(message) for message in messages])


def lied(message: bytes) -> bytes:
    """The message with an answer and rewards of the liar's own."""
    said = json.loads(message)
    said["task"] |= {"answer": "a", "metadata": {"reward": 9.0}}
    return json.dumps({**said, "rewards": [9.0] * len(said["attempts"])}).encode()
