"""What the experiments on schedules share: the middle of a run of `benchmarks/asynchronous.py`, once."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.base import TRAINING, Figures

IMPORTS = (*TRAINING, "rlflow.run.open", "rlflow.trainer.megatron.megatron_trainer")


class Once:
    """The one turn of a side."""

    def __init__(self) -> None:
        self._begun = False
        self.figures: Figures = {}

    def imported(self) -> None:
        """A cell is a process of its own already."""

    def begin(self) -> bool:
        """True the first time."""
        self._begun = not self._begun
        return self._begun

    def end(self, **figures: float) -> None:
        self.figures = figures


def played(options: dict[str, Any], seed: int, quick: bool, **changes: Any) -> Figures:
    """Of a run with these keys of `rollout.asynchronous`. changes: of the case, which is that of the benchmark. Adds rate:
    trajectories per second."""
    from asynchronous import Case, side, write_model

    case = replace(Case(8, 4, 10, 16, 40, 0.3, 1.2, 3.0, "8M"), seed=seed, **changes)
    if quick:
        case = replace(case, steps=1, prompts=2, median_s=case.median_s / 2)
    once = Once()
    with tempfile.TemporaryDirectory(prefix="rlflow-schedule-") as folder:
        write_model(Path(folder) / "model", case.model)
        side(once, folder, case, options, False)
    return {**once.figures, "rate": once.figures["trained"] / once.figures["seconds"]}
