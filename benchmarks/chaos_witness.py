"""Witnesses of what a run under `chaos.py` plays and trains: files that the run itself knows nothing of.

The environment gives each episode a number, which travels as a named reward that no method reads, and writes a line when it
closes the episode; a loss, always 0, writes a line per row that an optimizer step is made from. Both append and fsync."""

from __future__ import annotations

import json
import os
import secrets
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlflow.report.records import read_trajectories
from rlflow.run.directory import RunDirectory
from rlflow.types import NAMED_REWARD, Batch, Episode, Loss, LossResult, PolicyOutput, Step

FOLDER, SESSION = "CHAOS_WITNESS", "CHAOS_SESSION"
"""Variables of the environment: where witnesses write, and how many times the run was started before."""
REWARD = "witness"
PLAYED, TRAINED = "played.jsonl", "trained.jsonl"


def testify(name: str, facts: Sequence[dict[str, Any]]) -> None:
    """Appends a line per fact, all or none of them, and brings them to disk."""
    if not facts or FOLDER not in os.environ:
        return
    session = int(os.environ.get(SESSION, "0"))
    text = "".join(json.dumps({"session": session, **fact}) + "\n" for fact in facts)
    file = os.open(Path(os.environ[FOLDER]) / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, text.encode())
        os.fsync(file)
    finally:
        os.close(file)


def numbered(episode: Episode, step: Step) -> Step:
    """The step with the episode's number, drawn here at its first turn."""
    if episode.turns > 1:
        return step
    episode.scratch[REWARD] = secrets.randbits(52)  # exact as a double
    return replace(step, rewards={**step.rewards, REWARD: float(episode.scratch[REWARD])})


def closed(episode: Episode) -> None:
    """To be called by `close`."""
    if REWARD in episode.scratch:
        testify(
            PLAYED,
            [{"number": episode.scratch[REWARD], "task": episode.task.id, "turns": episode.turns}],
        )


class TrainedRows(Loss):
    """0 everywhere; tells of each row that a gradient is made from."""

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        numbers = batch.extras.get(NAMED_REWARD + REWARD)
        steps, turns = batch.require("trainer_version", "witness"), batch.require("turn", "witness")
        if numbers is not None:
            rows = zip(
                numbers.tolist(), steps.tolist(), (turns.amax(dim=1) + 1).tolist(), strict=True
            )
            testify(
                TRAINED,
                [
                    {"number": int(one), "step": step + 1, "turns": count}
                    for one, step, count in rows
                    if one
                ],
            )
        return output.logprobs * 0.0, {}


@dataclass(frozen=True)
class Testimony:
    """played: {number of an episode: (task, turns)}; trained: {step: {number: turns}}, by the last session that trained it."""

    played: dict[int, tuple[str, int]]
    trained: dict[int, dict[int, int]]
    sessions: int  # of which some step survived
    forgotten: int  # trained by sessions whose step another one trained again

    @property
    def turns(self) -> list[int]:
        """Of every trained episode."""
        return [turns for step in self.trained.values() for turns in step.values()]


def read(folder: Path) -> Testimony:
    """What the witnesses in the folder have written. Raises ValueError for an episode that was closed twice."""
    played: dict[int, tuple[str, int]] = {}
    for line in _lines(folder / PLAYED):
        if line["number"] in played:
            raise ValueError(f"episode {line['number']} was played twice")
        played[line["number"]] = line["task"], line["turns"]
    by_step: dict[int, dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    for line in _lines(folder / TRAINED):
        rows = by_step[line["step"]][line["session"]]
        rows[line["number"]] = max(line["turns"], rows.get(line["number"], 0))
    last = {step: max(sessions) for step, sessions in by_step.items()}
    lost = sum(
        len(rows)
        for step, sessions in by_step.items()
        for one, rows in sessions.items()
        if one != last[step]
    )
    trained = {step: by_step[step][session] for step, session in sorted(last.items())}
    return Testimony(played, trained, len(set(last.values())), lost)


def contradictions(
    found: Testimony, run: RunDirectory, steps: int, expected: int, samples: int
) -> Iterator[str]:
    """What the witnesses say against the run. expected: attempts of a step; samples: of a task."""
    if sorted(found.trained) != list(range(1, steps + 1)):
        yield f"witnesses: expected the steps 1 to {steps} trained, found {len(found.trained)} of them"
    twice = [
        number
        for number, times in Counter(n for rows in found.trained.values() for n in rows).items()
        if times > 1
    ]
    if twice:
        yield f"witnesses: {len(twice)} episodes were trained by two steps"
    aborted = Counter[str]()
    for step, rows in found.trained.items():
        records = read_trajectories(run.trajectories(step))
        told = {int(one["rewards"][REWARD]) for one in records if one["stop"] != "aborted"}
        aborted.update(one["task_id"] for one in records if one["stop"] == "aborted")
        gone = sum(one["stop"] == "aborted" for one in records)
        if told != set(rows) or len(rows) + gone != expected:
            yield (f"witnesses: step {step} trained {len(rows)} episodes and left out {gone} that were aborted, expected "
                   f"{expected}; {len(told ^ set(rows))} are not those that the run wrote down")  # fmt: skip
        wrong = [
            number
            for number, turns in rows.items()
            if found.played.get(number, ("", 0))[1] != turns
        ]
        if wrong:
            yield f"witnesses: {len(wrong)} episodes of step {step} were never played, or with other turns"
    tasks = aborted + Counter(
        found.played[n][0] for rows in found.trained.values() for n in rows if n in found.played
    )
    if tasks and max(tasks.values()) - min(tasks.values()) > 2 * samples:
        yield f"witnesses: a task was trained {max(tasks.values())} times, another one {min(tasks.values())} times"
    lines = [one["step"] for one in _lines(run.metrics) if "train/loss" in one]
    if lines != list(range(1, steps + 1)):
        yield f"metrics.jsonl: expected one record of each step in order, found {len(lines)} of {len(set(lines))} steps"


def _lines(path: Path) -> list[dict[str, Any]]:
    """A kill may have cut the last line of a file of which the next session went on behind it: an append is one write."""
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if path.is_file()
        else []
    )
