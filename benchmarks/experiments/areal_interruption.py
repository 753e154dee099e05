"""AReaL: what it saves that a weight update interrupts generation in place of waiting for it."""

from __future__ import annotations

from experiments.base import Experiment, Figures, Results, Verdict, all_of, average, beats
from experiments.schedules import IMPORTS, played

AHEAD = {"max_staleness": 4, "run_ahead": 2, "overlap": True}
ARMS = {"waits": "wait", "interrupts": "keep"}
SIGMA = 0.8  # of the logarithm of a response's seconds


def run(arm: str, seed: int, quick: bool) -> Figures:
    """rate: trajectories per second."""
    changes = {"median_s": 0.0, "cap_s": 0.0, "fake_s": (0.02, 1.0), "spread": SIGMA}
    return played({**AHEAD, "on_update": ARMS[arm]}, seed, quick, **changes)


def judge(results: Results) -> Verdict:
    gain = average(results, "interrupts", "rate") / average(results, "waits", "rate")
    return all_of(
        beats(results, "interrupts", "waits", "rate", by=0.0),
        (gain >= 1.05, f"{gain:.2f} times as many trajectories"),
    )


EXPERIMENT = Experiment(
    name="areal_interruption",
    system="AReaL: interruptible generation",
    claim="Interrupting generation for new weights is worth 12% (1.5B) and 17% (7B) of throughput (arXiv 2505.24298).",
    setup="Three turns of 16 tokens without tools, 8 tasks x 4 attempts, two batches ahead; an engine and a trainer that sleep, "
    f"20 ms a token times lognormal({SIGMA}) by request, 1 s an update: the schedule alone. Waits: no request begins until those "
    "in flight have ended and the weights are there.",
    rule="Interrupted runs make more trajectories per second in every seed, and 5% more in the mean.",
    arms=tuple(ARMS),
    columns=("rate", "lag"),
    run=run,
    judge=judge,
    imports=IMPORTS,
)
