"""On-policy distillation: what a teacher says of every token, against what the reward says of every attempt."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.base import TRAINING, Experiment, Figures, Results, Verdict, all_of, beats, values
from experiments.curves import curves

HOPS, TURNS = 4, 6
STEPS, TEACHER_STEPS = 20, 60
QUESTIONS = 128  # of the evaluation, two attempts each
DEMONSTRATIONS, ROUNDS, UPDATES = 192, 2, 80  # of the warm-up: new ones in every round
OVERRIDES = (
    "rollout.max_response_tokens=2", "rollout.samples_per_prompt=8", "rollout.prompts_per_step=16", "trainer.lr=2e-3",
)  # fmt: skip
REWARD, REVERSE, FORWARD = "the reward alone", "reverse KL of samples", "forward KL, top 8"
OF_TEACHER = 0.9


def run(arm: str, seed: int, quick: bool) -> Figures:
    """success: exact match on other questions after the student's steps; start, teacher: before them, and the teacher's."""
    from experiments.small_run import small_run, some_demonstrations
    from experiments.tasks.chains import REFERENCE, Chains

    task = Chains(TURNS, seed, HOPS)
    environment = {"name": REFERENCE, "turns": TURNS, "seed": seed, "hops": HOPS}
    questions = 8 if quick else QUESTIONS
    with tempfile.TemporaryDirectory(prefix="distillation_") as name:
        start, teacher = Path(name) / "start", Path(name) / "teacher"
        with small_run(seed, environment, task.characters, *OVERRIDES, preset="grpo") as small:
            for part in range(1 if quick else ROUNDS):
                shown = some_demonstrations(
                    small, task, task.follow, ROUNDS * seed + part, TURNS, DEMONSTRATIONS
                )
                small.warm_up(shown, 4 if quick else UPDATES)
            small.begin()
            found: Figures = {"start": exact_match(small, questions)}
            small.export(start)
            if arm != REWARD:
                for _ in range(2 if quick else TEACHER_STEPS):
                    small.step()
                found["teacher"] = exact_match(small, questions)
                small.export(teacher)

        def written(path: Path) -> None:
            shutil.copytree(start, path, dirs_exist_ok=True)

        extra, preset = told(arm, teacher)
        with small_run(
            seed + 100,
            environment,
            task.characters,
            *OVERRIDES,
            *extra,
            preset=preset,
            model=written,
        ) as small:
            rows = [small.step() for _ in range(2 if quick else STEPS)]
            found["success"] = exact_match(small, questions)
    return {**found, "curve": [row["train/exact_match"] for row in rows]}


def told(arm: str, teacher: Path) -> tuple[list[str], str]:
    """(overrides, preset) of a student."""
    if arm == REWARD:
        return [], "grpo"
    if arm == REVERSE:
        return [f"algorithm.teacher.path={teacher}"], "opd"
    return [
        "algorithm.losses=[teacher_kl]",
        f"algorithm.teacher={{name: model, path: '{teacher}', top_k: 8}}",
    ], "grpo"


def exact_match(small: Any, questions: int) -> float:
    """Of two attempts at questions that were not trained on, at temperature 1."""
    small.sync()
    tasks = small.rollout.environment.tasks("val")[:questions]
    groups = small.rollout.collect(tasks, step=-1, samples_per_prompt=2)
    return fmean(one.metrics.get("exact_match", 0.0) for group in groups for one in group.usable)


def judge(results: Results) -> Verdict:
    kept = []
    for arm in (REVERSE, FORWARD):
        pairs = list(
            zip(values(results, arm, "success"), values(results, arm, "teacher"), strict=True)
        )
        least = min(student / max(teacher, 1e-6) for student, teacher in pairs)
        kept.append(
            (least >= OF_TEACHER, f"'{arm}' has at least {least:.2f} of its teacher's success")
        )
    return all_of(*kept, beats(results, REVERSE, REWARD), beats(results, FORWARD, REWARD))


EXPERIMENT = Experiment(
    name="distillation",
    system="On-policy distillation: a trained policy into the one it began as",
    claim=(
        "A student that samples and is told by a teacher is as good as with reinforcement learning for a tenth of the work "
        "(AIME24 74.4 against 67.6, 1,800 GPU hours against 17,920; Qwen3, arXiv 2505.09388, section 4.5)."
    ),
    setup=(
        f"Questions of 1 to {HOPS} hops as under ASearcher, {TURNS} turns. The start can name what it was shown, not tell "
        f"when to answer; the teacher is the start after {TEACHER_STEPS} steps of `grpo` on the reward. Its students begin there "
        f"and make {STEPS} steps of 16 questions x 8 attempts: the preset `opd` (reverse KL on sampled tokens), the loss "
        "`teacher_kl` (forward KL over the teacher's 8 likeliest tokens), both without any reward, and `grpo` with the reward "
        "and no teacher. Success is exact match on other questions, at temperature 1."
    ),
    rule=(
        f"In every seed both students have {OF_TEACHER:.0%} of their teacher's success, and more than the reward alone after as "
        "many steps, by 0.05 in the mean."
    ),
    arms=(REWARD, REVERSE, FORWARD),
    columns=("success", "start", "teacher"),
    run=run,
    judge=judge,
    figure=curves("curve", ylabel="exact match in training", window=1),
    imports=(*TRAINING, "experiments.small_run"),
    quick_arms=(REWARD, REVERSE, FORWARD),
    deadline_s=900.0,  # for a machine that is busy; it takes a tenth of that
)
