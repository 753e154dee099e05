"""Distillation once more, judged by means over eight seeds."""

from __future__ import annotations

from dataclasses import replace

from experiments import distillation
from experiments.base import Results, Verdict, all_of, average, values
from experiments.distillation import FORWARD, OF_TEACHER, REVERSE, REWARD

SEEDS, BY = 8, 0.05


def judge(results: Results) -> Verdict:
    found = []
    reward = values(results, REWARD, "success")
    for arm in (REVERSE, FORWARD):
        share = average(results, arm, "success") / average(results, arm, "teacher")
        more = [
            one - other for one, other in zip(values(results, arm, "success"), reward, strict=True)
        ]
        above, gap = sum(one > 0 for one in more), sum(more) / len(more)
        found.append((share >= OF_TEACHER, f"'{arm}' has {share:.2f} of its teacher's success"))
        enough = gap >= BY and above >= len(more) - 1
        found.append(
            (enough, f"{gap:.2f} more than the reward alone (more in {above} of {len(more)} seeds)")
        )
    return all_of((len(reward) >= SEEDS, f"{len(reward)} seeds"), *found)


EXPERIMENT = replace(
    distillation.EXPERIMENT,
    name="distillation_seeds",
    setup="As above.",
    rule=(
        f"Over at least {SEEDS} seeds both students have {OF_TEACHER:.0%} of their teacher's success in the mean, and more than "
        f"the reward alone after as many steps in all seeds but one, by {BY} in the mean."
    ),
    judge=judge,
)
