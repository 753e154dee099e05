#!/usr/bin/env python
"""Trajectories per second of whole training runs with slow tools: step after step, and with rollouts that run ahead of training.

Every episode is a prompt and three responses with a tool call after each but the last; a call takes a lognormal time, drawn
from the task, the attempt and the turn, so that all sides meet the same tools. Generation, training and weight sync are real:
the embedded engine and the Megatron trainer in one process, one thread for products of the model.

    python benchmarks/asynchronous.py [--quick] [--median-s 0.3] [--sigma 1.2]

synchronous   a step is sampled when the one before is over
one ahead     max_staleness 1, run_ahead 1: the next batch is sampled meanwhile (the delayed parameter update)
ahead         max_staleness 4, run_ahead 2: what is slow may take up to four updates; the trainer takes turns with the engine
overlapping   the same, and the engine goes on while the trainer works

The sides take turns within one run, each in a process of its own; each turn is a run from its beginning, the first batch, which
nobody sampled ahead, included. busy: share of the time that the engine's steps and the trainer's work took; below both, the bound
is what the busier of the two alone could do (their sum, where they take turns). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import SHAPES, Figures, Turns, interleave, summary, versions, write_random_model

from rlflow.environment import Environment
from rlflow.rollout.embedded.engine import EmbeddedEngine
from rlflow.types import Episode, Step, Task

HERE = Path(__file__).resolve()
SIDES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "one ahead": {"max_staleness": 1, "run_ahead": 1},
    "ahead": {"max_staleness": 4, "run_ahead": 2},
    "overlapping": {"max_staleness": 4, "run_ahead": 2, "overlap": True},
}
TURNS = 3


@dataclass(frozen=True)
class Case:
    """median_s, sigma: of a tool call. steps: of one turn."""

    prompts: int
    samples: int
    steps: int
    response: int
    median_s: float
    sigma: float
    model: str = "tiny"


class SlowTools(Environment):
    """Answers each response with a few words after a lognormal time; the reward is the share of even words."""

    def __init__(self, median_s: float, sigma: float) -> None:
        self._median_s, self._sigma = median_s, sigma
        self._attempts: dict[str, int] = {}

    def tasks(self, split: str) -> Sequence[Task]:
        return [
            Task(f"{split}{number}", " ".join(f"w{2 + (7 * number + word) % 1000}" for word in range(24)))
            for number in range(512)
        ]

    async def reset(self, task: Task) -> Episode:
        attempt = self._attempts[task.id] = self._attempts.get(task.id, -1) + 1
        return Episode(task, scratch={"draw": random.Random(f"{task.id}/{attempt}")})

    async def step(self, episode: Episode, response: str) -> Step:
        words = response.split()
        reward = sum(word[1:].isdigit() and int(word[1:]) % 2 == 0 for word in words) / max(1, len(words)) / TURNS
        if episode.turns == TURNS:
            return Step(reward=reward, terminated=True)
        await asyncio.sleep(self._median_s * episode.scratch["draw"].lognormvariate(0, self._sigma))
        return Step(" w5 w6 w7 w8 w9 w10 w11 w12", reward)


class TimedEngine(EmbeddedEngine):
    """Knows how long its steps took."""

    def __init__(self, path: str, tokenizer: Any = None, *, max_concurrency: int = 256, max_tokens: int | None = None) -> None:
        super().__init__(path, tokenizer, max_concurrency=max_concurrency, max_tokens=max_tokens)
        self.busy_s = 0.0
        step = self._scheduler.step

        def timed(admit: bool) -> None:
            started = time.perf_counter()
            step(admit)
            self.busy_s += time.perf_counter() - started

        self._scheduler.step = timed  # type: ignore[method-assign]


def write_model(path: Path, model: str) -> int:
    """A random model with a tokenizer of one word per id; returns its number of parameters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shape = SHAPES[model]
    parameters = write_random_model(path, shape, pad_token_id=0, bos_token_id=None, eos_token_id=1)
    words = {word: index for index, word in enumerate(["<pad>", "<end>", *(f"w{i}" for i in range(2, shape.vocab))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>").save_pretrained(str(path))
    return parameters


def side(turns: Turns, folder: str, case: Case, options: dict[str, Any]) -> None:
    """One side: a run from its beginning per turn."""
    from rlflow.config.schema import load_config
    from rlflow.loop import training_step
    from rlflow.run.open import open_run

    chosen = [f"rollout.asynchronous.{key}={str(value).lower()}" for key, value in options.items()]
    values = [
        f"run.directory={folder}/runs/{os.getpid()}", f"run.steps={case.steps}", "run.overwrite=true",
        f"model.path={folder}/model",
        f"environment={{name: '{HERE}:SlowTools', median_s: {case.median_s}, sigma: {case.sigma}}}",
        f"rollout.engine={{name: '{HERE}:TimedEngine', max_concurrency: 256}}", f"rollout.prompts_per_step={case.prompts}",
        f"rollout.samples_per_prompt={case.samples}", f"rollout.max_turns={TURNS}",
        f"rollout.max_response_tokens={case.response}",
        "rollout.max_total_tokens=512", "trainer.lr=1e-5", "algorithm.transforms=[tis]",
        "algorithm.losses=[{name: ppo_clip, anchor: proximal}]",
        "metrics.progress=none", "metrics.trajectories_per_step=0",
    ]  # fmt: skip
    config = load_config(None, [*values, *chosen])
    turns.imported()
    while turns.begin():
        with open_run(config) as run:
            (engine,) = run.rollout.engines
            trained, lags, trainer_s = 0, [], 0.0
            start, busy = time.perf_counter(), engine.busy_s
            for groups in run.groups():
                began = time.perf_counter()
                metrics = training_step(run.step, groups, run.trainer, run.algorithm, run.timer)
                run.sync_weights(run.step + 1)
                trainer_s += time.perf_counter() - began
                versions = [
                    part.versions[part.loss_mask] for group in groups for one in group.usable for part in one.segments
                ]
                lags += [run.step - int(version.min()) for version in versions]
                trained += sum(len(group.usable) for group in groups)
                run.finish_step(metrics, groups)
            seconds, engine_s = time.perf_counter() - start, engine.busy_s - busy
        turns.end(seconds=seconds, trained=trained, engine_s=engine_s, trainer_s=trainer_s, lag=statistics.fmean(lags))


def figures(name: str, taken: list[Figures]) -> dict[str, Any]:
    """Of one side, its warm-up left out."""
    taken = taken[1:]
    rates = [one["trained"] / one["seconds"] for one in taken]
    engine, trainer, seconds = (sum(one[key] for one in taken) for key in ("engine_s", "trainer_s", "seconds"))
    most = max(engine, trainer) if SIDES[name].get("overlap") else engine + trainer
    return {
        "trajectories_per_s": summary(rates),
        "engine_busy": engine / seconds,
        "trainer_busy": trainer / seconds,
        "of_bound": most / seconds,
        "mean_lag": statistics.fmean(one["lag"] for one in taken),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--median-s", type=float, default=0.3, help="of a tool call (default 0.3)")
    parser.add_argument("--sigma", type=float, default=1.2, help="of its logarithm (default 1.2; 0: all alike)")
    parser.add_argument("--rounds", type=int, default=None)
    args = parser.parse_args()
    case = (
        Case(8, 4, 12, 16, args.median_s, args.sigma)
        if not args.quick
        else Case(4, 2, 6, 8, args.median_s / 2, args.sigma)
    )
    rounds = args.rounds or (1 if args.quick else 3)
    with tempfile.TemporaryDirectory(prefix="rlflow-asynchronous-") as folder:
        parameters = write_model(Path(folder) / "model", case.model)
        sides = {name: (side, folder, case, options) for name, options in SIDES.items()}
        taken = interleave(sides, rounds, threads=1)
    result = {name: figures(name, one) for name, one in taken.items()}
    base = result["synchronous"]["trajectories_per_s"]["median"]
    print(f"{parameters / 1e6:.1f}M parameters, {case.prompts} x {case.samples} episodes per step, {case.steps} steps, "
          f"tool calls {case.median_s:g} s x lognormal({case.sigma:g}); {rounds} rounds")  # fmt: skip
    print(
        f"{'':<14}{'episodes/s':>11}{'range':>15}{'x':>7}{'engine busy':>13}{'trainer busy':>14}{'of bound':>10}{'mean lag':>10}"
    )
    for name, one in result.items():
        rate = one["trajectories_per_s"]
        one["speedup"] = rate["median"] / base
        print(f"{name:<14}{rate['median']:>11.1f}{rate['low']:>8.1f}..{rate['high']:<5.1f}{one['speedup']:>7.2f}"
              f"{one['engine_busy']:>13.0%}{one['trainer_busy']:>14.0%}{one['of_bound']:>10.0%}"
              f"{one['mean_lag']:>10.2f}")  # fmt: skip
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
        **versions("torch", "megatron-core"),
    }
    print(json.dumps({"benchmark": "asynchronous", "case": asdict(case), "sides": result, "machine": machine}))


if __name__ == "__main__":
    main()
