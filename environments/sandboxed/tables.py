"""Tables made by rule, one half of whose targets is for scoring alone; numpy is all they need."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Columns = np.ndarray
TRAIN_ROWS, TEST_ROWS, FEATURES = 300, 200, 4
NOISE = 0.1  # standard deviations of a number; of classes as large a share is drawn anew


@dataclass(frozen=True)
class TargetRule:
    """What a target is of the features. classes: it is one, else a number."""

    name: str
    classes: bool
    target: Callable[[Columns, Columns], Columns]
    """Of (rows, features) and of a draw of the same width, normal both."""


RULES = (
    TargetRule("linear", False, lambda x, w: x @ w),
    TargetRule("product", False, lambda x, w: x[:, 0] * x[:, 1] + w[0] * x[:, 2]),
    TargetRule("wave", False, lambda x, w: np.sin(2 * x[:, 0] + w[0]) + 0.5 * x[:, 1]),
    TargetRule("corners", True, lambda x, w: (x[:, 0] > 0) ^ (x[:, 1] > 0)),
    TargetRule("ring", True, lambda x, w: x[:, 0] ** 2 + x[:, 1] ** 2 > 1.4),
    TargetRule("bands", True, lambda x, w: np.floor(1.5 * x @ w / np.linalg.norm(w)) % 3),
)


@dataclass(frozen=True)
class MadeTable:
    """Files of a task, and the targets that are in none of them."""

    train: str
    test: str
    targets: tuple[float, ...]
    classes: bool

    def score(self, predictions: Sequence[float]) -> float:
        """0 for what a constant achieves or less, 1 for all right: R^2, or what the share of right
        classes is beyond the most frequent one's, of what lies beyond it."""
        found, wanted = np.array(predictions), np.array(self.targets)
        if self.classes:
            least = np.unique(wanted, return_counts=True)[1].max() / len(wanted)
            gained = (np.mean(found == wanted) - least) / (1 - least)
        else:
            with np.errstate(over="ignore"):
                gained = 1 - np.mean((found - wanted) ** 2) / np.var(wanted)
        return float(max(0.0, gained)) if math.isfinite(gained) else 0.0


@functools.lru_cache(maxsize=256)
def made_table(rule: str, seed: int) -> MadeTable:
    """The table of a rule's name and a seed."""
    kind = next(one for one in RULES if one.name == rule)
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(TRAIN_ROWS + TEST_ROWS, FEATURES)).round(4)
    y = kind.target(x, draw.normal(size=FEATURES)).astype(float)
    if kind.classes:
        changed = draw.random(len(y)) < NOISE
        y[changed] = draw.permutation(y)[changed]
    else:
        y = (y + NOISE * y.std() * draw.normal(size=len(y))).round(4)
    names = [f"x{number}" for number in range(1, FEATURES + 1)]
    known = _csv([*names, "y"], np.column_stack([x, y])[:TRAIN_ROWS], kind.classes)
    hidden = tuple(y[TRAIN_ROWS:].tolist())
    return MadeTable(known, _csv(names, x[TRAIN_ROWS:]), hidden, kind.classes)


def _csv(names: Sequence[str], rows: Columns, classes: bool = False) -> str:
    formats = ["%.4f"] * (rows.shape[1] - 1) + ["%d" if classes else "%.4f"]
    lines = [",".join(names), *(",".join(formats) % tuple(row) for row in rows)]
    return "".join(f"{line}\n" for line in lines)
