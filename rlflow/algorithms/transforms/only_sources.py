"""Only what came from some sources carries a policy gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from rlflow.algorithms.base import Transform
from rlflow.algorithms.transforms.high_entropy_tokens import with_kept
from rlflow.types import SOURCES, Batch

Source = Literal["local", "external", "replay", "demonstration"]


class OnlySources(Transform):
    """Sets the coefficients of rows of other sources to 0: what is learned by likelihood (`sft`
    with a `source`), for example demonstrations, is not reinforced as well."""

    level = "sequence"

    def __init__(self, sources: Sequence[Source] = ("local",)) -> None:
        self._kept = torch.tensor([source in sources for source in SOURCES])

    def __call__(self, batch: Batch) -> Batch:
        rows = self._kept[batch.require("source", "transform only_sources")]
        return with_kept(batch, rows[:, None].expand(batch.tokens.shape))
