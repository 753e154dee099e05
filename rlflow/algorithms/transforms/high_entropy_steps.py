"""Only the turns at which the policy is least certain carry a policy gradient."""

from __future__ import annotations

from typing import Annotated, Literal

import torch

from rlflow.algorithms.base import Transform
from rlflow.algorithms.statistics import totals
from rlflow.algorithms.transforms.high_entropy_tokens import quantile, with_kept
from rlflow.types import Batch
from rlflow.values import Range


class HighEntropySteps(Transform):
    """Keeps the turns whose entropy, the mean over their trained tokens, reaches the `drop`
    quantile of its group's turns, or of the minibatch's (`over`): the top 80% of DART, arXiv
    2509.23866. The tokens of other turns get coefficient 0.

    A group's turns are those in the minibatch: with minibatches_per_step 1, all of them.
    """

    needs = frozenset({"current_entropy"})
    level = "token"

    def __init__(
        self,
        drop: Annotated[float, Range(0, below=1)] = 0.2,
        over: Literal["group", "minibatch"] = "group",
    ) -> None:
        self._drop, self._over = drop, over
        self._kept: list[float] = []

    def __call__(self, batch: Batch) -> Batch:
        who = "high_entropy_steps"
        entropy, turn = batch.require("current_entropy", who), batch.require("turn", who)
        trajectory, group = batch.require("trajectory", who), batch.require("group", who)
        mask = batch.loss_mask & (turn >= 0)
        if not bool(mask.any()):
            return batch
        # A step is a (trajectory, turn); tokens of the same one get the same number.
        names = (trajectory[:, None] * (int(turn.max()) + 1) + turn)[mask]
        steps, step = names.unique(return_inverse=True)
        means = totals(entropy[mask], step, len(steps)) / step.bincount()
        kept = torch.empty(len(steps), dtype=torch.bool, device=step.device)
        groups = torch.zeros_like(steps)
        if self._over == "group":
            groups[step] = group[:, None].expand_as(turn)[mask]
        for number in groups.unique():
            kept[groups == number] = means[groups == number] >= quantile(
                means[groups == number], self._drop
            )
        self._kept.append(float(kept.double().mean()))
        tokens = torch.ones_like(batch.loss_mask)  # what belongs to no turn stays
        tokens[mask] = kept[step]
        return with_kept(batch, tokens)

    def report(self) -> dict[str, float]:
        """Share of turns that were kept, mean over minibatches."""
        kept, self._kept = self._kept, []
        return {"steps_kept": sum(kept) / len(kept)} if kept else {}
