"""What is rounded and what is computed twice: bfloat16 over float32 master weights, activation recompute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model
from torch import Tensor

from rlflow.models.huggingface import digest
from rlflow.types import Batch, PolicyOutput
from tests.dist.megatron_ranks import PolicyGradientWithEntropy, make_batch
from tests.unit.trainer.batches import VOCAB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, sizes = (
        tmp_path_factory.mktemp("model"),
        {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 4},
    )
    return tiny_model(path, "qwen2", tied=True, tokenizer=False, vocab_size=VOCAB, **sizes)


@pytest.mark.parametrize("distributed", [False, True])
def test_updates_below_the_resolution_of_bfloat16_add_up(make: Any, distributed: bool) -> None:
    """Weights of 0.25 to 0.5 are 2^-9 apart in bfloat16. Steps of 2^-12 would each be rounded away; 16 of them are not."""
    adamw = {"name": "adamw", "weight_decay": 0.0}
    trainer = make(
        dtype="bfloat16", lr=2.0**-12, optimizer=adamw, distributed_optimizer=distributed
    )
    start, batch = dict(trainer.weights()), make_batch(VOCAB)
    trainer.update(batch, PolicyGradientWithEntropy())
    once = dict(trainer.weights())
    for _ in range(15):
        trainer.update(batch, PolicyGradientWithEntropy())

    def moved(weights: dict[str, Tensor]) -> float:
        """The share of elements of that size that have changed."""
        name = "model.layers.1.mlp.down_proj.weight"
        sized = (start[name].abs() >= 0.25) & (start[name].abs() < 0.5)
        assert sized.sum() > 10
        return float((weights[name] != start[name])[sized].float().mean())

    # The first step shows where a weight was loaded: exactly on a number of bfloat16, so a quarter of a gap is lost.
    assert moved(once) == 0.0
    assert moved(dict(trainer.weights())) > 0.5


def kept_bytes(trainer: Any) -> int:
    """What the forward pass of one micro-batch keeps for the backward pass, weights aside."""
    sizes: dict[int, int] = {}
    alive, answer = [], []
    weights = {
        parameter.untyped_storage().data_ptr()
        for chunk in trainer._chunks
        for parameter in chunk.parameters()
    }

    def note(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        alive.append(tensor)  # so that no address is used twice
        return tensor

    def loss(output: PolicyOutput, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        answer.append(sum(size for place, size in sizes.items() if place not in weights))
        return -output.logprobs, {}

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        trainer.update(make_batch(VOCAB, rows=64), loss)
    assert len(answer) == 1, "expected one micro-batch"
    return answer[0]


def test_recompute_changes_no_bit_and_keeps_less(make: Any) -> None:
    batch, loss = make_batch(VOCAB), PolicyGradientWithEntropy()
    results, kept = {}, {}
    for recompute in ("none", "selective", "full"):
        trainer = make(recompute=recompute)
        metrics = [trainer.update(batch, loss) for _ in range(2)]
        results[recompute] = (metrics, digest(trainer.weights()))
        kept[recompute] = kept_bytes(trainer)
    assert results["none"] == results["selective"] == results["full"]
    assert kept["full"] < 0.15 * kept["none"]
    assert kept["selective"] < 0.6 * kept["none"]
