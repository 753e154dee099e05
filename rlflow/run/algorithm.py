"""The algorithm section of a configuration, resolved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlflow.algorithms import make_advantage, make_loss
from rlflow.algorithms.losses.monitored import Monitored
from rlflow.config.schema import AlgorithmSection, RunConfig
from rlflow.types import Batch


@dataclass
class Algorithm:
    """The algorithm section, resolved: Batch -> advantages, the loss, and how tokens are weighed."""

    section: AlgorithmSection
    advantage: Callable[[Batch], Tensor]
    loss: Any
    seed: int = 0  # of the split into minibatches

    @classmethod
    def from_config(cls, config: RunConfig) -> Algorithm:
        section = config.algorithm
        return cls(section, make_advantage(section.advantage), Monitored(make_loss(section.losses)), config.run.seed)
