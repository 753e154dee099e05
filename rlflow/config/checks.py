"""Whether a configuration fits together, and the batch plan that it amounts to: all before anything expensive starts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from rlflow.components import ADVANTAGE, AGGREGATE, CURATOR, ENGINE, ENVIRONMENT, FILTER, LOSS, TRANSFORM
from rlflow.config.schema import RunConfig
from rlflow.errors import ConfigError, did_you_mean
from rlflow.trainer.layout import Layout

CHOICES = {
    "model.dtype": ("float32", "bfloat16"),
    "trainer.backend": ("megatron", "reference"),
    "trainer.recompute": ("none", "selective", "full"),
    "trainer.lr_schedule": ("constant", "cosine", "linear"),
    "metrics.progress": ("auto", "rich", "plain", "none"),
}
POSITIVE = (
    "run.steps",
    "run.max_minutes",
    "run.resume_step",
    "data.max_prompt_tokens",
    "rollout.prompts_per_step",
    "rollout.samples_per_prompt",
    "rollout.max_turns",
    "rollout.max_response_tokens",
    "rollout.max_total_tokens",
    "rollout.max_observation_tokens",
    "rollout.temperature",
    "algorithm.minibatches_per_step",
    "algorithm.epochs_per_step",
    "trainer.tensor_parallel",
    "trainer.pipeline_parallel",
    "trainer.context_parallel",
    "trainer.virtual_pipeline",
    "trainer.lr",
    "trainer.lr_decay_steps",
    "trainer.eps",
    "trainer.tokens_per_microbatch",
    "trainer.logits_chunk_mib",
    "evaluation.questions",
    "evaluation.final_questions",
    "evaluation.samples_per_prompt",
    "checkpoint.keep",
    "cluster.threads_per_rank",
)
NOT_NEGATIVE = (
    "trainer.lr_warmup_steps",
    "trainer.min_lr",
    "trainer.weight_decay",
    "trainer.max_gradient_norm",
    "evaluation.every_steps",
    "evaluation.temperature",
    "checkpoint.every_steps",
    "metrics.trajectories_per_step",
    "cluster.ranks",
    "cluster.gpus_per_rank",
    "run.seed",
)
SHARES = ("rollout.max_aborted_share", "trainer.beta1", "trainer.beta2", "run.target")
NOT_IN_REFERENCE = (
    ("packing", False, "pads"),
    ("distributed_optimizer", False, "runs on one device"),
    ("recompute", "none", "keeps all activations"),
)
"""Keys of `trainer`, the only value that the reference backend takes, and why."""
_NAME = re.compile(r"[\w][\w.+=-]*")
_ENGINE_GETS = ("path", "tokenizer", "dtype", "seed", "deterministic", "trust_remote_code")


def check_config(config: RunConfig, components: bool = True) -> None:
    """Returns when the configuration fits together: values in range, sections that agree, every name known.

    `components=False` leaves out the environment and the engine, whose packages may live on other machines.

    Raises:
        ConfigError: the first contradiction, with the keys to change.
    """
    _check_values(config)
    _check_sampling(config)
    _check_batch(config)
    _check_layout(config)
    if not _NAME.fullmatch(config.run.name):
        raise ConfigError(
            f"run.name: expected a name for a directory (letters, digits, . _ -), found '{config.run.name}'."
        )
    _check_components(config)
    if components:
        ENGINE.check(config.rollout.engine, _ENGINE_GETS, "rollout.engine")
        environment_name(config)
        ENVIRONMENT.check(config.environment)


def environment_name(config: RunConfig) -> str:
    """The environment that the configuration names. Raises ConfigError where it names none."""
    name = config.environment.get("name")
    if not name:
        installed = ", ".join(ENVIRONMENT.names()) or "none"
        raise ConfigError(
            "environment.name: expected an environment, found none; set environment.name or give --env NAME. Installed: "
            f"{installed}; or package.module:Class, or file.py:Class."
        )
    return str(name)


def _value(config: RunConfig, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _check_values(config: RunConfig) -> None:
    for key, choices in CHOICES.items():
        value = str(_value(config, key))
        if value not in choices:
            raise ConfigError(
                f"{key}: expected one of {', '.join(choices)}, found '{value}'.{did_you_mean(value, choices)}"
            )
    _check_range(config, POSITIVE, lambda value: value > 0, "a number above 0")
    _check_range(config, NOT_NEGATIVE, lambda value: value >= 0, "0 or a number above 0")
    _check_range(config, SHARES, lambda value: 0 <= value <= 1, "a number from 0 to 1")


def _check_range(config: RunConfig, keys: Sequence[str], holds: Callable[[float], bool], expected: str) -> None:
    for key in keys:
        value = _value(config, key)
        if value is None:
            continue
        if not math.isfinite(value) or not holds(value):
            raise ConfigError(f"{key}: expected {expected}, found {value}.")


def _check_sampling(config: RunConfig) -> None:
    for key in ("top_p", "top_k"):
        if key in config.rollout.engine:
            raise ConfigError(
                f"rollout.engine.{key}: training samples from the whole distribution; with {key} the sampled "
                "distribution would not be the one that is differentiated. Remove it, use rollout.temperature."
            )
    rollout = config.rollout
    if rollout.max_response_tokens >= rollout.max_total_tokens:
        raise ConfigError(
            f"rollout.max_total_tokens: expected more than rollout.max_response_tokens "
            f"({rollout.max_response_tokens}), as the prompt counts too; found {rollout.max_total_tokens}."
        )


def _check_batch(config: RunConfig) -> None:
    rollout, algorithm = config.rollout, config.algorithm
    trajectories = rollout.prompts_per_step * rollout.samples_per_prompt
    if trajectories % algorithm.minibatches_per_step:
        divisors = [n for n in range(1, min(trajectories, 64) + 1) if trajectories % n == 0]
        raise ConfigError(
            f"algorithm.minibatches_per_step: expected a divisor of the {trajectories} trajectories per step "
            f"({', '.join(str(n) for n in divisors[:8])}, ...), found {algorithm.minibatches_per_step}."
        )
    if algorithm.advantage.get("name") == "grpo" and rollout.samples_per_prompt < 2:
        raise ConfigError(
            "rollout.samples_per_prompt: grpo compares attempts at the same prompt; expected at least 2, found 1."
        )


def _check_layout(config: RunConfig) -> None:
    trainer, ranks = config.trainer, config.cluster.ranks
    layout = Layout.of(trainer)
    if trainer.backend == "reference":
        if layout.model_ranks > 1 or ranks > 1:
            raise ConfigError(
                "trainer.backend: 'reference' runs on one device; expected tensor_parallel, pipeline_parallel, "
                f"context_parallel and cluster.ranks at most 1, found {trainer.tensor_parallel}, "
                f"{trainer.pipeline_parallel}, {trainer.context_parallel}, {ranks}."
            )
        for name, expected, why in NOT_IN_REFERENCE:
            if (found := getattr(trainer, name)) != expected:
                raise ConfigError(
                    f"trainer.{name}: 'reference' {why}; expected {str(expected).lower()}, found {str(found).lower()}. "
                    "Use trainer.backend=megatron."
                )
    layout.data_parallel(ranks)


def _check_components(config: RunConfig) -> None:
    if not config.algorithm.losses:
        raise ConfigError("algorithm.losses: expected at least one loss, found none; try [ppo_clip]")
    for index, loss in enumerate(config.algorithm.losses):
        LOSS.build(loss, f"algorithm.losses[{index}]")  # a loss checks its own limits when it is made
    ADVANTAGE.check(config.algorithm.advantage, where="algorithm.advantage")
    AGGREGATE.check(config.algorithm.aggregate, ("tokens",), "algorithm.aggregate")
    for kind, name in ((FILTER, "filters"), (TRANSFORM, "transforms")):
        for index, component in enumerate(getattr(config.algorithm, name)):
            kind.check(component, where=f"algorithm.{name}[{index}]")
    if config.data.curator is not None:
        CURATOR.check(config.data.curator, where="data.curator")
