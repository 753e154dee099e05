"""On-policy distillation and the forward KL to a teacher, against hand arithmetic and float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlflow.algorithms.advantages.grpo import grpo
from rlflow.algorithms.advantages.opd import OnPolicyDistillation
from rlflow.algorithms.losses.teacher_kl import TeacherKLLoss
from rlflow.components import ADVANTAGE
from rlflow.errors import ConfigError, RLFlowError
from rlflow.types import TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS, Batch, PolicyOutput


def batch_of(mask: Tensor, **fields: Tensor) -> Batch:
    rows, width = mask.shape
    nothing = torch.zeros(rows, width)
    values = {
        "logprobs": nothing,
        "advantages": nothing,
        "weights": mask / mask.sum().clamp(min=1),
    } | fields
    return Batch(
        tokens=torch.zeros(rows, width, dtype=torch.int64),
        loss_mask=mask,
        lengths=torch.full((rows,), width),
        temperatures=torch.ones(rows),
        **values,
    )


def test_the_advantage_is_what_the_teacher_finds_likelier() -> None:
    """ell_theta [-1, -2], ell_T [-.5, -3] -> A [.5, -1], times the coefficient; off the mask 0."""
    mask = torch.tensor([[False, True, True]])
    batch = batch_of(
        mask,
        logprobs=torch.tensor([[0.0, -1, -2]]),
        teacher_logprobs=torch.tensor([[-9.0, -0.5, -3]]),
    )
    assert OnPolicyDistillation()(batch).tolist() == [[0.0, 0.5, -1.0]]
    assert OnPolicyDistillation(coefficient=0.5)(batch).tolist() == [[0.0, 0.25, -0.5]]


def test_the_anchor_says_whose_log_probs_are_the_policys() -> None:
    mask = torch.tensor([[False, True]])
    batch = batch_of(
        mask,
        logprobs=torch.tensor([[0.0, -1.0]]),
        proximal_logprobs=torch.tensor([[0.0, -4.0]]),
        teacher_logprobs=torch.tensor([[0.0, -2.0]]),
    )
    advantage = OnPolicyDistillation(anchor="proximal")
    assert advantage(batch).tolist() == [[0.0, 2.0]] and advantage.needs == {"teacher", "proximal"}
    assert OnPolicyDistillation()(batch).tolist() == [
        [0.0, -1.0]
    ] and OnPolicyDistillation().needs == {"teacher", "rollout"}
    with pytest.raises(ConfigError, match="expected one of rollout, proximal"):
        ADVANTAGE.check({"name": "opd", "anchor": "policy"})


def test_it_is_added_to_any_other_advantage() -> None:
    mask = torch.tensor([[False, True, True], [False, True, False]])
    batch = batch_of(
        mask,
        logprobs=torch.full((2, 3), -1.0),
        teacher_logprobs=torch.full((2, 3), -0.75),
        rewards=torch.tensor([1.0, 0.0]).double(),
        group_size=torch.tensor([2, 2]),
        group_mean=torch.tensor([0.5, 0.5]).double(),
        group_std=torch.tensor([0.5**0.5, 0.5**0.5]).double(),
    )
    found = OnPolicyDistillation(base={"name": "grpo", "std": "none"})(batch)
    assert found.tolist() == [[0.0, 0.75, 0.75], [0.0, -0.25, 0.0]]
    assert torch.equal(
        found, OnPolicyDistillation()(batch) + grpo(batch, std="none")[:, None] * mask
    )
    with pytest.raises(ConfigError, match="grop"):
        OnPolicyDistillation(base={"name": "grop"})


def test_a_batch_without_a_teacher_is_one_error() -> None:
    with pytest.raises(
        RLFlowError, match=r"advantage opd: the batch has no teacher_logprobs.*algorithm.teacher"
    ):
        OnPolicyDistillation()(batch_of(torch.tensor([[False, True]])))


def kl_case(vocab: int = 7, k: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the policy (1, 4, V), and ids and log-probs (1, 4, k) of a teacher's likeliest tokens, in float64."""
    draw = torch.Generator().manual_seed(0)
    policy = torch.randn(1, 4, vocab, generator=draw, dtype=torch.float64)
    teacher = (2 * torch.randn(1, 4, vocab, generator=draw, dtype=torch.float64)).log_softmax(-1)
    top = teacher.topk(k, dim=-1)
    return policy, top.indices, top.values


def kl_loss(logits: Tensor, ids: Tensor, teacher: Tensor, mask: Tensor, tail: bool) -> Tensor:
    batch = batch_of(mask).replace(extras={TEACHER_TOP_IDS: ids, TEACHER_TOP_LOGPROBS: teacher})
    logprobs = logits.log_softmax(-1)
    output = PolicyOutput(logprobs[..., 0], top_logprobs=logprobs.gather(-1, ids))
    values, _ = TeacherKLLoss(coefficient=2.0, tail=tail)(output, batch)
    return values


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_value_and_gradient_of_the_forward_kl_are_the_closed_form_and_finite_differences(
    k: int, tail: bool
) -> None:
    """d KL / d z_j = q_j p(K) - p_j on K and q_j p(K) elsewhere; the tail adds P q_j less P q_j / Q where j is not in K."""
    logits, ids, teacher = kl_case(k=k)
    mask = torch.tensor([[False, True, True, True]])
    logits.requires_grad_()
    values = kl_loss(logits, ids, teacher, mask, tail)
    q, p = (
        logits.detach().softmax(-1),
        torch.zeros_like(logits.detach()).scatter(-1, ids, teacher.exp()),
    )
    inside = torch.zeros_like(q).scatter(-1, ids, 1.0)
    mass, own = p.sum(-1, keepdim=True), (q * inside).sum(-1, keepdim=True)
    expected = torch.xlogy(p, p / q).sum(-1)
    gradient = q * mass - p
    if tail and k < q.shape[-1]:
        expected = expected + ((1 - mass) * ((1 - mass) / (1 - own)).log()).squeeze(-1)
        gradient = gradient + (1 - mass) * (q - q * (1 - inside) / (1 - own))
    torch.testing.assert_close(values, 2 * expected * mask, atol=1e-9, rtol=0)
    values.sum().backward()
    torch.testing.assert_close(logits.grad, 2 * gradient * mask[..., None], atol=1e-9, rtol=0)
    step = torch.zeros_like(q)
    step[0, 2, 4] = 1e-6
    ahead, behind = (
        kl_loss(logits.detach() + sign * step, ids, teacher, mask, tail).sum() for sign in (1, -1)
    )
    assert float((ahead - behind) / 2e-6) == pytest.approx(float(logits.grad[0, 2, 4]), abs=1e-8)


def test_with_the_tail_the_policy_that_equals_the_teacher_is_the_minimum_and_without_it_is_not() -> (
    None
):
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 2, 7, generator=draw, dtype=torch.float64)
    top, mask = logits.log_softmax(-1).topk(3, dim=-1), torch.tensor([[False, True]])
    gradients = {}
    for tail in (True, False):
        given = logits.clone().requires_grad_()
        kl_loss(given, top.indices, top.values, mask, tail).sum().backward()
        gradients[tail] = float(given.grad.abs().max())
    assert gradients[True] < 1e-12 < 1e-2 < gradients[False]


def test_extreme_log_probs_give_finite_values_and_gradients() -> None:
    """A teacher that is certain of what the policy excludes, and the other way round."""
    for teacher, policy in ((0.0, -1e4), (-1e4, 0.0), (0.0, 0.0)):
        ids, mask = torch.zeros(1, 2, 1, dtype=torch.int64), torch.tensor([[False, True]])
        found = torch.full((1, 2, 1), policy, requires_grad=True)
        extras = {TEACHER_TOP_IDS: ids, TEACHER_TOP_LOGPROBS: torch.full((1, 2, 1), teacher)}
        values, _ = TeacherKLLoss()(
            PolicyOutput(found[..., 0], top_logprobs=found), batch_of(mask).replace(extras=extras)
        )
        values.sum().backward()
        assert bool(torch.isfinite(values).all()) and bool(torch.isfinite(found.grad).all())


def test_without_the_teachers_tokens_it_says_so() -> None:
    with pytest.raises(
        RLFlowError, match="loss teacher_kl: expected log-probs of the teacher's likeliest tokens"
    ):
        TeacherKLLoss()(PolicyOutput(torch.zeros(1, 2)), batch_of(torch.tensor([[False, True]])))
