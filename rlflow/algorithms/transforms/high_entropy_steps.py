"""Only the turns at which the policy is least certain carry a policy gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from rlflow.algorithms.base import Transform
from rlflow.algorithms.statistics import totals
from rlflow.algorithms.transforms.high_entropy_tokens import quantile
from rlflow.algorithms.transforms.importance import multiplied
from rlflow.types import Batch
from rlflow.values import Range


@dataclass(frozen=True)
class HighEntropySteps(Transform):
    """Keeps the turns whose entropy, the mean over their trained tokens, reaches the `drop`
    quantile of its group's turns, or of the minibatch's (`over`): the top 80% of DART, arXiv
    2509.23866. The tokens of other turns get coefficient 0.

    A group's turns are those in the minibatch: with minibatches_per_step 1, all of them.
    """

    needs = frozenset({"current_entropy"})
    level = "token"

    drop: Annotated[float, Range(0, below=1)] = 0.2
    over: Literal["group", "minibatch"] = "group"

    def __call__(self, batch: Batch) -> Batch:
        who = "high_entropy_steps"
        entropy = batch.require("current_entropy", who)
        turn = batch.require("turn", who)
        trajectory = batch.require("trajectory", who)
        group = batch.require("group", who)
        mask = batch.loss_mask & (turn >= 0)
        if not bool(mask.any()):
            return batch
        # A step is a (trajectory, turn); tokens of the same one get the same number.
        names = (trajectory[:, None] * (int(turn.max()) + 1) + turn)[mask]
        steps, step = names.unique(return_inverse=True)
        means = totals(entropy[mask], step, len(steps)) / step.bincount()
        kept = torch.empty(len(steps), dtype=torch.bool, device=step.device)
        groups = torch.zeros_like(steps)
        if self.over == "group":
            groups[step] = group[:, None].expand_as(turn)[mask]
        for number in groups.unique():
            own = means[groups == number]
            kept[groups == number] = own >= quantile(own, self.drop)
        tokens = torch.ones_like(batch.loss_mask)  # what belongs to no turn stays
        tokens[mask] = kept[step]
        return multiplied(batch, tokens)
