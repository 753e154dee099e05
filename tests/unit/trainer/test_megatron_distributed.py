"""The distributed optimizer on one rank; on several: tests/dist/test_layouts.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.errors import ConfigError
from rlflow.models.huggingface import digest
from tests.dist.megatron_ranks import PolicyGradientWithEntropy, make_batch
from tests.unit.trainer.batches import VOCAB


@pytest.fixture
def defaults() -> dict[str, Any]:
    return {"lr": 1e-3, "distributed_optimizer": True}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("updates", [0, 2])
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


def test_split_adam_equals_whole_adam(make: Any) -> None:
    batch, loss = make_batch(VOCAB), PolicyGradientWithEntropy()
    split, whole = make(), make(distributed_optimizer=False)
    for _ in range(3):
        expected = whole.update(batch, loss)
        assert split.update(batch, loss)["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-6)
    for (name, tensor), (_, other) in zip(whole.weights(), split.weights(), strict=True):
        torch.testing.assert_close(other, tensor, atol=1e-7, rtol=1e-6, msg=name)


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("split", [True, False])
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
        assert reader.update(batch, loss)["loss"] == pytest.approx(writer.update(batch, loss)["loss"], rel=1e-6)
    resolution = 1e-5 if dtype == "float32" else torch.finfo(torch.bfloat16).eps
    for (name, tensor), (_, other) in zip(writer.weights(), reader.weights(), strict=True):
        assert (tensor.float() - other.float()).norm() <= resolution * tensor.float().norm(), name


def test_the_reference_backend_has_no_split_adam(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.distributed_optimizer: 'reference' runs on one device"):
        make(backend="reference")
