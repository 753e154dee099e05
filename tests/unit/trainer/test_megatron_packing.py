"""Packed rows compute what padded rows do, and no row knows of another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow.errors import ConfigError
from rlflow.trainer.base import Trainer
from rlflow.trainer.megatron.context import held_chunks, held_positions
from rlflow.trainer.megatron.layers import _attend
from rlflow.trainer.megatron.packing import Share, pack, pad
from rlflow.types import Batch, Loss, PolicyOutput
from tests import rounding
from tests.reference import ORACLE
from tests.unit.trainer.batches import VOCAB

LENGTHS = [20, 3, 1, 7, 20, 5, 2, 11]


def make_batch(seed: int = 0, lengths: list[int] = LENGTHS) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    rows, width = len(lengths), max(lengths)
    positions, sizes = torch.arange(width), torch.tensor(lengths)
    mask = (
        (positions < sizes[:, None])
        & (positions >= 1)
        & (torch.rand(rows, width, generator=draw) < 0.7)
    )
    return Batch(
        tokens=torch.randint(0, VOCAB, (rows, width), generator=draw)
        * (positions < sizes[:, None]),
        loss_mask=mask,
        logprobs=torch.zeros(rows, width),
        advantages=torch.randn(rows, width, generator=draw),
        weights=mask / mask.sum(),
        lengths=sizes,
        temperatures=0.7 + 0.6 * torch.rand(rows, generator=draw),
    )


class RowRatioWithEntropy(Loss):
    """A loss that needs whole rows (GSPO's sequence ratio, arXiv 2507.18071) and both outputs."""

    needs = frozenset({"entropy"})

    def __call__(self, output: PolicyOutput, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        count = batch.loss_mask.sum(1, keepdim=True).clamp(min=1)
        ratio = ((output.logprobs - batch.logprobs) * batch.loss_mask).sum(1, keepdim=True) / count
        loss = -batch.advantages * ratio.exp() * batch.loss_mask - 0.1 * output.entropy
        return loss, {"entropy": output.entropy}


@pytest.fixture
def defaults() -> dict[str, Any]:
    return {"lr": 1e-3, "optimizer": {"name": "adamw", "eps": 1e-5}}


def test_rows_go_end_to_end_and_are_found_again_by_hand() -> None:
    batch = make_batch(lengths=[3, 1, 0, 2])
    feed = pack(batch)
    assert feed.segments.cu_seqlens_q.tolist() == [0, 3, 4, 5, 7]  # the empty row keeps one token
    assert feed.tokens.tolist() == [
        [*batch.tokens[0].tolist(), *batch.tokens[1:3, 0].tolist(), *batch.tokens[3, :2].tolist()]
    ]
    assert feed.places.tolist() == [[0, 1, 2], [3, -1, -1], [4, -1, -1], [5, 6, -1]]


def test_filling_is_a_segment_of_its_own() -> None:
    batch = make_batch(lengths=[3, 2])
    feed = pack(batch, Share(slices=4))
    assert feed.segments.cu_seqlens_q.tolist() == [0, 3, 5, 8]
    assert feed.tokens.shape == (1, 8)
    assert feed.places.tolist() == [[0, 1, 2], [3, 4, -1]]
    assert pack(batch, Share(slices=4), least=9).segments.cu_seqlens_q.tolist() == [0, 3, 5, 12]


def test_padded_rows_lie_side_by_side() -> None:
    batch = make_batch(lengths=[3, 2])
    feed = pad(batch, Share(slices=2))
    assert feed.tokens.shape == (2, 4) and feed.segments is None
    assert feed.places.tolist() == [
        [0, 2, 4],
        [1, 3, 5],
    ]  # hidden states are (tokens, rows, hidden)


def test_context_parallel_ranks_hold_an_early_and_a_late_chunk_of_each_row() -> None:
    """Two ranks: rows are filled up to a multiple of 4 and cut into 4 chunks, of which rank 0 has the first and the last."""
    batch = make_batch(lengths=[6, 3])
    first, second = (pad(batch, Share(ranks=2, rank=rank)) for rank in range(2))
    assert first.places.tolist() == [[0, 2, -1, -1, -1, -1], [1, 3, -1, -1, -1, -1]]
    assert second.places.tolist() == [[-1, -1, 0, 2, 4, 6], [-1, -1, 1, 3, 5, 7]]
    assert torch.equal(second.tokens, batch.tokens[:, 2:6])
    first, second = (pack(batch, Share(ranks=2, rank=rank)) for rank in range(2))
    assert first.segments.cu_seqlens_q.tolist() == [0, 8, 12] and first.width == 12
    assert first.places.tolist() == [[0, 1, -1, -1, -1, -1], [4, -1, -1, -1, -1, -1]]
    assert second.places.tolist() == [[-1, -1, 0, 1, 2, 3], [-1, 4, 5, -1, -1, -1]]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [Share(2, 0, 2), Share(4, 0, 1), Share(3, 0, 2)], ids=str)
@pytest.mark.parametrize("lay", [pack, pad])
def test_every_token_lies_on_exactly_one_rank(lay: Any, share: Share, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    batch = make_batch(seed, torch.randint(0, 30, (7,), generator=draw).tolist())
    found = torch.zeros(batch.tokens.shape, dtype=torch.int64)
    for rank in range(share.ranks):
        feed = lay(batch, replace(share, rank=rank))
        assert (
            feed.tokens.shape[1] * share.ranks == feed.width
            and feed.tokens.shape[1] % share.slices == 0
        )
        here = feed.places >= 0
        places = feed.places[here]
        assert torch.equal(feed.tokens.t().flatten()[places], batch.tokens[here])
        found += here
    real = torch.arange(found.shape[1]) < batch.lengths.unsqueeze(1)
    assert (found[real] == 1).all()


@pytest.mark.parametrize("ranks", [2, 3])
def test_chunks_attend_as_the_whole_row_does(ranks: int) -> None:
    """Each rank's queries against all keys, put back in order, are causal attention of every segment."""
    lengths = [4 * ranks, 2 * ranks]
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(
        sum(lengths), 2, 4, 8, generator=draw, dtype=torch.float64
    )  # whose rounding is no question here
    key, value = torch.randn(2, sum(lengths), 2, 2, 8, generator=draw, dtype=torch.float64)
    whole = torch.cat(
        [
            _attend(*part)
            for part in zip(*(one.split(lengths) for one in (query, key, value)), strict=True)
        ]
    )
    for rank in range(ranks):
        held = held_positions(lengths, ranks, rank)
        mine = query[held]
        mixed = [
            _attend(
                mine[piece.here], key[piece.start : piece.stop], value[piece.start : piece.stop]
            )
            for piece in held_chunks(lengths, ranks, rank)
        ]
        torch.testing.assert_close(torch.cat(mixed), whole[held], atol=1e-12, rtol=0)


@pytest.mark.parametrize("limit", [pytest.param(1, marks=pytest.mark.slow), 30, 16384])
def test_packed_equals_padded(make: Any, limit: int) -> None:
    batch, loss = make_batch(), RowRatioWithEntropy()
    padded, packed = make(), make(packing=True, tokens_per_microbatch=limit)
    exact = rounding.Updates(lambda: make(backend=ORACLE), batch, loss, updates=3)
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
        assert ((tensor - other).abs() <= exact.most_apart(name, tensor)).all(), name


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
def test_an_observation_token_after_the_last_trained_one_changes_no_gradient(
    make: Any, seed: int
) -> None:
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
        Trainer.from_pretrained(model, backend=ORACLE, packing=True)


@pytest.mark.parametrize("feeding", [pad, pack])
def test_tokens_come_in_granules_and_stay_where_they_are(feeding: Any) -> None:
    batch = make_batch()
    plain, filled = feeding(batch), feeding(batch, Share(granule=16))
    assert filled.tokens.shape[1] % 16 == 0 and filled.tokens.shape[1] >= plain.tokens.shape[1]
    flat, wide = plain.tokens.t().flatten(), filled.tokens.t().flatten()
    real = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
    assert torch.equal(flat[plain.places[real]], wide[filled.places[real]])
