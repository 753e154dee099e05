"""About how long a step takes: operations and bytes by the configuration, over the table of device speeds."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass

from rlflow.algorithms.algorithm import config_needs
from rlflow.config.schema import RunConfig
from rlflow.models.architecture import Architecture
from rlflow.models.flops import forward_flops, training_flops
from rlflow.run.device_speeds import CPU_CORE, Device, find_device
from rlflow.run.memory_estimate import DTYPE_BYTES, is_embedded, stage_parameters
from rlflow.trainer.layout import ParallelLayout

SCORES = ("proximal", "reference", "values", "teacher")
"""Needs of an algorithm that cost a forward pass over the step's rows."""


@dataclass(frozen=True)
class StepTime:
    """Seconds. Without the environment, whose tools take what they take, and without the weights' way to
    the engine."""

    sample_s: float
    score_s: float
    update_s: float

    @property
    def total_s(self) -> float:
        return self.sample_s + self.score_s + self.update_s


def estimate_step(config: RunConfig, model: Architecture, device: Device, devices: int) -> StepTime:
    """The time of a step whose episodes all fill their budget, on so many devices. Decoding is bound by the bytes of
    weights, keys and values that each token's step reads, or by its operations."""
    rollout = config.rollout
    episodes, budget = rollout.prompts_per_step * rollout.samples_per_prompt, rollout.max_total_tokens
    sampled = min(rollout.max_turns * rollout.max_response_tokens, budget - 1)
    rate = device.matrix_flops * device.training_share
    rows, scored = [budget] * episodes, sampled * episodes
    forward = forward_flops(model, rows, scored)
    needs = config_needs(config)
    passes = sum(name in needs for name in SCORES)
    trained = training_flops(model, rows, scored) * config.algorithm.epochs_per_step
    if config.trainer.recompute == "full":
        trained += forward * config.algorithm.epochs_per_step
    if config.algorithm.critic is not None:
        trained *= 2
    return StepTime(
        sample_s=_decoding_s(config, model, device, devices, episodes, sampled),
        score_s=passes * forward / (rate * devices),
        update_s=trained / (rate * devices),
    )


def _decoding_s(
    config: RunConfig, model: Architecture, device: Device, devices: int, episodes: int, sampled: int
) -> float:
    width = DTYPE_BYTES[config.model.dtype]
    engines = 1 if config.cluster.ranks and is_embedded(config) else devices  # the embedded engine lives in the driver
    if device is CPU_CORE:
        device, engines = (
            dataclasses.replace(device, matrix_flops=device.matrix_flops * devices),
            1,
        )  # threads of one engine
    here = math.ceil(episodes / engines)
    at_once = min(here, int(config.rollout.engine.get("max_concurrency", 128)))
    weights = stage_parameters(model, ParallelLayout())[0] * width
    cache = at_once * config.rollout.max_total_tokens / 2 * model.layers * 2 * model.groups * model.head_dim * width
    read_s = (weights + cache) / device.memory_rate
    computed_s = forward_flops(model, [1] * at_once, at_once) / (device.matrix_flops * device.training_share)
    return math.ceil(here / at_once) * sampled * max(read_s, computed_s)


def this_device(config: RunConfig) -> tuple[str, Device, int] | None:
    """(name, the device of this machine, how many of them a run uses); None for a GPU that the table does not have."""
    import torch

    ranks = max(config.cluster.ranks, 1)
    if torch.cuda.is_available() and (config.cluster.gpus_per_rank > 0 or not config.cluster.ranks):
        name = torch.cuda.get_device_name()
        found = find_device(name)
        return None if found is None else (name, found, ranks)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = (
        min(cores, ranks * config.cluster.threads_per_rank)
        if config.cluster.ranks
        else min(cores, torch.get_num_threads())
    )
    return f"{threads} CPU cores", CPU_CORE, threads
