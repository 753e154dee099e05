"""Whether a configuration fits together, and the batch plan that it amounts to: all before anything
expensive starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

from rlflow.components import (
    ADVANTAGE,
    AGGREGATE,
    CURATOR,
    ENGINE,
    ENVIRONMENT,
    FILTER,
    LOSS,
    SINK,
    TEACHER,
    TRANSFORM,
    WEIGHT_TRANSFER,
)
from rlflow.config.loading import check_values
from rlflow.config.schema import RunConfig
from rlflow.errors import ConfigError

MOST_TRAJECTORIES = 1_000_000
_NAME = re.compile(r"[\w][\w.+=-]*")
_ENGINE_GETS = ("path", "tokenizer", "dtype", "seed", "deterministic", "trust_remote_code")


def check_config(config: RunConfig, components: bool = True) -> None:
    """Returns when the configuration fits together: values in range, sections that agree, every
    name known.

    `components=False` leaves out the environment and the engine, whose packages may live on other
    machines.

    Raises:
        ConfigError: the first contradiction, with the keys to change.
    """
    for check in config_checks(config, components):
        check()


def config_checks(config: RunConfig, components: bool = True) -> Iterator[Callable[[], object]]:
    """What `check_config` looks at, one thing per call; the first one is what the others rely on:
    every value by itself."""
    yield lambda: check_values(config)
    yield lambda: _check_asynchrony(config)
    yield lambda: _check_sampling(config)
    yield lambda: _check_batch(config)
    yield lambda: config.trainer.decaying_over(config.updates).check(config.cluster.ranks)
    yield lambda: _check_critic(config)
    yield lambda: _check_name(config)
    yield from _component_checks(config)
    if components:
        yield lambda: ENGINE.check(config.rollout.engine, _ENGINE_GETS, "rollout.engine")
        yield lambda: environment_name(config) and ENVIRONMENT.check(config.environment)


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


def _check_critic(config: RunConfig) -> None:
    if config.algorithm.critic is not None:
        config.algorithm.critic.decaying_over(config.updates).check()


def _check_name(config: RunConfig) -> None:
    if not _NAME.fullmatch(config.run.name):
        raise ConfigError(
            f"run.name: expected a name for a directory (letters, digits, . _ -), found '{config.run.name}'."
        )


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


def _check_asynchrony(config: RunConfig) -> None:
    asynchrony = config.asynchrony
    if not asynchrony.on:
        if asynchrony.group_s is not None:
            raise ConfigError(
                f"rollout.asynchronous.group_s: expected null where nothing runs ahead, found {asynchrony.group_s:g}: a step "
                "waits for all of its attempts, rollout.faults.episode_s at the most. Set max_staleness to at least 1."
            )
        return
    if config.run.deterministic:
        raise ConfigError(
            "run.deterministic: what runs ahead of training depends on how long everything takes; set "
            "rollout.asynchronous.run_ahead=0, or run.deterministic=false."
        )
    if asynchrony.max_staleness == 0:
        raise ConfigError(
            f"rollout.asynchronous.max_staleness: expected at least 1 with run_ahead {asynchrony.ahead}, found 0: what is "
            "sampled before its step is older than the weights that it trains."
        )
    if asynchrony.when_stale == "wait" and asynchrony.ahead > asynchrony.max_staleness:
        raise ConfigError(
            f"rollout.asynchronous.run_ahead: expected at most max_staleness ({asynchrony.max_staleness}), found "
            f"{asynchrony.ahead}: what runs further ahead is too old when its turn comes. Lower it, raise max_staleness, or set "
            "when_stale: drop."
        )


def _check_batch(config: RunConfig) -> None:
    rollout, algorithm = config.rollout, config.algorithm
    trajectories = rollout.prompts_per_step * rollout.samples_per_prompt
    if trajectories > MOST_TRAJECTORIES:
        raise ConfigError(
            f"rollout.prompts_per_step x rollout.samples_per_prompt: expected at most {MOST_TRAJECTORIES:,} trajectories "
            f"per step, which are all in memory at once; found {rollout.prompts_per_step:,} x {rollout.samples_per_prompt:,}."
        )
    if trajectories % algorithm.minibatches_per_step:
        divisors = [n for n in range(1, min(trajectories, 64) + 1) if trajectories % n == 0]
        raise ConfigError(
            f"algorithm.minibatches_per_step: expected a divisor of the {trajectories} trajectories per step "
            f"({', '.join(str(n) for n in divisors[:8])}, ...), found {algorithm.minibatches_per_step}."
        )


def _component_checks(config: RunConfig) -> Iterator[Callable[[], object]]:
    algorithm = config.algorithm
    yield lambda: _check_losses(config)
    yield lambda: _check_advantage(config)
    if algorithm.teacher:
        yield lambda: TEACHER.check(algorithm.teacher, where="algorithm.teacher")
    yield lambda: AGGREGATE.check(algorithm.aggregate, ("tokens",), "algorithm.aggregate")
    for kind, name in ((FILTER, "filters"), (TRANSFORM, "transforms")):
        for index, component in enumerate(getattr(algorithm, name)):
            yield partial(kind.check, component, ("tokens",), f"algorithm.{name}[{index}]")
    yield lambda: WEIGHT_TRANSFER.check(
        config.cluster.weight_transfer, where="cluster.weight_transfer"
    )
    yield lambda: CURATOR.check(config.data.curator, ("tasks", "seed"), "data.curator")
    for index, sink in enumerate(config.metrics.sinks):
        yield partial(SINK.check, sink, where=f"metrics.sinks[{index}]")


def _check_losses(config: RunConfig) -> None:
    if not config.algorithm.losses:
        raise ConfigError(
            "algorithm.losses: expected at least one loss, found none; try [ppo_clip]"
        )
    for index, loss in enumerate(config.algorithm.losses):
        # A loss checks its own limits when it is made
        LOSS.build(loss, f"algorithm.losses[{index}]")


def _check_advantage(config: RunConfig) -> None:
    """Whether it can be made, which for one with limits of its own its constructor knows; and has
    attempts to compare."""
    made = ADVANTAGE.build(config.algorithm.advantage, "algorithm.advantage")
    # A function with its keywords bound: its own
    compares = getattr(getattr(made, "func", made), "compares_attempts", False)
    if compares and config.rollout.samples_per_prompt < 2:
        raise ConfigError(
            f"rollout.samples_per_prompt: {config.algorithm.advantage['name']} compares attempts at the same prompt; expected at "
            "least 2, found 1."
        )
