"""`rlflow doctor`: what is installed, what was tested together, what is missing for which job."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata

from rlflow.commands.arguments import Commands, add_command
from rlflow.errors import as_called, install_command

PLUG_INS = "rlflow.jobs"
"""Entry-point group of sequences of `Job`."""
TESTED = {
    "torch": "2.13.0",
    "megatron-core": "0.16.1",
    "transformers": "5.23.0",
    "tokenizers": "0.23.3",
    "safetensors": "0.8.0",
    "numpy": "2.4.6",
    "PyYAML": "6.0.3",
    "psutil": "7.2.2",
    "rich": "15.0.0",
    "matplotlib": "3.11.2",
    "ray": "2.60.0",
    "tensorboard": "2.21.0",
}
"""Versions of the core's packages that were tested together (constraints/cpu.txt)."""
EXACT = {"megatron-core"}  # its behaviour without CUDA is adapted to one version


@dataclass(frozen=True)
class Job:
    """Something a user wants to do, the packages it takes (any of `a|b`), and how they are
    installed. tested: versions that were tested together, of packages that the core's table does
    not have."""

    name: str
    packages: tuple[str, ...]
    install: str
    gpu: bool = False
    tested: Mapping[str, str] = field(default_factory=dict)


JOBS = (
    Job(
        "train on CPU",
        ("torch", "megatron-core", "transformers", "safetensors", "numpy", "PyYAML"),
        install_command(),
    ),
    Job("live display, picture", ("rich", "matplotlib"), "pip install rich matplotlib"),
    Job("several ranks", ("ray",), install_command("ray")),
    Job(
        "train on GPU",
        ("torch", "megatron-core", "transformers", "safetensors"),
        install_command(),
        gpu=True,
    ),
    Job("fused GPU kernels", ("transformer-engine",), install_command("gpu"), gpu=True),
    Job("TensorBoard", ("tensorboard",), install_command("tensorboard")),
    Job("Weights & Biases", ("wandb",), install_command("wandb")),
)


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "doctor",
        run,
        "what is installed, what works together, what is missing for which job",
        "Prints versions against the tested ones, hardware, and for each job what is missing, with the command that\n"
        "installs it. The last line is the verdict; the exit code is 1 when training on this machine is not possible. With\n"
        "--config it opens all that the run needs as well, as `rlflow train --dry-run` does; the exit code is 2 where something\n"
        "is in its way.",
        "examples:\n  rlflow doctor\n  rlflow doctor --config my.yaml model.path=DIR\n",
    )
    parser.add_argument("--config", metavar="FILE", help="a run configuration to look at")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="override a key of it; the value is YAML",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the tables, and what `dry_run.look` says of a configuration."""
    code = diagnose()
    if args.config is None and not args.overrides:
        return code
    from rlflow.commands.dry_run import look
    from rlflow.config.schema import load_config

    print()
    return look(load_config(args.config, args.overrides)) or code


def all_jobs() -> list[Job]:
    """The core's jobs and those of the plug-ins."""
    entries = sorted(metadata.entry_points(group=PLUG_INS), key=lambda entry: entry.name)
    return [*JOBS, *(job for entry in entries for job in entry.load())]


def versions_tested() -> dict[str, str]:
    """Package -> version, the plug-ins' included."""
    return {
        **TESTED,
        **{name: version for job in all_jobs() for name, version in job.tested.items()},
    }


def diagnose() -> int:
    """Prints the three tables and the verdict; returns 0 where a policy can be trained on this
    machine, else 1."""
    installed = {name: installed_version(name) for name in package_names()}
    gpus = gpu_names()
    print(_table([("machine", ""), *machine_rows(gpus)]))
    print()
    packages = [package_row(name, version) for name, version in installed.items()]
    print(as_called(_table([("package", "installed", "tested", ""), *packages])))
    print()
    rows = [job_row(job, installed, bool(gpus)) for job in all_jobs()]
    print(_table([("job", "ready", "missing"), *(row[:3] for row in rows)]))
    print()
    for name, *_, install in rows:
        if install:
            print(f"for '{name}':\n  {as_called(install)}")
    text, ready = verdict(installed, bool(gpus))
    print(as_called(text))
    return 0 if ready else 1


def package_names() -> list[str]:
    """Every package of a job, in order; of alternatives the installed one, else the first."""
    chosen: dict[str, None] = dict.fromkeys(versions_tested())
    for job in all_jobs():
        for package in job.packages:
            options = package.split("|")
            chosen.setdefault(
                next((name for name in options if installed_version(name)), options[0])
            )
    return list(chosen)


def installed_version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def package_row(name: str, version: str | None) -> tuple[str, str, str, str]:
    tested = versions_tested().get(name)
    if version is None:
        return (name, "-", tested or "-", "")
    if tested is None:
        return (name, version, "-", "not tested with")
    same = version.split("+")[0] == tested
    return (
        name,
        version,
        tested,
        "" if same else f"pip install {name}=={tested}" if name in EXACT else "differs",
    )


def missing_packages(job: Job, installed: dict[str, str | None]) -> list[str]:
    return [
        need
        for need in job.packages
        if not any(installed.get(name) or installed_version(name) for name in need.split("|"))
    ]


def job_row(job: Job, installed: dict[str, str | None], gpu: bool) -> tuple[str, str, str, str]:
    missing = [need.replace("|", " or ") for need in missing_packages(job, installed)]
    lacks_gpu = job.gpu and not gpu
    if not missing and not lacks_gpu:
        return (job.name, "yes", "", "")
    return (
        job.name,
        "no",
        ", ".join([*(["an NVIDIA GPU"] if lacks_gpu else []), *missing]),
        job.install if missing else "",
    )


def verdict(installed: dict[str, str | None], gpu: bool) -> tuple[str, bool]:
    """(one line, whether a policy can be trained here)."""
    jobs = {job.name: job for job in JOBS}
    cpu_missing = missing_packages(jobs["train on CPU"], installed)
    if cpu_missing:
        return (
            f"verdict: training is not possible: {', '.join(cpu_missing)} missing; {jobs['train on CPU'].install}.",
            False,
        )
    exact = [
        name for name in sorted(EXACT) if (installed[name] or "").split("+")[0] != TESTED[name]
    ]
    if exact and not gpu:
        wanted = ", ".join(f"{name}=={TESTED[name]}" for name in exact)
        return (
            f"verdict: training on CPU was tested with another version only; pip install {wanted}.",
            True,
        )
    where = "GPU and CPU" if gpu else "CPU"
    return f"verdict: ready to train on {where}.", True


def machine_rows(gpus: list[str]) -> list[tuple[str, str]]:
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    threads = os.environ.get("OMP_NUM_THREADS")
    policy = os.environ.get("OMP_WAIT_POLICY")
    advice = (
        ""
        if threads or policy == "passive"
        else " (set OMP_NUM_THREADS or OMP_WAIT_POLICY=passive: waiting threads are slow)"
    )
    disk = shutil.disk_usage(os.getcwd()).free / 2**30
    return [
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("system", f"{platform.system()} {platform.machine()}"),
        (
            "cores",
            f"{cores} usable; OMP_NUM_THREADS={threads or 'unset'} OMP_WAIT_POLICY={policy or 'unset'}{advice}",
        ),
        ("products", products_text()),
        ("memory", memory_text()),
        ("disk", f"{disk:.0f} GiB free here"),
        ("GPU", ", ".join(gpus) or "none"),
    ]


def products_text() -> str:
    """Which library computes float32 products on the CPU, for which class of them."""
    if importlib.util.find_spec("torch") is None:
        return "unknown (torch is missing)"
    from rlflow import matmul

    chosen = matmul.PRODUCTS.chosen()
    parts = [
        (library, [name for name, taken in chosen.items() if taken == library])
        for library in matmul.LIBRARIES
    ]
    told = "; ".join(f"{library} for {', '.join(names)}" for library, names in parts if names)
    return f"{told} ({matmul.processor_name()}; {matmul.VARIABLE}={os.environ.get(matmul.VARIABLE, 'auto')})"


def memory_text() -> str:
    if importlib.util.find_spec("psutil") is None:
        return "unknown (pip install psutil)"
    import psutil

    memory = psutil.virtual_memory()
    return f"{memory.total / 2**30:.0f} GiB, {memory.available / 2**30:.0f} GiB free"


def gpu_names() -> list[str]:
    """Names of the NVIDIA GPUs that the driver reports; torch is not imported for it."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return (
        [line.strip() for line in done.stdout.splitlines() if line.strip()]
        if done.returncode == 0
        else []
    )


def _table(rows: list[tuple[str, ...]]) -> str:
    """Aligned columns; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * min(sum(widths) + 2 * len(widths) - 2, 80), *lines[1:]])
