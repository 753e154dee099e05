#!/usr/bin/env python
"""Seconds and bytes of every way from the trainer's weights to an engine, as shares of this machine's memory and loopback.

    python benchmarks/weight_sync.py [--quick] [--shapes 0.5B 3B] [--rounds 5]

in-process      `InProcessSync` to an engine that copies every tensor into its own, hashes (sha256) included
publish         the weights into shared memory, hashed on their way; the two slots are there already
shared memory   another process maps them and hashes them
tcp             another process on this machine receives and hashes them
tcp delta       the same, 1 % of the values changed since the version that it has; read seconds include copies of all tensors

Each way takes turns with what it is held against, in one run: copies of 256 MiB that lie in memory (memcpy), and as many bytes as
the weights have over as many sockets from the same memory, into buffers used again (loopback). Weights have the shapes of
Qwen2.5 and random values in bfloat16. After the timed rounds each way is read once more, every bit compared with what was
published, and the memory sampled that readers and publisher take beside the slots, the copy of a reader of deltas, and the
tensor in hand. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
from common import MIB, SHAPES, Shape, versions
from torch import Tensor

from rlflow.rollout.engine import Engine, each_weight
from rlflow.rollout.event_loop import LoopThread
from rlflow.rollout.transfer.base import Publisher, WeightReader
from rlflow.rollout.transfer.hashes import best_hash
from rlflow.rollout.transfer.readers import open_reader
from rlflow.rollout.transfer.shared_memory import SharedMemoryPublisher
from rlflow.rollout.transfer.tcp import TcpPublisher
from rlflow.rollout.transfer.tcp_reader import BUCKET_BYTES
from rlflow.rollout.weight_sync import InProcessSync

COPIED = 256 * MIB
CHANGED = 0.01
STREAMS = 2
AIM, AIM_BYTES, AIM_BUCKETS = 0.7, 20, 2


class Source:
    """Weights of a shape: views of one stretch of random values, so that they take the memory of the largest tensor."""

    def __init__(self, shape: Shape) -> None:
        self.shapes = tensor_shapes(shape)
        self.largest = 2 * max(np.prod(sizes) for _, sizes in self.shapes)
        self._pool = np.random.default_rng(0).integers(0, 2**16, self.largest // 2 + 1024, np.uint16)
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
            values = self._pool[start : start + int(np.prod(sizes))]
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
    while (request := pipe.recv()) is not None:
        if request[0] == "loopback":
            pipe.send(take_loopback(*request[1:]))
            continue
        what, address, key, version = request
        reader = readers.setdefault(address, open_reader(address, key))
        while source.version < version:
            source.step()
        before = reader.bytes_read
        if what == "read":
            began = time.perf_counter()
            for _ in reader.read(version):
                pass
            pipe.send({"seconds": time.perf_counter() - began, "bytes": reader.bytes_read - before})
        else:
            exact, peak = True, Peak()
            with peak:
                for (name, ours), (expected, theirs) in zip(reader.read(version), source.pairs(), strict=True):
                    peak.in_hand = max(peak.in_hand, ours.nbytes)
                    exact &= name == expected and torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
            pipe.send({"exact": bool(exact), "peak": peak.most, "bytes": reader.bytes_read - before})


class Peak:
    """Private memory of this process beyond what it had, at its highest, in bytes; sampled."""

    in_hand = 0

    def __enter__(self) -> Peak:
        self.most, self._first, self._over = 0, private_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, private_bytes() - self._first)


def private_bytes() -> int:
    """Without files, and without memory that is shared."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


# ---------------------------------------------------------------- what it is held against


def memcpy_rate(buffers: tuple[np.ndarray, np.ndarray]) -> float:
    """Bytes a second of a copy within memory."""
    began = time.perf_counter()
    np.copyto(*buffers)
    return len(buffers[0]) / (time.perf_counter() - began)


def loopback_rate(pipe: Connection, content: np.ndarray, size: int) -> float:
    """Bytes a second over STREAMS sockets to the other process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(("loopback", server.getsockname()[1], size))
        links = [server.accept()[0] for _ in range(STREAMS)]
        threads = [threading.Thread(target=send, args=(link, content, size // STREAMS)) for link in links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return size / pipe.recv()["seconds"]


def send(link: socket.socket, content: np.ndarray, size: int) -> None:
    with link:
        for start in range(0, size, len(content)):
            link.sendall(content[: min(len(content), size - start)].data)


def take_loopback(port: int, size: int) -> dict[str, float]:
    links = [socket.create_connection(("127.0.0.1", port)) for _ in range(STREAMS)]
    began = time.perf_counter()
    threads = [threading.Thread(target=drain, args=(link,)) for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"seconds": time.perf_counter() - began, "bytes": size}


def drain(link: socket.socket) -> None:
    buffer = bytearray(2**18)
    with link:
        while link.recv_into(buffer):
            pass


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


def measure_in_process(source: Source, rounds: int) -> dict[str, Any]:
    engine, thread = Copies(), LoopThread("sync")
    taken, rates = [], []
    buffers = (np.ones(COPIED, np.uint8), np.ones(COPIED, np.uint8))
    for _ in range(rounds + 1):
        rates.append(memcpy_rate(buffers))
        version, began = source.step(), time.perf_counter()
        InProcessSync([engine], thread).push(source.pairs(), version)
        taken.append(time.perf_counter() - began)
    size = sum(tensor.nbytes for _, tensor in source.pairs())
    thread.close()
    return {"in-process": way(taken[1:], size, rates[1:], size)}


def measure_shared_memory(source: Source, pipe: Connection, rounds: int) -> dict[str, Any]:
    written, read, rates = [], [], []
    buffers = (np.ones(COPIED, np.uint8), np.ones(COPIED, np.uint8))
    with SharedMemoryPublisher() as publisher:
        for _ in range(rounds + 2):  # two slots are made first
            rates.append(memcpy_rate(buffers))
            published = publisher.publish(source.pairs(), source.step())
            written.append(published.seconds)
            read.append(asked(pipe, "read", publisher, source)["seconds"])
        with Peak() as peak:
            publisher.publish(source.pairs(), source.step())
        checked = asked(pipe, "check", publisher, source)
    size = published.bytes
    return {
        "publish": {**way(written[2:], size, rates[2:], size), "peak_mib": peak.most / MIB},
        "shared memory": {**way(read[2:], size, rates[2:], size), **verdict(checked)},
    }


def measure_tcp(source: Source, pipe: Connection, rounds: int) -> dict[str, Any]:
    read, rates = [], []
    content = np.ones(64 * MIB, np.uint8)
    with TcpPublisher(streams=STREAMS) as publisher:
        for _ in range(rounds + 1):
            published = publisher.publish(source.pairs(), source.step())
            rates.append(loopback_rate(pipe, content, published.bytes))
            read.append(asked(pipe, "read", publisher, source)["seconds"])
        checked = asked(pipe, "check", publisher, source)
    return {"tcp": {**way(read[1:], published.bytes, rates[1:], published.bytes), **verdict(checked)}}


def measure_delta(source: Source, pipe: Connection, rounds: int) -> dict[str, Any]:
    read, sizes, rates, made = [], [], [], []
    content = np.ones(64 * MIB, np.uint8)
    with TcpPublisher(streams=STREAMS, delta=True) as publisher:
        for _ in range(rounds + 1):
            published = publisher.publish(source.pairs(), source.step())
            began = time.perf_counter()
            publisher._deltas.wait()  # type: ignore[union-attr]
            made.append(time.perf_counter() - began)
            rates.append(loopback_rate(pipe, content, published.bytes))
            answer = asked(pipe, "read", publisher, source)
            read.append(answer["seconds"])
            sizes.append(answer["bytes"])
        publisher.publish(source.pairs(), source.step())
        checked = asked(pipe, "check", publisher, source)
    figures = way(read[1:], published.bytes, rates[1:], int(statistics.median(sizes[1:])))
    fewer = published.bytes / figures["bytes"]
    return {"tcp delta": {**figures, **verdict(checked), "fewer": fewer, "delta_s": statistics.median(made[1:])}}


def asked(pipe: Connection, what: str, publisher: Publisher, source: Source) -> dict[str, Any]:
    pipe.send((what, publisher.address, publisher.key, source.version))
    return pipe.recv()


def way(seconds: list[float], size: int, rates: list[float], sent: int) -> dict[str, Any]:
    """Medians; the share is that of each round, held against its own baseline."""
    shares = [size / took / rate for took, rate in zip(seconds, rates)]
    return {
        "seconds": statistics.median(seconds),
        "bytes": sent,
        "rate": size / statistics.median(seconds),
        "baseline_rate": statistics.median(rates),
        "share": statistics.median(shares),
        "shares": [round(share, 3) for share in shares],
    }


def verdict(checked: dict[str, Any]) -> dict[str, Any]:
    return {"exact": checked["exact"], "peak_mib": checked["peak"] / MIB}


def measure(name: str, rounds: int, only: list[str]) -> dict[str, Any]:
    """{way: figures} of a shape."""
    source = Source(SHAPES[name])
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=read_on_request, args=(there, name), daemon=True)
    process.start()
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "in-process": lambda: measure_in_process(source, min(rounds, 3)),
        "shared memory": lambda: measure_shared_memory(source, here, rounds),
        "tcp": lambda: measure_tcp(source, here, rounds),
        "tcp delta": lambda: measure_delta(source, here, rounds),
    }
    figures: dict[str, Any] = {}
    for label in only or ways:
        figures.update(ways[label]())
    here.send(None)
    process.join(30)
    bucket = max(BUCKET_BYTES, int(source.largest)) / MIB
    print(f"\n{name}: {len(source.shapes)} tensors; a bucket is {bucket:.0f} MiB")
    for label, one in figures.items():
        exact = {True: "every bit", False: "WRONG", None: ""}[one.get("exact")]
        memory = f"{one['peak_mib'] / bucket:4.1f} buckets" if "peak_mib" in one else ""
        print(f"  {label:14} {one['seconds']:7.3f} s {one['bytes'] / MIB:8.1f} MiB {one['rate'] / 1e9:6.2f} GB/s  "
              f"{one['share']:5.0%} of {one['baseline_rate'] / 1e9:5.2f} GB/s  {memory:12} {exact}")  # fmt: skip
    return {"bucket_mib": bucket, **figures}


def passed(figures: dict[str, Any]) -> dict[str, bool]:
    """Which aims are met, of those that were measured."""
    found: dict[str, bool] = {}
    for label, one in figures.items():
        if label == "bucket_mib":
            continue
        if label in ("publish", "shared memory", "tcp"):
            found[f"{label}: {AIM:.0%}"] = one["share"] >= AIM
        if "exact" in one:
            found[f"{label}: every bit"] = one["exact"]
        if "peak_mib" in one:
            found[f"{label}: {AIM_BUCKETS} buckets"] = one["peak_mib"] <= AIM_BUCKETS * figures["bucket_mib"]
        if "fewer" in one:
            found[f"{label}: {AIM_BYTES}x fewer bytes"] = one["fewer"] >= AIM_BYTES
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a model of 93M parameters, three rounds: under a minute")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), help="0.5B 3B (quick: 93M); 3B takes 14 GiB of memory")
    parser.add_argument("--only", nargs="+", choices=["in-process", "shared memory", "tcp", "tcp delta"], default=[])
    parser.add_argument("--rounds", type=int, help="5 (quick: 3)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = options.rounds or (3 if options.quick else 5)
    shapes = options.shapes or (["93M"] if options.quick else ["0.5B", "3B"])
    figures = {name: measure(name, rounds, options.only) for name in shapes}
    aims = {name: passed(one) for name, one in figures.items()}
    from rlflow.matmul import processor_name

    result = {
        "benchmark": "weight_sync",
        "versions": {"python": platform.python_version(), **versions("rlflow", "torch", "numpy")},
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "hash": best_hash(),
        "streams": STREAMS,
        "shapes": figures,
        "aims": aims,
        "passed": all(met for one in aims.values() for met in one.values()),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
