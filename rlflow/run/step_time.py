"""Estimates of the seconds of a step on CPU cores, before the run starts."""

from __future__ import annotations

import math
import os

import torch

from rlflow.algorithms.algorithm import config_needs
from rlflow.config.schema import RunConfig
from rlflow.models.architecture import Architecture
from rlflow.models.flops import forward_flops, training_flops
from rlflow.run.estimates import DTYPE_BYTES, episodes, on_gpus
from rlflow.trainer.layout import ParallelLayout, stage_parameters

CORE_FLOPS, CORE_MEMORY_RATE = 90e9, 10e9
"""FLOP/s and bytes/s of a core of a server of 2022 to 2025 in float32: what a step of 93M
parameters reached on an Intel Xeon (75e9) and an AMD EPYC (130e9), attention, optimizer and all."""
SCORES = ("proximal", "reference", "values", "teacher")
"""Needs of an algorithm that cost a forward pass over the step's rows."""


def estimate_step(config: RunConfig, model: Architecture, cores: int) -> dict[str, float]:
    """{what takes them: seconds} of a step on so many cores, without the environment's own and
    without the weights' way to the engine. Decoding is bound by the bytes of weights, keys and
    values that each token reads, or by its operations."""
    rollout = config.rollout
    count, budget = episodes(config), rollout.max_total_tokens
    sampled = min(rollout.max_turns * rollout.max_response_tokens, budget - 1)
    rows, scored = [budget] * count, sampled * count
    forward, rate = forward_flops(model, rows, scored), CORE_FLOPS * cores
    trained = training_flops(model, rows, scored)
    if "full" in config.trainer.recomputed:
        trained += forward
    if config.algorithm.critic is not None:
        trained *= 2
    passes = sum(name in config_needs(config) for name in SCORES)
    return {
        "sampling": _decoding_s(config, model, cores, sampled),
        "scores": passes * forward / rate,
        "updates": trained * config.algorithm.epochs_per_step / rate,
    }


def _decoding_s(config: RunConfig, model: Architecture, cores: int, sampled: int) -> float:
    """Of one engine, whose threads have all cores."""
    width, count = DTYPE_BYTES[config.model.dtype], episodes(config)
    at_once = min(count, int(config.rollout.engine.get("max_concurrency", 128)))
    weights = stage_parameters(model, ParallelLayout())[0] * width
    token = model.layers * model.groups * (model.key_dim + model.value_dim) * width
    cache = at_once * config.rollout.max_total_tokens / 2 * token
    read_s = (weights + cache) / CORE_MEMORY_RATE
    computed_s = forward_flops(model, [1] * at_once, at_once) / (CORE_FLOPS * cores)
    return math.ceil(count / at_once) * sampled * max(read_s, computed_s)


def cores_of(config: RunConfig) -> int | None:
    """CPU cores that the run uses; None where it trains on GPUs."""
    if on_gpus(config):
        return None
    ranks, threads = config.cluster.ranks, config.cluster.threads_per_rank
    return min(len(os.sched_getaffinity(0)), ranks * threads or torch.get_num_threads())
