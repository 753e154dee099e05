"""Only what came from some sources carries a policy gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlflow.algorithms.base import Transform
from rlflow.algorithms.transforms.importance import multiplied
from rlflow.types import SOURCES, Batch, Source


@dataclass(frozen=True)
class OnlySources(Transform):
    """Sets the coefficients of rows of other sources to 0: what is learned by likelihood (`sft`
    with a `source`), for example demonstrations, is not reinforced as well."""

    level = "sequence"

    sources: Sequence[Source] = ("local",)

    def __call__(self, batch: Batch) -> Batch:
        kept = torch.tensor([source in self.sources for source in SOURCES])
        rows = kept[batch.require("source", "transform only_sources")]
        return multiplied(batch, rows[:, None].expand(batch.tokens.shape))
