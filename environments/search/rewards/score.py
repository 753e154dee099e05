"""What a reward gives for an episode."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Score:
    """A reward and what there is to say about it."""

    value: float
    metrics: dict[str, float] = field(default_factory=dict)
