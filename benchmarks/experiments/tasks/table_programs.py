"""Two real programs to choose from, which learn from a table in a sandbox: a quick and poor one, a slow and good one."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.small_run import SmallTask
from experiments.tasks.programs import BROKEN, QUICK, SLOW
from rlflow import Episode, Step, Task
from rlflow_environments.sandboxed.learner import MEAN, NEAREST, READ, WRITE
from rlflow_environments.sandboxed.ml_engineering import MlEngineering

CHOICE = f"{__name__}:TablePrograms"
RULE = "wave"
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
PROGRAMS = {QUICK: ONE_FEATURE, SLOW: READ + SEARCH + NEAREST + MEAN + WRITE, BROKEN: "raise SystemExit(1)\n"}


class TablePrograms(SmallTask):
    """One response names the program that is run on the table; the reward is its score."""

    characters = "?" + QUICK + SLOW + BROKEN

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._world = MlEngineering([RULE], 1, at_once=64, seed=seed)

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task("choice", "?", metadata=self._world.tasks(split)[0].metadata)]

    def answer(self, episode: Episode, response: str) -> Step:
        return Step(terminated=True)  # of demonstrations, whose programs need not run

    async def step(self, episode: Episode, response: str) -> Step:
        inner = await self._world.reset(episode.task)
        source = PROGRAMS.get(response, PROGRAMS[BROKEN])
        done = await self._world.step(inner, f"<python>\n{source}</python>")
        return Step(reward=done.reward, terminated=True, waited_s=done.waited_s)
