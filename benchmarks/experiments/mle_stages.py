"""ML-engineering agents: partial credit by the stages that a program's output shows."""

from __future__ import annotations

from experiments.base import TRAINING, Experiment, Figures, Results, Verdict, all_of, values
from experiments.curves import at_the_end, curves

STEPS = 40
PER_STAGE = {"without": 0.0, "instrumentation": 0.1}


def run(arm: str, seed: int, quick: bool) -> Figures:
    """stages: per program at the end, of five; result: share of programs that ran to their end, at the end; first: stages per
    program in the first quarter."""
    from experiments.small_run import CRITIC, small_run, some_demonstrations
    from experiments.tasks.programs import SCRIPT, STAGES, Script

    task = Script()
    environment = {"name": "stages", "base": {"name": SCRIPT}, "stages": {name: name for name in STAGES.values()},
                   "valid": "result", "failure": -10.0, "per_stage": PER_STAGE[arm]}  # fmt: skip
    overrides = (CRITIC, f"rollout.max_response_tokens={len(STAGES)}")
    with small_run(seed, environment, task.characters, *overrides, preset="mle_duration") as small:
        small.warm_up(some_demonstrations(small, task, task.write_anything, seed, 1), 4 if quick else 30)
        rows = [small.step() for _ in range(2 if quick else STEPS)]
    # With a result the wrapper counts no stages any more: they are all done.
    stages = [row["rollout/stages_reached"] + len(STAGES) * row["train/result"] for row in rows]
    first = stages[: max(1, len(stages) // 4)]
    return {
        "stages": at_the_end(stages),
        "first": sum(first) / len(first),
        "result": at_the_end([row["train/result"] for row in rows]),
        "curve": stages,
    }


def judge(results: Results) -> Verdict:
    bare, helped = (values(results, arm, "stages") for arm in PER_STAGE)
    gains = [with_it - without for with_it, without in zip(helped, bare, strict=True)]
    rose = [last - first for last, first in zip(bare, values(results, "without", "first"), strict=True)]
    told = f"instrumentation brings {min(gains):.2g} to {max(gains):.2g} stages more"
    return all_of((min(gains) >= 2, told), (max(rose) < 0.5, f"without it the mean rises by {max(rose):.2g} at the most"))


EXPERIMENT = Experiment(
    name="mle_stages",
    system="RL for ML-engineering agents: instrumentation",
    claim="Partial credit by the stages that a program completes is worth 22%; without it nothing is learned (arXiv 2509.01684).",
    setup=(
        "Programs of five commands of eight, which run until one is not the stage that comes next (all five: 1 in 32768 by "
        f"chance); the wrapper `stages`, -10 without a result, with 0.1 per stage or with nothing. {STEPS} steps of 64 programs, "
        "the preset `mle_duration`. Patterns of the output take the place of the frozen model's print statements."
    ),
    rule="In every seed at least two stages more with instrumentation, and a rise of less than half a stage without.",
    arms=tuple(PER_STAGE),
    columns=("stages", "first", "result"),
    run=run,
    judge=judge,
    figure=curves("curve", ylabel="stages per program"),
    imports=(*TRAINING, "experiments.small_run"),
    version=3,
    deadline_s=900.0,  # for a machine that is busy; it takes a tenth of that
)
