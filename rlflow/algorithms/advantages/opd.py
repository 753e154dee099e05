"""On-policy distillation: every sampled token is as good as the teacher thinks it likelier than the
policy does."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.algorithms.base import Advantage, Anchor, anchor_logprobs, as_part
from rlflow.components import ADVANTAGE
from rlflow.types import Batch
from rlflow.values import Component, PositiveFloat


class OnPolicyDistillation(Advantage):
    """(B, T) coefficient * (teacher's log-prob - the policy's), no gradient through either, plus
    the advantage `base`.

    The expectation under the policy is minus the gradient of the reverse KL(policy || teacher),
    token by token and without credit to earlier tokens (GKD, arXiv 2306.13649; MiniLLM, arXiv
    2306.08543 equation 3 without its long-range term).

    base: another advantage that this is added to, e.g. {name: grpo}; None: the teacher alone, and
    rewards do not count. anchor: whose log-probs count as the policy's, the engine's (rollout) or
    the trainer's before the step's first update (proximal)."""

    def __init__(
        self,
        coefficient: PositiveFloat = 1.0,
        base: Component | None = None,
        anchor: Anchor = "rollout",
    ) -> None:
        self._coefficient, self._anchor = coefficient, anchor
        made = None if base is None else ADVANTAGE.build(base, "algorithm.advantage.base")
        self.compares_attempts = getattr(getattr(made, "func", made), "compares_attempts", False)
        self.weighs = getattr(made, "weighs", False)
        self.reads_rewards = getattr(made, "reads_rewards", base is not None)
        self.base_advantage = None if made is None else as_part(made)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        own = frozenset({"teacher", self._anchor})
        return own if self.base_advantage is None else own | self.base_advantage.needs

    def __call__(self, batch: Batch) -> Tensor | tuple[Tensor, Tensor]:
        teacher = batch.require("teacher_logprobs", "advantage opd")
        gap = teacher - anchor_logprobs(batch, self._anchor, "advantage opd")
        advantages = torch.where(batch.loss_mask, self._coefficient * gap, 0.0)
        if self.base_advantage is None:
            return advantages
        found = self.base_advantage(batch)
        base, *returns = found if isinstance(found, tuple) else (found,)
        spread = base[:, None] * batch.loss_mask if base.dim() == 1 else base
        advantages = advantages + spread.float()
        return (advantages, returns[0]) if returns else advantages
