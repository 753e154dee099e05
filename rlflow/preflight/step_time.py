"""Estimates of the seconds of a step on CPU cores, before the run starts."""

from __future__ import annotations

import math
import os

import torch

from rlflow.config.schema import ClusterSection
from rlflow.models.flops import forward_flops, training_flops
from rlflow.preflight.estimates import RunSizes

CORE_FLOPS, CORE_MEMORY_RATE = 90e9, 10e9
"""FLOP/s and bytes/s of a core of a server of 2022 to 2025 in float32: what a step of 93M
parameters reached on an Intel Xeon (75e9) and an AMD EPYC (130e9), attention, optimizer and all."""
SCORES = ("proximal", "reference", "values", "teacher")
"""Needs of an algorithm that cost a forward pass over the step's rows."""


def estimate_step(sizes: RunSizes, cores: int) -> dict[str, float]:
    """{what takes them: seconds} of a step on so many cores, without the environment's own and
    without the weights' way to the engine. Decoding is bound by the bytes of weights, keys and
    values that each token reads, or by its operations."""
    budget = sizes.max_total_tokens
    sampled = min(sizes.sampled_tokens, budget - 1)
    rows, scored = [budget] * sizes.episodes, sampled * sizes.episodes
    rate = CORE_FLOPS * cores
    forward = forward_flops(sizes.model, rows, scored)
    trained = training_flops(sizes.model, rows, scored)
    if "full" in sizes.trainer.recomputed:
        trained += forward
    if sizes.critic:
        trained *= 2
    passes = sum(name in sizes.needs for name in SCORES)
    return {
        "sampling": 0.0 if sizes.engine.recorded else _decoding_s(sizes, cores, sampled),
        "scores": passes * forward / rate,
        "updates": trained * sizes.epochs / rate,
    }


def _decoding_s(sizes: RunSizes, cores: int, sampled: int) -> float:
    """Of one engine, whose threads have all cores."""
    model = sizes.model
    at_once = min(sizes.episodes, int(sizes.engine.options.get("max_concurrency", 128)))
    weights = sizes.engine_load.parameters * sizes.width
    token = model.layers * model.groups * (model.key_dim + model.value_dim) * sizes.width
    cache = at_once * sizes.max_total_tokens / 2 * token
    read_s = (weights + cache) / CORE_MEMORY_RATE
    computed_s = forward_flops(model, [1] * at_once, at_once) / (CORE_FLOPS * cores)
    return math.ceil(sizes.episodes / at_once) * sampled * max(read_s, computed_s)


def cores_of(cluster: ClusterSection) -> int | None:
    """CPU cores that the run uses; None where it trains on GPUs."""
    if cluster.on_gpus:
        return None
    asked = cluster.ranks * cluster.threads_per_rank
    return min(len(os.sched_getaffinity(0)), asked or torch.get_num_threads())
