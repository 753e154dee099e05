"""A way through rooms that only its end rewards; what happens is told in words."""

from __future__ import annotations

import random
from collections.abc import Sequence

from experiments.small_run import SmallTask
from rlflow import Episode, Step, Task
from rlflow.report.metrics import Metric

REFERENCE = f"{__name__}:Rooms"
WINGS = "ABCD"
DIRECTIONS = "nesud"
EXIT = "exit"


class Rooms(SmallTask):
    """Four wings of `rooms` rooms; from each room one of five directions leads on, the others to a wall. 1 for the exit, else 0.
    After each step the environment says `A room 3`, `A wall` or `A exit`."""

    characters = WINGS + DIRECTIONS + " romwalxit123456789"
    metrics = {
        "success": Metric("share", "of episodes that found the exit", score=True, shown="{:.2f}"),
        "rooms": Metric("per episode", "doors that were found"),
    }

    def __init__(self, rooms: int = 6, turns: int = 8, seed: int = 0) -> None:
        super().__init__()
        draw = random.Random(f"{seed}/rooms")
        self.max_turns = turns
        self._tasks = [Task(wing, f"{wing} room 1", [draw.choice(DIRECTIONS) for _ in range(rooms)]) for wing in WINGS]

    def tasks(self, split: str) -> Sequence[Task]:
        return self._tasks

    def answer(self, episode: Episode, response: str) -> Step:
        way: list[str] = episode.task.answer
        found: int = episode.scratch.get("found", 0)
        goes_on = response == way[found]
        found = episode.scratch["found"] = found + goes_on
        over = found == len(way)
        told = f"{episode.task.id} {EXIT if over else f'room {found + 1}' if goes_on else 'wall'}"
        metrics = {"success": float(over), "rooms": float(found)}
        return Step(told, reward=float(over), terminated=over, metrics=metrics)

    def go_anywhere(self, seen: str, draw: random.Random) -> str:
        """What a policy does that knows the directions and nothing else."""
        return draw.choice(DIRECTIONS)
