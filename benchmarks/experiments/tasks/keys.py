"""A task of pressing the right keys in the right order, where only the end tells."""

from __future__ import annotations

import random
from collections.abc import Sequence

from experiments.small_run import SmallTask
from rlflow import Episode, Step, Task
from rlflow.report.metrics import Metric

REFERENCE = f"{__name__}:Keys"
NAMES = "ABCDEFGHIJKLMNOPQRSTUVWX"
DIGITS = "123456789"
LOST = "~"
"""The environment's answer to a press that it lost."""


class Keys(SmallTask):
    """Each task has a sequence of keys of its own; all pressed in order is worth 1, all else 0, and a response that is no key
    takes 0.5 off. After each press the environment says how many there were, and not whether it was right.

    lengths: of the sequences, task by task. keys: how many there are to choose from. flaky: the share of presses that are
    lost, which the environment says; an episode ends after two of them more than its sequence is long. wander: turns for which an
    attempt that went wrong goes on, at most nine keys of which are told apart; 0: it ends with as many as its sequence has.
    """

    characters = NAMES + DIGITS + LOST + "abcdefgh"
    metrics = {
        "success": Metric(
            "share", "of episodes with the right sequence", score=True, shown="{:.2f}"
        ),
        "success_short": Metric("share", "of episodes of the shortest sequences"),
        "success_long": Metric("share", "of episodes of the longest sequences"),
    }

    def __init__(
        self,
        lengths: Sequence[int] = (2,),
        keys: int = 4,
        flaky: float = 0.0,
        seed: int = 0,
        wander: int = 0,
    ) -> None:
        super().__init__()
        draw = random.Random(f"{seed}/keys")
        self._flaky, self._draw = flaky, random.Random(f"{seed}/lost")
        self._shortest, self._longest = min(lengths), max(lengths)
        self.keys = self.characters[-8:][:keys]
        self._wander = wander
        self.max_turns = wander or self._longest + (2 if flaky else 0)
        sequences = ["".join(draw.choice(self.keys) for _ in range(length)) for length in lengths]
        self._tasks = [
            Task(name, name, sequence) for name, sequence in zip(NAMES, sequences, strict=False)
        ]

    def tasks(self, split: str) -> Sequence[Task]:
        return self._tasks

    def answer(self, episode: Episode, response: str) -> Step:
        pressed: str = episode.scratch.get("pressed", "")
        right: str = episode.task.answer
        lost = self._flaky > 0 and self._draw.random() < self._flaky
        if not lost:
            pressed = episode.scratch["pressed"] = pressed + (
                response if response in self.keys and response else "?"
            )
        over = len(pressed) == len(right) or episode.turns == len(right) + (2 if self._flaky else 0)
        if self._wander:
            over = pressed == right or episode.turns >= self._wander
        if not over:
            return Step(LOST if lost else DIGITS[min(len(pressed), len(DIGITS)) - 1])
        success = float(pressed == right)
        metrics = {"success": success}
        metrics |= {"success_short": success} if len(right) == self._shortest else {}
        metrics |= {"success_long": success} if len(right) == self._longest else {}
        return Step(reward=success - 0.5 * ("?" in pressed), terminated=True, metrics=metrics)

    def press_any(self, seen: str, draw: random.Random) -> str:
        """What a policy does that knows the keys and nothing else."""
        return draw.choice(self.keys)
