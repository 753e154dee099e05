"""Vocab-parallel log-probs and entropies against closed forms and torch's own gradients (one rank; more in tests/dist)."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.trainer.megatron import logprobs as module
from rlflow.trainer.megatron.logprobs import OutputLayer, token_logprobs


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    made = not dist.is_initialized()
    if made:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD  # type: ignore[misc]
    if made:
        dist.destroy_process_group()


def from_logits(
    logits: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    temperatures: Tensor,
    group: dist.ProcessGroup,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`token_logprobs` where the hidden states are the logits (B, T, V): the output layer is the identity."""
    vocab, chunk_bytes = options.pop("vocab", logits.shape[-1]), options.pop("chunk_bytes", 1 << 20)
    weight = torch.eye(logits.shape[-1], dtype=logits.dtype)
    layer = OutputLayer(
        weight, vocab, group, group, sequence_parallel=False, chunk_bytes=chunk_bytes
    )
    options |= {"places": places_of(tokens)}
    return token_logprobs(
        logits.transpose(0, 1), tokens, lengths, temperatures, layer=layer, **options
    )[:2]


def places_of(tokens: Tensor) -> Tensor:
    """Of padded rows, as one rank holds them."""
    rows, width = tokens.shape
    return torch.arange(width) * rows + torch.arange(rows).unsqueeze(1)


def test_hidden_states_of_another_rank_count_as_zero(group: dist.ProcessGroup) -> None:
    """Each context-parallel rank gives the log-probs that its hidden states predict, and the sum over ranks is all."""
    logits, tokens, lengths, temperatures = make_case()
    layer = OutputLayer(
        torch.eye(13), 13, group, group, sequence_parallel=False, chunk_bytes=1 << 20
    )
    whole, _ = from_logits(logits, tokens, lengths, temperatures, group)
    total = torch.zeros_like(whole)
    for columns in ([0, 5], [1, 2, 3, 4]):
        places = torch.full(tokens.shape, -1)
        places[:, columns] = torch.arange(len(columns)) * 3 + torch.arange(3).unsqueeze(1)
        part, *_ = token_logprobs(
            logits.transpose(0, 1)[columns],
            tokens,
            lengths,
            temperatures,
            layer=layer,
            places=places,
        )
        assert not part[:, [column for column in range(1, 6) if column - 1 not in columns]].any()
        total += part
    assert torch.equal(total, whole)


def make_case(vocab: int = 13) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(3, 6, vocab, generator=draw)
    tokens = torch.randint(0, vocab, (3, 6), generator=draw)
    return logits, tokens, torch.tensor([6, 4, 1]), torch.tensor([0.5, 1.0, 1.7])


def oracle(
    logits: Tensor, tokens: Tensor, lengths: Tensor, temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    logp = (logits / temperatures[:, None, None]).log_softmax(-1)[:, :-1]
    chosen = logp.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    valid = torch.arange(1, tokens.shape[1]) < lengths[:, None]
    pad = torch.nn.functional.pad
    return pad(chosen * valid, (1, 0)), pad(entropy * valid, (1, 0))


def test_two_words_by_hand(group: dist.ProcessGroup) -> None:
    """Logits (ln 3, 0) at temperature 1: p = (3/4, 1/4), and token 1 was drawn after token 0."""
    logits = torch.tensor([[[math.log(3), 0.0], [9.0, 9.0]]])
    got, entropy = from_logits(
        logits, torch.tensor([[0, 1]]), torch.tensor([2]), torch.ones(1), group, want_entropy=True
    )
    assert entropy is not None
    assert got.tolist() == [[0.0, pytest.approx(math.log(1 / 4))]]
    assert entropy.tolist() == [
        [0.0, pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))]
    ]


@pytest.mark.parametrize("cache", [1, 40, 1 << 18])
@pytest.mark.parametrize("chunk_bytes", [1, 4 * 13 * 3, 1 << 20])
def test_values_and_gradients_equal_torch(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, cache: int, chunk_bytes: int
) -> None:
    """One position per chunk, three (the last chunk is smaller), all in one: the gradients of both outputs are torch's."""
    monkeypatch.setattr(module, "CACHE_ELEMENTS", cache)
    logits, tokens, lengths, temperatures = make_case()
    draw = torch.Generator().manual_seed(1)
    of_logprobs, of_entropy = torch.randn(2, 3, 6, generator=draw)

    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    got, entropy = from_logits(
        ours, tokens, lengths, temperatures, group, want_entropy=True, chunk_bytes=chunk_bytes
    )
    expected, expected_entropy = oracle(theirs, tokens, lengths, temperatures.double())
    assert entropy is not None
    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=2e-6, rtol=0)
    (got * of_logprobs + entropy * of_entropy).sum().backward(retain_graph=True)
    (expected * of_logprobs + expected_entropy * of_entropy).sum().backward()
    torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=2e-6, rtol=0)
    ours.grad = None
    (
        got * of_logprobs + entropy * of_entropy
    ).sum().backward()  # the kept chunk was overwritten: it is made again
    torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=2e-6, rtol=0)


def project(
    hidden: Tensor, weight: Tensor, group: dist.ProcessGroup, chunk_bytes: int, want_entropy: bool
) -> Tensor:
    """The sum of what `token_logprobs` gives for the hidden states (T, B, H), weighed by position."""
    _, tokens, lengths, temperatures = make_case(vocab=29)
    layer = OutputLayer(weight, 29, group, group, sequence_parallel=False, chunk_bytes=chunk_bytes)
    got, entropy, _ = token_logprobs(
        hidden, tokens, lengths, temperatures, layer=layer, places=places_of(tokens),
        want_entropy=want_entropy,
    )  # fmt: skip
    share = torch.linspace(-1, 2, got.numel()).view(got.shape)
    return (share * got).sum() + ((share.flip(0) * entropy).sum() if entropy is not None else 0)


@pytest.mark.parametrize("want_entropy", [False, True])
@pytest.mark.parametrize("chunk_bytes", [1, 4 * 32 * 2])
def test_chunks_change_no_gradient_of_hidden_states_or_weight(
    group: dist.ProcessGroup, chunk_bytes: int, want_entropy: bool
) -> None:
    """29 columns of vocabulary and 3 of padding; against one chunk, and against Megatron's gradient buffer."""
    draw = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(6, 3, 8, generator=draw), torch.randn(32, 8, generator=draw)
    results = []
    for size, buffered in ((1 << 20, False), (chunk_bytes, False), (chunk_bytes, True)):
        given, learned = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if buffered:
            learned.main_grad = torch.ones_like(weight)  # what an earlier micro-batch left there
        value = project(given, learned, group, size, want_entropy)
        value.backward()
        results.append(
            (value.detach(), given.grad, learned.main_grad - 1 if buffered else learned.grad)
        )
        assert not buffered or learned.grad is None
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            torch.testing.assert_close(second, first, atol=2e-6, rtol=1e-6)
    assert not results[0][2][29:].any(), "padding of the vocabulary learns"


def test_no_more_logits_than_a_chunk_exist_at_once(group: dist.ProcessGroup) -> None:
    """Every tensor as wide as the vocabulary that is made in forward and backward pass is one chunk long at most."""
    longest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.dim() == 2 and result.shape[1] == 32:
                longest.append(len(result))
            return result

    hidden, weight = (
        torch.randn(6, 3, 4, requires_grad=True),
        torch.randn(32, 4, requires_grad=True),
    )
    with Watch():
        project(hidden, weight, group, 4 * 32 * 4, True).backward()
    assert longest
    assert max(longest) == 4


def test_scoring_equals_training(group: dist.ProcessGroup) -> None:
    """Without gradients nothing is kept for the backward pass, and the numbers are the same bits."""
    logits, tokens, lengths, temperatures = make_case()
    kept, _ = from_logits(logits.clone().requires_grad_(), tokens, lengths, temperatures, group)
    plain, _ = from_logits(logits, tokens, lengths, temperatures, group)
    assert torch.equal(kept.detach(), plain)


def test_padded_vocabulary_has_no_probability_and_no_gradient(group: dist.ProcessGroup) -> None:
    logits, tokens, lengths, temperatures = make_case()
    padded = torch.cat([logits, torch.full((3, 6, 3), 50.0)], dim=-1).requires_grad_()
    got, entropy = from_logits(
        padded, tokens, lengths, temperatures, group, vocab=13, want_entropy=True
    )
    expected, expected_entropy = oracle(logits, tokens, lengths, temperatures)
    assert entropy is not None
    torch.testing.assert_close(got.detach(), expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(entropy.detach(), expected_entropy, atol=2e-6, rtol=0)
    (got.sum() + entropy.sum()).backward()
    assert not padded.grad[..., 13:].any()


def test_padding_and_the_last_position_get_no_gradient(group: dist.ProcessGroup) -> None:
    logits, tokens, lengths, temperatures = make_case()
    logits.requires_grad_()
    got, _ = from_logits(logits, tokens, lengths, temperatures, group)
    got.sum().backward()
    moved = logits.grad.abs().sum(-1) > 0
    assert moved.sum(dim=1).tolist() == [
        5,
        3,
        0,
    ]  # one less than each length: position t is predicted at t - 1


def test_greedy_temperature_counts_as_one(group: dist.ProcessGroup) -> None:
    logits, tokens, lengths, _ = make_case()
    greedy, _ = from_logits(logits, tokens, lengths, torch.zeros(3), group)
    one, _ = from_logits(logits, tokens, lengths, torch.ones(3), group)
    assert torch.equal(greedy, one)


def test_extreme_logits_stay_finite(group: dist.ProcessGroup) -> None:
    logits = torch.tensor([[[1e4, 0.0, -1e4], [0.0, 0.0, 0.0]]], requires_grad=True)
    got, entropy = from_logits(
        logits, torch.tensor([[0, 0]]), torch.tensor([2]), torch.ones(1), group, want_entropy=True
    )
    assert entropy is not None
    assert (got[0, 1].item(), entropy[0, 1].item()) == (0.0, 0.0)
    (got.sum() + entropy.sum()).backward()
    assert torch.isfinite(logits.grad).all()


def test_only_what_is_wanted_is_described(group: dist.ProcessGroup) -> None:
    logits, tokens, lengths, temperatures = make_case()
    wanted = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(3)) < 0.5
    logits.requires_grad_()
    got, _ = from_logits(logits, tokens, lengths, temperatures, group, wanted=wanted)
    whole, _ = from_logits(logits, tokens, lengths, temperatures, group)
    assert torch.equal(got, whole * wanted)
    got.sum().backward()
    described = wanted & (torch.arange(6) >= 1) & (torch.arange(6) < lengths[:, None])
    assert ((logits.grad != 0).any(-1)[:, :-1] == described[:, 1:]).all()


def test_no_position_wanted_gives_zeros_and_no_gradient(group: dist.ProcessGroup) -> None:
    """A data-parallel rank without rows runs such a micro-batch."""
    logits, tokens, _, temperatures = make_case()
    logits.requires_grad_()
    got, entropy = from_logits(
        logits, tokens, torch.ones(3, dtype=torch.int64), temperatures, group, want_entropy=True
    )
    assert entropy is not None
    (got.sum() + entropy.sum()).backward()
    assert not got.any()
    assert not logits.grad.any()


def test_an_entropy_that_is_only_reported_changes_no_gradient(group: dist.ProcessGroup) -> None:
    logits, tokens, lengths, temperatures = make_case()
    with_entropy, without = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    from_logits(with_entropy, tokens, lengths, temperatures, group, want_entropy=True)[
        0
    ].sum().backward()
    from_logits(without, tokens, lengths, temperatures, group)[0].sum().backward()
    assert torch.equal(with_entropy.grad, without.grad)


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPUs"
)
@pytest.mark.parametrize("columns", [0, 990])
def test_compiled_passes_compute_what_the_operations_do(columns: int) -> None:
    """What GPUs run, by the compiler's CPU backend."""
    draw = torch.Generator().manual_seed(0)
    for rows in (7, 33):
        logits = torch.randn(rows, 1000, generator=draw)
        logits[:, 990:] = -torch.inf
        index = torch.randint(0, 990, (rows, 2), generator=draw)
        scale = 0.5 + torch.rand(rows, 1, generator=draw)
        share, of_surprise = torch.randn(2, rows, 1, generator=draw)
        results = []
        for change in (lambda function: function, module._compiled):
            values = logits.clone()
            found = change(module._exponentiate)(
                values, index, scale, values.amax(1, keepdim=True) / scale, columns
            )
            steps = [*found, values.clone()]
            change(module._slope)(
                values, index, share, share.expand(-1, 2), of_surprise if columns else None
            )
            results.append([*steps, values])
        torch.testing.assert_close(*results)
