"""The experiments of `benchmarks/claims.py`, one file each: `EXPERIMENT` in `experiments/<name>.py`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.base import Experiment
from rlflow.errors import ConfigError, did_you_mean

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # of the repository, for `recipes` and `tests`

NAMES: tuple[str, ...] = (
    "areal", "astraflow", "sparsity", "llamarl",
    "sapo_swarm", "dart", "mobile_agent", "vlac", "asearcher", "distillation", "rlinf",
    "areal_answers", "llamarl_late", "m2po", "mobile_agent_seldom", "asearcher_guesses", "distillation_seeds",
    "sapo_weak", "dart_counts", "sparsity_begun", "mle_stages_programs", "mle_duration_programs",
    "asyncflow", "areal_interruption", "llamarl_sizes", "dart_utilisation",
)  # fmt: skip
"""In the order in which they are run and printed."""


def load(names: Sequence[str] = ()) -> list[Experiment]:
    """The experiments of these names, or all, in the order of NAMES. Raises ConfigError for an unknown name."""
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ConfigError(
            f"--only: there is no experiment '{unknown[0]}'.{did_you_mean(unknown[0], NAMES)} Known: {', '.join(NAMES)}."
        )
    return [
        importlib.import_module(f"experiments.{name}").EXPERIMENT
        for name in NAMES
        if not names or name in names
    ]
