#!/usr/bin/env python
"""Seconds and bytes of every way from the trainer's weights to an engine, as shares of this
machine's memory.

    python benchmarks/weight_sync.py [--quick] [--shapes 0.5B 3B] [--only WAY ...] [--rounds 7]

in-process   `InProcessSync` to an engine that copies every tensor into its own, hashes included
publish      the weights into Ray's object store, hashed on their way
read         another process maps them and verifies their hashes
delta, ...   the same two, 1 % of the values changed since the version before; reading includes
             writing what changed into the copy of the weights that the reader has

In every round each way stands between two runs of what it is held against: as many bytes as the
weights have copied into memory of their size, 1 GiB at most, that has been written to before. Its
share is the median over rounds of its speed by the mean of the two; `cpu` is the same of processor
time, which other work on the machine disturbs less, and in which two threads are not faster than
one. Weights have the shapes of Qwen2.5 and random values in bfloat16. At the end every bit of the
last version is compared in the reading process. Ways whose memory is not free are left out. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
from common import MIB, SHAPES, versions
from torch import Tensor

from rlflow.cluster.object_store import put, room_for
from rlflow.cluster.session import connect
from rlflow.devices.matmul import processor_name
from rlflow.models.architecture import Architecture
from rlflow.models.huggingface import digest
from rlflow.rollout.engine import Engine, each_weight
from rlflow.rollout.event_loop import LoopThread
from rlflow.rollout.weight_sync import InProcessSync
from rlflow.rollout.weights import WeightPublisher, WeightReader

VERSIONS_HELD = {"in-process": 1, "whole": 3, "delta": 4}
CHANGED = 0.01
AIM, AIM_BYTES = 0.5, 20
SOURCE = 256 * MIB  # about the largest tensor, which stands for all of the weights
MOST = 1024 * MIB  # more than caches hold
ANSWER_S = 300.0


@dataclass(frozen=True)
class Taken:
    """By the clock, and by the processor."""

    seconds: float
    cpu_s: float


class Timed:
    """From now on, in this process."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def taken(self) -> Taken:
        return Taken(time.perf_counter() - self._began[0], time.process_time() - self._began[1])


def memcpy(size: int) -> Callable[[], Taken]:
    """Copies so many bytes into memory of that size, MOST at most, which has been written to
    before."""
    source, target = np.ones(SOURCE, np.uint8), np.ones(min(size, MOST), np.uint8)

    def run() -> Taken:
        timed = Timed()
        for start in range(0, size, SOURCE):
            place = target[start % MOST :][: min(SOURCE, size - start)]
            np.copyto(place, source[: len(place)])
        return timed.taken()

    return run


class Source:
    """Weights of a shape: views of one stretch of random values, so that they take the memory of the
    largest tensor."""

    def __init__(self, shape: Architecture) -> None:
        self.shapes = tensor_shapes(shape)
        self.largest = 2 * max(math.prod(sizes) for _, sizes in self.shapes)
        self._pool = np.random.default_rng(0).integers(
            0, 2**16, self.largest // 2 + 1024, np.uint16
        )
        self.size = 2 * sum(math.prod(sizes) for _, sizes in self.shapes)
        self.version = 0

    def step(self) -> int:
        """The next version: some of the values are others."""
        self.version += 1
        random = np.random.default_rng(self.version)
        self._pool[random.integers(0, len(self._pool), int(CHANGED * len(self._pool)))] += 1
        return self.version

    def pairs(self) -> Iterator[tuple[str, Tensor]]:
        for number, (name, sizes) in enumerate(self.shapes):
            start = number % 1024
            values = self._pool[start : start + math.prod(sizes)]
            yield name, torch.from_numpy(values.view(np.int16)).view(torch.bfloat16).view(sizes)


def tensor_shapes(shape: Architecture) -> list[tuple[str, tuple[int, ...]]]:
    """Of a Qwen2 model with tied embeddings, under its HuggingFace names."""
    hidden, groups = shape.hidden, shape.groups * shape.head_dim
    layer = {
        "self_attn.q_proj.weight": (hidden, hidden), "self_attn.q_proj.bias": (hidden,),
        "self_attn.k_proj.weight": (groups, hidden), "self_attn.k_proj.bias": (groups,),
        "self_attn.v_proj.weight": (groups, hidden), "self_attn.v_proj.bias": (groups,),
        "self_attn.o_proj.weight": (hidden, hidden), "mlp.gate_proj.weight": (shape.ffn, hidden),
        "mlp.up_proj.weight": (shape.ffn, hidden), "mlp.down_proj.weight": (hidden, shape.ffn),
        "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,),
    }  # fmt: skip
    layers = [
        (f"model.layers.{i}.{name}", sizes)
        for i in range(shape.layers)
        for name, sizes in layer.items()
    ]
    return [
        ("model.embed_tokens.weight", (shape.vocab, hidden)),
        *layers,
        ("model.norm.weight", (hidden,)),
    ]


class Reading:
    """The other process, an actor of Ray."""

    def __init__(self, shape: str) -> None:
        torch.set_num_threads(1)
        self._source, self._reader = Source(SHAPES[shape]), WeightReader()

    def read(self, offers: list[Any]) -> tuple[Taken, int, bool]:
        """(time, bytes, whether what had changed)."""
        timed = Timed()
        read = self._reader.read(offers[0])
        self._weights = read.weights
        return timed.taken(), read.bytes, read.delta

    def exact(self, version: int) -> bool:
        """Whether every bit of what was read last is that of this version."""
        while self._source.version < version:
            self._source.step()
        return all(
            name == expected and torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
            for (name, ours), (expected, theirs) in zip(
                self._weights, self._source.pairs(), strict=True
            )
        )


class Copies(Engine):
    """Nothing but weights."""

    hashes_weights = takes_device_tensors = True

    def __init__(self) -> None:
        self._weights: dict[str, Tensor] = {}

    async def load_weights(self, weights: Any, version: int) -> None:
        async for name, tensor in each_weight(weights):
            self._weights.setdefault(name, torch.empty_like(tensor)).copy_(tensor)

    async def weights_digest(self) -> str:
        return digest(self._weights.items())

    async def _nothing(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    generate = pause = resume = abort = close = _nothing


def measure_in_process(shape: str, rounds: int) -> dict[str, Any]:
    source, engine, thread = Source(SHAPES[shape]), Copies(), LoopThread("sync")

    def push() -> dict[str, Taken]:
        version = source.step()
        timed = Timed()
        InProcessSync([engine], thread).push(source.pairs(), version)
        return {"in-process": timed.taken()}

    figures = alternate(rounds, 1, memcpy(source.size), push, source.size)
    thread.close()
    return figures


def measure_published(shape: str, rounds: int, delta: bool = False) -> dict[str, Any]:
    """Publishes versions that another process reads, one after the other."""
    import ray

    source = Source(SHAPES[shape])
    session = connect(None, cpus=2, options=room_for((4 + delta) * source.size))
    publisher, sent = WeightPublisher(put, delta=delta), []
    reader = ray.remote(num_cpus=1)(Reading).remote(shape)
    names = [f"delta, {way}" if delta else way for way in ("publish", "read")]

    def sync() -> dict[str, Taken]:
        version = source.step()
        timed = Timed()
        offer = publisher.publish(source.pairs(), version)
        published = timed.taken()
        taken, size, as_delta = ray.get(reader.read.remote([offer]), timeout=ANSWER_S)
        sent.append(size)
        assert as_delta == (delta and version > 1)
        return dict(zip(names, (published, taken), strict=True))

    try:
        figures = alternate(rounds, 2, memcpy(source.size), sync, source.size)
        exact = ray.get(reader.exact.remote(source.version), timeout=ANSWER_S)
        figures[names[1]] |= {"exact": exact, "bytes": int(statistics.median(sent[2:]))}
    finally:
        publisher.close()
        if session is not None:
            session.close()
    return figures


def alternate(
    rounds: int,
    first: int,
    base: Callable[[], Taken],
    run: Callable[[], dict[str, Taken]],
    size: int,
) -> dict[str, Any]:
    """{way: medians}, after `first` rounds that do not count. Each way is held against what ran
    before and after its round."""
    bases, runs = [base()], []
    for _ in range(first + rounds):
        runs.append(run())
        bases.append(base())
    figures = {}
    for label in runs[0]:
        shares, cpu = [], []
        for number in range(first, first + rounds):
            before, after, took = bases[number], bases[number + 1], runs[number][label]
            shares.append((before.seconds + after.seconds) / 2 / took.seconds)
            cpu.append((before.cpu_s + after.cpu_s) / 2 / max(took.cpu_s, 1e-9))
        seconds = statistics.median(one[label].seconds for one in runs[first:])
        figures[label] = {
            "seconds": seconds,
            "first_s": runs[0][label].seconds,
            "rate": size / seconds,
            "baseline_rate": size / statistics.median(one.seconds for one in bases[first:]),
            "share": statistics.median(shares),
            "cpu_share": statistics.median(cpu),
            "shares": [round(share, 3) for share in shares],
        }
    return figures


WAYS: dict[str, Callable[[str, int], dict[str, Any]]] = {
    "in-process": measure_in_process,
    "whole": measure_published,
    "delta": partial(measure_published, delta=True),
}


def measure(shape: str, rounds: int, labels: list[str]) -> dict[str, Any]:
    """{way: figures} of a shape."""
    source, figures = Source(SHAPES[shape]), dict[str, Any]()
    for label in labels:
        print(f"{shape}: {label} ...", file=sys.stderr)
        figures.update(WAYS[label](shape, rounds))
    print(f"\n{shape}: {len(source.shapes)} tensors, {source.size / MIB:.1f} MiB")
    for label, one in figures.items():
        exact = {True: "every bit", False: "WRONG", None: ""}[one.get("exact")]
        sent = f"{one['bytes'] / MIB:8.1f} MiB" if "bytes" in one else ""
        print(
            f"  {label:15} {one['seconds']:7.3f} s {sent:12} {one['rate'] / 1e9:6.2f} GB/s "
            f"{one['share']:5.0%} of {one['baseline_rate'] / 1e9:5.2f} GB/s, "
            f"cpu {one['cpu_share']:5.0%}  {exact}"
        )
    return {"size": source.size, **figures}


def with_room(shapes: list[str], labels: list[str]) -> dict[str, list[str]]:
    """The ways of each shape whose memory is free; says on stderr which are left out. Exits where
    none is left."""
    free = available_bytes()
    fits: dict[str, list[str]] = {}
    for name in shapes:
        source = Source(SHAPES[name])
        for label in labels:
            needed = (
                source.size * VERSIONS_HELD[label] + 4 * source.largest + SOURCE + MOST + 1024 * MIB
            )
            if needed <= free:
                fits.setdefault(name, []).append(label)
            else:
                print(
                    f"weight_sync: {name}, {label}: left out: it takes {needed / 2**30:.1f} GiB of "
                    f"memory, {free / 2**30:.1f} are free",
                    file=sys.stderr,
                )
    if not fits:
        sys.exit(
            "weight_sync: nothing that was asked for fits into memory; choose others with --shapes "
            "and --only"
        )
    return fits


def available_bytes() -> int:
    """Memory that is free, of the machine and of the file system in memory."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    return min(available, shutil.disk_usage("/dev/shm").free)


def passed(figures: dict[str, Any]) -> dict[str, bool]:
    """Which aims are met, of those that were measured."""
    found: dict[str, bool] = {}
    for label, one in figures.items():
        if label == "in-process":
            found[f"{label}: {AIM:.0%} of memcpy"] = one["share"] >= AIM
        if label.endswith("read"):
            found[f"{label}: every bit"] = one["exact"]
        if label == "delta, read":
            found[f"{label}: {AIM_BYTES}x fewer bytes"] = (
                one["bytes"] * AIM_BYTES <= figures["size"]
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="93M and 0.5B, five rounds: a minute")
    parser.add_argument(
        "--shapes", nargs="+", choices=list(SHAPES), help="0.5B 3B (quick: 93M 0.5B)"
    )
    parser.add_argument("--only", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--rounds", type=int, help="7 (quick: 5)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = options.rounds or (5 if options.quick else 7)
    shapes = options.shapes or (["93M", "0.5B"] if options.quick else ["0.5B", "3B"])
    loads = [os.getloadavg()[0]]
    fitting = with_room(shapes, options.only)
    figures = {name: measure(name, rounds, labels) for name, labels in fitting.items()}
    loads.append(os.getloadavg()[0])
    aims = {name: passed(one) for name, one in figures.items()}
    print(
        f"\n{processor_name()}, {os.cpu_count()} cores, load {loads[0]:.1f} before and "
        f"{loads[1]:.1f} after"
    )
    result = {
        "benchmark": "weight_sync",
        "versions": {"python": platform.python_version(), **versions("rlflow", "torch", "ray")},
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "load": loads,
        "shapes": figures,
        "aims": aims,
        "passed": all(met for one in aims.values() for met in one.values()),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
