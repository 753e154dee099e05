"""Checks that a training run can start, before anything is built or written: `check_start` stops at
the first problem that files and installed packages show. `rlflow.preflight.examine` opens everything."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rlflow.algorithms.algorithm import check_parts, make_loss
from rlflow.components import ENGINE, FILTER
from rlflow.config.checks import check_secrets, config_checks
from rlflow.config.loading import to_dict
from rlflow.config.schema import (
    AlgorithmSection,
    ClusterSection,
    MetricsSection,
    RunConfig,
    RunSection,
)
from rlflow.errors import (
    ConfigError,
    MissingPackageError,
    imports_triton,
    install_command,
)
from rlflow.models.architecture import Architecture, architecture
from rlflow.models.huggingface import check_loadable, read_config
from rlflow.rollout.engine_facts import EngineFacts, engine_facts
from rlflow.run.directory import RunDirectory, run_path
from rlflow.run.gpus import check_gpus
from rlflow.trainer.options import TrainerOptions
from rlflow.trainer.routing import balance_of


def check_start(config: RunConfig) -> None:
    """Returns when nothing is known to be in the way of a run: values, model directory, layout,
    packages, run directory.

    Raises ConfigError, ModelError or MissingPackageError, the first. Data and tokenizer are read
    when the environment is built.
    """
    for check in itertools.chain(config_checks(config), start_checks(config)):
        check()


def start_checks(
    config: RunConfig, model: bool = True, weights: bool = True
) -> Iterator[Callable[[], object]]:
    """What `check_start` looks at beyond `config_checks`, one thing per call. model, weights: they
    are there, and looked at."""
    yield lambda: check_secrets(to_dict(config))
    yield lambda: check_parts(config.algorithm, config.asynchrony.on)
    if model:
        yield lambda: config.trainer.layout.check_model(policy_architecture(config.model.path))
        if weights:
            yield lambda: _check_weights(config.model.path)
    for package in _needed_packages(config.cluster, config.metrics, config.trainer):
        yield partial(_check_package, *package)
    engine = engine_facts(config.rollout.engine)
    yield lambda: check_gpus(config.cluster, engine)
    if engine.recorded:
        yield lambda: _check_recorded(config.algorithm, config.cluster, config.run)
    if model and config.model.path:
        yield lambda: _check_routers(config.trainer, config.model.path)
    if config.trainer.router_replay == "rollout":
        yield lambda: _check_routes(config.rollout.engine, config.algorithm.filters)
    yield lambda: _check_offload(config.trainer, config.cluster)
    yield lambda: _check_workers(config.cluster, config.rollout.engine)
    yield lambda: _check_engine(
        engine, config.cluster, routes=config.trainer.router_replay == "rollout"
    )
    yield lambda: _check_directory(config.run)


def policy_architecture(path: str) -> Architecture:
    """The architecture of `model.path`. Raises ConfigError without one, ModelError for a directory
    that holds no such model."""
    if not path:
        raise ConfigError(
            "model.path: expected a HuggingFace model directory, found nothing; set it, or give "
            "--model PATH."
        )
    return architecture(read_config(path))


def _check_weights(path: str) -> None:
    # The families that can be trained are fewer than those that can be read
    policy_architecture(path)
    check_loadable(path)


def _check_recorded(algorithm: AlgorithmSection, cluster: ClusterSection, run: RunSection) -> None:
    """What makes no sense where nothing is sampled. Raises ConfigError."""
    if make_loss(algorithm.losses).vanishes_at_zero_advantage:
        names = ", ".join(str(one["name"]) for one in algorithm.losses)
        raise ConfigError(
            "algorithm.losses: with rollout.engine=recorded nothing has an advantage; expected a "
            f"loss that learns by likelihood, such as [sft], found {names}."
        )
    if cluster.rollout_workers:
        raise ConfigError(
            "cluster.rollout_workers: rollout.engine=recorded samples nothing that workers could "
            f"do; expected 0, found {cluster.rollout_workers}."
        )
    if run.target is not None:
        raise ConfigError(
            "run.target: a score to reach, and with rollout.engine=recorded a loss is measured, "
            f"which falls; expected null, found {run.target:g}."
        )


def _check_routers(trainer: TrainerOptions, model_path: str) -> None:
    """Whether the model has routers that do what is asked of them. Raises ConfigError."""
    model = policy_architecture(model_path)
    if trainer.router_replay != "off" and model.experts is None:
        raise ConfigError("trainer.router_replay: the model has no experts; set it to off.")
    balance_of(trainer, read_config(model_path), model)


def _check_routes(engine: Mapping[str, Any], filters: Sequence[Mapping[str, Any]]) -> None:
    """Whether the engine says which experts its tokens went to, for all that is trained. Raises
    ConfigError."""
    target = ENGINE.resolve(engine["name"], "rollout.engine")
    if "routes" not in inspect.signature(target).parameters:
        raise ConfigError(
            f"trainer.router_replay: the engine '{engine['name']}' cannot say to which experts "
            "tokens went; expected one that takes `routes` (embedded, vllm, vllm_server) for "
            "rollout; or set it to recompute."
        )
    for place, component in enumerate(filters):
        where = f"algorithm.filters[{place}]"
        kind, _ = FILTER.check(component, ("tokens",), where)
        if getattr(kind, "unscored", False) is True:
            raise ConfigError(
                f"trainer.router_replay: {where} '{component['name']}' brings attempts that no "
                "engine of the run sampled, so nothing says their experts; set it to recompute."
            )


def _check_offload(trainer: TrainerOptions, cluster: ClusterSection) -> None:
    """What the trainer would spare of a GPU that it has not. Ranks see the GPUs that Ray gives
    them."""
    if trainer.backend == "megatron" and not cluster.on_gpus:
        trainer.check_without_gpu()


def _check_workers(section: ClusterSection, options: Mapping[str, Any]) -> None:
    """What no rollout worker could be made with, or would share with another one."""
    if not section.rollout_workers:
        return
    made = options.get("engines", 1)
    if isinstance(made, int) and made != 1:
        raise ConfigError(
            f"rollout.engine.engines: expected 1 with cluster.rollout_workers, found {made}: each "
            "worker has one engine; set "
            f"cluster.rollout_workers={section.rollout_workers * made} and "
            "rollout.engine.engines=1."
        )
    if options.get("transfer") == "ipc":
        raise ConfigError(
            "rollout.engine.transfer: 'ipc' needs the engines in the run's process; take 'files', "
            "or set cluster.rollout_workers=0."
        )
    if "url" in options and (section.rollout_workers > 1 or not isinstance(options["url"], str)):
        raise ConfigError(
            f"rollout.engine.url: {section.rollout_workers} workers would load their weights into "
            "the same servers, each at its "
            "own time; set cluster.rollout_workers=0, where every url is an engine of the run."
        )


def _check_engine(engine: EngineFacts, section: ClusterSection, routes: bool) -> None:
    """Whether the engine's program and devices are there, for the run's own engines and those of
    workers on this machine. Raises RLFlowError."""
    if not (section.rollout_workers and section.address):  # elsewhere they have their own programs
        engine.check_installed(routes)
    if not section.rollout_workers:  # theirs have GPUs that Ray gives them
        engine.check_devices(section.ranks, section.gpus_per_rank)


def _check_directory(run: RunSection) -> None:
    if run.resume_step is not None and not run.resume:
        raise ConfigError(f"run.resume_step: {run.resume_step} needs run.resume (--resume).")
    RunDirectory.check(run_path(run), resume=run.resume, overwrite=run.overwrite)


def _needed_packages(
    cluster: ClusterSection, shown: MetricsSection, trainer: TrainerOptions
) -> list[tuple[str, str, str]]:
    """(key that asks for it, package, how it is installed)."""
    sinks = {sink["name"] for sink in shown.sinks}
    megatron = trainer.backend == "megatron"
    needed = (
        ("cluster.ranks", cluster.ranks > 0, "ray", install_command("ray")),
        (
            "cluster.rollout_workers",
            cluster.rollout_workers > 0,
            "ray",
            install_command("ray"),
        ),
        (
            "metrics.sinks",
            "tensorboard" in sinks,
            "tensorboard",
            install_command("tensorboard"),
        ),
        (
            "metrics.progress",
            shown.progress == "rich",
            "rich",
            "pip install rich",
        ),
        (
            "metrics.picture",
            shown.picture,
            "matplotlib",
            "pip install matplotlib",
        ),
        ("metrics.sinks", "wandb" in sinks, "wandb", install_command("wandb")),
        (
            "trainer.fp8",
            trainer.fp8 != "none",
            "transformer_engine",
            install_command("gpu"),
        ),
        ("trainer.backend=megatron", megatron, "megatron", "pip install megatron-core"),
        (
            "trainer.backend=megatron",
            megatron and imports_triton(),
            "triton",
            "pip install triton",
        ),
    )
    return [(key, package, command) for key, asked, package, command in needed if asked]


def _check_package(key: str, package: str, command: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingPackageError(f"{key}: the package '{package}' is not installed: {command}.")
