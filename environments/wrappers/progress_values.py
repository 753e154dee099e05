"""Values from judged progress, and how well their order is that of time. Source: VLAC, arXiv
2509.15937."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

Backward = Literal["paper", "mix_f"]
"""What a step back does to the value; the released code has a rule of its own."""


def pair_label(start: int, end: int, last: int) -> float | None:
    """(end - start) / (last - start): the share of the remaining work between two frames of a
    trajectory that ends with the frame `last`, negative when going back. None from the last frame
    on, which leaves no work."""
    return (end - start) / (last - start) if start < last else None


def next_value(value: float, delta: float, backward: Backward = "paper") -> float:
    """v + c (1 - v). For c < 0 the rule `mix_f` of the released code is v + v c up to 1/2, and
    above it max(0.1, 1 - max(1 - v, 0.01) / (1 + c))."""
    if delta >= 0 or backward == "paper":
        return value + delta * (1 - value)
    if value <= 0.5:
        return value + value * delta
    return max(0.1, 1 - max(1 - value, 0.01) / (1 + delta)) if delta > -1 else 0.1


def values(deltas: Sequence[float], backward: Backward = "paper") -> list[float]:
    """The values after each step, from 0 before the first one."""
    found, value = [], 0.0
    for delta in deltas:
        value = next_value(value, delta, backward)
        found.append(value)
    return found


def value_order_correlation(found: Sequence[float]) -> float:
    """VOC: Spearman's rank correlation of values with time, in [-1, 1]; equal values share the mean
    of their ranks, and where all are equal it is 0."""
    if len(found) < 2:
        return 0.0
    _, places, counts = np.unique(found, return_inverse=True, return_counts=True)
    ranks, times = (counts.cumsum() - counts / 2)[places], np.arange(len(found))
    ranks, times = ranks - ranks.mean(), times - times.mean()
    spread = np.sqrt((ranks @ ranks) * (times @ times))
    return float(ranks @ times / spread) if spread > 0 else 0.0


def negative_rate(deltas: Sequence[float]) -> float:
    """NR: the share of steps that went back; 0 without steps."""
    return sum(delta < 0 for delta in deltas) / len(deltas) if deltas else 0.0
