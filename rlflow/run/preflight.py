"""Whether a training run can start: what files and installed packages can tell before anything is built or written."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from rlflow.algorithms.algorithm import check_parts
from rlflow.config.checks import config_checks
from rlflow.config.schema import RunConfig
from rlflow.errors import ConfigError, MissingPackageError, install_command
from rlflow.models.architecture import Architecture, architecture
from rlflow.models.huggingface import check_loadable, read_config
from rlflow.rollout.embedded.engine import device_of
from rlflow.rollout.vllm.device_buckets import check_device_transfer
from rlflow.rollout.vllm.process import check_python, find_python
from rlflow.run.directory import RunDirectory
from rlflow.run.estimates import is_embedded, is_vllm
from rlflow.storage.files import read_json
from rlflow.trainer.options import MEGATRON_WITHOUT_CUDA, untested_megatron


def check_start(config: RunConfig) -> None:
    """Returns when nothing is known to be in the way of a run: values, model directory, layout, packages, run directory.

    Raises ConfigError, ModelError or MissingPackageError, the first. Data and tokenizer are read when the environment is built.
    """
    for check in itertools.chain(config_checks(config), start_checks(config)):
        check()


def start_checks(config: RunConfig, model: bool = True, weights: bool = True) -> Iterator[Callable[[], object]]:
    """What `check_start` looks at beyond `config_checks`, one thing per call. model, weights: they are there, and
    looked at."""
    yield lambda: check_parts(config)
    if model:
        yield lambda: policy_architecture(config)
    if model and config.model.path:
        yield lambda: config.trainer.layout.check_model(architecture(read_config(config.model.path)))
        if weights:
            yield lambda: _check_weights(config)
    for package in _needed_packages(config):
        yield partial(_check_package, *package)
    yield lambda: _check_megatron(config)
    yield lambda: _check_gpus(config)
    yield lambda: _check_offload(config)
    yield lambda: _check_engine_device(config)
    yield lambda: _check_workers(config)
    yield lambda: _check_vllm(config)
    yield lambda: _check_resume_step(config)
    yield lambda: RunDirectory.check(run_path(config), resume=config.run.resume, overwrite=config.run.overwrite)


def policy_architecture(config: RunConfig) -> Architecture:
    """The architecture of `model.path`. Raises ConfigError without one, ModelError for a directory that holds no such model."""
    if not config.model.path:
        raise ConfigError(
            "model.path: expected a HuggingFace model directory, found nothing; set it, or give --model PATH."
        )
    return architecture(read_config(config.model.path))


def _check_weights(config: RunConfig) -> None:
    policy_architecture(config)  # the families of its error are those that can be trained; more can be read
    check_loadable(config.model.path)


def run_path(config: RunConfig) -> Path:
    """Where the run writes. Raises ConfigError where `run.directory` holds another placeholder than {name}."""
    try:
        return Path(config.run.directory.format(name=config.run.name))
    except (KeyError, IndexError, ValueError):
        raise ConfigError(
            f"run.directory: expected a path in which only {{name}} stands for something else, found '{config.run.directory}'."
        ) from None


def finished_summary(config: RunConfig) -> dict[str, Any] | None:
    """The summary of the run that is to be resumed, where all its steps are done and nothing is left to do; else None."""
    directory = RunDirectory(run_path(config))
    latest = directory.latest_checkpoint()
    if latest is None or not directory.summary.is_file() or config.run.resume_step not in (None, latest[0]):
        return None
    summary = read_json(directory.summary)
    done = summary.get("status") == "finished" and summary.get("steps") == latest[0] >= config.run.steps
    return summary if done else None


def _check_gpus(config: RunConfig) -> None:
    """Ray would wait for GPUs that a cluster of this machine alone can never have."""
    section = config.cluster
    who = f"{section.ranks} ranks" + (f" + {section.rollout_workers} workers" if section.rollout_workers else "")
    wanted, here = (section.ranks + section.rollout_workers) * section.gpus_per_rank, torch.cuda.device_count()
    if section.address is None and wanted > here:
        raise ConfigError(
            f"cluster.gpus_per_rank: {who} x {section.gpus_per_rank:g} = {wanted:g} GPUs, this machine has "
            f"{here}: lower cluster.ranks, rollout_workers or cluster.gpus_per_rank, or set cluster.address to a running cluster."
        )


def _check_offload(config: RunConfig) -> None:
    """What the trainer would spare of a GPU that it has not. Ranks see the GPUs that Ray gives them."""
    section = config.cluster
    if config.trainer.backend == "megatron" and not (section.gpus_per_rank if section.ranks else torch.cuda.is_available()):
        config.trainer.check_without_gpu()


def _check_engine_device(config: RunConfig) -> None:
    if not config.cluster.rollout_workers and is_embedded(config):
        device_of(config.rollout.engine.get("device"), config.rollout.engine.get("cuda_graphs"))


def _check_workers(config: RunConfig) -> None:
    """What no rollout worker could be made with, or would share with another one."""
    section, options = config.cluster, config.rollout.engine
    if not section.rollout_workers:
        return
    made = options.get("engines", 1)
    if isinstance(made, int) and made != 1:
        raise ConfigError(
            f"rollout.engine.engines: expected 1 with cluster.rollout_workers, found {made}: each worker has one engine; set "
            f"cluster.rollout_workers={section.rollout_workers * made} and rollout.engine.engines=1."
        )
    if "url" in options and (section.rollout_workers > 1 or not isinstance(options["url"], str)):
        raise ConfigError(
            f"rollout.engine.url: {section.rollout_workers} workers would load their weights into the same servers, each at its "
            "own time; set cluster.rollout_workers=0, where every url is an engine of the run."
        )
    devices = options.get("tensor_parallel", 1)
    if isinstance(devices, int) and 0 < section.gpus_per_rank < devices:
        raise ConfigError(
            f"rollout.engine.tensor_parallel: expected at most cluster.gpus_per_rank ({section.gpus_per_rank:g}), all that a "
            f"rollout worker sees; found {devices}. Raise gpus_per_rank, or lower tensor_parallel."
        )


def _check_vllm(config: RunConfig) -> None:
    """Whether vLLM is there for the run's engines, those of workers on this machine included. Raises ConfigError,
    MissingPackageError."""
    section = config.cluster
    if is_vllm(config) and not (section.rollout_workers and section.address):  # workers elsewhere have interpreters of their own
        check_python(find_python(config.rollout.engine.get("python")))
        if config.rollout.engine.get("transfer") == "ipc":
            check_device_transfer(section.ranks + section.rollout_workers)


def _check_megatron(config: RunConfig) -> None:
    """What `rlflow.trainer.megatron.cpu.check_version` says once megatron-core is imported, which takes seconds."""
    if config.trainer.backend != "megatron" or torch.cuda.is_available():
        return
    try:
        found = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:  # `_check_package` says it
        return
    if not found.startswith(MEGATRON_WITHOUT_CUDA):
        raise MissingPackageError(untested_megatron(found))


def _check_resume_step(config: RunConfig) -> None:
    if config.run.resume_step is not None and not config.run.resume:
        raise ConfigError(f"run.resume_step: {config.run.resume_step} needs run.resume (--resume).")


def _needed_packages(config: RunConfig) -> list[tuple[str, str, str]]:
    """(key that asks for it, package, how it is installed)."""
    sinks = {sink["name"] for sink in config.metrics.sinks}
    needed = (
        ("cluster.ranks", config.cluster.ranks > 0, "ray", install_command("ray")),
        ("cluster.rollout_workers", config.cluster.rollout_workers > 0, "ray", install_command("ray")),
        ("metrics.sinks", "tensorboard" in sinks, "tensorboard", install_command("tensorboard")),
        ("metrics.progress", config.metrics.progress == "rich", "rich", "pip install rich"),
        ("metrics.picture", config.metrics.picture, "matplotlib", "pip install matplotlib"),
        ("metrics.sinks", "wandb" in sinks, "wandb", install_command("wandb")),
        ("trainer.fp8", config.trainer.fp8 != "none", "transformer_engine", install_command("gpu")),
        ("trainer.backend=megatron", config.trainer.backend == "megatron", "megatron", "pip install megatron-core"),
    )
    return [(key, package, command) for key, asked, package, command in needed if asked]


def _check_package(key: str, package: str, command: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingPackageError(f"{key}: the package '{package}' is not installed: {command}.")
