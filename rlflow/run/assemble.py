"""Makes what a configuration names: rollout, trainer, fitting tasks, run directory, metrics."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rlflow.batching import token_batch
from rlflow.cluster.placement import Placement
from rlflow.cluster.trainer import RayTrainer
from rlflow.components import ENGINE, ENVIRONMENT
from rlflow.config.checks import (
    check_environment_keywords,
    check_secrets,
    environment_name,
)
from rlflow.config.loading import save_config
from rlflow.config.schema import MetricsSection, RolloutSection, RunConfig, RunSection
from rlflow.devices.matmul import PRODUCTS
from rlflow.environment import Environment
from rlflow.errors import ConfigError, DataError
from rlflow.report.metrics import Metrics, save_registered
from rlflow.report.sinks import PICTURE, MetricsLog, PageSink, Sink, make_display, make_sinks
from rlflow.rollout.engine import Engine
from rlflow.rollout.engine_facts import engine_facts
from rlflow.rollout.environment_calls import tasks_of
from rlflow.rollout.groups import Groups, Terms
from rlflow.rollout.pacing import Pacing
from rlflow.rollout.probe_rule import TOKENS, spacing
from rlflow.rollout.recorded import RecordedRollout
from rlflow.rollout.rollout import Rollout
from rlflow.rollout.tasks import TaskSource
from rlflow.rollout.tokenizer import Tokenizer
from rlflow.rollout.weight_sync import WeightProbe
from rlflow.run.directory import RunDirectory, run_path
from rlflow.run.engine_keeper import EngineKeeper
from rlflow.run.gpus import adapters_alone
from rlflow.run.origin import mark_own
from rlflow.storage.redaction import redact
from rlflow.trainer.base import Trainer
from rlflow.trainer.options import LoraOptions, torch_dtype
from rlflow.types import Task

logger = logging.getLogger(__name__)


def make_rollout(config: RunConfig, gpus: list[list[str]] | None = None) -> Rollout:
    """The rollout of a configuration over a new engine and environment; the caller closes it. gpus:
    of each engine, where somebody has placed them."""
    if config.run.deterministic:
        PRODUCTS.fix()
    section = config.rollout
    tokenizer = Tokenizer.from_pretrained(config.model.path, config.model.trust_remote_code)
    environment = make_environment(config.environment)
    engine = make_engine(config, tokenizer, gpus)
    rollout = rollout_over(engine, environment, tokenizer, section, config.run)
    if environment.max_turns is not None:
        logger.info(
            "the environment's limit of %d responses replaces rollout.max_turns = %d",
            environment.max_turns,
            section.max_turns,
        )
    if rollout.max_total_tokens < section.max_total_tokens:
        logger.warning(
            "the engine holds %d tokens: episodes end there, not at rollout.max_total_tokens = %d",
            rollout.max_total_tokens,
            section.max_total_tokens,
        )
    return rollout


def rollout_over(
    engines: Engine | Sequence[Engine],
    environment: Environment,
    tokenizer: Tokenizer,
    section: RolloutSection,
    run: RunSection,
) -> Rollout:
    """The rollout of a configuration over these. Raises ConfigError, ModelError."""
    options = rollout_options(section, run)
    if engine_facts(section.engine).recorded:
        too_long = section.engine.get("too_long", "drop")
        return RecordedRollout(environment, tokenizer, too_long=too_long, **options)
    return Rollout(engines, environment, tokenizer, **options)


def rollout_options(section: RolloutSection, run: RunSection) -> dict[str, Any]:
    """The keywords of `Rollout` that a configuration names."""
    return {
        "samples_per_prompt": section.samples_per_prompt,
        "max_turns": section.max_turns,
        "max_response_tokens": section.max_response_tokens,
        "max_total_tokens": section.max_total_tokens,
        "max_observation_tokens": section.max_observation_tokens,
        "temperature": section.temperature,
        **dataclasses.asdict(section.faults),
        "chat_template": section.chat_template,
        "chat_template_options": section.chat_template_options,
        "history": section.history,
        "seed": run.seed,
        "deterministic": run.deterministic,
    }


def make_engine(
    config: RunConfig, tokenizer: Tokenizer, gpus: list[list[str]] | None = None
) -> Engine:
    """The engine of a configuration, over the model that it names."""
    section = config.rollout
    check_secrets({"rollout": {"engine": section.engine}})
    facts = engine_facts(section.engine)
    lora = config.trainer.lora
    offered: dict[str, Any] = {
        "path": config.model.path,
        "tokenizer": tokenizer,
        "dtype": facts.dtype(config.model.dtype),
        "max_tokens": section.max_total_tokens,
        "seed": config.run.seed,
        "deterministic": config.run.deterministic,
        "trust_remote_code": config.model.trust_remote_code,
        **({"devices": gpus} if gpus else {}),
        **({"routes": True} if config.trainer.router_replay == "rollout" else {}),
    }
    if lora is not None and adapters_alone(lora, facts):
        offered["adapters"] = {"rank": lora.rank, "targets": list(lora.targets)}
    engine: Engine = ENGINE.build(section.engine, "rollout.engine", **offered)
    return engine


def make_environment(section: Mapping[str, Any], **offered: Any) -> Environment:
    """The environment that the section `environment` names. offered: keywords that its constructor may have. Raises
    ConfigError for what is no environment."""
    name = environment_name(section)
    check_secrets({"environment": section})
    environment_class(section)
    environment = ENVIRONMENT.build(section, **offered)
    if not isinstance(environment, Environment):
        found = type(environment).__name__
        expected = "expected a function that makes an Environment"
        raise ConfigError(f"environment.name: '{name}': {expected}, it returned {found}.")
    return environment


def environment_class(
    section: Mapping[str, Any],
) -> tuple[type[Environment] | None, dict[str, Any]]:
    """(the environment's class, None where a function makes it; its keywords). Raises ConfigError
    for what is no environment."""
    name = environment_name(section)
    check_environment_keywords(section)
    target, options = ENVIRONMENT.check(section)
    if not isinstance(target, type):
        return None, options
    missing = sorted(getattr(target, "__abstractmethods__", ()))
    derived = issubclass(target, Environment)
    if missing or not derived:
        found = f"one without {', '.join(missing)}" if derived else "a class that is not one"
        expected = "expected an rlflow.Environment"
        raise ConfigError(f"environment.name: '{name}': {expected}, found {found}.")
    return target, options


def fitting_tasks(
    rollout: Rollout, split: str, max_prompt_tokens: int, first: int | None = None
) -> tuple[list[Task], int]:
    """(the tasks whose prompts fit, number of the others) of the split's first ones or of all.
    Raises DataError where none is left."""
    tasks = tasks_of(rollout.environment, split, rollout.call_s)[:first]
    if not tasks:
        raise DataError(f"split '{split}': the environment has no tasks; give it data.")
    kept = rollout.fitting(split, tasks, max_prompt_tokens)
    return kept, len(tasks) - len(kept)


def make_trainer(config: RunConfig, placement: Placement | None = None) -> Trainer:
    """The trainer of a run: in this process for cluster.ranks 0, else `cluster.ranks` Ray actors,
    at the places of a placement where there is one.

    Raises ConfigError where ranks and parallel sizes do not fit, MissingPackageError without
    Ray."""
    if config.run.deterministic:
        PRODUCTS.fix()
    section = config.trainer.decaying_over(config.policy_updates)
    ranks = config.cluster.ranks
    section.check(ranks)
    options = {**dataclasses.asdict(section), "seed": config.run.seed}
    for name in ("dtype", "trust_remote_code"):
        options[name] = getattr(config.model, name)
    if config.algorithm.critic is not None:
        critic = config.algorithm.critic.decaying_over(config.updates)
        options["critic"] = dataclasses.asdict(critic)
    if ranks == 0:
        return Trainer.from_pretrained(config.model.path, **options)
    places = {
        name: getattr(config.cluster, name)
        for name in (
            "address",
            "threads_per_rank",
            "gpus_per_rank",
            "stall_timeout_s",
        )
    }
    return RayTrainer(config.model.path, ranks=ranks, placement=placement, **places, **options)


@contextmanager
def open_directory(section: RunSection) -> Iterator[RunDirectory]:
    """The directory of a run, open for writing; a failed start leaves none.

    Raises ConfigError as `RunDirectory.create` does."""
    modes = {"resume": section.resume, "overwrite": section.overwrite}
    with RunDirectory.create(run_path(section), **modes) as directory:
        try:
            yield directory
        except BaseException:
            directory.discard_unless_begun()
            raise


def write_resolved_config(config: RunConfig, directory: RunDirectory, registered: Metrics) -> None:
    """Writes the resolved configuration, with the folder that its paths start from and without the
    step that this start alone went back to, and the environment's registered metrics. Removes the
    summary of an earlier start, which is no longer true."""
    directory.summary.unlink(missing_ok=True)
    lasting = dataclasses.replace(config.run, resume_step=None, folder=os.getcwd())
    save_config(dataclasses.replace(config, run=lasting), directory.config)
    mark_own(directory.config)
    save_registered(directory.environment_metrics, registered)


def make_metrics(
    section: MetricsSection,
    run_name: str,
    configuration: Mapping[str, Any],
    directory: RunDirectory,
    resumed_step: int,
    evaluations: int,
    page: PageSink | None,
) -> MetricsLog:
    """The run's metrics.jsonl and further sinks, picture and page included; the caller closes it.

    configuration: for trackers, which get it without its secrets. resumed_step: that of the checkpoint, later records are dropped; -1 drops all. evaluations:
    number that the checkpoint knows of at its own step; others there are made again."""
    sinks = make_sinks(
        directory.path,
        section.sinks,
        run_name=run_name,
        config=redact(configuration),
        resumed_step=resumed_step,
    )
    picture: Sink | None = None
    if section.picture:
        offered = {"directory": directory.path, "run_name": run_name}
        picture = make_display(PICTURE, "metrics.picture", **offered)
    sinks += [sink for sink in (picture, page) if sink is not None]
    return MetricsLog(directory.path, sinks, resumed_step, evaluations, directory.confirm)


def make_groups(
    section: RolloutSection,
    steps: int,
    rollout: Rollout,
    source: TaskSource,
    tasks: Sequence[Task],
    max_rounds: int,
) -> Groups:
    """The groups of a run's `steps`, of tasks from the source; the caller closes it. tasks: all that
    the source may name."""
    asynchrony = section.asynchronous
    faults = section.faults
    ages = (asynchrony.max_staleness, asynchrony.ahead, asynchrony.when_stale)
    pacing = Pacing(section.prompts_per_step, *ages)
    terms = Terms(
        section.samples_per_prompt,
        faults.max_aborted_share,
        lease_s=faults.episode_s + faults.call_s,
        max_rounds=max_rounds,
        group_s=asynchrony.group_s,
        steps=steps,
    )
    return rollout.groups(source.take, pacing, terms, tasks=tasks)


PROMPTS, PROBED = 4, 32
"""Prompts and tokens of a probe in float32; four times the prompts, and more tokens, below it."""
TEMPERATURE = 0.7
"""Not 1, as in most runs: an engine that ignores the temperature fails the probe."""
TOLERANCE = 1e-3
"""Nats, in float32."""


def require_trainable(rollout: Rollout) -> None:
    """Raises ConfigError where an engine takes no weights."""
    for engine in rollout.engines:
        if not engine.takes_weights:
            raise ConfigError(
                f"rollout.engine: {type(engine).__name__} takes no weights: it serves evaluation, "
                "not training. For vllm_server name a folder that rlflow and the server see, in "
                "rollout.engine.weights_folder."
            )


def make_engine_keeper(
    section: RolloutSection,
    model_dtype: str,
    lora: LoraOptions | None,
    rollout: Rollout,
    trainer: Trainer,
    tasks: Sequence[Task],
) -> EngineKeeper:
    """What keeps the engines of a run in step with its trainer. lora: what it says of adapters.
    tasks: the prompts of some are those of a probe."""
    asynchrony = section.asynchronous
    engine = engine_facts(section.engine)
    alone = lora is not None and adapters_alone(lora, engine)
    merged_dtype = None
    if lora is not None and not alone:  # rounded once, to what the engines keep
        merged_dtype = torch_dtype(engine.dtype(model_dtype))
    rounded = 0.0
    if alone:
        dtypes = {torch_dtype(one) for one in (model_dtype, engine.dtype(model_dtype))}
        rounded = max(spacing(one, section.temperature) for one in dtypes)
    return EngineKeeper(
        rollout,
        trainer,
        make_probe(rollout, trainer, tasks, model_dtype),
        on_update=asynchrony.on_update,
        overlap=asynchrony.overlap,
        adapters_alone=alone,
        spacing=rounded,
        merged_dtype=merged_dtype,
    )


def make_probe(
    rollout: Rollout, trainer: Trainer, tasks: Sequence[Task], dtype: str
) -> WeightProbe | None:
    """A probe on the prompts of a few tasks, scored by the trainer; None where every engine hashes
    its weights."""
    if rollout.hashes_weights:
        return None

    def score(rows: Sequence[Sequence[int]]) -> list[list[float]]:
        batch = token_batch(rows)
        logprobs = trainer.score(
            batch.replace(temperatures=torch.full_like(batch.temperatures, TEMPERATURE))
        )["logprobs"]
        return [values[: len(row)].tolist() for row, values in zip(rows, logprobs, strict=True)]

    dtypes = {
        getattr(torch, dtype),
        *(one.dtype for one in rollout.engines if one.dtype),
    }
    step = max(spacing(one, TEMPERATURE) for one in dtypes)
    count, tokens = (4 * PROMPTS, TOKENS) if step else (PROMPTS, PROBED)
    prompts = [rollout.prompt_tokens(task) for task in tasks[:count]]
    each = math.ceil(tokens / max(1, len(prompts)))
    return WeightProbe(prompts, score, TOLERANCE, each, TEMPERATURE, step)
