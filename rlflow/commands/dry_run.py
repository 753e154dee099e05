"""The plan, memory, time and problems of a configuration, for `train --dry-run` and `doctor
--config`."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlflow.errors import Problems, RLFlowError, as_called
from rlflow.storage.redaction import redact_text
from rlflow.texts import printable

if TYPE_CHECKING:
    from rlflow.config.schema import RunConfig
    from rlflow.preflight.estimates import PhaseMemory, RunSizes

GIB = 2**30


def dry_run(config: RunConfig, model_later: bool = False, note: str = "") -> int:
    """Prints what `look` prints, then the resolved configuration; returns what `look` does."""
    from rlflow.config.loading import config_text

    status = look(config, model_later, note)
    print(f"\n# resolved configuration\n{config_text(config)}", end="")
    return status


def look(config: RunConfig, model_later: bool = False, note: str = "") -> int:
    """Prints, on stderr, every problem in a line; then notes, total time, batch plan and memory.
    model_later: the model is made before the run starts. note: what else to say. Returns 0 where a
    run could start, else 2."""
    from rlflow.config.batch_plan import batch_plan
    from rlflow.preflight.examine import examine
    from rlflow.run.origin import fetch_models

    unreached = Problems()
    waiting = None
    if not model_later:
        waiting = unreached.attempt(fetch_models, config.model, config.algorithm, weights=False)
    found = examine(config, model=waiting is not None, weights=waiting == [])
    found.problems[:0] = unreached
    if note:
        found.notes.insert(0, note)
    if model_later:
        found.notes.append(
            f"{config.model.path} is made by the first start and was not looked at: neither "
            "lengths of prompts nor memory and time are known before"
        )
    found.notes += waiting or []
    for problem in found.problems:
        told = printable(as_called(redact_text(str(problem))))
        print(f"rlflow: {type(problem).__name__}: {told}", file=sys.stderr, flush=True)
    count = len(found.problems)
    found_some = f"{count} problem{'' if count == 1 else 's'} found, nothing was started."
    print(found_some if count else "ready: nothing is in the way of this run.")
    for note in found.notes:
        print(f"note: {printable(redact_text(note))}")
    for split, sample in found.samples.items():
        told = "what is trained stands between ⟦ and ⟧"
        print(f"\n# a row of split '{split}': {told}\n{printable(sample)}\n")
    if found.fits and found.sizes is not None:
        _estimate(print_time, config.run.steps, found.sizes)
    if found.fits:
        print(f"\n# batch plan\n{fitted(batch_plan(config))}")
    if found.fits and found.sizes is not None:
        _estimate(print_memory, found.sizes)
    return RLFlowError.exit_code if count else 0


def _estimate(print_it: Callable[..., None], *arguments: object) -> None:
    try:
        # What is wrong is among the problems that are told
        Problems().attempt(print_it, *arguments)
    except OverflowError:
        print("no estimate: the numbers are too large")


def print_memory(sizes: RunSizes) -> None:
    """Prints memory by process and phase; of a run with engines on GPUs of their own by GPU."""
    from rlflow.preflight.estimates import estimate, server_memory
    from rlflow.preflight.gpu_memory import gpu_bytes, gpu_memory, gpu_table
    from rlflow.preflight.host_memory import engine_room, host_bytes, host_memory

    if lines := gpu_table(sizes):
        print("\n# GPUs")
        print("\n".join(lines))
    print("\n# memory at the most, GiB (an estimate; every episode fills its budget)")
    gpu_size, host_size = gpu_bytes(), host_bytes()
    gpus = gpu_memory(sizes, gpu_size)
    free = None if sizes.cluster.on_gpus else engine_room(sizes, host_size)
    phases = gpus or [*estimate(sizes, free), *server_memory(sizes)]
    print(fitted("\n".join(memory_lines(phases))))
    if together := host_memory(sizes, host_size):
        needed = max(phase.total for phase in together)
        verdict = "fits" if needed <= host_size else "does not fit"
        there = f"this machine's {host_size / GIB:.1f} GiB"
        print(f"together {needed / GIB:.2f} GiB: {verdict} {there}")
    if gpus:
        fits = max(phase.total for phase in gpus) <= gpu_size
        print(f"{'fits' if fits else 'does not fit'} GPUs of {gpu_size / GIB:.1f} GiB")
    if not sizes.engine.memory_known:
        print(
            f"rollout.engine '{sizes.engine.options['name']}' manages memory of its own, which is "
            "not among these"
        )


def print_time(steps: int, sizes: RunSizes) -> None:
    """Prints about how long a run of so many steps and a step take."""
    from rlflow.preflight.step_time import cores_of, estimate_step
    from rlflow.report.lines import span

    print("\n# time (a rough estimate; without evaluations and the environment's own time)")
    cores = cores_of(sizes.cluster)
    if cores is None:
        print("unknown: seconds on GPUs were not held against measurements yet")
        return
    spent = estimate_step(sizes, cores)
    step_s = sum(spent.values())
    print(
        f"the run: at most about {span(step_s * steps)} "
        f"(run.steps = {steps:,}) if every episode fills its budget"
    )
    parts = ", ".join(f"{what} {span(seconds)}" for what, seconds in spent.items())
    print(f"a step: {span(step_s)} ({parts}) on {cores} CPU core{'' if cores == 1 else 's'}")


def fitted(table: str) -> str:
    """The table with lines that are wider than the terminal wrapped under their last column."""
    width = shutil.get_terminal_size((sys.maxsize, 24)).columns
    lines = []
    for line in table.splitlines():
        column = re.match(r"(?:.*?\S  +)?(?:[\d.]+ = )?", line)
        indent = " " * (column.end() if column else 0)
        lines += textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(lines)


def memory_lines(phases: list[PhaseMemory]) -> list[str]:
    """A line per process and phase: the total and its parts."""
    names = [f"{phase.process}, {phase.phase}" for phase in phases]
    width = max(map(len, names))
    return [
        f"{name:<{width}}  {phase.total / GIB:8.2f} = "
        + " + ".join(f"{part} {size / GIB:.2f}" for part, size in phase.parts.items() if size)
        for name, phase in zip(names, phases, strict=True)
    ]
