"""Packed rows compute what padded rows do, and no row knows of another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model
from torch import Tensor

from rlflow.errors import ConfigError
from rlflow.trainer import Trainer
from rlflow.trainer.megatron.packing import pack
from rlflow.types import Batch, PolicyOutput

VOCAB = 101
LENGTHS = [20, 3, 1, 7, 20, 5, 2, 11]


def make_batch(seed: int = 0, lengths: list[int] = LENGTHS) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    rows, width = len(lengths), max(lengths)
    positions, sizes = torch.arange(width), torch.tensor(lengths)
    mask = (positions < sizes[:, None]) & (positions >= 1) & (torch.rand(rows, width, generator=draw) < 0.7)
    return Batch(
        tokens=torch.randint(0, VOCAB, (rows, width), generator=draw) * (positions < sizes[:, None]),
        loss_mask=mask,
        logprobs=torch.zeros(rows, width),
        advantages=torch.randn(rows, width, generator=draw),
        weights=mask / mask.sum(),
        lengths=sizes,
        temperatures=0.7 + 0.6 * torch.rand(rows, generator=draw),
    )


class RowRatioWithEntropy:
    """A loss that needs whole rows (GSPO's sequence ratio, arXiv 2507.18071) and both outputs."""

    needs_entropy = True

    def __call__(self, output: PolicyOutput, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        count = batch.loss_mask.sum(1, keepdim=True).clamp(min=1)
        ratio = ((output.logprobs - batch.logprobs) * batch.loss_mask).sum(1, keepdim=True) / count
        loss = -batch.advantages * ratio.exp() * batch.loss_mask - 0.1 * output.entropy
        return loss, {"entropy": output.entropy}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return tiny_model(path, "qwen2", tied=True, tokenizer=False, vocab_size=VOCAB, hidden_size=32, intermediate_size=48)


@pytest.fixture
def make(model: Path) -> Iterator[Any]:
    """A function that makes trainers; they are closed in reverse order, so the groups outlive their users."""
    trainers: list[Trainer] = []

    def build(**options: Any) -> Trainer:
        trainers.append(Trainer.from_pretrained(model, **{"lr": 1e-3, "eps": 1e-5, **options}))
        return trainers[-1]

    yield build
    for trainer in reversed(trainers):
        trainer.close()


def test_rows_go_end_to_end_and_back_by_hand() -> None:
    batch = make_batch(lengths=[3, 1, 0, 2])
    packing = pack(batch)
    assert packing.segments.cu_seqlens_q.tolist() == [0, 3, 4, 5, 7]  # the empty row keeps one token
    assert packing.tokens.tolist() == [
        [*batch.tokens[0].tolist(), *batch.tokens[1:3, 0].tolist(), *batch.tokens[3, :2].tolist()]
    ]
    assert packing.scatter(torch.arange(1, 8).unsqueeze(0)).tolist() == [[1, 2, 3], [4, 0, 0], [5, 0, 0], [6, 7, 0]]
    assert torch.equal(packing.gather(packing.scatter(packing.tokens)), packing.tokens)


def test_filling_is_a_segment_of_its_own() -> None:
    batch = make_batch(lengths=[3, 2])
    packing = pack(batch, multiple=4)
    assert packing.segments.cu_seqlens_q.tolist() == [0, 3, 5, 8]
    assert packing.tokens.shape == (1, 8)
    assert packing.gather(batch.tokens).tolist() == [packing.tokens[0, :5].tolist()]


@pytest.mark.parametrize("limit", [1, 30, 16384])
def test_packed_equals_padded(make: Any, limit: int) -> None:
    batch, loss = make_batch(), RowRatioWithEntropy()
    padded, packed = make(), make(packing=True, tokens_per_microbatch=limit)
    want = ("logprobs", "entropy")
    expected, found = padded.score(batch, want=want), packed.score(batch, want=want)
    for name in want:
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=0)
    for _ in range(3):
        before, after = padded.update(batch, loss), packed.update(batch, loss)
        for key in ("loss", "gradient_norm", "entropy", "tokens"):
            assert after[key] == pytest.approx(before[key], rel=1e-5, abs=1e-7), key
    assert (after["microbatches"] == 1) == (limit == 16384)
    for (name, tensor), (_, other) in zip(padded.weights(), packed.weights(), strict=True):
        assert (tensor - other).norm() <= 1e-5 * tensor.norm(), name


def row_gradients(trainer: Trainer, batch: Batch, row: int) -> dict[str, Tensor]:
    """The gradient of one row's loss alone: what Adam's first moment holds of it after one update from zero."""
    weights = torch.zeros_like(batch.weights)
    weights[row] = batch.weights[row]
    trainer.update(batch.replace(weights=weights), RowRatioWithEntropy())
    return dict(trainer.weights())


@pytest.mark.parametrize("seed", range(4))
def test_another_row_changes_no_gradient_of_this_row(make: Any, seed: int) -> None:
    batch = make_batch(seed)
    row = [0, 3, 5, 7][seed]
    other = (batch.tokens + 1 + seed) % VOCAB
    other[row] = batch.tokens[row]
    first = row_gradients(make(packing=True), batch, row)
    second = row_gradients(make(packing=True), batch.replace(tokens=other), row)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("seed", range(4))
def test_an_observation_token_after_the_last_trained_one_changes_no_gradient(make: Any, seed: int) -> None:
    batch = make_batch(seed)
    weights, tokens = batch.weights.clone(), batch.tokens.clone()
    for row, length in enumerate(LENGTHS):
        weights[row, length - 1] = 0
        tokens[row, length - 1] = (tokens[row, length - 1] + 1 + seed) % VOCAB

    def policy_gradient(output: PolicyOutput, part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return -part.advantages * output.logprobs, {}

    first, second = make(packing=True), make(packing=True)
    before = first.update(batch.replace(weights=weights), policy_gradient)
    after = second.update(batch.replace(weights=weights, tokens=tokens), policy_gradient)
    assert before == after
    for (name, tensor), (_, other) in zip(first.weights(), second.weights(), strict=True):
        assert torch.equal(tensor, other), name


def test_the_reference_backend_refuses_to_pack(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.packing: 'reference' pads"):
        Trainer.from_pretrained(model, backend="reference", packing=True)
