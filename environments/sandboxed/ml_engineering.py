"""Programs that learn from a table and predict, scored by targets that they never see.

Source: RL for machine-learning-engineering agents, arXiv 2509.01684, whose tasks are Kaggle's; here
tables are made by rule."""

from __future__ import annotations

import dataclasses
import math
import secrets
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.environment import Environment
from rlflow.report.metrics import Metric
from rlflow.types import Episode, Step, Task
from rlflow.values import PositiveInt
from rlflow_environments.common.blocks import blocks
from rlflow_environments.common.choices import chosen
from rlflow_environments.common.judge import make_judge
from rlflow_environments.common.threads import EpisodePlaces
from rlflow_environments.sandbox import Limits, ProgramResult, Sandbox, make_confines
from rlflow_environments.sandbox.bubblewrap import Confinement
from rlflow_environments.sandboxed import stages
from rlflow_environments.sandboxed.python import source_of
from rlflow_environments.sandboxed.tables import (
    FEATURES,
    RULES,
    TEST_ROWS,
    TRAIN_ROWS,
    MadeTable,
    made_table,
)

PREDICTIONS = "predictions.csv"
RULE_NAMES = tuple(rule.name for rule in RULES)
NEITHER = "Write <python>program</python>.\n"
PROMPT = (
    "train.csv has {rows} rows of {features} numbers, x1 to x{features}, and the target y, {kind}. "
    "test.csv has {hidden} rows without y. Write a Python program that learns y and writes "
    "predictions.csv: {hidden} lines, one {one} each, in the order of test.csv. It has numpy and "
    "{limit_s:g} s. Score: {score}.\n<python>program</python>\n"
)
KINDS = {
    False: ("a number", "number", "R^2"),
    True: ("a class (a whole number)", "class", "right ones beyond the most frequent class"),
}


class MlEngineering(Environment):
    """A policy writes programs that learn from train.csv; the return is the best score of their
    predictions, 0 to 1. Sandbox and program never hold the targets.

    Each program runs in a sandbox of its own, and print statements that are inserted tell which
    stages it completed: `[stage loaded]` and so on, for the wrapper `stages`. A turn lasts as long
    as its program: the wait for a place to run does not count."""

    stop = ("</python>",)
    harmless_options = ("rules", "tasks_per_split", "tries", "seed")
    metrics = {
        "score": Metric("1", "best of the episode's predictions, 0 to 1", score=True),
        "valid": Metric("share", "of episodes with predictions that can be scored"),
        "stages": Metric("per episode", "most stages that one of its programs completed"),
        "failed_programs": Metric("per episode", "programs that raised or were killed"),
        "limits_reached": Metric("per episode", "programs that a limit ended"),
        "program_s": Metric("s", "of its programs, from start to end"),
    }

    def __init__(
        self,
        rules: Sequence[str] = RULE_NAMES,
        tasks_per_split: PositiveInt = 256,
        *,
        tries: PositiveInt = 1,
        instrumenter: Mapping[str, Any] | None = None,
        limits: dict[str, Any] | None = None,
        confinement: Confinement = "bubblewrap",
        at_once: PositiveInt | None = None,
        seed: int = 0,
    ) -> None:
        """rules: of the tables. tries: programs of an episode. instrumenter: a model (url, model
        and further options of JudgeEndpoint) that inserts the print statements; none: patterns do.
        limits: of each program. at_once: programs that run at the same time; none: two per
        processor. seed: of the tables, which whoever knows it and this code can make again: where
        that matters, one that nobody guesses. Raises ConfigError, SandboxError."""
        rules = chosen(rules, RULE_NAMES, "environment.rules", "rule")
        defaults = Limits(timeout_s=60.0, memory_mb=1024, processes=32)
        self._confines = make_confines(limits, defaults, confinement)
        limit_s = self._confines.limits.timeout_s
        self._model = make_judge(instrumenter, "environment.instrumenter") if instrumenter else None
        self._tasks = {
            split: [
                _task(f"{split}-{at}", rules[at % len(rules)], seed, limit_s)
                for at in range(tasks_per_split)
            ]
            for split in ("train", "val")
        }
        self._tries = tries
        self._places = EpisodePlaces(at_once)

    def tasks(self, split: str) -> Sequence[Task]:
        return self._tasks.get(split, [])

    async def reset(self, task: Task) -> Episode:
        counts = dict.fromkeys(self.metrics, 0.0)
        return Episode(task, scratch={"counts": counts, "tries": 0})

    async def step(self, episode: Episode, response: str) -> Step:
        state, programs = episode.scratch, blocks("python", response)
        state["tries"] += 1
        ended = state["tries"] >= self._tries
        if not programs:
            return Step(NEITHER, terminated=ended, metrics=dict(state["counts"]))
        source = source_of(programs[-1]).lstrip("\n")
        if self._model is None:
            marks = stages.by_patterns(source)
        else:
            marks = await stages.by_model(source, self._model)
        secret = secrets.token_hex(8)
        program = stages.with_marks(source, marks, secret)
        table = made_table(**episode.task.metadata)
        began = time.monotonic()
        async with self._places.here():
            waited_s = time.monotonic() - began
            result, written = await self._run(table, program)
        shown, reached = stages.reached(result.stdout, secret)
        told = dataclasses.replace(result, stdout=shown).told().replace("[stage ", "(stage ")
        told += "".join(f"[stage {name}]\n" for name in reached)
        score, said = _score(table, written)
        before = state["counts"]["score"]
        _count(state["counts"], result, len(reached), score)
        gained = state["counts"]["score"] - before
        return Step(told + said, gained, ended, dict(state["counts"]), waited_s=waited_s)

    def shutdown(self) -> None:
        if self._model is not None:
            self._model.close()

    async def _run(self, table: MadeTable, program: str) -> tuple[ProgramResult, str | None]:
        """How a program ended, and the predictions of one that succeeded."""
        files = {"train.csv": table.train, "test.csv": table.test}
        async with Sandbox(self._confines) as box:
            result = await box.python(program, files=files)
            if not result.succeeded or box.ended:
                return result, None
            try:
                return result, await box.read(PREDICTIONS)
            except FileNotFoundError:
                return result, None


def _task(name: str, rule: str, seed: int, limit_s: float) -> Task:
    classes = next(one.classes for one in RULES if one.name == rule)
    kind, one, score = KINDS[classes]
    prompt = PROMPT.format(
        rows=TRAIN_ROWS,
        features=FEATURES,
        hidden=TEST_ROWS,
        kind=kind,
        one=one,
        score=score,
        limit_s=limit_s,
    )
    metadata = {"rule": rule, "seed": zlib.crc32(f"{seed}/{name}".encode())}
    return Task(f"{rule}/{name}", prompt, metadata=metadata)


def _score(table: MadeTable, written: str | None) -> tuple[float | None, str]:
    """The score of predictions, None where they are none; and what the policy is told."""
    if written is None:
        return None, f"No {PREDICTIONS} of a program that ended well.\n"
    lines = written.split()
    try:
        found = [float(line) for line in lines]
    except ValueError:
        found = []
    if len(found) != len(table.targets) or not all(map(math.isfinite, found)):
        return None, f"{PREDICTIONS}: expected {len(table.targets)} numbers, found others.\n"
    score = table.score(found)
    return score, f"Score {score:.3f}.\n"


def _count(
    counts: dict[str, float], result: ProgramResult, reached: int, score: float | None
) -> None:
    counts["program_s"] += result.duration_s
    counts["failed_programs"] += not result.succeeded
    counts["limits_reached"] += bool(result.limit)
    counts["stages"] = max(counts["stages"], float(reached))
    if score is not None:
        counts["valid"] = 1.0
        counts["score"] = max(counts["score"], score)
