"""Programs to choose from that take their time, and a program to be written whose stages run one after another."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from experiments.small_run import SmallTask
from rlflow import Episode, Step, Task
from rlflow.report.metrics import Metric

CHOICE, SCRIPT = f"{__name__}:Choice", f"{__name__}:Script"
FAILURE = -10.0
QUICK, SLOW, BROKEN = "q", "s", "x"
SECONDS = {QUICK: 0.02, SLOW: 0.2, BROKEN: 0.02}
SCORES = {QUICK: 0.6, SLOW: 0.9, BROKEN: FAILURE}
STAGES = {"i": "imported", "l": "loaded", "b": "built", "t": "trained", "p": "predicted"}
COMMANDS = "".join(STAGES) + "xyz"


class Choice(SmallTask):
    """One response names the program that is run, in real seconds: quick and poor, slow and good, or broken."""

    characters = "?" + "".join(SECONDS)

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task("choice", "?")]

    def answer(self, episode: Episode, response: str) -> Step:
        return Step(reward=SCORES[response if response in SECONDS else BROKEN], terminated=True)

    async def step(self, episode: Episode, response: str) -> Step:
        await asyncio.sleep(SECONDS[response if response in SECONDS else BROKEN])
        return self.answer(episode, response)


class Script(SmallTask):
    """One response of five commands is run until one of them is not the stage that comes next; the output says which stages were
    done. All five are a result, worth 0.8."""

    characters = "?" + COMMANDS
    metrics = {"result": Metric("share", "of scripts that ran to their end", score=True)}

    def __init__(self) -> None:
        super().__init__()
        self.stop = ()  # a response is as long as it may be

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task("script", "?")]

    def answer(self, episode: Episode, response: str) -> Step:
        done = 0
        while done < len(STAGES) and response[done : done + 1] == "".join(STAGES)[done]:
            done += 1
        output = " ".join(list(STAGES.values())[:done])
        result = float(done == len(STAGES))
        return Step(output, reward=0.8 * result, terminated=True, metrics={"result": result})

    def write_anything(self, seen: str, draw: random.Random) -> str:
        """Five commands at random."""
        return "".join(draw.choice(COMMANDS) for _ in STAGES)
