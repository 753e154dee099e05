#!/usr/bin/env python
"""Trajectories per second of whole training runs with slow tools: step after step, and with rollouts that run ahead of training.

Every episode is a prompt and three responses with a tool call after each but the last; a call takes a lognormal time up to a
limit, as tools have one, drawn from the task, the attempt and the turn, so that all sides meet the same tools. Generation,
training and weight sync are real: the embedded engine and the Megatron trainer, one thread each for products of the model.

    python benchmarks/asynchronous.py [--quick] [--ablation] [--fake] [--median-s 0.3] [--sigma 1.2] [--cap-s 3]

synchronous   a step is sampled when the one before is over
generation    generation alone: max_staleness without end, and a trainer that takes no time
turns         max_staleness 8, run_ahead 4: what is slow may take up to eight updates; the trainer takes turns with the engine
overlapping   the same, and the engine goes on while the trainer works, in the same process
separate      the same by rollout workers beside the trainer, one per core that the trainer leaves (needs Ray)

--ablation: AsyncFlow's besides, every side with a frozen reference that scores every row: `synchronous` is its barrier,
`streaming` scores groups as they end (score_early), `delayed` has the delayed parameter update too (max_staleness 1, run_ahead 1,
overlapping).

--fake: an engine and a trainer that sleep (the schedule alone, on any machine: nobody computes anything).

The sides take turns within one run, each in a process of its own. A turn is the middle of a run: its first steps, before which
nobody sampled ahead, and its last ones, for which nothing is left to start, are not counted. All that bounds a step is measured
here, on the same cores, as seconds of a step:

generation  of the side `generation`: the engine has the machine for itself
training    of the trainer on the synchronous side, with weight sync and scores: the trainer has the machine for itself
stragglers  the mean longest attempt of a synchronous step, over max_staleness + 1: an attempt that begins with the weights of a
            version is trained by the step max_staleness later at the latest, which waits for it
turns       training and the engine's own work: no less can do where both share a core

`of bound` is the share of max(generation, training) that a side reaches, `binds` the longest of all that apply to it. Where
engine and trainer share a core, max(generation, training) is out of reach by what they take from each other; `turns` says by how
much. The last line is one JSON object.
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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import SHAPES, Figures, Turns, interleave, summary, versions, write_random_model

from rlflow.environment import Environment
from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine
from rlflow.types import Episode, Step, Task, Trajectory

HERE = Path(__file__).resolve()
SLEEPING = HERE.with_name("sleeping.py")
FAR = {"max_staleness": 8, "run_ahead": 4}
WORKERS = max(1, len(os.sched_getaffinity(0)) - 1)  # of the side `separate`
SIDES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "generation": {**FAR, "max_staleness": 1000, "overlap": True},
    "turns": FAR,
    "overlapping": {**FAR, "overlap": True},
    "separate": {**FAR, "overlap": True, "workers": WORKERS},
}
ABLATION: dict[str, dict[str, Any]] = {
    "streaming": {"score_early": True},
    "delayed": {"score_early": True, "max_staleness": 1, "run_ahead": 1, "overlap": True},
}
ALONE = "generation"  # the side whose trainer takes no time
TURNS = 3


@dataclass(frozen=True)
class Case:
    """median_s, sigma, cap_s: of a tool call. observation: words that it answers. steps: of one turn. fake_s: (a token, an
    update) where nobody computes, spread: of the logarithm of a response's seconds there. reference: there is one, which scores
    every row; where nobody computes, in two thirds of the time of an update."""

    prompts: int
    samples: int
    steps: int
    response: int
    observation: int
    median_s: float
    sigma: float
    cap_s: float
    model: str
    fake_s: tuple[float, float] | None = None
    reference: bool = False
    spread: float = 0.0
    seed: int = 0
    environment: str = f"{HERE}:SlowTools"


class SlowTools(Environment):
    """Answers each response with some words after a lognormal time; the reward is the share of even words."""

    def __init__(
        self, median_s: float, sigma: float, cap_s: float, observation: int, seed: int = 0
    ) -> None:
        self._median_s, self._sigma, self._cap_s, self._seed = median_s, sigma, cap_s, seed
        self._observation = "".join(f" w{2 + 3 * word % 1000}" for word in range(observation))
        self._attempts: dict[str, int] = {}

    def tasks(self, split: str) -> Sequence[Task]:
        return [
            Task(
                f"{split}{number}",
                " ".join(f"w{2 + (7 * number + word) % 1000}" for word in range(24)),
            )
            for number in range(512)
        ]

    async def reset(self, task: Task) -> Episode:
        attempt = self._attempts[task.id] = self._attempts.get(task.id, -1) + 1
        return Episode(task, scratch={"draw": random.Random(f"{self._seed}/{task.id}/{attempt}")})

    async def step(self, episode: Episode, response: str) -> Step:
        words = response.split()
        reward = (
            sum(word[1:].isdigit() and int(word[1:]) % 2 == 0 for word in words)
            / max(1, len(words))
            / TURNS
        )
        if episode.turns == TURNS:
            return Step(reward=reward, terminated=True)
        latency_s = self._median_s * episode.scratch["draw"].lognormvariate(0, self._sigma)
        await asyncio.sleep(min(self._cap_s, latency_s))
        return Step(self._observation, reward)


class TimedEngine(EmbeddedEngine):
    """Tells the processor seconds of its steps in a file of the folder `told`, from whatever process it is in."""

    def __init__(
        self,
        path: str,
        tokenizer: Any = None,
        *,
        told: str,
        max_concurrency: int = 256,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(path, tokenizer, max_concurrency=max_concurrency, max_tokens=max_tokens)
        file, busy_s, step = (
            os.open(f"{told}/{os.getpid()}-{id(self)}", os.O_CREAT | os.O_WRONLY),
            0.0,
            self._scheduler.step,
        )

        def timed(admit: bool) -> None:
            nonlocal busy_s
            started = time.thread_time()
            step(admit)
            busy_s += time.thread_time() - started
            os.pwrite(file, f"{busy_s:12.6f}".encode(), 0)

        self._scheduler.step = timed  # type: ignore[method-assign]


def told_s(folder: Path) -> float:
    """Processor seconds that the engines of a turn have told of."""
    return sum(float(path.read_text() or 0) for path in folder.iterdir())


def write_model(path: Path, model: str) -> int:
    """A random model with a tokenizer of one word per id; returns its number of parameters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shape = SHAPES[model]
    parameters = write_random_model(path, shape, pad_token_id=0, bos_token_id=None, eos_token_id=1)
    words = {
        word: index
        for index, word in enumerate(["<pad>", "<end>", *(f"w{i}" for i in range(2, shape.vocab))])
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"
    ).save_pretrained(str(path))
    return parameters


def configured(
    folder: str, told: Path, case: Case, options: dict[str, Any], alone: bool
) -> list[str]:
    """The configuration of a side's run, as overrides."""
    chosen = [
        f"rollout.asynchronous.{key}={str(value).lower()}"
        for key, value in options.items()
        if key != "workers"
    ]
    if "workers" in options:
        chosen.append(f"cluster.rollout_workers={options['workers']}")
    update_s = score_s = 0.0
    if case.fake_s is None:
        chosen.append(
            f"rollout.engine={{name: '{HERE}:TimedEngine', max_concurrency: 256, told: '{told}'}}"
        )
    else:
        token_s, update_s = case.fake_s
        tokens = (
            case.prompts
            * case.samples
            * (24 + TURNS * case.response + case.observation * (TURNS - 1))
        )
        score_s = update_s / 1.5 / tokens if case.reference else 0.0
        times = f"token_s: {token_s}, sigma: {case.spread}"
        chosen.append(
            f"rollout.engine={{name: '{SLEEPING}:FakeEngine', {times}, max_concurrency: 256}}"
        )
    if alone or case.fake_s is not None:
        times = "" if alone else f", update_s: {update_s}, score_token_s: {score_s}"
        chosen.append(f"trainer.backend={SLEEPING}:FakeTrainer")
        chosen.append(f"trainer.optimizer={{name: '{SLEEPING}:Sleep'{times}}}")
    losses = (
        "{name: ppo_clip, anchor: proximal}" + ", {name: kl, coefficient: 0.01}" * case.reference
    )
    tools = f"median_s: {case.median_s}, sigma: {case.sigma}, cap_s: {case.cap_s}, observation: {case.observation}"
    environment = f"environment={{name: '{case.environment}', {tools}, seed: {case.seed}}}"
    return [
        f"run.directory={folder}/runs/{os.getpid()}", f"run.steps={case.steps + 2 * margin(options)}", "run.overwrite=true",
        f"model.path={folder}/model", f"run.seed={case.seed}", environment,
        f"rollout.prompts_per_step={case.prompts}", f"rollout.samples_per_prompt={case.samples}",
        f"rollout.max_turns={TURNS}", f"rollout.max_response_tokens={case.response}", "rollout.max_total_tokens=512",
        "trainer.lr=1e-5", "algorithm.transforms=[tis]", f"algorithm.losses=[{losses}]",
        "metrics.progress=none", "metrics.trajectories_per_step=0", *chosen,
    ]  # fmt: skip


def margin(options: dict[str, Any]) -> int:
    """Steps at both ends of a run that are not counted."""
    return 1 + int(options.get("run_ahead", 0))


def side(turns: Turns, folder: str, case: Case, options: dict[str, Any], alone: bool) -> None:
    """One side: the middle of a run per turn. alone: nothing is trained, nor are weights given to anybody."""
    from rlflow.config.schema import load_config
    from rlflow.loop import training_step
    from rlflow.run.open import open_run

    first = margin(options)
    turns.imported()
    while turns.begin():
        told = Path(tempfile.mkdtemp(dir=folder))
        with open_run(load_config(None, configured(folder, told, case, options, alone))) as run:
            trained, lags, slowest, longest, played_s, trainer_s = 0, [], [], [], 0.0, 0.0
            start = busy = 0.0
            for groups in run.groups():
                began = time.perf_counter()
                metrics = training_step(run.step, groups, run.trainer, run.algorithm, run.timer)
                if not alone:
                    run.sync_weights(run.step + 1)
                if start:
                    trainer_s += time.perf_counter() - began
                    tokens = [
                        part for group in groups for one in group.usable for part in one.segments
                    ]
                    lags += [run.step - int(part.versions[part.loss_mask].min()) for part in tokens]
                    trained += sum(len(group.usable) for group in groups)
                    played_s += sum(duration(one) for group in groups for one in group.usable)
                    slowest += [max(duration(one) for one in group.usable) for group in groups]
                    longest.append(max(slowest[-len(groups) :]))
                run.finish_step(metrics, groups)
                if run.step == first:
                    start, busy = time.perf_counter(), told_s(told)
                if run.step == first + case.steps:
                    break
            seconds, engine_s = time.perf_counter() - start, told_s(told) - busy
        turns.end(seconds=seconds, trained=trained, engine_s=engine_s, trainer_s=trainer_s, lag=statistics.fmean(lags),
                  played_s=played_s, group_s=statistics.fmean(slowest), longest_s=statistics.fmean(longest))  # fmt: skip


def duration(one: Trajectory) -> float:
    """Seconds that an episode took, from the first token of its first response to its end."""
    return sum(turn.duration_s for turn in one.turns)


def figures(
    case: Case, options: dict[str, Any], taken: dict[str, list[Figures]], name: str
) -> dict[str, Any]:
    """Of one side, against what bounds it."""

    def per_step(key: str, of: str = name) -> float:
        return sum(one[key] for one in taken[of]) / case.steps / len(taken[of])

    step_s, engine_s = per_step("seconds"), per_step("engine_s")
    longest_s = statistics.fmean(one["longest_s"] for one in taken["synchronous"])
    training = per_step("trainer_s", "synchronous")
    bounds = {
        "generation": per_step("seconds", ALONE) if "run_ahead" in options else longest_s,
        "training": 0.0 if name == ALONE else training,
        "stragglers": longest_s / (1 + options.get("max_staleness", 0)),
    }
    aim = max(bounds["generation"], bounds["training"])
    if not options.get(
        "overlap"
    ):  # of what an engine that sleeps does meanwhile nothing can be said
        bounds["turns"] = training + (
            per_step("engine_s", "synchronous") if "run_ahead" in options else longest_s
        )
    return {
        "trajectories_per_s": summary([one["trained"] / one["seconds"] for one in taken[name]]),
        "engine_busy": engine_s / step_s
        if case.fake_s is None
        else None,  # places of a fake one sleep side by side
        "trainer_busy": per_step("trainer_s") / step_s,
        "step_s": step_s,
        "bounds_s": bounds,
        "binds": max(bounds, key=lambda bound: bounds[bound]),
        "of_bound": aim / step_s,
        "of_longest": max(bounds.values()) / step_s,
        "mean_lag": statistics.fmean(one["lag"] for one in taken[name]),
    }


def chosen_sides(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The sides that are played; those without which there is no bound always."""
    known = {**SIDES, **(ABLATION if args.ablation else {})}
    if find_spec("ray") is None or args.fake:
        del known["separate"]
    return {
        name: one
        for name, one in known.items()
        if not args.only or name in ("synchronous", ALONE, *args.only)
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument(
        "--fake", action="store_true", help="engine and trainer sleep: the schedule alone"
    )
    parser.add_argument(
        "--ablation",
        action="store_true",
        help="barrier, streaming, streaming and delayed update besides",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="SIDE",
        help="this side, beside those that give the bounds",
    )
    parser.add_argument("--median-s", type=float, default=0.3, help="of a tool call (default 0.3)")
    parser.add_argument(
        "--sigma", type=float, default=1.2, help="of its logarithm (default 1.2; 0: all alike)"
    )
    parser.add_argument(
        "--cap-s", type=float, default=3.0, help="the longest that a tool call takes (default 3)"
    )
    parser.add_argument(
        "--update-s", type=float, default=0.75, help="of an update, with --fake (default 0.75)"
    )
    parser.add_argument("--rounds", type=int, default=None)
    args = parser.parse_args()
    case = Case(
        8, 4, 12, 16, 40, args.median_s, args.sigma, args.cap_s, "8M", reference=args.ablation
    )
    if args.quick:
        case = replace(
            case, prompts=4, samples=2, steps=6, median_s=args.median_s / 2, cap_s=args.cap_s / 2
        )
    if args.fake:
        case = replace(case, fake_s=(0.005, args.update_s / (2 if args.quick else 1)))
    rounds = args.rounds or (1 if args.quick else 3)
    sides = chosen_sides(args)
    with tempfile.TemporaryDirectory(prefix="rlflow-asynchronous-") as folder:
        parameters = write_model(Path(folder) / "model", case.model)
        played = {
            name: (side, folder, case, options, name == ALONE) for name, options in sides.items()
        }
        taken = interleave(
            played, rounds, threads=1, warm_up=False
        )  # a turn's first steps are none of its figures
    result = {name: figures(case, options, taken, name) for name, options in sides.items()}
    print(f"{parameters / 1e6:.1f}M parameters, {case.prompts} x {case.samples} episodes per step, {case.steps} steps, "
          f"tool calls {case.median_s:g} s x lognormal({case.sigma:g}) up to {case.cap_s:g} s; {rounds} rounds"
          + ", fake" * args.fake)  # fmt: skip
    report(result)
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "platform": platform.platform(),
        **versions("torch", "megatron-core"),
    }
    print(
        json.dumps(
            {"benchmark": "asynchronous", "case": asdict(case), "sides": result, "machine": machine}
        )
    )


def report(result: dict[str, dict[str, Any]]) -> None:
    """Prints the table, and which of overlapping and separate placement was faster."""
    base = result["synchronous"]["trajectories_per_s"]["median"]
    print(f"{'':<12}{'episodes/s':>11}{'range':>15}{'x':>6}{'engine':>8}{'trainer':>8}{'step s':>8}{'generation':>12}"
          f"{'training':>10}{'stragglers':>12}{'turns':>7}  {'binds':<12}{'of bound':>8}{'mean lag':>10}")  # fmt: skip
    for name, one in result.items():
        rate, bounds = one["trajectories_per_s"], one["bounds_s"]
        one["speedup"] = rate["median"] / base
        engine = "-" if one["engine_busy"] is None else f"{one['engine_busy']:.0%}"
        turns = f"{bounds['turns']:.2f}" if "turns" in bounds else "-"
        print(f"{name:<12}{rate['median']:>11.1f}{rate['low']:>8.1f}..{rate['high']:<5.1f}{one['speedup']:>6.2f}{engine:>8}"
              f"{one['trainer_busy']:>8.0%}{one['step_s']:>8.2f}{bounds['generation']:>12.2f}{bounds['training']:>10.2f}"
              f"{bounds['stragglers']:>12.2f}{turns:>7}  {one['binds']:<12}{one['of_bound']:>8.0%}"
              f"{one['mean_lag']:>10.2f}")  # fmt: skip
    if "separate" in result and "overlapping" in result:
        ratio = result["separate"]["speedup"] / result["overlapping"]["speedup"]
        print(
            f"separate placement is {'faster' if ratio > 1 else 'slower'} than one process: {ratio:.2f}x"
        )


if __name__ == "__main__":
    main()
