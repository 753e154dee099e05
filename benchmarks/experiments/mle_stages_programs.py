"""ML-engineering agents: partial credit by the stages that a real program completes before it ends or fails."""

from __future__ import annotations

from experiments.base import TRAINING, Experiment, Figures, Results, Verdict, all_of, values
from experiments.curves import at_the_end, curves

STEPS = 40
STAGES = ("loaded", "trained", "predicted")
PER_STAGE = {"without": 0.0, "instrumentation": 0.1}


def run(arm: str, seed: int, quick: bool) -> Figures:
    """stages: per program at the end, of three; first: in the first quarter; result: share of programs whose predictions could be
    scored, at the end; score: of all programs, at the end."""
    from experiments.small_run import CRITIC, small_run, some_demonstrations
    from experiments.tasks.table_programs import RIGHT, SCRIPT, Script

    task = Script(seed)
    environment = {"name": "stages", "base": {"name": SCRIPT, "seed": seed}, "valid": "valid", "failure": -10.0,
                   "stages": {name: rf"\[stage {name}\]" for name in STAGES}, "per_stage": PER_STAGE[arm]}  # fmt: skip
    overrides = (CRITIC, f"rollout.max_response_tokens={len(RIGHT)}", "rollout.prompts_per_step=4")
    with small_run(seed, environment, task.characters, *overrides, preset="mle_duration") as small:
        small.warm_up(
            some_demonstrations(small, task, task.write_anything, seed, 1), 4 if quick else 30
        )
        rows = [small.step() for _ in range(1 if quick else STEPS)]
    stages = [row["rollout/stages"] for row in rows]
    first = stages[: max(1, len(stages) // 4)]
    return {
        "stages": at_the_end(stages),
        "first": sum(first) / len(first),
        "result": at_the_end([row["rollout/valid"] for row in rows]),
        "score": at_the_end([row["train/score"] for row in rows]),
        "curve": stages,
    }


def judge(results: Results) -> Verdict:
    bare, helped = (values(results, arm, "stages") for arm in PER_STAGE)
    gains = [with_it - without for with_it, without in zip(helped, bare, strict=True)]
    rose = [
        last - first for last, first in zip(bare, values(results, "without", "first"), strict=True)
    ]
    told = f"instrumentation brings {min(gains):.2g} to {max(gains):.2g} stages more"
    return all_of(
        (min(gains) >= 1, told),
        (max(rose) < 0.5, f"without it the mean rises by {max(rose):.2g} at the most"),
    )


EXPERIMENT = Experiment(
    name="mle_stages_programs",
    system="RL for ML-engineering agents: instrumentation",
    claim="Partial credit by the stages that a program completes is worth 22%; without it nothing is learned (arXiv 2509.01684).",
    setup=(
        "The world `ml_engineering`: programs of five parts of eight, run in sandboxes; three parts raise, and of the 32,768 "
        "programs three predict. Inserted print statements tell of three stages (by patterns; no model inserts them here); the "
        f"wrapper `stages`, -10 without predictions, with 0.1 per stage or with nothing. {STEPS} steps of 32 programs, the "
        "preset `mle_duration`."
    ),
    rule="In every seed at least one stage more with instrumentation, and a rise of less than half a stage without.",
    arms=tuple(PER_STAGE),
    columns=("stages", "first", "result", "score"),
    run=run,
    judge=judge,
    figure=curves("curve", ylabel="stages per program"),
    imports=(*TRAINING, "experiments.small_run"),
    deadline_s=900.0,  # for a machine that is busy; it takes a fifth of that
)
