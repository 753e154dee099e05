"""Forward KL to a teacher over the tokens that it thinks likeliest."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlflow.errors import RLFlowError
from rlflow.types import TEACHER_TOP_LOGPROBS, Batch, Loss, LossResult, PolicyOutput
from rlflow.values import PositiveFloat, check_annotated

LEAST_TAIL = 1e-6  # of a probability that is 1 less a float32 sum


@dataclass(frozen=True)
class TeacherKLLoss(Loss):
    """coefficient * KL(p || q) per token, p the teacher's distribution and q the policy's,
    back-propagated through q.

    With the teacher's k likeliest tokens K: sum over K of p (log p - log q), and with `tail` the
    rest as one more event, P log(P / Q) with P = 1 - p(K), Q = 1 - q(K). So the minimum is q = p on
    K; without it q = p / p(K), which leaves nothing to all other tokens (GKD, arXiv 2306.13649
    equation 2, by back-propagation). Metrics: teacher_kl (nats), teacher_mass = p(K).

    There is no reverse KL over the top k: KL(q || p) restricted to K is also made small by taking
    all probability from K, and training drifts there. On sampled tokens the reverse KL is sound:
    the advantage opd."""

    needs = frozenset({"top_logprobs"})

    coefficient: PositiveFloat = 1.0
    tail: bool = True

    def __post_init__(self) -> None:
        check_annotated(self)

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        if output.top_logprobs is None or TEACHER_TOP_LOGPROBS not in batch.extras:
            raise RLFlowError(
                "loss teacher_kl: expected log-probs of the teacher's likeliest tokens, found "
                "none; see `needs`."
            )
        mask = batch.loss_mask[..., None]
        teacher = torch.where(mask, batch.extras[TEACHER_TOP_LOGPROBS], 0.0)
        policy = torch.where(mask, output.top_logprobs, 0.0)
        kl = (teacher.exp() * (teacher - policy)).sum(dim=-1)
        mass = teacher.exp().sum(dim=-1)
        if self.tail:
            rest = (1 - mass).clamp(min=LEAST_TAIL)
            left = (1 - policy.exp().sum(dim=-1)).clamp(min=LEAST_TAIL)
            kl = kl + rest * (rest.log() - left.log())
        kl = torch.where(batch.loss_mask, kl, 0.0)
        return self.coefficient * kl, {
            "teacher_kl": kl.detach(),
            "teacher_mass": torch.where(batch.loss_mask, mass, 0.0),
        }
