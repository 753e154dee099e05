"""M2PO once more, at a rate at which its fresh arm is at its best."""

from __future__ import annotations

import functools
from dataclasses import replace

from experiments import astraflow
from experiments.base import Results, Verdict, all_of, keeps

RATE = 1e-3


def judge(results: Results) -> Verdict:
    whole = keeps(results, astraflow.arm(0, "M2PO"), astraflow.arm(16, "M2PO"), share=1.0)
    return all_of(
        (whole[0], f"the fresh arm is at its best: {whole[1]}"), *astraflow.parts(results)
    )


EXPERIMENT = replace(
    astraflow.EXPERIMENT,
    name="m2po",
    setup=f"As above at a rate of {RATE:g}, chosen on the fresh arm of M2PO alone, with other seeds.",
    rule=f"M2PO is no better at lag 16 than fresh, in the mean. {astraflow.EXPERIMENT.rule}",
    run=functools.partial(astraflow.run, rate=RATE),
    judge=judge,
)
