"""What has to be there before anything is measured: the driver, packages, collectives, the
project's own checks."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata

from machine import ROOT, Report, Skipped, last_line, need, need_gpu

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "megatron-core",
    "transformer-engine",
    "vllm",
    "ray",
    "safetensors",
    "xxhash",
    "psutil",
    "rich",
    "matplotlib",
    "aiohttp",
    "google-re2",
    "faiss-gpu",
    "pytest",
)
IMPORTED = (
    "rlflow",
    "rlflow.trainer.megatron.megatron_trainer",
    "rlflow.rollout.embedded.embedded_engine",
    "rlflow.rollout.rollout",
    "rlflow.run.run",
    "rlflow_environments",
)


def machine(report: Report) -> None:
    """The GPUs by nvidia-smi, versions, and whether every part of rlflow can be imported."""
    if shutil.which("nvidia-smi"):
        asked = "--query-gpu=name,memory.total,memory.used,driver_version"
        said = subprocess.run(
            ["nvidia-smi", asked, "--format=csv,noheader"], capture_output=True, text=True
        ).stdout
        for number, line in enumerate(said.strip().splitlines()):
            report.row(f"GPU {number}: {line.strip()}", number, "index")
    report.row(f"Python {platform.python_version()}, {os.cpu_count()} cores", 1, "version")
    for package in PACKAGES:
        try:
            report.row(f"{package} {metadata.version(package)}", 1, "version")
        except metadata.PackageNotFoundError:
            report.row(f"{package}: not installed", 0, "version")
    for module in IMPORTED:
        try:
            importlib.import_module(module)
            report.row(f"import {module}", 1, "imports")
        except ImportError as error:
            report.row(f"import {module}: {error}", 0, "imports")


def doctor(report: Report) -> None:
    """`rlflow doctor`."""
    done = subprocess.run(
        [sys.executable, "-m", "rlflow", "doctor"], capture_output=True, text=True, cwd=ROOT
    )
    (report.folder / "doctor.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    report.row(f"rlflow doctor: {last_line(done.stdout)}", done.returncode, "exit code")


def collectives(report: Report) -> None:
    """A world of 1: every collective that the trainer uses, with its types."""
    import torch
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if report.on_gpu else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    options = {"device": report.device}
    for kind, dtype, operation in (
        ("sum", torch.float64, dist.ReduceOp.SUM),
        ("max", torch.float64, dist.ReduceOp.MAX),
        ("max", torch.int64, dist.ReduceOp.MAX),
        ("min", torch.int64, dist.ReduceOp.MIN),
        ("sum", torch.float32, dist.ReduceOp.SUM),
    ):
        value = torch.tensor([2**40 + 1, 3], dtype=dtype, **options)
        reduced = value.clone()
        dist.all_reduce(reduced, op=operation)
        report.holds(f"all_reduce {kind} {str(dtype)[6:]}", torch.equal(reduced, value))
    value = torch.randn(1000, dtype=torch.bfloat16, **options)
    sent, parts = value.clone(), [torch.empty_like(value)]
    dist.broadcast(sent, 0)
    dist.all_gather(parts, value)
    gathered, scattered = torch.empty_like(value), torch.empty_like(value)
    dist.all_gather_into_tensor(gathered, value)
    dist.reduce_scatter_tensor(scattered, value)
    for name, found in (
        ("broadcast", sent),
        ("all_gather", parts[0]),
        ("all_gather_into_tensor", gathered),
        ("reduce_scatter_tensor", scattered),
    ):
        report.holds(f"{name} bfloat16", torch.equal(found, value))
    objects: list[object] = [{"step": 7}]
    dist.broadcast_object_list(objects, 0)
    listed: list[object] = [None]
    dist.all_gather_object(listed, objects[0])
    report.holds("objects", listed == [{"step": 7}])
    dist.barrier()
    dist.destroy_process_group()


def tests(report: Report) -> None:
    """The tests that need a GPU."""
    need("pytest")
    need_gpu(report)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    (report.folder / "pytest.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode == 5:
        raise Skipped("no test is marked gpu")
    report.at_most(f"pytest -m gpu: {last_line(done.stdout)}", done.returncode, 0, "exit code")
