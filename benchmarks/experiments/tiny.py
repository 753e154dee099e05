"""The smallest set-up in which the real parts learn: the training step, algorithms and presets, rollout, embedded engine and
trainer of `rlflow train`, around a model of 20,000 parameters and a task whose optimum is known.

Samples of staleness k come from the policy as it was k steps ago: the engine is given that snapshot, under its version, before it
samples. That is what an asynchronous run trains on whose samples are all k steps late; its first k steps train on samples of the
policy that it began with.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.base import Figures
from recipes.swarm.alphabet import write_model
from rlflow.algorithms.algorithm import Algorithm
from rlflow.algorithms.base import Curator
from rlflow.algorithms.teachers.classroom import Classroom
from rlflow.batching import token_batch
from rlflow.components import CURATOR
from rlflow.config.schema import RunConfig, load_config
from rlflow.environment import Environment
from rlflow.errors import RLFlowError
from rlflow.loop import training_step
from rlflow.report.metrics import Metric
from rlflow.report.timer import PhaseTimer
from rlflow.rollout import Rollout
from rlflow.run.assemble import make_rollout, make_trainer
from rlflow.trainer.base import Trainer
from rlflow.types import Episode, Group, Step, Task
from tests.reference import ORACLE

LETTERS = "abcdefghijkl"
WORDS = ("<pad>", "<end>", *LETTERS, "?")
SPELLING = f"{__name__}:Spelling"
"""The environment's name in a configuration."""


class Spelling(Environment):
    """Shown a letter, say the one that follows it in the alphabet, which is a circle; with a length the next ones too. The reward
    is the share of them that is right in its place: 1 at the optimum, 1/15 by chance."""

    metrics = {"exact_match": Metric("share", "of answers", score=True)}

    def __init__(self, length: int = 1) -> None:
        self._length = length

    def tasks(self, split: str) -> Sequence[Task]:
        circle = LETTERS * 2
        return [
            Task(f"after-{letter}", f"{letter}?", circle[place + 1 : place + 1 + self._length])
            for place, letter in enumerate(LETTERS)
        ]

    async def step(self, episode: Episode, response: str) -> Step:
        answer = episode.task.answer
        right = sum(one == other for one, other in zip(response, answer, strict=False)) / len(
            answer
        )
        return Step(reward=right, terminated=True, metrics={"exact_match": float(right == 1)})


@dataclass
class Tiny:
    """A run between its steps, with the parts that `rlflow train` makes of the configuration."""

    config: RunConfig
    rollout: Rollout
    algorithm: Algorithm
    trainer: Trainer
    source: Curator

    def train(self, steps: int, lag: int = 0) -> Iterator[tuple[dict[str, float], list[Group]]]:
        """(metrics, groups) of one step after another, each on samples of the policy `lag` steps before it."""
        timer, snapshots = PhaseTimer(), deque([self.weights()], maxlen=lag + 1)
        stream = self.rollout.stream(
            self.source,
            self.config.rollout.prompts_per_step,
            admit=self.algorithm.admit,
            max_rounds=self.algorithm.max_rounds,
        )
        for step in range(steps):
            version = max(0, step - lag)
            if version != self.rollout.version:
                self.rollout.load_weights(snapshots[0], version)
            groups = self.algorithm.complete(next(stream))
            yield training_step(step, groups, self.trainer, self.algorithm, timer), groups
            snapshots.append(self.weights())

    def weights(self) -> list[tuple[str, Tensor]]:
        """A copy of today's policy."""
        return [(name, tensor.clone()) for name, tensor in self.trainer.weights()]

    def success(self, split: str = "val") -> float:
        """The chance that an answer sampled at temperature 1 is wholly right, the mean over all tasks: exact, from log-probs."""
        tasks = self.rollout.environment.tasks(split)
        prompts = [self.rollout.prompt_tokens(task) for task in tasks]
        answers = [self.rollout.tokenizer.encode_text(task.answer) for task in tasks]
        rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        scores = self.trainer.score(token_batch(rows))["logprobs"].double()
        sums = [
            float(scores[row, len(prompt) : len(rows[row])].sum())
            for row, prompt in enumerate(prompts)
        ]
        return float(torch.tensor(sums).exp().mean())


@contextmanager
def tiny(
    seed: int,
    *overrides: str,
    preset: str | None = None,
    algorithm: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    model: Callable[[Path], None] | None = None,
) -> Iterator[Tiny]:
    """A run at its start, in a temporary folder. algorithm: keys of that section, over the preset. environment: a component;
    None: `Spelling`. model: writes the HuggingFace directory of the starting policy; None: a random Qwen2 of 20,000 parameters,
    drawn with the seed. overrides: as on the command line."""
    with tempfile.TemporaryDirectory(prefix="rlflow-tiny-") as folder, ExitStack() as stack:
        path = Path(folder) / "model"
        if model is None:
            write_model(path, "qwen2", WORDS, width=32, seed=seed + 1)
        else:
            model(path)
        section = [
            f"algorithm.{key}={json.dumps(value)}" for key, value in (algorithm or {}).items()
        ]
        usual = [
            f"run.seed={seed}", f"model.path={path}", f"environment={json.dumps(environment or {'name': SPELLING})}",
            "rollout.prompts_per_step=12", "rollout.samples_per_prompt=8", "rollout.max_turns=1",
            "rollout.max_response_tokens=1", "rollout.max_total_tokens=16", f"trainer.backend={ORACLE}", "trainer.lr=3e-3",
            "trainer.optimizer={name: adamw, weight_decay: 0, beta2: 0.99}",
        ]  # fmt: skip
        config = load_config(None, [*usual, *section, *overrides], preset)
        rollout = stack.enter_context(make_rollout(config))
        made = Algorithm.from_config(config, rollout.response_budget, rollout=rollout)
        stack.callback(made.close)
        trainer = make_trainer(config)
        stack.callback(trainer.close)
        if "reference" in made.needs:
            trainer.snapshot("reference")
        if made.teacher is not None:
            stack.callback(made.teacher.close)
            made.teacher.open(
                Classroom(
                    trainer, rollout.tokenizer, rollout.prompt_tokens, config.rollout.temperature
                )
            )
        tasks = rollout.environment.tasks("train")
        source = CURATOR.build(config.data.curator, "data.curator", tasks=tasks, seed=seed)
        yield Tiny(config, rollout, made, trainer, source)


SEEN = ("clip_fraction", "kept", "capped", "ratio", "second_moment")
"""Metrics of a step that `learned` averages, where the algorithm has them."""


def learned(run: Tiny, steps: int, lag: int = 0, measures: int = 20) -> Figures:
    """What a run comes to: success (the mean of the last three measures), start, halfway, best, collapsed (1: a loss or a
    gradient was not finite), the means of some metrics over the steps, and the curve of success."""
    places = {round(steps * number / measures) for number in range(1, measures + 1)}
    curve, seen = [run.success()], dict[str, list[float]]()
    collapsed = 0.0
    try:
        for step, (metrics, _) in enumerate(run.train(steps, lag), 1):
            for name in SEEN:
                if f"train/{name}" in metrics:
                    seen.setdefault(name, []).append(metrics[f"train/{name}"])
            if step in places:
                curve.append(run.success())
    except RLFlowError as error:
        print(f"collapsed: {error}", file=sys.stderr)
        collapsed = 1.0
    means = {name: statistics.fmean(found) for name, found in seen.items()}
    return {
        "success": statistics.fmean(curve[-3:]),
        "start": curve[0],
        "halfway": curve[len(curve) // 2],
        "best": max(curve),
        "collapsed": collapsed,
        **means,
        "curve": curve,
    }
