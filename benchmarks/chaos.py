"""What kills and hangs cost an asynchronous run with rollout workers: its journal must prove that they cost time alone.

    python benchmarks/chaos.py                 # 30 minutes
    python benchmarks/chaos.py --minutes 2
    python benchmarks/chaos.py --quick         # the machinery, in about a minute

A tiny model plays a game of one to six turns, in an environment in which some answers are slow and few never come. Meanwhile, at
random: kill -9 and SIGSTOP of rollout workers, kill -9 of trainer ranks, kill -9 of everything, which `--resume` then continues.
Afterwards the journal is held against what every step wrote: each accepted attempt trained exactly once, no task skipped, the
bound of the staleness held; and the turns of the episodes that were trained against a calm run of the same seed, by a two-sample
Kolmogorov-Smirnov test: what is lost must not be the long ones. Ends with 1 where anything of that fails."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rlflow.config.loading import config_text
from rlflow.config.schema import load_config
from rlflow.environment import Environment
from rlflow.metrics.names import Metric
from rlflow.metrics.sinks import read_metrics
from rlflow.run.directory import RunDirectory
from rlflow.run.trajectories import read_trajectories
from rlflow.types import Episode, Step, Task

TASKS, GROUPS, SAMPLES, STALENESS, AHEAD = 60, 6, 4, 3, 2
CALL_S = 4.0
"""Deadline of the environment's calls, and of a worker's answers: short, so that two minutes hold many losses."""
KINDS = {"worker killed": 5, "worker stopped": 3, "rank killed": 1, "driver killed": 1}
"""What happens, and how often beside the others."""
SIGNIFICANT = 0.001


class Turns(Environment):
    """Tasks of one to six turns, whatever the policy says. Some answers take long, few for ever: drawn by task, turn and the
    clock, so that another attempt meets another fate."""

    stop = (*"abcdef?|",)  # a token with text ends a response
    metrics = {"length": Metric("turns", "that the task has", score=False)}

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(f"{split}-{number}", "a?", 1 + number % 6) for number in range(TASKS)]

    async def step(self, episode: Episode, response: str) -> Step:
        text = f"{episode.task.id}/{episode.turns}/{time.time_ns()}"
        fate = random.Random(hashlib.blake2b(text.encode(), digest_size=8).digest()).random()
        if os.environ.get("CHAOS_CALM") != "1":
            await asyncio.sleep(3600.0 if fate < 0.0005 else 2.0 if fate < 0.01 else 0.3 * fate)
        over = episode.turns >= episode.task.answer
        return Step(
            "" if over else "|b?", float("a" in response), terminated=over, metrics={"length": episode.task.answer}
        )


@dataclass
class Chaos:
    """Starts the run, hurts it until the time is over, and lets it come to an end."""

    config: Path
    run: RunDirectory
    draw: random.Random
    kinds: dict[str, int]
    done: Counter[str] = field(default_factory=Counter)
    process: subprocess.Popen[bytes] | None = None
    sessions: int = 0

    def start(self) -> None:
        """The run, or its continuation, in a session of its own."""
        command = [sys.executable, "-m", "rlflow", "train", "--config", str(self.config), "--resume"]
        with open(self.run.path.parent / "chaos.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self.sessions += 1

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def hurt(self) -> None:
        """One of the kinds, where somebody is there to be hurt."""
        kind = self.draw.choices(list(self.kinds), list(self.kinds.values()))[0]
        assert self.process is not None
        if kind == "driver killed":
            if self.step() > 0:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.done[kind] += 1
            return
        victims = self.actors("TrainerRank" if kind == "rank killed" else "WorkerActor")
        if victims and self.step() > 0:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.draw.choice(victims).send_signal(signal.SIGSTOP if kind == "worker stopped" else signal.SIGKILL)
                self.done[kind] += 1

    def actors(self, name: str) -> list[psutil.Process]:
        """The processes of the run's actors of a class."""
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            assert self.process is not None
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if name in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                        found.append(child)
        return found

    def step(self) -> int:
        records = read_metrics(self.run.metrics) if self.run.metrics.is_file() else []
        return int(records[-1]["step"]) if records else 0

    def play(self, seconds: float, every_s: float, steps: int) -> None:
        """Hurts the run for so long; a driver that ended, by a kill or by its own error, is started again."""
        until, limit = float("inf"), time.monotonic() + 3 * seconds + 600
        self.start()
        shown = 0.0
        while time.monotonic() < limit:
            time.sleep(self.draw.uniform(0.3, 1.7) * every_s)
            if until == float("inf") and self.step() > 0:
                until = time.monotonic() + seconds  # what starts is not counted
            if not self.alive():
                if self.run.summary.is_file() or self.step() >= steps:
                    self.finish()
                    return
                self.start()
            elif time.monotonic() < until:
                self.hurt()
            if time.monotonic() - shown > 20:
                shown = time.monotonic()
                print(f"step {self.step()}, {dict(self.done)}, {self.sessions} sessions", flush=True)
            if time.monotonic() >= until and self.alive() and self.step() >= steps:
                break
        self.finish()

    def end(self) -> None:
        """Ends the run and its processes, where any is left."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def finish(self) -> None:
        """Waits for the end of the run; ends it where it has no end."""
        if self.process is not None:
            try:
                self.process.wait(timeout=300)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def write_run(folder: Path, name: str, steps: int, workers: int, ranks: int) -> tuple[Path, RunDirectory]:
    """(configuration, directory) of a run."""
    from tests.flow.letters import write_letters_model

    model = folder / "model"
    if not model.is_dir():
        write_letters_model(model)
    values = [
        f"run.directory={folder}/runs/{{name}}", f"run.name={name}", f"run.steps={steps}", f"model.path={model}",
        f"environment={{name: '{Path(__file__).resolve()}:Turns'}}", f"rollout.prompts_per_step={GROUPS}",
        f"rollout.samples_per_prompt={SAMPLES}", "rollout.max_turns=6", "rollout.max_response_tokens=2",
        "rollout.max_total_tokens=64", f"rollout.faults={{call_s: {CALL_S}, episode_s: 20, max_aborted_share: 0.5}}",
        f"rollout.asynchronous={{max_staleness: {STALENESS}, run_ahead: {AHEAD}}}", f"cluster.rollout_workers={workers}",
        f"cluster.ranks={ranks}", "trainer.lr=1e-4", "evaluation.every_steps=0", "evaluation.at_start=false",
        "evaluation.final_questions=6", "checkpoint.every_steps=4", "checkpoint.export=false", "metrics.picture=false",
        "metrics.progress=none", "metrics.trajectories_per_step=1000000",
    ]  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(config_text(load_config(None, values)), encoding="utf-8")
    return path, RunDirectory(folder / "runs" / name)


def trained_turns(run: RunDirectory, steps: int) -> list[int]:
    """Turns of every usable episode that was trained."""
    records = [one for step in range(1, steps + 1) for one in read_trajectories(run.trajectories(step))]
    return [len(one["turns"]) for one in records if one["stop"] != "aborted"]


def problems_of(run: RunDirectory, steps: int) -> Iterator[str]:
    """What the journal and the steps' files do not prove."""
    written = [(step, one["id"]) for step in range(1, steps + 1) for one in read_trajectories(run.trajectories(step))]
    if not len(written) == len({name for _, name in written}) == steps * GROUPS * SAMPLES:
        yield f"expected {steps * GROUPS * SAMPLES} attempts trained once, found {len(written)}, {len(set(written))} different"
    with sqlite3.connect(run.journal) as database:
        columns = "number, sample, task, group_id, state, step, min_version"
        rows = database.execute(f"SELECT {columns} FROM attempts ORDER BY number, sample").fetchall()
    database.close()
    trained = {(step, f"{group}/{sample}") for _, sample, _, group, state, step, _ in rows if state == "trained"}
    if trained != set(written):
        yield f"journal and steps differ in {len(trained ^ set(written))} attempts"
    ages = [step - 1 - oldest for *_, state, step, oldest in rows if state == "trained" and oldest is not None]
    if not all(0 <= age <= STALENESS for age in ages):
        yield f"a trained token was {max(ages)} updates old, at most {STALENESS} are allowed"
    numbers = [number for number, sample, *_ in rows if sample == 0]
    if numbers != list(range(len(numbers))):
        yield "groups are missing in the journal"
    order = [task for _, sample, task, *_ in rows if sample == 0]
    for epoch in range(len(order) // TASKS):
        if len(set(order[epoch * TASKS : (epoch + 1) * TASKS])) != TASKS:
            yield f"pass {epoch} over the tasks skipped some"
    left = [number for number, *_, state, _, _ in rows if state not in ("trained", "dropped")]
    if left and min(left) < len(numbers) - (AHEAD + 2) * GROUPS:
        yield f"group {min(left)} was left behind"


def different(one: Sequence[int], other: Sequence[int]) -> float:
    """p of the two-sample Kolmogorov-Smirnov test, asymptotic (Smirnov 1948); for discrete values it errs towards 1."""
    from math import exp, sqrt

    values = sorted({*one, *other})
    gap = max(abs(sum(x <= v for x in one) / len(one) - sum(x <= v for x in other) / len(other)) for v in values)
    size = sqrt(len(one) * len(other) / (len(one) + len(other))) * gap
    return (
        min(1.0, max(0.0, 2 * sum((-1) ** (k - 1) * exp(-2 * (k * size) ** 2) for k in range(1, 101))))
        if size > 0.2
        else 1.0
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="of kills (default 30); the run then comes to its end in peace"
    )
    parser.add_argument("--steps", type=int, help="of the run (default: 60 per minute)")
    parser.add_argument(
        "--every", type=float, default=4.0, metavar="S", help="seconds between two kills, about (default 4)"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--ranks", type=int, default=0, help="trainer ranks, which are killed then too (default 0: in the driver)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="half a minute of kills")
    args = parser.parse_args(arguments)
    minutes = 0.5 if args.quick else args.minutes
    steps = args.steps or max(20, round(60 * minutes))
    kinds = {kind: share for kind, share in KINDS.items() if args.ranks or kind != "rank killed"}
    with tempfile.TemporaryDirectory(prefix="rlflow-chaos-") as name:
        folder = Path(name)
        calm, calm_run = write_run(folder, "calm", steps, workers=0, ranks=0)
        command = [sys.executable, "-m", "rlflow", "train", "--config", str(calm)]
        subprocess.run(command, check=True, env={**os.environ, "CHAOS_CALM": "1"}, stdout=subprocess.DEVNULL)
        config, run = write_run(folder, "hurt", steps, args.workers, args.ranks)
        run.path.mkdir(parents=True)
        chaos = Chaos(config, run, random.Random(args.seed), kinds)
        try:
            chaos.play(60 * minutes, args.every, steps)
        finally:
            chaos.end()
        log = (folder / "runs" / "chaos.log").read_text(errors="replace").splitlines()
        if not run.summary.is_file():
            print("\n".join(log[-30:]))
            print(f"the run did not come to its end: step {chaos.step()} of {steps}")
            return 1
        found = list(problems_of(run, steps))
        turns, expected = trained_turns(run, steps), trained_turns(calm_run, steps)
        p = different(turns, expected)
        if not chaos.done:
            found.append("nothing was hurt: the run ended too soon; give it more --steps")
        if p < SIGNIFICANT:
            found.append(f"episodes are of other lengths than in the calm run (p = {p:.2g})")
        with sqlite3.connect(run.journal) as database:
            (lost,) = database.execute("SELECT COUNT(*) FROM losses").fetchone()
        database.close()
        print(
            f"{steps} steps in {chaos.sessions} sessions; {', '.join(f'{count} x {kind}' for kind, count in chaos.done.items())}"
        )
        print(f"{len(turns)} usable episodes trained, {lost} attempts lost with a worker and played again")
        print(f"turns: mean {sum(turns) / len(turns):.3f}, calm {sum(expected) / len(expected):.3f}, p = {p:.2g}")
        print(
            "\n".join(f"PROBLEM: {one}" for one in found)
            or "every attempt trained exactly once, none lost, staleness held"
        )
        return 1 if found else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
