"""The control of the recipe: rewards that say nothing, with all else as it is."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.algorithms.base import RewardTerm
from rlflow.types import Batch


@dataclass(frozen=True)
class ShuffledRewards(RewardTerm):
    """The rewards of each group, dealt out to its attempts anew: means and deviations stay, and no
    reward has to do with its response. Of episodes of one segment each."""

    def term(self, batch: Batch) -> Tensor:
        rewards = batch.require("rewards", "transform shuffled_rewards").double()
        group = batch.require("group", "transform shuffled_rewards")
        # What was sampled differs from step to step, and is the same in a run that is repeated
        generator = random.Random(int(batch.tokens.sum()))
        dealt = rewards.clone()
        for number in group.unique():
            rows = (group == number).nonzero().flatten().tolist()
            dealt[torch.tensor(rows)] = rewards[generator.sample(rows, len(rows))]
        return dealt - rewards
