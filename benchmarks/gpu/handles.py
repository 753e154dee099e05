"""Weights from one process to another on the same GPU, in buckets behind a CUDA IPC handle:
bytes, GB/s, and what stays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from machine import GB, Report, model_path, precision, synchronized, weight_bytes

BUCKET = 256 * 2**20
ANSWER_S = 60.0


def buckets(tensors: dict[str, Any], limit: int) -> Iterator[dict[str, Any]]:
    """Tensors together, at most `limit` bytes; a larger one alone."""
    held: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if held and sum(one.nbytes for one in held.values()) + tensor.nbytes > limit:
            yield held
            held = {}
        held[name] = tensor
    yield held


def checksum(tensors: dict[str, Any]) -> int:
    """The sum of all bytes."""
    import torch

    return sum(
        int(value.contiguous().view(torch.uint8).sum(dtype=torch.int64))
        for value in tensors.values()
    )


def exchange(report: Report) -> None:
    """Two updates with new weights each; then both processes let go of everything."""
    import torch
    import torch.multiprocessing as multiprocessing

    from rlflow.models.huggingface import iterate_weights

    path = model_path(report, "3B", precision(report))
    free = free_bytes(report)
    tensors = {name: value.to(report.device) for name, value in iterate_weights(path)}
    limit = max(BUCKET, max(value.nbytes for value in tensors.values()))
    buffer = torch.empty(min(limit, weight_bytes(path)), dtype=torch.uint8, device=report.device)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=receive, args=(there, report.device), daemon=True)
    process.start()
    here.send(buffer)
    answer(here)
    for number in range(2):
        for value in tensors.values():
            value.add_(1)
        spent_s = update(report, here, buffer, tensors)
        report.row(f"update {number}", weight_bytes(path) / spent_s / GB, "GB/s", seconds=spent_s)
        here.send("sum")
        report.holds(f"update {number}: every byte arrived", answer(here) == checksum(tensors))
    here.send("close")
    report.row("left in the receiver after it closed", answer(here) / GB, "GB")
    process.join(ANSWER_S)
    report.holds("the receiver ended", process.exitcode == 0)
    process.kill()
    del buffer, tensors
    if report.on_gpu:
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
    report.row("left on the device", (free - free_bytes(report)) / GB, "GB")


def update(report: Report, pipe: Any, buffer: Any, tensors: dict[str, Any]) -> float:
    """Seconds until the receiver has copied all tensors."""
    import torch

    started = synchronized(report)
    for held in buckets(tensors, buffer.numel()):
        start, told = 0, []
        for name, value in held.items():
            buffer[start : start + value.nbytes].copy_(value.view(-1).view(torch.uint8))
            told.append((name, value.dtype, tuple(value.shape), start, value.nbytes))
            start += value.nbytes
        synchronized(report)  # before another process reads it
        pipe.send(told)
        answer(pipe)
    return synchronized(report) - started


def answer(pipe: Any) -> Any:
    """The other side's next message. Raises TimeoutError after `ANSWER_S`."""
    if not pipe.poll(ANSWER_S):
        raise TimeoutError(f"the receiver did not answer within {ANSWER_S:.0f} s")
    return pipe.recv()


def receive(pipe: Any, device: str) -> None:
    """The other process's whole life: copies what is in the buffer, and says the sum of what it
    has."""
    import torch

    held: dict[str, Any] = {}
    buffer = pipe.recv()
    pipe.send("opened")
    while True:
        told = pipe.recv()
        if told == "close":
            break
        if told == "sum":
            pipe.send(checksum(held))
            continue
        for name, dtype, shape, start, size in told:
            held[name] = buffer[start : start + size].view(dtype).view(shape).clone()
        if device != "cpu":
            torch.cuda.synchronize()
        pipe.send("copied")
    held.clear()
    del buffer
    if device != "cpu":
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
    pipe.send(torch.cuda.memory_reserved() if device != "cpu" else 0)


def free_bytes(report: Report) -> int:
    """Of the device; 0 of a CPU."""
    import torch

    time.sleep(
        0.5 if report.on_gpu else 0
    )  # a process that ended gives its memory back a little later
    return torch.cuda.mem_get_info()[0] if report.on_gpu else 0
