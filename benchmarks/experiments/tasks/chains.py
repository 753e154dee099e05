"""Questions in several hops: each page names the next one, and the last one is the answer."""

from __future__ import annotations

import random
from collections.abc import Sequence

from experiments.small_run import SmallTask
from rlflow import Episode, Step, Task
from rlflow.report.metrics import Metric

REFERENCE = f"{__name__}:Chains"
ENTITIES = "abcdefghijkl"
MOST_HOPS = 8
ON, LAST, NOTHING = ">", ".", "-"
"""Before the entity that a page names: one that leads on, the last one. Of a page that is not on the way: nothing."""
LOOK_UP, ANSWER = "s", "="


class Chains(SmallTask):
    """`>a` asks where the way from a ends. `sa` looks a up: `>c` says that it goes on at c, `.c` that it ends there. `=c`
    answers, and ends the episode: 1 if right, else 0. A question of h hops takes h look-ups and an answer."""

    characters = ENTITIES + ON + LAST + NOTHING + "?" + LOOK_UP + ANSWER
    metrics = {
        "exact_match": Metric("share", "of questions answered right", score=True, shown="EM {:.2f}")
    }

    def __init__(self, turns: int = 12, seed: int = 0, hops: int = MOST_HOPS) -> None:
        super().__init__()
        self.stop = tuple(ENTITIES)
        self.max_turns = turns
        self._seed, self._hops = seed, hops

    def tasks(self, split: str) -> Sequence[Task]:
        draw, found = random.Random(f"{self._seed}/{split}"), []
        for number in range(256):
            hops = 1 + number % self._hops
            way = "".join(draw.sample(ENTITIES, hops + 1))
            found.append(Task(f"{split}{number}", ON + way[0], way, {"hops": hops}))
        return found

    def answer(self, episode: Episode, response: str) -> Step:
        way: str = episode.task.answer
        verb, entity = response[:1], response[1:]
        if verb == ANSWER:
            right = float(entity == way[-1])
            return Step(reward=right, terminated=True, metrics={"exact_match": right})
        place = way.find(entity) if verb == LOOK_UP and entity else -1
        if not 0 <= place < len(way) - 1:
            return Step(f"{NOTHING}{entity if entity in ENTITIES and entity else '?'}")
        return Step(f"{LAST if place == len(way) - 2 else ON}{way[place + 1]}")

    def follow(self, seen: str, draw: random.Random) -> str:
        """What a policy does that knows how to name what it was shown, and not when to answer."""
        return draw.choice(LOOK_UP + ANSWER) + seen[-1]
