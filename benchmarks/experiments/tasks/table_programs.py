"""Real programs, which learn from a table in a sandbox: two to choose from, and one to be written part by part."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Sequence

from experiments.small_run import SmallTask
from rlflow import Episode, Step, Task
from rlflow_environments.sandboxed.learner import LINEAR, MEAN, NEAREST, READ, WRITE
from rlflow_environments.sandboxed.ml_engineering import MlEngineering

CHOICE, SCRIPT = f"{__name__}:Choice", f"{__name__}:Script"
QUICK, SLOW, BROKEN = "q", "s", "x"
FOLDS = 12  # times that the slow program looks for the best number of neighbours
SEARCH = f"""for fold in range({FOLDS}):
    inside = np.arange(len(x)) % {FOLDS} != fold
    e = ((x[~inside][:, None] - x[inside][None]) ** 2).sum(2)
    errors = [((y[inside][np.argsort(e, 1)[:, :k]].mean(1) - y[~inside]) ** 2).mean() for k in range(1, 30)]
"""
ONE_FEATURE = """rows = [line.split(",") for line in open("train.csv")][1:]
pairs = [(float(row[1]), float(row[-1])) for row in rows]
slope = sum(x * y for x, y in pairs) / sum(x * x for x, y in pairs)
with open("predictions.csv", "w") as file:
    file.writelines(f"{slope * float(line.split(',')[1])}\\n" for line in list(open("test.csv"))[1:])
"""
PROGRAMS = {
    QUICK: ONE_FEATURE,
    SLOW: READ + SEARCH + NEAREST + MEAN + WRITE,
    BROKEN: "raise SystemExit(1)\n",
}
_IMPORT, _ROWS, _COLUMNS, _TEST = READ.splitlines(keepends=True)
_FIT, _PREDICT = LINEAR.splitlines(keepends=True)
PARTS = {
    "i": _IMPORT, "l": _ROWS + _COLUMNS, "t": _TEST, "f": _FIT, "p": _PREDICT + WRITE,
    "x": "model.fit(x, y)\n", "y": "p = model.predict(t)\n", "z": "x = scale(x)\n",
}  # fmt: skip
"""Letter -> lines of a program; those of the last three raise."""
RIGHT = "iltfp"


class TableTask(SmallTask):
    """A response stands for a program that is run on a table made by `rule`; the reward is its score."""

    def __init__(self, rule: str, seed: int = 0) -> None:
        super().__init__()
        self._world = MlEngineering([rule], 1, at_once=64, seed=seed)
        self.metrics = self._world.metrics

    @abstractmethod
    def program(self, response: str) -> str:
        """What is run."""

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task("program", "?", metadata=self._world.tasks(split)[0].metadata)]

    def answer(self, episode: Episode, response: str) -> Step:
        return Step(terminated=True)  # of demonstrations, whose programs need not run

    async def step(self, episode: Episode, response: str) -> Step:
        inner = await self._world.reset(episode.task)
        return await self._world.step(inner, f"<python>\n{self.program(response)}</python>")


class Choice(TableTask):
    """One response names the program: quick and poor, slow and good, or broken."""

    characters = "?" + QUICK + SLOW + BROKEN

    def __init__(self, seed: int = 0) -> None:
        super().__init__("wave", seed)

    def program(self, response: str) -> str:
        return PROGRAMS.get(response, PROGRAMS[BROKEN])


class Script(TableTask):
    """A response of five letters is a program of five parts."""

    characters = "?" + "".join(PARTS)

    def __init__(self, seed: int = 0) -> None:
        super().__init__("linear", seed)
        self.stop = ()  # a response is as long as it may be

    def program(self, response: str) -> str:
        return "".join(PARTS.get(letter, PARTS["x"]) for letter in response)

    def write_anything(self, seen: str, draw: random.Random) -> str:
        """Parts at random."""
        return "".join(draw.choice(list(PARTS)) for _ in RIGHT)
