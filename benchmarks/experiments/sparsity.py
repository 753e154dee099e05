"""AstraFlow: from one version to the next hardly any bfloat16 weight changes, so that what changed is all that need be sent."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

from experiments.base import Experiment, Figures, Results, Verdict, all_of, average, values

RATES = (1e-6, 1e-5, 1e-4, 1e-3)
STEPS = 24
WEIGHT_BYTES, DELTA_BYTES, HEADER_BYTES = (
    2,
    6,
    16,
)  # of a value, of one that is sent with its place, of a tensor's delta


def arm(rate: float) -> str:
    return f"lr {rate:.0e}"


def run(name: str, seed: int, quick: bool, before: int = 0) -> Figures:
    """unchanged, least: shares of the weights, means and least over versions; unchanged_begun: of those tensors that do not begin
    at 0; bytes_ratio: weights / delta; std: of the matrices. before: versions that are not counted."""
    import torch

    from experiments.tiny import tiny

    optimizer = "trainer.optimizer={name: adamw, beta2: 0.999, weight_decay: 0.01}"
    with tiny(seed, f"trainer.lr={name.split()[1]}", optimizer, preset="m2po_paper") as made:
        for _ in made.train(0 if quick else before):
            pass
        versions = [_halves(made.weights())]
        for _ in made.train(3 if quick else STEPS):
            versions.append(_halves(made.weights()))
    begun = [key for key, value in versions[0].items() if bool(value.any())]
    spread = float(
        torch.cat(
            [value.float().flatten() for value in versions[0].values() if value.dim() > 1]
        ).std()
    )
    shares, ratios, of_begun = [], [], []
    for old, new in pairwise(versions):
        differ = {
            key: int((new[key].view(torch.int16) != old[key].view(torch.int16)).sum())
            for key in new
        }
        changed = list(differ.values())
        of_begun.append(
            1 - sum(differ[key] for key in begun) / sum(new[key].numel() for key in begun)
        )
        count = sum(value.numel() for value in new.values())
        shares.append(1 - sum(changed) / count)
        ratios.append(
            WEIGHT_BYTES * count / sum(HEADER_BYTES + DELTA_BYTES * one for one in changed)
        )
    return {
        "unchanged": statistics.fmean(shares),
        "least": min(shares),
        "unchanged_begun": statistics.fmean(of_begun),
        "bytes_ratio": statistics.fmean(ratios),
        "std": spread,
    }


def _halves(weights: list[tuple[str, Any]]) -> dict[str, Any]:
    import torch

    return {name: value.to(torch.bfloat16) for name, value in weights}


def judge(results: Results) -> Verdict:
    """At 1e-6 at least 0.98 is unchanged in every seed, and the share falls from each rate to the next."""
    least = min(values(results, arm(1e-6), "unchanged"))
    shares = [average(results, arm(rate), "unchanged") for rate in RATES]
    falls = all(one > other for one, other in pairwise(shares))
    sparse = least >= 0.98, f"at 1e-6 at least {least:.4f} is unchanged"
    return all_of(
        sparse, (falls, "the shares by rate are " + ", ".join(f"{share:.4f}" for share in shares))
    )


EXPERIMENT = Experiment(
    name="sparsity",
    system="AstraFlow (arXiv 2605.15565): the sparsity of bfloat16 updates",
    claim="98.4 to 99.6% of the bfloat16 weights do not change from one version to the next at usual learning rates (5e-6), so "
    "that a delta is some 20 to 40 times smaller than the weights.",
    setup=f"Preset `m2po_paper` (4 updates per version, Adam with beta2 0.999) over {STEPS} versions at four learning rates; "
    "float32 weights, compared as bfloat16. A delta is counted as 6 bytes per changed value and 16 per tensor. The weights are "
    "random, std in the table: smaller ones have finer bfloat16 steps and change more often.",
    rule="At 1e-6 0.98 or more is unchanged in every seed, and the share falls from each learning rate to the next.",
    arms=tuple(arm(rate) for rate in RATES),
    columns=("unchanged", "least", "bytes_ratio", "std"),
    run=run,
    judge=judge,
)
