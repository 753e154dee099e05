"""The algorithm section of a configuration, resolved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlflow.algorithms.base import LossTerm, SumLoss
from rlflow.algorithms.losses.monitored import Monitored
from rlflow.components import ADVANTAGE, LOSS
from rlflow.config.schema import AlgorithmSection, RunConfig
from rlflow.errors import ConfigError
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


def make_loss(components: Sequence[str | Mapping[str, Any]]) -> LossTerm:
    """The sum of the named losses, or the single one: [ppo_clip, {name: kl, coefficient: 1}]. Raises ConfigError."""
    losses = [LOSS.build(component, f"algorithm.losses[{index}]") for index, component in enumerate(components)]
    if not losses:
        raise ConfigError("algorithm.losses: expected at least one loss, found none; try [ppo_clip]")
    return losses[0] if len(losses) == 1 else SumLoss(tuple(losses))


def make_advantage(component: str | Mapping[str, Any]) -> Callable[[Batch], Tensor]:
    """The named advantage with its keywords bound, Batch -> (B,) or (B, T): {name: grpo, std: none}. Raises ConfigError."""
    return ADVANTAGE.build(component, "algorithm.advantage")
