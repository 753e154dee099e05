"""VLAC once more: at a rate at which the sparse reward teaches, with the arm of demonstrations and the sparse reward."""

from __future__ import annotations

import functools
from dataclasses import replace

from experiments import vlac
from experiments.base import Results, Verdict, all_of, average, beats, values
from experiments.vlac import LEARNED

RATE, STEPS = 5e-4, 120
SPARSE, PROGRESS, BOTH, SHOWN = (
    "sparse", "progress", "progress and demonstrations", "sparse and demonstrations",
)  # fmt: skip


def judge(results: Results) -> Verdict:
    began, ended = (average(results, SPARSE, name) for name in ("start", "success"))
    order = [values(results, PROGRESS, f"order_{name}") for name in ("success", "failure")]
    tells = all(good > bad for good, bad in zip(*order, strict=True))
    return all_of(
        (ended >= began + LEARNED, f"with the sparse reward success goes from {began:.2f} to {ended:.2f}"),
        (tells, "the critic's order is better on successes in every seed" if tells else "the critic's order tells nothing"),
        beats(results, PROGRESS, SPARSE),
        beats(results, BOTH, SHOWN),
    )


EXPERIMENT = replace(
    vlac.EXPERIMENT,
    name="vlac_rate",
    setup=f"As above at a rate of {RATE:g} and with {STEPS} steps, both chosen on the sparse arm with other seeds; and an arm "
    "with demonstrations whose reward is sparse.",
    rule=f"The sparse reward raises success by {LEARNED} in the mean; the critic's order is better on successes than on failures; "
    "progress rewards are above sparse ones in every seed, by 0.05 in the mean, without demonstrations and with them.",
    arms=(SPARSE, PROGRESS, SHOWN, BOTH),
    run=functools.partial(vlac.run, lr=RATE, steps=STEPS),
    judge=judge,
    version=1,
)
