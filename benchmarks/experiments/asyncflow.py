"""AsyncFlow: what streaming between the stages adds to a barrier, and the delayed parameter update to that."""

from __future__ import annotations

from typing import Any

from experiments.base import Experiment, Figures, Results, Verdict, all_of, beats
from experiments.schedules import IMPORTS, played

ARMS: dict[str, dict[str, Any]] = {
    "barrier": {},
    "+ streaming": {"score_early": True},
    "+ delayed update": {"score_early": True, "max_staleness": 1, "run_ahead": 1, "overlap": True},
}


def run(arm: str, seed: int, quick: bool) -> Figures:
    """rate: trajectories per second; lag: of the oldest tokens, in updates."""
    return played(ARMS[arm], seed, quick, reference=True)


def judge(results: Results) -> Verdict:
    barrier, streaming, delayed = ARMS
    return all_of(
        beats(results, streaming, barrier, "rate", by=0.0),
        beats(results, delayed, streaming, "rate", by=0.0),
        (max(one["lag"] for one in results[delayed]) <= 1, "no mean lag above 1"),
    )


EXPERIMENT = Experiment(
    name="asyncflow",
    system="AsyncFlow: streaming, and updates one step late",
    claim="Throughput 1 with a barrier between the stages, 2.01 with streaming, 2.74 with the delayed update besides "
    "(arXiv 2507.01663).",
    setup="The benchmark `asynchronous.py --ablation`: 8 tasks x 4 attempts of three turns with slow tools, a reference "
    "that scores every row, embedded engine and Megatron trainer on two cores, the middle 10 steps of a run.",
    rule="Each arm makes more trajectories per second than the one before it in every seed, and the mean lag is at most 1.",
    arms=tuple(ARMS),
    columns=("rate", "lag", "trainer_s", "engine_s"),
    run=run,
    judge=judge,
    imports=IMPORTS,
)
