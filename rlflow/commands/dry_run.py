"""What `train --dry-run` and `doctor --config` say of a configuration before anything starts: plan, memory, time, and
every problem."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rlflow.config.redaction import redact_text
from rlflow.errors import Problems, RLFlowError

if TYPE_CHECKING:
    from rlflow.config.schema import RunConfig
    from rlflow.models.architecture import Architecture
    from rlflow.run.memory_estimate import PhaseMemory

GIB = 2**30


def dry_run(config: RunConfig) -> int:
    """Prints the resolved configuration and what `look` prints; returns what that does."""
    from rlflow.config.loading import config_text

    print(f"# resolved configuration\n{config_text(config)}")
    return look(config)


def look(config: RunConfig) -> int:
    """Prints the batch plan, the estimates and what is worth a look; on stderr every problem in a line. Returns 0 where
    a run could start, else 2."""
    from rlflow.config.batch_plan import batch_plan
    from rlflow.run.model_directory import fetch_models
    from rlflow.run.readiness import examine

    unreached = Problems()
    waiting = unreached.attempt(fetch_models, config, weights=False)
    found = examine(config, model=waiting is not None, weights=waiting == [])
    found.problems[:0] = unreached
    found.notes += waiting or []
    if found.fits:
        print(f"# batch plan\n{batch_plan(config)}")
    if found.fits and found.model is not None:
        try:
            print_estimates(config, found.model)
        except OverflowError:
            print("\n# memory and time\nno estimate: the numbers are too large")
    for note in found.notes:
        print(f"note: {redact_text(note)}")
    for problem in found.problems:
        print(f"rlflow: {type(problem).__name__}: {redact_text(str(problem))}", file=sys.stderr)
    count = len(found.problems)
    found_some = f"{count} problem{'' if count == 1 else 's'} found, nothing was started."
    print(found_some if count else "ready: nothing is in the way of this run.")
    return RLFlowError.exit_code if count else 0


def print_estimates(config: RunConfig, model: Architecture) -> None:
    """Prints memory by process and phase, and about how long a step takes."""
    from rlflow.run.memory_estimate import estimate, is_embedded
    from rlflow.run.step_time import estimate_step, this_device
    from rlflow.run.vllm_memory import vllm_memory

    phases = Problems().attempt(estimate, config, model)
    if phases is None:  # what is wrong is among the problems
        return
    print("\n# memory at the most, GiB (an estimate; every episode fills its budget)")
    beside = vllm_memory(config, model)
    print("\n".join(memory_lines([*phases, *beside])))
    if not (beside or is_embedded(config)):
        print(f"rollout.engine '{config.rollout.engine['name']}' manages memory of its own, which is not among these")
    device = this_device(config)
    if device is None:
        print("\n# time of a step\nunknown: rlflow/run/device_speeds.py does not have this GPU")
        return
    name, speeds, count = device
    time = estimate_step(config, model, speeds, count)
    share = f", {speeds.training_share:.0%} of its matrix rate in training" if speeds.training_share < 1 else ""
    print(f"\n# time of a step (a rough estimate on {name}{share}; without the environment's own time)")
    parts = ", ".join(f"{what} {seconds / 60:.2g}" for what, seconds in
                      (("sampling", time.sample_s), ("scores", time.score_s), ("updates", time.update_s)))  # fmt: skip
    print(f"at most about {time.total_s / 60:.2g} minutes if every episode fills its budget: {parts}\n")


def memory_lines(phases: list[PhaseMemory]) -> list[str]:
    """A line per process and phase: the total and its parts."""
    names = [f"{phase.process}, {phase.phase}" for phase in phases]
    width = max(map(len, names))
    return [
        f"{name:<{width}}  {phase.total / GIB:8.2f} = "
        + " + ".join(f"{part} {size / GIB:.2f}" for part, size in phase.parts.items() if size)
        for name, phase in zip(names, phases, strict=True)
    ]
