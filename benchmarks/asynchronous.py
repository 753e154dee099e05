#!/usr/bin/env python
"""Trajectories per second of whole training runs with slow tools: step after step, and with rollouts that run ahead of training.

Every episode is a prompt and three responses with a tool call after each but the last; a call takes a lognormal time, drawn
from the task, the attempt and the turn, so that all sides meet the same tools. Generation, training and weight sync are real:
the embedded engine and the Megatron trainer in one process, one thread for products of the model.

    python benchmarks/asynchronous.py [--quick] [--fake] [--ablation] [--median-s 0.3] [--sigma 1.2]

synchronous   a step is sampled when the one before is over
one ahead     max_staleness 1, run_ahead 1: the next batch is sampled meanwhile (the delayed parameter update)
ahead         max_staleness 4, run_ahead 2: what is slow may take up to four updates; the trainer takes turns with the engine
overlapping   the same, and the engine goes on while the trainer works
far ahead     max_staleness 8, run_ahead 4, overlapping
separate      the same as overlapping, by two rollout workers beside the trainer (cluster.rollout_workers), where Ray is installed

--ablation: AsyncFlow's, with a frozen reference that scores every row: barrier (synchronous), streaming (score_early: it scores
groups as they end), streaming and the delayed parameter update (max_staleness 1 besides, overlapping).

--fake: an engine and a trainer that sleep (the schedule alone, on any machine: nobody computes anything).

The sides take turns within one run, each in a process of its own. A turn is the middle of a run: its first steps, before which
nobody sampled ahead, and its last ones, for which nothing is left to start, are not counted. The bound of a step is the longest
of four times, all measured here:

generation  the mean time of a group as the synchronous side sees it (its slowest attempt), over run_ahead + 1: what groups that
            are always in flight could give (Little's law)
training    of the trainer, with the weight sync
stragglers  the mean longest attempt of a step, over max_staleness + 1: an attempt that begins with the weights of a version is
            trained by the step max_staleness later at the latest, which waits for it
turns       training and the engine's own steps, where they take turns; not with --fake, whose engine may sleep meanwhile

A step takes its prompts_per_step groups together, and while it is trained they count as in flight (the rule of admission bounds
what is not yet trained), so about half a batch of run_ahead + 1 is finished and waits: a bound by generation is met to about
1 - 1 / (2 (run_ahead + 1)), 83% for run_ahead 2 and 90% for 4. Stragglers cost more than their mean: what is waited for is the
longest of several steps. A bound by training has no such losses. The last line is one JSON object.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import SHAPES, Figures, Turns, interleave, summary, versions, write_random_model

from rlflow.environment import Environment
from rlflow.rollout.embedded.engine import EmbeddedEngine
from rlflow.types import Episode, Step, Task, Trajectory

HERE = Path(__file__).resolve()
SIDES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "one ahead": {"max_staleness": 1, "run_ahead": 1},
    "ahead": {"max_staleness": 4, "run_ahead": 2},
    "overlapping": {"max_staleness": 4, "run_ahead": 2, "overlap": True},
    "far ahead": {"max_staleness": 8, "run_ahead": 4, "overlap": True},
}
ABLATION: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "streaming": {"score_early": True},
    "and delayed": {"score_early": True, "max_staleness": 1, "run_ahead": 1, "overlap": True},
}
WORKERS = 2  # of the side `separate`
TURNS = 3


@dataclass(frozen=True)
class Case:
    """median_s, sigma: of a tool call. steps: of one turn. fake_s: (a token, an update) where nobody computes. reference: there
    is one, which scores every row; where nobody computes, in two thirds of the time of an update."""

    prompts: int
    samples: int
    steps: int
    response: int
    median_s: float
    sigma: float
    model: str = "tiny"
    fake_s: tuple[float, float] | None = None
    reference: bool = False


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

    def __init__(
        self, path: str, tokenizer: Any = None, *, max_concurrency: int = 256, max_tokens: int | None = None
    ) -> None:
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


def configured(folder: str, case: Case, options: dict[str, Any]) -> list[str]:
    """The configuration of a side's run, as overrides."""
    chosen = [f"rollout.asynchronous.{key}={str(value).lower()}" for key, value in options.items() if key != "workers"]
    if "workers" in options:
        chosen.append(f"cluster.rollout_workers={options['workers']}")
    parts = [f"rollout.engine={{name: '{HERE}:TimedEngine', max_concurrency: 256}}"]
    if case.fake_s is not None:
        token_s, update_s = case.fake_s
        tokens = case.prompts * case.samples * (24 + TURNS * case.response + 8 * (TURNS - 1))
        score_s = update_s / 1.5 / tokens if case.reference else 0.0
        parts = [
            f"rollout.engine={{name: fake, token_s: {token_s}, max_concurrency: 256}}", "trainer.backend=fake",
            f"trainer.optimizer={{name: sleep, update_s: {update_s}, score_token_s: {score_s}}}",
        ]  # fmt: skip
    losses = "{name: ppo_clip, anchor: proximal}" + ", {name: kl, coefficient: 0.01}" * case.reference
    return [
        f"run.directory={folder}/runs/{os.getpid()}", f"run.steps={case.steps + 2 * margin(options)}", "run.overwrite=true",
        f"model.path={folder}/model",
        f"environment={{name: '{HERE}:SlowTools', median_s: {case.median_s}, sigma: {case.sigma}}}",
        f"rollout.prompts_per_step={case.prompts}",
        f"rollout.samples_per_prompt={case.samples}", f"rollout.max_turns={TURNS}",
        f"rollout.max_response_tokens={case.response}",
        "rollout.max_total_tokens=512", "trainer.lr=1e-5", "algorithm.transforms=[tis]",
        f"algorithm.losses=[{losses}]",
        "metrics.progress=none", "metrics.trajectories_per_step=0", *parts, *chosen,
    ]  # fmt: skip


def margin(options: dict[str, Any]) -> int:
    """Steps at both ends of a run that are not counted."""
    return 1 + int(options.get("run_ahead", 0))


def side(turns: Turns, folder: str, case: Case, options: dict[str, Any]) -> None:
    """One side: the middle of a run per turn."""
    from rlflow.config.schema import load_config
    from rlflow.loop import training_step
    from rlflow.run.open import open_run

    config = load_config(None, configured(folder, case, options))
    first = margin(options)
    turns.imported()
    while turns.begin():
        with open_run(config) as run:
            engine = run.rollout.engines[0]
            trained, lags, slowest, longest, trainer_s = 0, [], [], [], 0.0
            start = busy = 0.0
            for groups in run.groups():
                began = time.perf_counter()
                metrics = training_step(run.step, groups, run.trainer, run.algorithm, run.timer)
                run.sync_weights(run.step + 1)
                if start:
                    trainer_s += time.perf_counter() - began
                    tokens = [part for group in groups for one in group.usable for part in one.segments]
                    lags += [run.step - int(part.versions[part.loss_mask].min()) for part in tokens]
                    trained += sum(len(group.usable) for group in groups)
                    slowest += [max(duration(one) for one in group.usable) for group in groups]
                    longest.append(max(slowest[-len(groups) :]))
                run.finish_step(metrics, groups)
                if run.step == first:
                    start, busy = time.perf_counter(), getattr(engine, "busy_s", 0.0)
                if run.step == first + case.steps:
                    break
            seconds, engine_s = time.perf_counter() - start, getattr(engine, "busy_s", 0.0) - busy
        turns.end(seconds=seconds, trained=trained, engine_s=engine_s, trainer_s=trainer_s, lag=statistics.fmean(lags),
                  group_s=statistics.fmean(slowest), longest_s=statistics.fmean(longest))  # fmt: skip


def duration(one: Trajectory) -> float:
    """Seconds that an episode took, from the first token of its first response to its end."""
    return sum(turn.duration_s for turn in one.turns)


def figures(case: Case, options: dict[str, Any], taken: list[Figures], alone: list[Figures]) -> dict[str, Any]:
    """Of one side, its warm-up left out. alone: of the synchronous side."""
    taken = taken[1:]
    rates = [one["trained"] / one["seconds"] for one in taken]
    engine, trainer, seconds = (sum(one[key] for one in taken) for key in ("engine_s", "trainer_s", "seconds"))
    steps = case.steps * len(taken)
    group_s, longest_s = (statistics.fmean(one[key] for one in alone[1:]) for key in ("group_s", "longest_s"))
    generation = group_s / (1 + options.get("run_ahead", 0))
    stragglers = longest_s / (1 + options.get("max_staleness", 0))
    turns = 0.0 if options.get("overlap") or case.fake_s is not None else engine / steps
    training = trainer / steps
    bound = max(generation, stragglers, training + turns) if "run_ahead" in options else stragglers + training
    return {
        "trajectories_per_s": summary(rates),
        "engine_busy": engine / seconds if case.fake_s is None else None,  # places of a fake one sleep side by side
        "trainer_busy": trainer / seconds,
        "step_s": seconds / steps,
        "generation_s": generation,
        "stragglers_s": stragglers,
        "training_s": training,
        "turns_s": training + turns,
        "of_bound": bound * steps / seconds,
        "mean_lag": statistics.fmean(one["lag"] for one in taken),
    }


def chosen_sides() -> dict[str, dict[str, Any]]:
    """The sides that can be played here."""
    from importlib.util import find_spec

    from rlflow.config.schema import ClusterSection

    if find_spec("ray") is None or "rollout_workers" not in ClusterSection.__dataclass_fields__:
        return SIDES
    return {**SIDES, "separate": {**SIDES["overlapping"], "workers": WORKERS}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--fake", action="store_true", help="engine and trainer sleep: the schedule alone")
    parser.add_argument("--ablation", action="store_true", help="barrier, streaming, streaming and delayed update")
    parser.add_argument("--only", action="append", metavar="SIDE", help="this side, beside the synchronous one")
    parser.add_argument("--median-s", type=float, default=0.3, help="of a tool call (default 0.3)")
    parser.add_argument("--sigma", type=float, default=1.2, help="of its logarithm (default 1.2; 0: all alike)")
    parser.add_argument("--update-s", type=float, default=0.75, help="of an update, with --fake (default 0.75)")
    parser.add_argument("--rounds", type=int, default=None)
    args = parser.parse_args()
    case = (
        Case(8, 4, 12, 16, args.median_s, args.sigma)
        if not args.quick
        else Case(4, 2, 6, 8, args.median_s / 2, args.sigma)
    )
    if args.fake:
        case = replace(case, fake_s=(0.005, args.update_s / (2 if args.quick else 1)))
    case = replace(case, reference=args.ablation)
    rounds = args.rounds or (1 if args.quick else 3)
    known = ABLATION if args.ablation else chosen_sides()
    sides = {name: one for name, one in known.items() if not args.only or name in ("synchronous", *args.only)}
    with tempfile.TemporaryDirectory(prefix="rlflow-asynchronous-") as folder:
        parameters = write_model(Path(folder) / "model", case.model)
        played = {name: (side, folder, case, options) for name, options in sides.items()}
        taken = interleave(played, rounds, threads=1)
    result = {name: figures(case, sides[name], one, taken["synchronous"]) for name, one in taken.items()}
    base = result["synchronous"]["trajectories_per_s"]["median"]
    print(f"{parameters / 1e6:.1f}M parameters, {case.prompts} x {case.samples} episodes per step, {case.steps} steps, "
          f"tool calls {case.median_s:g} s x lognormal({case.sigma:g}); {rounds} rounds" + ", fake" * args.fake)  # fmt: skip
    print(f"{'':<12}{'episodes/s':>11}{'range':>15}{'x':>6}{'engine':>8}{'trainer':>8}{'step s':>8}{'generation':>12}"
          f"{'stragglers':>12}"
          f"{'training':>10}{'turns':>7}{'of bound':>10}{'mean lag':>10}")  # fmt: skip
    for name, one in result.items():
        rate = one["trajectories_per_s"]
        one["speedup"] = rate["median"] / base
        engine = "-" if one["engine_busy"] is None else f"{one['engine_busy']:.0%}"
        print(f"{name:<12}{rate['median']:>11.1f}{rate['low']:>8.1f}..{rate['high']:<5.1f}{one['speedup']:>6.2f}{engine:>8}"
              f"{one['trainer_busy']:>8.0%}{one['step_s']:>8.2f}{one['generation_s']:>12.2f}{one['stragglers_s']:>12.2f}{one['training_s']:>10.2f}"
              f"{one['turns_s']:>7.2f}{one['of_bound']:>10.0%}{one['mean_lag']:>10.2f}")  # fmt: skip
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
        **versions("torch", "megatron-core"),
    }
    print(json.dumps({"benchmark": "asynchronous", "case": asdict(case), "sides": result, "machine": machine}))


if __name__ == "__main__":
    main()
