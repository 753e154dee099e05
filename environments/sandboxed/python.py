"""Functions that a policy writes in Python, scored by cases that it does not see."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlflow.environment import Environment
from rlflow.errors import ConfigError
from rlflow.report.metrics import Metric
from rlflow.types import Episode, Step, Task
from rlflow.values import PositiveInt
from rlflow_environments.common.blocks import blocks
from rlflow_environments.common.threads import EpisodePlaces
from rlflow_environments.sandbox import Limits, ProgramResult, Sandbox, make_confines
from rlflow_environments.sandbox.bubblewrap import Confinement
from rlflow_environments.sandboxed.tasks import TRANSFORMATIONS, made_tasks

HARNESS = (Path(__file__).parent / "harness.py").read_text(encoding="utf-8")
MOST_JUDGED = 8_192  # answers whose score is remembered
NEITHER = "Write <python>program</python> or <answer>program</answer>.\n"
WRONG = "Wrong on {wrong} of {cases} cases.\n"


class PythonPrograms(Environment):
    """A policy tries programs (`<python>...</python>`: what they print is the observation) and
    gives the function that is asked for (`<answer>...</answer>`). The reward is 1 where it is right
    on every held-out case, else 0.

    A program's own failure is an observation; a sandbox that fails by no fault of its program
    aborts the episode. The same answer to the same task is run once."""

    stop = ("</python>", "</answer>")
    harmless_options = ("depth", "tasks_per_split", "examples", "tries", "kept", "seed")
    metrics = {
        "solved": Metric("share", "of functions that were right on all held-out cases", score=True),
        "cases_passed": Metric("share", "of the held-out cases"),
        "programs": Metric("per episode", "programs that it tried"),
        "failed_programs": Metric("per episode", "programs and answers that raised or were killed"),
        "limits_reached": Metric("per episode", "programs and answers that a limit ended"),
        "program_s": Metric("s", "of its programs and answers, from start to end"),
    }

    def __init__(
        self,
        depth: PositiveInt = 2,
        tasks_per_split: PositiveInt = 512,
        examples: PositiveInt = 2,
        *,
        tries: PositiveInt = 1,
        kept: bool = False,
        limits: dict[str, Any] | None = None,
        confinement: Confinement = "bubblewrap",
        at_once: PositiveInt | None = None,
        seed: int = 0,
    ) -> None:
        """depth: steps of a made rule. examples: cases in the prompt. tries: answers of an
        episode. kept: the names of one tried program are there in the next. limits: of each
        program. at_once: programs that run at the same time; none: two per processor. Raises
        ConfigError, SandboxError."""
        if depth > len(TRANSFORMATIONS):
            raise ConfigError(
                f"environment.depth: expected at most {len(TRANSFORMATIONS)}, found {depth}."
            )
        defaults = Limits(timeout_s=10.0, memory_mb=512, processes=16)
        self._confines = make_confines(limits, defaults, confinement)
        self._tasks = {
            split: made_tasks(split, tasks_per_split, depth, examples, seed)
            for split in ("train", "val")
        }
        self._tries, self._kept = tries, kept
        self._places = EpisodePlaces(at_once)
        self._judged: OrderedDict[tuple[str, str], tuple[list[bool], ProgramResult]] = OrderedDict()

    def tasks(self, split: str) -> Sequence[Task]:
        return self._tasks.get(split, [])

    async def reset(self, task: Task) -> Episode:
        counts = dict.fromkeys(self.metrics, 0.0)
        return Episode(task, scratch={"counts": counts, "answers": 0, "box": None})

    async def step(self, episode: Episode, response: str) -> Step:
        answers, programs = blocks("answer", response), blocks("python", response)
        if answers:
            return await self._answer(episode, source_of(answers[-1]))
        if not programs:
            return Step(NEITHER, metrics=dict(episode.scratch["counts"]))
        result = await self._try(episode, source_of(programs[-1]))
        self._count(episode, result)
        episode.scratch["counts"]["programs"] += 1
        return Step(result.told(), metrics=dict(episode.scratch["counts"]))

    async def close(self, episode: Episode) -> None:
        if episode.scratch["box"] is not None:
            await episode.scratch["box"].close()

    async def _try(self, episode: Episode, source: str) -> ProgramResult:
        """What came of a program in the episode's own sandbox."""
        async with self._places.here():
            box = episode.scratch["box"]
            if box is None or box.ended:
                box = episode.scratch["box"] = Sandbox(self._confines)
                await box.open()
            return await (box.cell(source) if self._kept else box.python(source))

    async def _answer(self, episode: Episode, source: str) -> Step:
        key, state = (episode.task.id, source), episode.scratch
        judged = self._judged.get(key)
        if judged is None:
            judged = await self._judge(episode.task, source)
            if not judged[1].limit:  # which another try may not reach
                self._judged[key] = judged
        if len(self._judged) > MOST_JUDGED:
            self._judged.popitem(last=False)
        passed, result = judged
        self._count(episode, result)
        state["answers"] += 1
        solved = all(passed)
        state["counts"] |= {"solved": float(solved), "cases_passed": sum(passed) / len(passed)}
        said = result.stderr[-2_000:]
        said += "" if solved else WRONG.format(wrong=len(passed) - sum(passed), cases=len(passed))
        said += f"[{result.ending}]\n" if result.ending else ""
        ended = solved or state["answers"] >= self._tries
        return Step(said, float(solved), ended, dict(state["counts"]))

    async def _judge(self, task: Task, source: str) -> tuple[list[bool], ProgramResult]:
        """Which held-out cases the function passes, in a sandbox of its own; and how it ended."""
        cases = task.metadata["cases"]
        asked = [task.metadata["function"], [arguments for arguments, _ in cases]]
        files = {"answer.py": source, "harness.py": HARNESS}
        async with self._places.here(), Sandbox(self._confines) as box:
            result = await box.run(
                [sys.executable, "-I", "harness.py"], json.dumps(asked), files=files
            )
        expected = [json.dumps(wanted) for _, wanted in cases]
        return _passed(result.stdout, expected), result

    def _count(self, episode: Episode, result: ProgramResult) -> None:
        counts = episode.scratch["counts"]
        counts["program_s"] += result.duration_s
        counts["failed_programs"] += not result.succeeded
        counts["limits_reached"] += bool(result.limit)


def source_of(text: str) -> str:
    """The program between tags, without the fence that models put around it."""
    lines = text.strip("\n").split("\n")
    if len(lines) > 1 and lines[0].startswith("```") and lines[-1].strip() == "```":
        lines = lines[1:-1]
    return "\n".join(lines) + "\n"


def _passed(stdout: str, expected: Sequence[str]) -> list[bool]:
    """Which results are those expected: compared as JSON, so that true is not 1."""
    try:
        found = json.loads(stdout)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or len(found) != len(expected):
        return [False] * len(expected)
    return [one == wanted for one, wanted in zip(found, expected, strict=True)]
