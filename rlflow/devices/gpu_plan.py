"""The GPUs that this process sees, and which of some each trainer rank and each engine gets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch

from rlflow.errors import ConfigError

LOCAL = "127.0.0.1"
"""The address of this machine for a Ray that is started on it."""


@dataclass(frozen=True)
class Bundle:
    """Where a rank or a part of an engine is. node: the address of its machine. gpu: as
    CUDA_VISIBLE_DEVICES names it there; "" without one. number: in this process, -1 where it does
    not see it."""

    node: str
    gpu: str = ""
    number: int = field(default=-1, compare=False)

    @property
    def order(self) -> tuple[tuple[tuple[int, str], ...], tuple[int, str]]:
        """What places are sorted by: neighbours, which tensor parallelism needs to be fast, are on
        one machine."""
        return tuple(map(_number, self.node.split("."))), _number(self.gpu)


def _number(text: str) -> tuple[int, str]:
    return (int(text) if text.isdecimal() else -1, text)


@dataclass(frozen=True)
class GpuPlan:
    """The GPUs of a run. engines: those of each engine. Rank i has `bundles[i]`."""

    bundles: tuple[Bundle, ...]
    ranks: int
    engines: tuple[tuple[Bundle, ...], ...]

    def table(self, bytes_: Sequence[int] = ()) -> list[str]:
        """Lines: machine, GPU, rank and engine there, memory planned. bytes_: of each place."""
        rows = [("node", "GPU", "rank", "engine", "GiB")]
        for number, place in enumerate(self.bundles):
            rank = str(number) if number < self.ranks else "-"
            engines = [str(i) for i, places in enumerate(self.engines) if place in places]
            planned = f"{bytes_[number] / 2**30:.1f}" if number < len(bytes_) else "?"
            rows.append((place.node, place.gpu, rank, ", ".join(engines) or "-", planned))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        line = "  ".join(f"{{:>{width}}}" for width in widths)
        return [line.format(*row) for row in rows]


def plan(
    bundles: Sequence[Bundle],
    ranks: int,
    engines: int,
    each: int,
    shared: bool,
    again: bool,
) -> GpuPlan:
    """Rank i on GPU i and engine i on `each` GPUs from i * each on, of those in this order. shared:
    engines are on the ranks' GPUs and behind, else behind them. again: where GPUs are used up,
    engines begin with the first again.

    Raises ConfigError where there are too few GPUs, or an engine would lie on two machines."""
    free = bundles[0 if shared else ranks :]
    room = len(free) // each
    if ranks > len(bundles) or (engines and not room) or (engines > room and not again):
        held = f"{ranks} ranks" + (f" and {engines} engines of {each}" if engines else "")
        raise ConfigError(
            f"cluster.ranks: {held} on {len(bundles)} GPUs: expected one for each rank (NCCL "
            f"refuses two ranks on one) and {'' if shared else 'others '}for each engine. Lower "
            "cluster.ranks, rollout_workers or rollout.engine.engines."
        )
    starts = [number % room * each for number in range(engines)]
    placed = [tuple(free[start : start + each]) for start in starts]
    for number, found in enumerate(placed):
        if len({bundle.node for bundle in found}) > 1:
            nodes = " and ".join(sorted({bundle.node for bundle in found}))
            raise ConfigError(
                f"rollout.engine.tensor_parallel: engine {number} would lie on {nodes}; expected a "
                f"number that divides each machine's GPUs, found {each}."
            )
    used = {bundle for engine in placed for bundle in engine} | set(bundles[:ranks])
    return GpuPlan(tuple(one for one in bundles if one in used), ranks, tuple(placed))


def visible_gpus(
    variables: Mapping[str, str] = os.environ, count: int | None = None
) -> list[Bundle]:
    """The GPUs that this process sees: those of CUDA_VISIBLE_DEVICES, where it is set. count: on
    the machine; none: they are counted. [] where there is none."""
    count = gpu_count() if count is None else count
    named = variables.get("CUDA_VISIBLE_DEVICES")
    if not count or named is None:
        return [Bundle(LOCAL, str(number), number) for number in range(count)]
    # As CUDA reads it: what comes behind is not seen
    names = takewhile(lambda name: name not in ("", "-1"), map(str.strip, named.split(",")))
    return [Bundle(LOCAL, name, number) for number, name in enumerate(names)]


def gpu_count() -> int:
    """GPUs that CUDA shows: a container may have fewer than its machine. Those of the machine for a
    torch that knows none."""
    try:
        return torch.cuda.device_count() or len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0
