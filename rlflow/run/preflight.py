"""Whether a training run can start: what files and installed packages can tell before anything is built or written."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from rlflow.config.checks import check_config
from rlflow.config.schema import RunConfig
from rlflow.errors import ConfigError, MissingPackageError, install_command
from rlflow.models.architecture import architecture
from rlflow.models.huggingface import WeightFiles, read_config
from rlflow.run.algorithm import check_parts
from rlflow.run.directory import RunDirectory
from rlflow.storage.files import read_json


def check_start(config: RunConfig) -> None:
    """Returns when nothing is known to be in the way of a run: values, model directory, layout, packages, run directory.

    Raises ConfigError, ModelError or MissingPackageError. Data and tokenizer are read when the environment is built.
    """
    check_config(config)
    check_parts(config)
    if not config.model.path:
        raise ConfigError(
            "model.path: expected a HuggingFace model directory, found nothing; set it, or give --model PATH."
        )
    config.trainer.layout.check_model(architecture(read_config(config.model.path)))
    WeightFiles(config.model.path)
    _check_packages(config)
    _check_gpus(config)
    if config.run.resume_step is not None and not config.run.resume:
        raise ConfigError(f"run.resume_step: {config.run.resume_step} needs run.resume (--resume).")
    RunDirectory.check(run_path(config), resume=config.run.resume, overwrite=config.run.overwrite)


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
    wanted, here = section.ranks * section.gpus_per_rank, torch.cuda.device_count()
    if section.address is None and wanted > here:
        raise ConfigError(
            f"cluster.gpus_per_rank: {section.ranks} ranks x {section.gpus_per_rank:g} = {wanted:g} GPUs, this machine has "
            f"{here}: lower cluster.ranks or cluster.gpus_per_rank, or set cluster.address to a running cluster."
        )


def _check_packages(config: RunConfig) -> None:
    sinks = {sink["name"] for sink in config.metrics.sinks}
    needed = (
        ("cluster.ranks", config.cluster.ranks > 0, "ray", install_command("ray")),
        ("metrics.sinks", "tensorboard" in sinks, "tensorboard", install_command("tensorboard")),
        ("metrics.picture", config.metrics.picture, "matplotlib", "pip install matplotlib"),
        ("metrics.sinks", "wandb" in sinks, "wandb", install_command("wandb")),
        ("trainer.backend=megatron", config.trainer.backend == "megatron", "megatron", "pip install megatron-core"),
    )
    for key, asked, package, command in needed:
        if asked and importlib.util.find_spec(package) is None:
            raise MissingPackageError(f"{key}: the package '{package}' is not installed: {command}.")
