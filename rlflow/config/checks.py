"""Checks that a configuration fits together, before anything expensive starts."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

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
from rlflow.config.schema import (
    AlgorithmSection,
    Asynchrony,
    ClusterSection,
    RolloutSection,
    RunConfig,
)
from rlflow.errors import ConfigError, RLFlowError
from rlflow.storage.redaction import redacted_keys
from rlflow.values import checked, section_hints, section_of, show

MOST_TRAJECTORIES = 1_000_000
_NAME = re.compile(r"[\w][\w.+=-]*")
_ENGINE_GETS = (
    "path",
    "tokenizer",
    "dtype",
    "max_tokens",
    "seed",
    "deterministic",
    "trust_remote_code",
)


def check_config(config: RunConfig, components: bool = True) -> None:
    """Checks that values are in range, sections agree and every name is known.

    components: False leaves out the environment and the engine, whose packages may live on other
    machines. Raises ConfigError for the first contradiction, with the keys to change."""
    for check in config_checks(config, components):
        check()


def config_checks(config: RunConfig, components: bool = True) -> Iterator[Callable[[], object]]:
    """The checks of `check_config`; the others rely on the first, of every value by itself."""
    yield lambda: check_values(config)
    rollout = config.rollout
    yield lambda: _check_asynchrony(rollout.asynchronous, config.run.deterministic)
    yield lambda: _check_sampling(rollout)
    yield lambda: _check_batch(rollout, config.algorithm.minibatches_per_step)
    yield lambda: config.trainer.decaying_over(config.policy_updates).check(config.cluster.ranks)
    if critic := config.algorithm.critic:
        yield lambda: critic.decaying_over(config.updates).check()
    yield lambda: _check_name(config.run.name)
    yield lambda: _check_cluster(config.cluster)
    yield from _algorithm_checks(config.algorithm, config.rollout.samples_per_prompt)
    transfer = config.cluster.weight_transfer
    yield lambda: WEIGHT_TRANSFER.check(transfer, ("put",), "cluster.weight_transfer")
    offered = ("tasks", "seed", "samples")
    yield lambda: CURATOR.check(config.data.curator, offered, "data.curator")
    for index, sink in enumerate(config.metrics.sinks):
        yield partial(SINK.check, sink, where=f"metrics.sinks[{index}]")
    if components:
        yield lambda: ENGINE.check(rollout.engine, _ENGINE_GETS, "rollout.engine")
        yield lambda: check_environment_keywords(config.environment)


def check_values(config: Any, path: str = "") -> None:
    """Raises ConfigError for a value that is not as its annotation says, however it came there."""
    schema: Any = type(config)
    hints = section_hints(schema)
    for name, hint in hints.items():
        value, here = getattr(config, name), f"{path}.{name}" if path else name
        section = section_of(hint)
        if section is None or (value is None and section is not hint):
            checked(hint, value, here)
        elif isinstance(value, section):
            check_values(value, here)
        else:
            raise ConfigError(f"{here}: expected a {section.__name__} object, found {show(value)}.")


def check_secrets(values: Mapping[str, Any]) -> None:
    """Raises ConfigError where sections of a configuration hold `***`, as a run's config.yaml does,
    in place of a secret."""
    if missing := redacted_keys(values):
        given = " ".join(f"{key}=VALUE" for key in missing)
        raise ConfigError(
            f"{', '.join(missing)}: expected a value, found ***, which stands in a run's "
            f"config.yaml for a secret; give it anew: {given}."
        )


def environment_name(environment: Mapping[str, Any]) -> str:
    """The name in the section `environment`. Raises ConfigError where it names none."""
    name = environment.get("name")
    if not name:
        installed = ", ".join(ENVIRONMENT.names()) or "none"
        raise ConfigError(
            "environment.name: expected an environment, found none; set environment.name or give "
            f"--env NAME. Installed: {installed}; or package.module:Class, or file.py:Class."
        )
    return str(name)


def check_environment_keywords(environment: Mapping[str, Any]) -> None:
    """Checks the environment's keywords. An agent in its place is told from a function that makes
    one: it is called with a task."""
    name = environment_name(environment)
    try:
        ENVIRONMENT.check(environment)
    except ConfigError:
        target = ENVIRONMENT.resolve(name)
        is_function = callable(target) and not isinstance(target, type)
        taken = _required(target) if is_function else []
        if taken[:1] != ["task"]:
            raise
        raise ConfigError(
            f"environment.name: expected an Environment, or a function that makes one, found "
            f"{name}({', '.join(taken)}): {_as_agent(name)}."
        ) from None


def _required(function: Callable[..., Any]) -> list[str]:
    """The parameters that a function cannot be called without."""
    parameters = inspect.signature(function).parameters.values()
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.default is one.empty and one.kind not in fixed]


def _as_agent(name: str) -> str:
    """How a function that plays a task is named, by what is installed."""
    for known in ENVIRONMENT.names():
        with suppress(RLFlowError):
            if "agent" in ENVIRONMENT.options(known):
                return f"an agent is environment.name={known} environment.agent={name}"
    return "an agent needs an environment that starts it"


def _require(holds: object, key: str, problem: str) -> None:
    if not holds:
        raise ConfigError(f"{key}: {problem}.")


def _check_name(name: str) -> None:
    _require(
        _NAME.fullmatch(name),
        "run.name",
        f"expected a name for a directory (letters, digits, . _ -), found '{name}'",
    )


def _check_cluster(section: ClusterSection) -> None:
    _require(
        section.address is None or section.ranks or section.rollout_workers,
        "cluster.address",
        f"found {section.address}, which nothing of this run would use, as cluster.ranks and "
        "cluster.rollout_workers are 0; set one of them, or remove the address",
    )


def _check_sampling(rollout: RolloutSection) -> None:
    for key in ("top_p", "top_k"):
        _require(
            key not in rollout.engine,
            f"rollout.engine.{key}",
            f"training samples from the whole distribution, which {key} would cut; remove it, use "
            "rollout.temperature",
        )
    _require(
        rollout.max_response_tokens < rollout.max_total_tokens,
        "rollout.max_total_tokens",
        f"expected more than rollout.max_response_tokens ({rollout.max_response_tokens}), as the "
        f"prompt counts too; found {rollout.max_total_tokens}",
    )


def _check_asynchrony(asynchrony: Asynchrony, deterministic: bool) -> None:
    key = "rollout.asynchronous"
    ahead, staleness = asynchrony.ahead, asynchrony.max_staleness
    if not asynchrony.on:
        _require(
            asynchrony.group_s is None,
            f"{key}.group_s",
            f"expected null where nothing runs ahead, found {asynchrony.group_s}: a step waits for "
            "all of its attempts. Set max_staleness to at least 1",
        )
        return
    _require(
        not deterministic,
        "run.deterministic",
        "what runs ahead of training depends on how long everything takes; set "
        f"{key}.run_ahead=0, or run.deterministic=false",
    )
    _require(
        staleness > 0,
        f"{key}.max_staleness",
        f"expected at least 1 with run_ahead {ahead}, found 0: what is sampled before its step is "
        "older than the weights that it trains",
    )
    _require(
        asynchrony.when_stale == "drop" or ahead <= staleness,
        f"{key}.run_ahead",
        f"expected at most max_staleness ({staleness}), found {ahead}: what runs further ahead is "
        "too old when its turn comes. Lower it, raise max_staleness, or set when_stale: drop",
    )


def _check_batch(rollout: RolloutSection, minibatches: int) -> None:
    prompts, samples = rollout.prompts_per_step, rollout.samples_per_prompt
    trajectories = prompts * samples
    _require(
        trajectories <= MOST_TRAJECTORIES,
        "rollout.prompts_per_step x rollout.samples_per_prompt",
        f"expected at most {MOST_TRAJECTORIES:,} trajectories per step, which are all in memory at "
        f"once; found {prompts:,} x {samples:,}",
    )
    divisors = [str(n) for n in range(1, min(trajectories, 64) + 1) if trajectories % n == 0]
    _require(
        trajectories % minibatches == 0,
        "algorithm.minibatches_per_step",
        f"expected a divisor of the {trajectories} trajectories per step "
        f"({', '.join(divisors[:8])}, ...), found {minibatches}",
    )


def _algorithm_checks(algorithm: AlgorithmSection, samples: int) -> Iterator[Callable[[], object]]:
    """samples: attempts per prompt."""
    yield lambda: _check_losses(algorithm.losses)
    yield lambda: _check_advantage(algorithm.advantage, samples)
    if algorithm.teacher:
        yield lambda: TEACHER.check(algorithm.teacher, where="algorithm.teacher")
    yield lambda: AGGREGATE.check(algorithm.aggregate, ("tokens",), "algorithm.aggregate")
    for index, component in enumerate(algorithm.filters):
        yield partial(_check_filter, component, samples, f"algorithm.filters[{index}]")
    for index, component in enumerate(algorithm.transforms):
        where = f"algorithm.transforms[{index}]"
        yield partial(TRANSFORM.check, component, ("tokens",), where)


def _check_losses(losses: Sequence[Any]) -> None:
    _require(
        losses,
        "algorithm.losses",
        "expected at least one loss, found none; try [ppo_clip]",
    )
    for index, loss in enumerate(losses):
        # A loss checks its own limits when it is made
        LOSS.build(loss, f"algorithm.losses[{index}]")


def _check_advantage(component: Any, samples: int) -> None:
    """Makes the advantage, which checks its own limits; some need several attempts to compare."""
    made = ADVANTAGE.build(component, "algorithm.advantage")
    # A function with its keywords bound: its own
    _check_attempts(component, samples, getattr(made, "func", made))


def _check_filter(component: Any, samples: int, where: str) -> None:
    target, _ = FILTER.check(component, ("tokens",), where)
    _check_attempts(component, samples, target)


def _check_attempts(component: Any, samples: int, part: Any) -> None:
    _require(
        not getattr(part, "compares_attempts", False) or samples > 1,
        "rollout.samples_per_prompt",
        f"{component['name']} compares attempts at the same prompt; expected at least 2, found 1",
    )
