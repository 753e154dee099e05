"""What the environment said is never trained: the loss feels the log-probs of sampled tokens, and of nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model
from torch import Tensor

from rlflow.algorithms import EntropyLoss, KLLoss, PPOClipLoss, SumLoss
from rlflow.trainer.base import Trainer
from rlflow.types import Batch, Loss, PolicyOutput

VOCAB = 101
ROWS, WIDTH = 5, 16


def make_batch(seed: int) -> Batch:
    """Rows whose sampled tokens and observations alternate at random; only the sampled have a weight."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, WIDTH + 1, (ROWS,), generator=draw)
    lengths[0] = WIDTH
    positions = torch.arange(WIDTH)
    sampled = (
        (positions >= 1)
        & (positions < lengths[:, None])
        & (torch.rand(ROWS, WIDTH, generator=draw) < 0.5)
    )
    return Batch(
        tokens=torch.randint(1, VOCAB, (ROWS, WIDTH), generator=draw)
        * (positions < lengths[:, None]),
        loss_mask=sampled,
        logprobs=-4
        - torch.rand(
            ROWS, WIDTH, generator=draw
        ),  # what padding and observations hold must not matter
        advantages=torch.randn(ROWS, WIDTH, generator=draw),
        weights=sampled / sampled.sum(),
        lengths=lengths,
        temperatures=torch.full((ROWS,), 0.9),
        reference_logprobs=-4 - torch.rand(ROWS, WIDTH, generator=draw),
    )


class Watched(Loss):
    """A loss that notes the gradient which reaches each output."""

    needs = frozenset({"entropy"})

    def __init__(self) -> None:
        self.loss = SumLoss((PPOClipLoss(), KLLoss(0.1), EntropyLoss(0.1)))
        self.gradients: dict[str, Tensor] = {}

    def __call__(self, output: PolicyOutput, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        for name in ("logprobs", "entropy"):
            getattr(output, name).register_hook(
                lambda gradient, name=name: self.gradients.update({name: gradient})
            )
        return self.loss(output, batch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return tiny_model(
        path, "qwen2", tokenizer=False, vocab_size=VOCAB, hidden_size=32, intermediate_size=48
    )


@pytest.fixture(scope="module", params=[False, True], ids=["padded", "packed"])
def trainer(model: Path, request: pytest.FixtureRequest) -> Iterator[Trainer]:
    trainer = Trainer.from_pretrained(model, lr=1e-3, packing=request.param)
    yield trainer
    trainer.close()


@pytest.mark.parametrize("seed", range(4))
def test_no_observations_logprob_or_entropy_enters_the_loss(trainer: Any, seed: int) -> None:
    batch, loss = make_batch(seed), Watched()
    trainer.update(batch, loss)
    assert loss.gradients.keys() == {"logprobs", "entropy"}
    for name, gradient in loss.gradients.items():
        assert not gradient[~batch.loss_mask].any(), (
            f"{name} of an observation or of padding is trained"
        )
    assert loss.gradients["entropy"][batch.loss_mask].all(), "a sampled token is not trained"


@pytest.mark.parametrize("seed", range(4))
def test_what_the_engine_recorded_for_observations_changes_nothing(
    model: Path, trainer: Any, seed: int
) -> None:
    """Their log-probs, advantages and reference log-probs: whatever stands there, the update is the same bit for bit."""
    batch, draw = make_batch(seed), torch.Generator().manual_seed(100 + seed)

    def elsewhere(values: Tensor) -> Tensor:
        return torch.where(batch.loss_mask, values, 5 * torch.randn(values.shape, generator=draw))

    other = batch.replace(
        logprobs=elsewhere(batch.logprobs),
        advantages=elsewhere(batch.advantages),
        reference_logprobs=elsewhere(batch.reference_logprobs),
    )
    packing = trainer._limits.packed
    first, second = (Trainer.from_pretrained(model, lr=1e-3, packing=packing) for _ in range(2))
    before, after = first.update(batch, Watched()), second.update(other, Watched())
    assert (before["loss"], before["gradient_norm"]) == (after["loss"], after["gradient_norm"])
    for (name, tensor), (_, changed) in zip(first.weights(), second.weights(), strict=True):
        assert torch.equal(tensor, changed), name
    second.close()
    first.close()
