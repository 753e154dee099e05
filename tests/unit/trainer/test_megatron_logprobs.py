"""Vocab-parallel log-probs and entropies against closed forms and torch's own gradients (one rank; more in tests/dist)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.trainer.megatron import logprobs as module
from rlflow.trainer.megatron.logprobs import token_logprobs


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    made = not dist.is_initialized()
    if made:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD  # type: ignore[misc]
    if made:
        dist.destroy_process_group()


def make_case(vocab: int = 13) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(3, 6, vocab, generator=draw)
    tokens = torch.randint(0, vocab, (3, 6), generator=draw)
    return logits, tokens, torch.tensor([6, 4, 1]), torch.tensor([0.5, 1.0, 1.7])


def oracle(logits: Tensor, tokens: Tensor, lengths: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    logp = (logits / temperatures[:, None, None]).log_softmax(-1)[:, :-1]
    chosen = logp.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    valid = torch.arange(1, tokens.shape[1]) < lengths[:, None]
    pad = torch.nn.functional.pad
    return pad(chosen * valid, (1, 0)), pad(entropy * valid, (1, 0))


def test_two_words_by_hand(group: dist.ProcessGroup) -> None:
    """Logits (ln 3, 0) at temperature 1: p = (3/4, 1/4), and token 1 was drawn after token 0."""
    logits = torch.tensor([[[math.log(3), 0.0], [9.0, 9.0]]])
    got, entropy = token_logprobs(
        logits, torch.tensor([[0, 1]]), torch.tensor([2]), torch.ones(1), vocab=2, group=group, want_entropy=True
    )
    assert entropy is not None
    assert got.tolist() == [[0.0, pytest.approx(math.log(1 / 4))]]
    assert entropy.tolist() == [[0.0, pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))]]


@pytest.mark.parametrize("chunk", [1, 40, 1 << 18])
def test_values_and_gradients_equal_torch(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS_CUDA", chunk)
    logits, tokens, lengths, temperatures = make_case()
    draw = torch.Generator().manual_seed(1)
    of_logprobs, of_entropy = torch.randn(2, 3, 6, generator=draw)

    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    got, entropy = token_logprobs(ours, tokens, lengths, temperatures, vocab=13, group=group, want_entropy=True)
    expected, expected_entropy = oracle(theirs, tokens, lengths, temperatures.double())
    assert entropy is not None
    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=2e-6, rtol=0)
    (got * of_logprobs + entropy * of_entropy).sum().backward()
    (expected * of_logprobs + expected_entropy * of_entropy).sum().backward()
    torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=2e-6, rtol=0)


def test_scoring_equals_training(group: dist.ProcessGroup) -> None:
    """Without gradients nothing is kept for the backward pass, and the numbers are the same bits."""
    logits, tokens, lengths, temperatures = make_case()
    kept, _ = token_logprobs(logits.clone().requires_grad_(), tokens, lengths, temperatures, vocab=13, group=group)
    plain, _ = token_logprobs(logits, tokens, lengths, temperatures, vocab=13, group=group)
    assert torch.equal(kept.detach(), plain)


def test_padded_vocabulary_has_no_probability_and_no_gradient(group: dist.ProcessGroup) -> None:
    logits, tokens, lengths, temperatures = make_case()
    padded = torch.cat([logits, torch.full((3, 6, 3), 50.0)], dim=-1).requires_grad_()
    got, entropy = token_logprobs(padded, tokens, lengths, temperatures, vocab=13, group=group, want_entropy=True)
    expected, expected_entropy = oracle(logits, tokens, lengths, temperatures)
    assert entropy is not None
    torch.testing.assert_close(got.detach(), expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(entropy.detach(), expected_entropy, atol=2e-6, rtol=0)
    (got.sum() + entropy.sum()).backward()
    assert not padded.grad[..., 13:].any()


def test_padding_and_the_last_position_get_no_gradient(group: dist.ProcessGroup) -> None:
    logits, tokens, lengths, temperatures = make_case()
    logits.requires_grad_()
    got, _ = token_logprobs(logits, tokens, lengths, temperatures, vocab=13, group=group)
    got.sum().backward()
    moved = logits.grad.abs().sum(-1) > 0
    assert moved.sum(dim=1).tolist() == [5, 3, 0]  # one less than each length: position t is predicted at t - 1


def test_greedy_temperature_counts_as_one(group: dist.ProcessGroup) -> None:
    logits, tokens, lengths, _ = make_case()
    greedy, _ = token_logprobs(logits, tokens, lengths, torch.zeros(3), vocab=13, group=group)
    one, _ = token_logprobs(logits, tokens, lengths, torch.ones(3), vocab=13, group=group)
    assert torch.equal(greedy, one)


def test_extreme_logits_stay_finite(group: dist.ProcessGroup) -> None:
    logits = torch.tensor([[[1e4, 0.0, -1e4], [0.0, 0.0, 0.0]]], requires_grad=True)
    got, entropy = token_logprobs(
        logits, torch.tensor([[0, 0]]), torch.tensor([2]), torch.ones(1), vocab=3, group=group, want_entropy=True
    )
    assert entropy is not None
    assert (got[0, 1].item(), entropy[0, 1].item()) == (0.0, 0.0)
    (got.sum() + entropy.sum()).backward()
    assert torch.isfinite(logits.grad).all()
