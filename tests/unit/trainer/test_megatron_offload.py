"""What leaves the GPU changes no result. The machine of these tests has none: moving is a copy within host memory here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.errors import ConfigError
from rlflow.models.huggingface import digest
from rlflow.trainer.base import Trainer
from rlflow.trainer.megatron import adam_state, offload
from rlflow.trainer.megatron.cpu import adapted
from rlflow.trainer.megatron.offload import HostAdamW
from rlflow.trainer.megatron.optimizer import make_optimizer
from rlflow.trainer.optimizers import AdamW
from rlflow.types import Batch, PolicyOutput
from tests.dist.megatron_ranks import PolicyGradientWithEntropy, make_batch
from tests.reference import ORACLE
from tests.unit.trainer.batches import VOCAB

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@pytest.fixture
def defaults() -> dict[str, Any]:
    return {"lr": 1e-3, "optimizer": {"name": "adamw", "weight_decay": 0.1}}


def on_host(trainer: Any) -> Trainer:
    """The trainer with the optimizer that `optimizer.offload` gives it on a GPU."""
    with adapted():
        trainer._optimizer = make_optimizer(
            trainer._model, AdamW(weight_decay=0.1, offload=True), 1e-3, 1.0
        )
    return trainer


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param({"distributed_optimizer": True}, marks=pytest.mark.slow),
        {"dtype": "bfloat16", "distributed_optimizer": True},
    ],
    ids=str,
)
def test_adam_in_host_memory_equals_adam(
    make: Any, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, through a checkpoint of it too, whatever the pieces."""
    monkeypatch.setattr(offload, "PIECE", 256)
    monkeypatch.setattr(adam_state, "ROUND", 4000)  # several collectives
    batch, loss = make_batch(VOCAB), PolicyGradientWithEntropy()
    plain, host = make(**options), on_host(make(**options))
    for _ in range(2):
        assert plain.update(batch, loss) == host.update(batch, loss)
    assert digest(plain.weights()) == digest(host.weights())
    host.save(tmp_path, 2)
    resumed = on_host(make(**options))
    resumed.load(tmp_path)
    assert plain.update(batch, loss) == resumed.update(batch, loss)
    assert digest(plain.weights()) == digest(resumed.weights())
    inner = getattr(host._optimizer, "chained_optimizers", [host._optimizer])[0].optimizer
    assert isinstance(inner, HostAdamW)
    held = sum(
        parameter.untyped_storage().size()
        for group in inner.param_groups
        for parameter in group["params"]
    )
    assert (held == 0) == (
        "dtype" in options
    )  # float32 weights of a bfloat16 model are on the host alone


def test_page_locked_buffers_waste_little_by_powers_of_two() -> None:
    """A third of Qwen2.5-3B's weights, one buffer per tensor."""
    layer = {
        "qkv": 2 * 2560 * 2048,
        "proj": 2 * 2048**2,
        "fc1": 2 * 22016 * 2048,
        "fc2": 2 * 11008 * 2048,
        "norm": 4096,
    }
    sizes = {"embedding": 2 * 151936 * 2048} | {
        f"{number} {name}": size for number in range(36) for name, size in layer.items()
    }
    buffers = list(offload.shared_buffers(sizes))
    assert [name for _, names in buffers for name in names] == list(sizes)
    for size, names in buffers:
        assert size.bit_count() == 1 and sum(sizes[name] for name in names) <= size
    alone = sum(1 << (size - 1).bit_length() for size in sizes.values())
    assert alone > 1.3 * sum(sizes.values()) > 1.3 / 1.1 * sum(size for size, _ in buffers)


@pytest.mark.parametrize("options", [{}, {"distributed_optimizer": True}], ids=str)
def test_releasing_gradients_changes_nothing_and_frees_them(
    make: Any, options: dict[str, Any]
) -> None:
    batch, loss = make_batch(VOCAB), PolicyGradientWithEntropy()
    plain, released = make(**options), make(release_gradients=True, **options)

    def fails(output: PolicyOutput, batch: Batch) -> Any:
        raise ZeroDivisionError

    for step in range(4):  # before the first update too
        if step == 2:
            with pytest.raises(ZeroDivisionError):
                released.update(batch, fails)
        elif step:
            assert plain.update(batch, loss) == released.update(batch, loss)
        sizes = [
            sum(
                buffer.grad_data.untyped_storage().size()
                for chunk in trainer._model
                for buffer in chunk.buffers
            )
            for trainer in (plain, released)
        ]
        assert sizes[0] > 0
        assert sizes[1] == 0
    assert digest(plain.weights()) == digest(released.weights())


def test_a_snapshot_in_host_memory_scores_as_the_policy_did(make: Any) -> None:
    batch, trainer = make_batch(VOCAB), make()
    trainer._offload_snapshots = True
    before = trainer.score(batch)["logprobs"]
    trainer.snapshot("reference")
    trainer.update(batch, PolicyGradientWithEntropy())
    assert torch.equal(trainer.score(batch, "reference")["logprobs"], before)
    assert not torch.equal(trainer.score(batch)["logprobs"], before)


@WITHOUT_GPU
@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("optimizer.offload", {"optimizer": {"name": "adamw", "offload": True}}),
        ("offload_snapshots", {"offload_snapshots": True}),
    ],
)
def test_offloading_is_refused_by_name_without_a_gpu(
    make: Any, key: str, options: dict[str, Any]
) -> None:
    with pytest.raises(
        ConfigError, match=rf"trainer\.{key}: found true, but the trainer has no GPU"
    ):
        make(**options)


def test_the_reference_backend_refuses_by_name(make: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"trainer\.release_gradients: 'reference' runs on one device"
    ):
        make(backend=ORACLE, release_gradients=True)
