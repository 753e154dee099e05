"""The smallest task that reinforcement learning can solve end to end: say the letter that was just shown, twice.

A tiny random model with a vocabulary of a dozen tokens learns it from reward alone in seconds. Named in configurations as
`<this file>:Letters`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlflow.config.loading import config_text
from rlflow.config.schema import RunConfig, load_config
from rlflow.environment import Environment
from rlflow.report.metrics import Metric
from rlflow.types import Episode, Step, Task
from tests.fixtures import tiny_model

LETTERS = "abcdef"
SPECIAL = ("<pad>", "<end>")
REFERENCE = f"{Path(__file__).resolve()}:Letters"
DEMAND = "?"
"""Stands between the letters; the policy may say it, the environment says it too."""


class Letters(Environment):
    """Shows `X?`, expects X; answers with `|Y?`, expects Y. Half a point each; exact_match is 1 for both."""

    stop = (*LETTERS, DEMAND, "|")  # one token with text ends a response
    metrics = {"exact_match": Metric("share", "of pairs said", score=True, shown="EM {:.3f}")}

    def __init__(self, tasks: int = 36, prompt: str = "{letter}?") -> None:
        self._count = tasks
        self._prompt = prompt

    def tasks(self, split: str) -> Sequence[Task]:
        pairs = [(one, other) for one in LETTERS for other in LETTERS][: self._count]
        return [
            Task(f"{split}-{one}{other}", self._prompt.format(letter=one), (one, other))
            for one, other in pairs
        ]

    async def step(self, episode: Episode, response: str) -> Step:
        said = response == episode.task.answer[episode.turns - 1]
        right = episode.scratch["right"] = episode.scratch.get("right", 0) + said
        metrics = {"exact_match": float(right == 2)}
        if episode.turns == 2:
            return Step(reward=said / 2, terminated=True, metrics=metrics)
        return Step(f"|{episode.task.answer[1]}{DEMAND}", said / 2, metrics=metrics)


def write_letters_model(path: Path, family: str = "qwen2", **sizes: Any) -> Path:
    """A random model whose tokens are the letters, `?`, `|`, an end and a padding token; returns its directory."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *LETTERS, DEMAND, "|"]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.Fuse()
    small = {
        "vocab_size": len(words),
        "hidden_size": 32,
        "intermediate_size": 64,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    tiny_model(path, family, tokenizer=False, **{**small, **sizes})
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[1]
    )
    fast.save_pretrained(str(path))
    return path


LEARNING = ("rollout.prompts_per_step=12", "rollout.samples_per_prompt=8")
"""Overrides of a run that is to learn."""
STEPS = 9
DETERMINISTIC = (
    f"run.steps={STEPS}", "run.deterministic=true", "evaluation.every_steps=3", "checkpoint.every_steps=2", "checkpoint.keep=3",
    "trainer.schedule={name: cosine, warmup_steps: 2, decay_steps: 20}", "algorithm.minibatches_per_step=2",
    "algorithm.losses=[{name: ppo_clip}, {name: kl, coefficient: 0.01, refresh_steps: 5}, {name: entropy_target, target: 2.0}]",
    "algorithm.advantage=running", "metrics.picture=false",
)  # fmt: skip
"""Everything that a resumed run has to find again: schedule, moments, reference policy, order of tasks and minibatches, running
statistics and coefficients."""
SAVED_OFTEN = ("checkpoint.every_steps=1", "checkpoint.keep=100")


def letters_config(
    model: Path, runs: Path, *overrides: str, preset: str | None = None
) -> RunConfig:
    """A run of few and small steps; the run directory is `runs/letters`. With LEARNING it solves the task in seconds.
    preset: another algorithm."""
    values = [
        f"run.directory={runs}/{{name}}", "run.name=letters", "run.steps=40", f"model.path={model}",
        f"environment={{name: '{REFERENCE}'}}", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4",
        "rollout.max_turns=2", "rollout.max_response_tokens=2", "rollout.max_total_tokens=16",
        "trainer.lr=5e-3", "trainer.optimizer={name: adamw, weight_decay: 0, beta2: 0.99}", "evaluation.every_steps=10",
        "evaluation.temperature=1.0", "checkpoint.every_steps=10", "metrics.progress=none",
        "metrics.picture=false",
    ]  # fmt: skip
    return load_config(None, [*values, *overrides], preset)


def asked_of_the_user(preset: str, shared: Path, teacher: Path) -> list[str]:
    """Overrides for what a preset leaves open: the directory that a swarm shares, the teacher's model."""
    asked = {
        "opd": [f"algorithm.teacher.path={teacher}"],
        "sapo_swarm": [f"algorithm.filters.0.transport={{name: directory, path: '{shared}'}}"],
    }
    return asked.get(preset, [])


def write_config(config: RunConfig, path: Path) -> Path:
    """The configuration as a YAML file, for the command line."""
    path.write_text(config_text(config), encoding="utf-8")
    return path
