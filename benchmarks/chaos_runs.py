"""What `chaos.py` plays, how a run of it is written, and what its checkpoint and files prove."""

from __future__ import annotations

import asyncio
import hashlib
import operator
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from math import exp, sqrt
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rlflow.config.loading import config_text
from rlflow.config.schema import load_config
from rlflow.environment import Environment
from rlflow.report.metrics import Metric
from rlflow.report.records import read_trajectories
from rlflow.report.sinks import read_metrics
from rlflow.run.directory import RunDirectory
from rlflow.storage.files import read_json
from rlflow.types import Episode, Step, Task
from rlflow_environments.search.environment import SearchEnvironment

sys.path.append(str(Path(__file__).resolve().parent))  # a run loads this file by its path
import chaos_witness

ROOT = Path(__file__).resolve().parents[1]
WITNESS = f"{ROOT / 'benchmarks/chaos_witness.py'}:TrainedRows"
TASKS, STALENESS, AHEAD = 60, 3, 2
FAULTS = {
    "game": "{call_s: 4, episode_s: 20, max_aborted_share: 0.5}",
    "search": "{call_s: 20, episode_s: 45, max_aborted_share: 0.5}",
}
"""Deadlines of the environment's calls, and of a worker's answers: short, so that minutes hold many losses; long enough for
the demo's retrieval service to come back."""
LIMITS_S = {"game": 24.0, "search": 65.0}
"""Of both together: a driver that is suspended for longer must not take its episodes as late."""
OUT = "tools_are_out"
"""A file in the witnesses' folder: while it is there every tool fails."""
STALL_S = 15.0
"""In which trainer ranks that do not move are given up."""
SIGNIFICANT = 0.001
SIGMAS = 3.5
"""By which the exact match may fall behind the calm run's."""


async def take_time(episode: Episode) -> None:
    """As long as tools take: mostly little, at times seconds, seldom for ever. Drawn by task, turn and the clock, so that another
    attempt meets another fate."""
    if (Path(os.environ.get(chaos_witness.FOLDER, "/nowhere")) / OUT).exists():
        raise ConnectionError("the tools are out")
    text = f"{episode.task.id}/{episode.turns}/{time.time_ns()}"
    fate = random.Random(hashlib.blake2b(text.encode(), digest_size=8).digest()).random()
    if os.environ.get("CHAOS_CALM") != "1":
        await asyncio.sleep(3600.0 if fate < 0.0005 else 2.0 if fate < 0.01 else 0.3 * fate)


class Pool:
    """A process of the environment's own, as sandboxes have: started by the first call, and again where it was killed."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    async def add(self, one: int, other: int) -> int:
        """The sum, computed there."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        pool = self._pool
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, operator.add, one, other)
        except BrokenProcessPool:
            self._pool = None if self._pool is pool else self._pool
            raise


class Turns(Environment):
    """Tasks of one to six turns, whatever the policy says."""

    stop = (*"abcdef?|",)  # a token with text ends a response
    metrics = {"length": Metric("turns", "that the task has", score=False)}

    def __init__(self) -> None:
        self._pool = Pool()

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(f"{split}-{number}", "a?", 1 + number % 6) for number in range(TASKS)]

    async def step(self, episode: Episode, response: str) -> Step:
        await take_time(episode)
        over = await self._pool.add(episode.turns, -episode.task.answer) >= 0
        step = Step(
            "" if over else "|b?",
            float("a" in response),
            terminated=over,
            metrics={"length": episode.task.answer},
        )
        return chaos_witness.numbered(episode, step)

    async def close(self, episode: Episode) -> None:
        chaos_witness.closed(episode)


class SlowSearch(SearchEnvironment):
    """The demo's environment, whose tools take their time."""

    async def step(self, episode: Episode, response: str) -> Step:
        await take_time(episode)
        if not hasattr(self, "_sums"):
            self._sums = Pool()
        await self._sums.add(episode.turns, 0)
        return chaos_witness.numbered(episode, await super().step(episode, response))

    async def close(self, episode: Episode) -> None:
        await super().close(episode)
        chaos_witness.closed(episode)


def write_run(
    folder: Path,
    name: str,
    steps: int,
    workers: int,
    ranks: int,
    task: str = "game",
    engine: str = "embedded",
) -> tuple[Path, RunDirectory]:
    """(configuration, directory) of a run."""
    values = [
        f"run.directory={folder}/runs/{{name}}", f"run.name={name}", f"run.steps={steps}",
        f"rollout.faults={FAULTS[task]}",
        f"rollout.asynchronous={{max_staleness: {STALENESS}, run_ahead: {AHEAD}}}", f"cluster.rollout_workers={workers}",
        f"cluster.ranks={ranks}", f"cluster.stall_timeout_s={STALL_S}", "evaluation.every_steps=0", "evaluation.at_start=false",
        "checkpoint.every_steps=4", "checkpoint.export=false", "metrics.picture=false", "metrics.progress=none",
        "metrics.trajectories_per_step=1000000", "metrics.page=true",
    ]  # fmt: skip
    base = None
    if task == "search":
        base = ROOT / "recipes" / "searchr1" / "config" / "short.yaml"
        values += [
            f"model.path={ROOT / 'recipes/searchr1/starting_policy'}",
            f"environment.name={Path(__file__).resolve()}:SlowSearch", "environment.managed=true",
            f"environment.world.directory={folder}/world", "rollout.prompts_per_step=8", "algorithm.transforms=[tis]",
            "algorithm.losses=[{name: ppo_clip, anchor: proximal, clip_low: 0.2, clip_high: 0.28}, "
            f"{{name: kl, coefficient: 0.01, estimator: k3}}, '{WITNESS}']",
        ]  # fmt: skip
    else:
        from tests.flow.letters import write_letters_model

        model = folder / "model"
        if not model.is_dir():
            write_letters_model(
                model,
                hidden_size=64,
                intermediate_size=128,
                num_attention_heads=2,
                num_key_value_heads=1,
            )
        values += [
            f"environment={{name: '{Path(__file__).resolve()}:Turns'}}", f"model.path={model}", "rollout.prompts_per_step=6",
            "rollout.samples_per_prompt=4", "rollout.max_turns=6", "rollout.max_response_tokens=2",
            "rollout.max_total_tokens=64", "trainer.lr=1e-4", "evaluation.final_questions=6",
            f"algorithm.losses=[ppo_clip, '{WITNESS}']",
        ]  # fmt: skip
    if engine != "embedded":
        values.append(f"rollout.engine={{name: {engine}, max_concurrency: 16}}")
    path = folder / f"{name}.yaml"
    path.write_text(config_text(load_config(base, values)), encoding="utf-8")
    return path, RunDirectory(folder / "runs" / name)


def witnesses(run: RunDirectory) -> Path:
    """The folder of a run's witnesses, beside its own."""
    return run.path.with_name(run.path.name + ".witnesses")


def problems_of(run: RunDirectory, steps: int) -> Iterator[str]:
    """What the last checkpoint and the steps' files do not prove."""
    config = load_config(run.config).rollout
    written = [
        (step, one)
        for step in range(1, steps + 1)
        for one in read_trajectories(run.trajectories(step))
    ]
    names = [one["id"] for _, one in written]
    expected = steps * config.prompts_per_step * config.samples_per_prompt
    if not len(names) == len(set(names)) == expected:
        yield f"expected {expected} attempts trained once, found {len(names)}, {len(set(names))} different"
    ages = [
        record["rollout/staleness_max"]
        for record in read_metrics(run.metrics)
        if "rollout/staleness_max" in record
    ]
    if not all(0 <= age <= STALENESS for age in ages):
        yield f"a trained token was {max(ages):g} updates old, at most {STALENESS} are allowed"
    last = run.saved.latest()
    if last is None or last[0] != steps:
        yield f"the last checkpoint is {last}, not that of step {steps}"
        return
    state = run.saved.read_state(steps)["groups"]
    trained = {one["group_id"]: one["task_id"] for _, one in written}
    left = {name: task for _, name, task, *_ in state["groups"]}
    refused = state["issued"] - len(trained) - len(left)
    if trained.keys() & left.keys() or refused:
        yield f"of {state['issued']} groups {len(trained)} were trained, {len(left)} wait, {refused} are missing"
    counts = Counter([*trained.values(), *left.values()])
    if max(counts.values()) - (min(counts.values()) if len(counts) == TASKS else 0) > 1:
        yield "a pass over the tasks skipped some, or took some twice"
    if any(
        number < state["issued"] - (AHEAD + 2) * config.prompts_per_step
        for number, *_ in state["groups"]
    ):
        yield "a group was left behind"


def different(one: Sequence[int], other: Sequence[int]) -> float:
    """p of the two-sample Kolmogorov-Smirnov test, asymptotic (Smirnov 1948); for discrete values it errs towards 1."""
    values = sorted({*one, *other})
    gap = max(
        abs(sum(x <= v for x in one) / len(one) - sum(x <= v for x in other) / len(other))
        for v in values
    )
    size = sqrt(len(one) * len(other) / (len(one) + len(other))) * gap
    if size <= 0.2:
        return 1.0
    return min(
        1.0, max(0.0, 2 * sum((-1) ** (k - 1) * exp(-2 * (k * size) ** 2) for k in range(1, 101)))
    )


def compared(
    task: str, hurt: RunDirectory, calm: RunDirectory, steps: int
) -> Iterator[tuple[str, Any]]:
    """(name, value) of what the run reached beside the calm one; under `problems` what that proves."""
    config, problems = load_config(hurt.config).rollout, list(problems_of(hurt, steps))
    found, before = (chaos_witness.read(witnesses(run)) for run in (hurt, calm))
    attempts, samples = (
        config.prompts_per_step * config.samples_per_prompt,
        config.samples_per_prompt,
    )
    problems += chaos_witness.contradictions(found, hurt, steps, attempts, samples)
    turns, expected = found.turns, before.turns
    p = different(turns, expected)
    if task == "game" and p < SIGNIFICANT:  # in the demo the policy decides about them
        problems.append(f"episodes are of other lengths than in the calm run (p = {p:.2g})")
    records = read_metrics(hurt.metrics)
    lost = sum(record.get("workers/attempts_lost", 0) for record in records)
    oldest = max(record.get("rollout/staleness_max", 0) for record in records)
    witnessed = {
        "played": len(found.played),
        "trained": len(turns),
        "trained_in_lost_history": found.forgotten,
    }
    yield "witnesses", witnessed
    yield from (
        ("episodes", len(turns)),
        ("lost_and_played_again", lost),
        ("staleness_max", oldest),
        ("p", p),
    )
    yield from (("turns", sum(turns) / len(turns)), ("turns_calm", sum(expected) / len(expected)))
    if task == "search":
        scores = [read_json(run.summary)["last_evaluation"] for run in (hurt, calm)]
        reached, wanted = (one["eval/exact_match"] for one in scores)
        share = (reached + wanted) / 2
        error = sqrt(
            2 * share * (1 - share) / scores[0]["eval/questions"]
        )  # of a difference of two shares
        yield from (("exact_match", reached), ("exact_match_calm", wanted), ("error", error))
        if reached < wanted - SIGMAS * error:
            problems.append(
                f"exact match {reached:.3f}, expected {wanted:.3f} of the calm run (+- {error:.3f})"
            )
    yield "problems", problems
