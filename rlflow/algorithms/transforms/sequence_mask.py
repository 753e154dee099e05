"""DeepSeek-V3.2's mask of off-policy sequences."""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.algorithms.base import Anchor, Transform, anchor_logprobs, log_ratio
from rlflow.algorithms.transforms.importance import at_level, multiplied
from rlflow.types import Batch
from rlflow.values import PositiveFloat


@dataclass(frozen=True)
class SequenceMask(Transform):
    """Times 0 where A < 0 and the mean over the row's tokens of old log-prob - log-prob is above
    the threshold (nats).

    DeepSeek-V3.2, arXiv 2512.02556 section 3.1 ("off-policy sequence masking"), the old policy
    being the one that sampled (anchor rollout) and the new one that just before this update. The
    sequence is the row: of a trajectory with several segments, each is judged by itself."""

    level = "sequence"

    threshold: PositiveFloat
    anchor: Anchor = "rollout"

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"current", self.anchor})

    def __call__(self, batch: Batch) -> Batch:
        old = anchor_logprobs(batch, self.anchor, "transform sequence_mask")
        current = batch.require("current_logprobs", "transform sequence_mask")
        distance = at_level(log_ratio(old, current, batch.loss_mask), batch.loss_mask, "geometric")
        return multiplied(batch, ~((batch.advantages < 0) & (distance > self.threshold)))
