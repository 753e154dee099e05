#!/usr/bin/env python
"""Seconds and bytes of every way from the trainer's weights to an engine, as shares of this machine's memory and loopback.

    python benchmarks/weight_sync.py [--quick] [--shapes 0.5B 3B] [--rounds 7]

in-process      `InProcessSync` to an engine that copies every tensor into its own, hashes (sha256) included
publish         the weights into shared memory, hashed on their way; the two slots are there already
shared memory   another process maps them and hashes them
tcp             another process on this machine receives and hashes them
tcp delta       the same, 1 % of the values changed since the version that it has; read seconds include copies of all tensors
... end to end  from the first tensor published to the last one read, a delta made in between included

In every round each way stands between two runs of what it is held against, as many bytes as the weights have: copies into
memory of their size, 1 GiB at most, that has been written to before (memcpy), or from such memory over as many sockets into
a bucket of the other process that has been written to before (loopback). The share of a way is the median over rounds of its
speed by the mean of the two; `cpu` is the same of processor time, of both processes, which other work on the machine disturbs
less, and in which two threads are not faster than one. Weights have the shapes of Qwen2.5 and random values in bfloat16. After
the timed rounds each way is read once more, every bit compared with what was published, and the memory sampled that readers and
publisher take beside the slots and the copy of a reader of deltas. Ways whose memory is not free are left out. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
from bandwidth import MOST, SOURCE, STREAMS, Peak, Taken, Timed, loopback, memcpy, private_bytes, take_loopback
from common import MIB, SHAPES, Shape, versions
from torch import Tensor

from rlflow.rollout.engine import Engine, each_weight
from rlflow.rollout.event_loop import LoopThread
from rlflow.rollout.transfer.base import Publisher, WeightReader
from rlflow.rollout.transfer.hashes import best_hash
from rlflow.rollout.transfer.readers import open_reader
from rlflow.rollout.transfer.shared_memory import SharedMemoryPublisher
from rlflow.rollout.transfer.signed_tcp import TcpPublisher
from rlflow.rollout.transfer.tcp_reader import BUCKET_BYTES
from rlflow.rollout.weight_sync import InProcessSync
from rlflow.storage.memory_folders import shared_memory

VERSIONS_HELD = {"in-process": 1, "shared memory": 2, "tcp": 2, "tcp delta": 3}
CHANGED = 0.01
AIM, AIM_BYTES, AIM_BUCKETS = 0.7, 20, 2


class Source:
    """Weights of a shape: views of one stretch of random values, so that they take the memory of the largest tensor."""

    def __init__(self, shape: Shape) -> None:
        self.shapes = tensor_shapes(shape)
        self.largest = 2 * max(math.prod(sizes) for _, sizes in self.shapes)
        self._pool = np.random.default_rng(0).integers(0, 2**16, self.largest // 2 + 1024, np.uint16)
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


def tensor_shapes(shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
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
    layers = [(f"model.layers.{i}.{name}", sizes) for i in range(shape.layers) for name, sizes in layer.items()]
    return [("model.embed_tokens.weight", (shape.vocab, hidden)), *layers, ("model.norm.weight", (hidden,))]


# ---------------------------------------------------------------- the reading process


def read_on_request(pipe: Connection, shape: str) -> None:
    """Answers requests of the publishing process until there are no more."""
    torch.set_num_threads(1)
    source = Source(SHAPES[shape])
    readers: dict[str, WeightReader] = {}
    had: dict[str, int] = {}
    buckets: list[np.ndarray] = []
    while (request := pipe.recv()) is not None:
        if request[0] == "loopback":
            pipe.send(take_loopback(request[1], buckets))
            continue
        what, address, key, version = request
        if address not in readers:
            readers[address], had[address] = open_reader(address, key), private_bytes()
        reader = readers[address]
        while source.version < version:
            source.step()
        before = reader.bytes_read
        if what == "read":
            timed = Timed()
            for _ in reader.read(version):
                pass
            pipe.send((timed.taken(), reader.bytes_read - before))
        else:
            exact = True
            with Peak(had[address]) as peak:
                for (name, ours), (expected, theirs) in zip(reader.read(version), source.pairs(), strict=True):
                    exact &= name == expected and torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
            pipe.send({"exact": bool(exact), "peak_mib": peak.most / MIB})


# ---------------------------------------------------------------- ways


class Copies(Engine):
    """Nothing but weights."""

    hashes_weights = True

    def __init__(self) -> None:
        self._weights: dict[str, Tensor] = {}

    async def load_weights(self, weights: Any, version: int) -> None:
        async for name, tensor in each_weight(weights):
            self._weights.setdefault(name, torch.empty_like(tensor)).copy_(tensor)

    async def weights_digest(self) -> str:
        from rlflow.models.huggingface import digest

        return digest(self._weights.items())

    async def _nothing(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    generate = pause = resume = abort = close = _nothing


def measure_in_process(source: Source, pipe: Connection, rounds: int) -> dict[str, Any]:
    engine, thread = Copies(), LoopThread("sync")

    def push() -> dict[str, Taken]:
        version = source.step()
        timed = Timed()
        InProcessSync([engine], thread).push(source.pairs(), version)
        return {"in-process": timed.taken()}

    figures = alternate(min(rounds, 3), 1, memcpy(source.size), push, source.size)
    thread.close()
    return figures


def measure_shared_memory(source: Source, pipe: Connection, rounds: int) -> dict[str, Any]:
    with SharedMemoryPublisher() as publisher:
        return measure_published(publisher, "shared memory", source, pipe, rounds, memcpy(source.size))


def measure_tcp(source: Source, pipe: Connection, rounds: int, delta: bool = False) -> dict[str, Any]:
    with TcpPublisher(streams=STREAMS, delta=delta) as publisher:
        label = "tcp delta" if delta else "tcp"
        return measure_published(publisher, label, source, pipe, rounds, loopback(pipe, source.size))


def measure_published(
    publisher: Publisher, label: str, source: Source, pipe: Connection, rounds: int, base: Callable[[], Taken]
) -> dict[str, Any]:
    """A publisher of which the other process reads each version. The first two rounds make the slots."""
    sent: list[int] = []

    def sync() -> dict[str, Taken]:
        version = source.step()
        timed = Timed()
        publisher.publish(source.pairs(), version)
        published = timed.taken()
        if label == "tcp delta":
            publisher._deltas.wait()  # type: ignore[attr-defined]
        ready = timed.taken()
        taken, size = asked(pipe, "read", publisher, source)
        sent.append(size)
        ways = {label: Taken(taken.seconds, taken.cpu_s + timed.taken().cpu_s - ready.cpu_s)}
        ways[f"{label}, end to end"] = ready + ways[label]
        return {"publish": published, **ways} if label == "shared memory" else ways

    figures = alternate(rounds, 2, base, sync, source.size)
    version = source.step()
    with Peak() as peak:
        publisher.publish(source.pairs(), version)
    checked = asked(pipe, "check", publisher, source)
    if label == "tcp delta":
        checked["peak_mib"] -= source.size / MIB  # the copy
    figures[label] |= checked | {"bytes": int(statistics.median(sent[2:]))}
    figures[f"{label}, end to end"]["peak_mib"] = peak.most / MIB
    return figures


def asked(pipe: Connection, what: str, publisher: Publisher, source: Source) -> Any:
    pipe.send((what, publisher.address, publisher.key, source.version))
    return pipe.recv()


def alternate(
    rounds: int, first: int, base: Callable[[], Taken], run: Callable[[], dict[str, Taken]], size: int
) -> dict[str, Any]:
    """{way: medians}, after `first` rounds that do not count. Each way is held against what ran before and after its round."""
    bases, runs = [base()], []
    for _ in range(first + rounds):
        runs.append(run())
        bases.append(base())
    figures = {}
    for label in runs[0]:
        shares, cpu = [], []
        for number in range(first, first + rounds):
            beside, took = bases[number] + bases[number + 1], runs[number][label]
            shares.append(beside.seconds / 2 / took.seconds)
            cpu.append(beside.cpu_s / 2 / max(took.cpu_s, 1e-9))
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


def measure(name: str, rounds: int, labels: list[str]) -> dict[str, Any]:
    """{way: figures} of a shape."""
    source = Source(SHAPES[name])
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=read_on_request, args=(there, name), daemon=True)
    process.start()
    ways: dict[str, Callable[[Source, Connection, int], dict[str, Any]]] = {
        "in-process": measure_in_process,
        "shared memory": measure_shared_memory,
        "tcp": measure_tcp,
        "tcp delta": partial(measure_tcp, delta=True),
    }
    figures: dict[str, Any] = {}
    for label in labels:
        print(f"{name}: {label} ...", file=sys.stderr)
        figures.update(ways[label](source, here, rounds))
    here.send(None)
    process.join(30)
    bucket = max(BUCKET_BYTES, source.largest) / MIB
    print(f"\n{name}: {len(source.shapes)} tensors, {source.size / MIB:.1f} MiB; a bucket is {bucket:.0f} MiB")
    for label, one in figures.items():
        exact = {True: "every bit", False: "WRONG", None: ""}[one.get("exact")]
        memory = f"{one['peak_mib'] / bucket:4.1f} buckets" if "peak_mib" in one else ""
        sent = f"{one['bytes'] / MIB:8.1f} MiB" if "bytes" in one else ""
        print(f"  {label:25} {one['seconds']:7.3f} s {sent:12} {one['rate'] / 1e9:6.2f} GB/s  {one['share']:5.0%} of "
              f"{one['baseline_rate'] / 1e9:5.2f} GB/s, cpu {one['cpu_share']:5.0%}  {memory:12} {exact}")  # fmt: skip
    return {"bucket_mib": bucket, "size": source.size, **figures}


def with_room(shapes: list[str], labels: list[str]) -> dict[str, list[str]]:
    """The ways of each shape whose memory is free; says on stderr which are left out. Exits where none is left."""
    free = available_bytes()
    fits: dict[str, list[str]] = {}
    for name in shapes:
        source = Source(SHAPES[name])
        for label in labels:
            needed = source.size * VERSIONS_HELD[label] + 4 * source.largest + SOURCE + MOST + 1024 * MIB
            if needed <= free:
                fits.setdefault(name, []).append(label)
            else:
                print(f"weight_sync: {name}, {label}: left out: it takes {needed / 2**30:.1f} GiB of memory, "
                      f"{free / 2**30:.1f} are free", file=sys.stderr)  # fmt: skip
    if not fits:
        sys.exit("weight_sync: nothing that was asked for fits into memory; choose others with --shapes and --only")
    return fits


def available_bytes() -> int:
    """Memory that is free, of the machine and of the file system in memory."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return min(int(lines["MemAvailable"].split()[0]) * 1024, shutil.disk_usage(shared_memory()).free)


def passed(figures: dict[str, Any]) -> dict[str, bool]:
    """Which aims are met, of those that were measured."""
    found: dict[str, bool] = {}
    for label, one in figures.items():
        if label in ("bucket_mib", "size"):
            continue
        if label in ("publish", "shared memory", "tcp"):
            found[f"{label}: {AIM:.0%}"] = one["share"] >= AIM
        if "exact" in one:
            found[f"{label}: every bit"] = one["exact"]
        if "peak_mib" in one:
            found[f"{label}: {AIM_BUCKETS} buckets"] = one["peak_mib"] <= AIM_BUCKETS * figures["bucket_mib"]
        if label == "tcp delta":
            found[f"{label}: {AIM_BYTES}x fewer bytes"] = one["bytes"] * AIM_BYTES <= figures["size"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a model of 93M parameters, five rounds: under a minute")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), help="0.5B 3B (quick: 93M)")
    parser.add_argument("--only", nargs="+", choices=list(VERSIONS_HELD), default=list(VERSIONS_HELD))
    parser.add_argument("--rounds", type=int, help="7 (quick: 5)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = options.rounds or (5 if options.quick else 7)
    shapes = options.shapes or (["93M"] if options.quick else ["0.5B", "3B"])
    loads = [os.getloadavg()[0]]
    figures = {name: measure(name, rounds, labels) for name, labels in with_room(shapes, options.only).items()}
    loads.append(os.getloadavg()[0])
    aims = {name: passed(one) for name, one in figures.items()}
    from rlflow.matmul import processor_name

    print(f"\n{processor_name()}, {os.cpu_count()} cores, load {loads[0]:.1f} before and {loads[1]:.1f} after")
    result = {
        "benchmark": "weight_sync",
        "versions": {"python": platform.python_version(), **versions("rlflow", "torch", "numpy")},
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "load": loads,
        "hash": best_hash(),
        "streams": STREAMS,
        "shapes": figures,
        "aims": aims,
        "passed": all(met for one in aims.values() for met in one.values()),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
