"""The trainer's speed: the matrix rate, packed updates, what an update waits for, weights on
their way out, retrieval."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from contextlib import closing
from typing import Any

from flops import training_flops
from machine import (
    GB,
    Report,
    Skipped,
    model_path,
    need,
    precision,
    shape_of,
    synchronized,
    weight_bytes,
)
from train_step import make_batch, policy_gradient

PACK = (
    2048,
    1536,
    1024,
    1024,
    896,
    640,
    512,
    384,
    128,
)  # tokens of rows that fill a micro-batch of 8,192
QUICK_PACK = (48, 16)
UPDATES = 3  # counted, after one that warms up
SYNCHRONIZING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def matrix(report: Report) -> None:
    """bfloat16 products of square matrices, the best of several sizes: what shares are taken of."""
    import torch

    best = 0.0
    for size in (256,) if report.quick else (4096, 8192, 16384):
        left, right = (
            torch.randn(size, size, device=report.device, dtype=torch.bfloat16) for _ in range(2)
        )
        left @ right
        repeats, started = (2 if report.quick else 20), synchronized(report)
        for _ in range(repeats):
            left @ right
        best = max(best, 2 * size**3 * repeats / (synchronized(report) - started))
    report.row("bfloat16 products", best / 1e12, "TFLOP/s", matrix_rate=best)


def lengths_of(report: Report, tokens: int) -> tuple[int, ...]:
    """Rows of two micro-batches of about `tokens` tokens."""
    return QUICK_PACK * 2 if report.quick else PACK * (2 * tokens // sum(PACK))


def build(report: Report, model: str, tokens: int, layers: str, options: dict[str, Any]) -> Any:
    """A packing trainer. layers: local, te, or rows for local layers whose attention goes row by
    row."""
    need("megatron", *(["transformer_engine"] if layers == "te" else []))
    from rlflow.trainer.base import Trainer

    os.environ["RLFLOW_LAYERS"] = "auto" if layers == "te" else "local"
    if layers == "rows":
        from rlflow.trainer.megatron import layers as ours

        ours.varlen_attn = None
    limit = sum(QUICK_PACK) if report.quick else tokens
    dtype = precision(report)
    return Trainer.from_pretrained(
        model_path(report, model, dtype),
        lr=1e-5,
        packing=True,
        dtype=dtype,
        tokens_per_microbatch=limit,
        **options,
    )


def forced(fields: dict[str, Any]) -> None:
    """From here on Megatron's configuration has these fields, whatever rlflow asks for."""
    from rlflow.trainer.megatron import model

    original = model.TransformerConfig
    model.TransformerConfig = lambda **given: original(**{**given, **fields})  # type: ignore


def train(
    report: Report,
    model: str = "3B",
    tokens: int = 8192,
    layers: str = "local",
    fields: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Packed updates: tokens/s, model FLOP/s (what is computed again counts nothing; of adapters
    two thirds count, as frozen weights have no gradients), memory against the estimate. fields:
    forced."""
    if fields:
        need("megatron")
        forced(fields)
    shape, lengths = shape_of(report, model), lengths_of(report, tokens)
    batch = make_batch(lengths, shape.vocab)
    with closing(build(report, model, tokens, layers, options)) as trainer:
        trainer.update(batch, policy_gradient)
        started = synchronized(report)
        for _ in range(UPDATES):
            trainer.update(batch, policy_gradient)
        each_s = (synchronized(report) - started) / UPDATES
        memory = peak_gib(report)
    scored = sum(lengths) - len(lengths)
    operations = training_flops(shape, lengths, scored) * (2 / 3 if options.get("lora") else 1)
    report.row(
        f"{model}, {layers}",
        sum(lengths) / each_s,
        "tokens/s",
        flops_per_s=operations / each_s,
        seconds=each_s,
        peak_gib=memory,
        estimated_gib=estimated_gib(report, model, tokens, options),
    )


def peak_gib(report: Report) -> float | None:
    import torch

    return torch.cuda.max_memory_reserved() / 2**30 if report.on_gpu else None


def estimated_gib(report: Report, model: str, tokens: int, options: dict[str, Any]) -> float:
    """What `--dry-run` says of an update with such micro-batches, libraries aside."""
    from rlflow.config.schema import load_config
    from rlflow.models.architecture import architecture
    from rlflow.models.huggingface import read_config
    from rlflow.preflight.estimates import rank_parts, run_sizes, update_parts

    path = model_path(report, model, precision(report))
    asked = {"packing": True, "tokens_per_microbatch": tokens, **options}
    given = {
        "model": {"path": str(path), "dtype": precision(report)},
        "environment": {"name": "none"},
        "trainer": asked,
    }
    sizes = run_sizes(load_config(given), architecture(read_config(path)))
    parts = {**rank_parts(sizes, 0), **update_parts(sizes, 0)}
    return sum(parts.values()) / 2**30


def profile(report: Report, model: str = "3B", layers: str = "local", **options: Any) -> None:
    """Two updates under torch's profiler: how long the device was busy, how often the host
    waited for it, and the kernels that took longest (profile.txt)."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    batch = make_batch(lengths_of(report, 8192), shape_of(report, model).vocab)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if report.on_gpu else [])]
    with closing(build(report, model, 8192, layers, options)) as trainer:
        trainer.update(batch, policy_gradient)
        started = synchronized(report)
        with profiler(activities=activities) as recorded:
            for _ in range(2):
                trainer.update(batch, policy_gradient)
            spent_s = synchronized(report) - started
    averages = recorded.key_averages()
    order = "self_device_time_total" if report.on_gpu else "self_cpu_time_total"
    text = averages.table(sort_by=order, row_limit=30)
    (report.folder / f"profile-{report.case.replace(' ', '-')}.txt").write_text(
        text, encoding="utf-8"
    )
    waited = sum(event.count for event in averages if event.key in SYNCHRONIZING)
    busy_s = sum(getattr(event, "self_device_time_total", 0) for event in averages) / 1e6
    report.row("host waits for the device", waited / 2, "per update")
    report.row("device busy", busy_s / spent_s, "share", seconds=spent_s / 2)


def host_adam(report: Report, model: str = "1.5B") -> None:
    """The optimizer alone, its state in host memory and on the device: seconds of a step."""
    need("megatron")
    from rlflow.trainer.megatron import cpu, optimizer

    batch = make_batch(lengths_of(report, 8192), shape_of(report, model).vocab)
    for name in ("host", "device") if report.on_gpu else ("device",):
        options = {"optimizer": {"name": "adamw", "offload": name == "host"}}
        with closing(build(report, model, 8192, "local", options)) as trainer, cpu.adapted():
            trainer.update(batch, policy_gradient)
            started = synchronized(report)
            for _ in range(2):
                optimizer.step(trainer._optimizer, 1e-5)
            report.row(f"AdamW on the {name}", (synchronized(report) - started) / 2, "s/update")


def weights_out(report: Report, model: str = "3B") -> None:
    """`trainer.weights()` to the host and, where it can, on the device; copies of the same size
    to pageable and to pinned memory."""
    import torch

    size = weight_bytes(model_path(report, model, precision(report)))
    with closing(build(report, model, 8192, "local", {})) as trainer:
        ways: dict[str, Callable[[], Any]] = {"weights() to the host": trainer.weights}
        if "device" in inspect.signature(trainer.weights).parameters:
            ways["weights() on the device"] = lambda: trainer.weights(device=report.device)
        for name, way in ways.items():
            for _round in range(2):
                started = synchronized(report)
                for _ in way():
                    pass
                spent_s = synchronized(report) - started
            report.row(name, size / spent_s / GB, "GB/s", seconds=spent_s)
    source = torch.empty(min(size, 2**30), dtype=torch.uint8, device=report.device)
    for name, pinned in (("pageable", False), ("pinned", report.on_gpu)):
        target = torch.empty(source.shape, dtype=torch.uint8, pin_memory=pinned)
        target.copy_(source)
        started = synchronized(report)
        target.copy_(source)
        report.row(
            f"copy to {name} memory", source.nbytes / (synchronized(report) - started) / GB, "GB/s"
        )


def retrieve(report: Report, index: str) -> None:
    """Searches per second over random vectors, 256 queries at a time, the best 3."""
    import torch

    count, width, queries = (1000, 16, 8) if report.quick else (1_000_000, 768, 256)
    draw = torch.Generator().manual_seed(0)
    vectors = torch.nn.functional.normalize(torch.randn(count, width, generator=draw), dim=1)
    asked = vectors[:: count // queries][:queries] + 0.01
    search = (_scan if index == "torch" else _faiss)(report, vectors, asked)
    found = search()
    right = (found[:, 0] == torch.arange(queries) * (count // queries)).float().mean()
    started, rounds = synchronized(report), 3
    for _ in range(rounds):
        search()
    rate = rounds * queries / (synchronized(report) - started)
    report.row(f"{index} over {count:,} x {width}", rate, "searches/s")
    report.holds(f"{index} finds each vector", right == 1)


def _scan(report: Report, vectors: Any, asked: Any) -> Callable[[], Any]:
    held, batch = vectors.to(report.device), asked.to(report.device)
    if report.on_gpu:
        held, batch = held.half(), batch.half()
    return lambda: (batch @ held.T).topk(3, dim=1).indices.cpu()


def _faiss(report: Report, vectors: Any, asked: Any) -> Callable[[], Any]:
    need("faiss")
    import faiss
    import torch

    flat = faiss.IndexFlatIP(vectors.shape[1])
    if report.on_gpu:
        if not hasattr(faiss, "StandardGpuResources"):
            raise Skipped("the installed faiss has no GPU part")
        options = faiss.GpuClonerOptions()
        options.useFloat16 = True
        flat = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, flat, options)
    flat.add(vectors.numpy())
    return lambda: torch.from_numpy(flat.search(asked.numpy(), 3)[1])
