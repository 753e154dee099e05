"""The distributed optimizer on one rank; on several: tests/dist/test_layouts.py."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.errors import ConfigError
from rlflow.models.huggingface import digest
from rlflow.trainer.megatron.cpu import adapted
from rlflow.trainer.megatron.optimizer import step, zero_gradients
from tests import rounding
from tests.dist.megatron_ranks import PolicyGradientWithEntropy, make_batch
from tests.reference import ORACLE
from tests.unit.trainer.batches import VOCAB


@pytest.fixture
def defaults() -> dict[str, Any]:
    return {"lr": 1e-3, "distributed_optimizer": True}


@pytest.mark.parametrize(
    ("updates", "dtype"),
    [
        (0, "bfloat16"),
        (2, "float32"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((0, "float32"), (2, "bfloat16"))
        ),
    ],
)
def test_resume_continues_bit_for_bit(make: Any, tmp_path: Path, dtype: str, updates: int) -> None:
    """A count of updates shared by all parameters would be incremented by each of them from here on."""
    batch, loss = make_batch(VOCAB), PolicyGradientWithEntropy()
    trainer, resumed = make(dtype=dtype), make(dtype=dtype)
    for _ in range(updates):
        trainer.update(batch, loss)
    trainer.save(tmp_path / "checkpoint", updates)
    assert resumed.load(tmp_path / "checkpoint") == updates
    for _ in range(2):
        assert trainer.update(batch, loss) == resumed.update(batch, loss)
    assert digest(trainer.weights()) == digest(resumed.weights())


def stepped(trainer: Any, updates: int) -> str:
    """The digest of the weights after Adam was given the same random gradients; clipping would divide them by a rounded norm."""
    draw = torch.Generator().manual_seed(0)
    with adapted():
        for _ in range(updates):
            zero_gradients(trainer._model, trainer._optimizer)
            for _, parameter in sorted(trainer._model[0].named_parameters()):
                parameter.main_grad.copy_(torch.randn(parameter.shape, generator=draw))
            step(trainer._optimizer, 1e-3)
    return digest(trainer.weights())


def test_split_adam_is_whole_adam_bit_for_bit_given_the_same_gradients(make: Any) -> None:
    """One rank's part of a parameter is all of it, so both run the same operations on the same numbers."""
    options = {"max_gradient_norm": 0.0, "optimizer": {"name": "adamw", "weight_decay": 0.1}}
    split, whole = make(**options), make(distributed_optimizer=False, **options)
    start = digest(whole.weights())
    assert stepped(split, 3) == stepped(whole, 3) != start


def test_split_adam_trains_as_whole_adam_does_up_to_rounding(make: Any) -> None:
    """The two keep parameters in other places in memory, and BLAS rounds gradients by that; Adam divides by their size."""
    batch, loss = make_batch(VOCAB), PolicyGradientWithEntropy()
    split, whole = make(), make(distributed_optimizer=False)
    reference = functools.partial(make, backend=ORACLE, distributed_optimizer=False)
    exact = rounding.Updates(reference, batch, loss, updates=3)
    for number in range(3):
        expected = whole.update(batch, loss)["gradient_norm"]
        assert (
            abs(split.update(batch, loss)["gradient_norm"] - expected)
            <= 2 * exact.norm_bounds[number]
        )
    for (name, tensor), (_, other) in zip(whole.weights(), split.weights(), strict=True):
        assert ((tensor - other).abs() <= exact.most_apart(name, tensor)).all(), name


def test_a_snapshot_leaves_the_split_parameters_in_their_buffer(make: Any) -> None:
    batch, loss = make_batch(VOCAB), PolicyGradientWithEntropy()
    trainer, other = make(), make()
    trainer.snapshot("reference")
    before = trainer.score(batch)["logprobs"]
    for _ in range(2):
        trainer.update(batch, loss)
        other.update(batch, loss)
        assert torch.equal(trainer.score(batch, "reference")["logprobs"], before)
    assert digest(trainer.weights()) == digest(other.weights())


@pytest.mark.parametrize(
    ("split", "dtype"),
    [
        (True, "bfloat16"),
        (False, "float32"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((True, "float32"), (False, "bfloat16"))
        ),
    ],
)
def test_checkpoints_of_split_and_whole_adam_load_into_each_other(
    make: Any, tmp_path: Path, dtype: str, split: bool
) -> None:
    batch, loss = make_batch(VOCAB), PolicyGradientWithEntropy()
    writer = make(distributed_optimizer=split, dtype=dtype)
    for _ in range(2):
        writer.update(batch, loss)
    writer.save(tmp_path / "checkpoint", 2)
    reader = make(distributed_optimizer=not split, dtype=dtype)
    assert reader.load(tmp_path / "checkpoint") == 2
    assert digest(reader.weights()) == digest(writer.weights())
    # The two keep parameters in other places in memory, and BLAS rounds by that (gradients differ by up to 7e-9).
    for _ in range(2):
        assert reader.update(batch, loss)["loss"] == pytest.approx(
            writer.update(batch, loss)["loss"], rel=1e-6
        )
    pairs = zip(writer.weights(), reader.weights(), strict=True)
    if dtype == "bfloat16":  # by one value of the type that neighbours, at the most
        for (name, tensor), (_, other) in pairs:
            distance, size = (tensor.float() - other.float()).norm(), tensor.float().norm()
            assert distance <= torch.finfo(torch.bfloat16).eps * size, name
        return
    reference = functools.partial(make, backend=ORACLE, distributed_optimizer=False)
    exact = rounding.Updates(reference, batch, loss, updates=4)
    for (name, tensor), (_, other) in pairs:
        assert ((tensor - other).abs() <= exact.most_apart(name, tensor)).all(), name


def test_the_reference_backend_has_no_split_adam(make: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"trainer\.distributed_optimizer: 'reference' runs on one device"
    ):
        make(backend=ORACLE)
