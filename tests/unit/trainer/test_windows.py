"""Windows, norms after attention and MLP, and stretched positions: in one process, against transformers. Over ranks:
tests/dist/test_layouts.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model

from rlflow.models.huggingface import digest
from rlflow.models.weight_files import write_model
from tests.unit.trainer.batches import VOCAB, make_batch, policy_gradient
from tests.unit.trainer.gradients import assert_gradients_equal_transformers

SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48}
NARROW = {"sliding_window": 7}


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("gemma3_text", {**NARROW, "tied": True}),
        ("mistral", NARROW),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
        pytest.param("gemma3_text", {**NARROW, "num_hidden_layers": 6}, marks=pytest.mark.slow),
        pytest.param("mixtral", NARROW, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_loss_and_gradients_equal_transformers(
    make: Any, family: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    path = tiny_model(tmp_path / "model", family, tokenizer=False, **{**SIZES, **sizes})
    assert_gradients_equal_transformers(make, path, tmp_path / "gradients")


def test_packing_and_recomputation_change_nothing(make: Any, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model", "gemma3_text", tokenizer=False, **SIZES, **NARROW)
    adamw = {"name": "adamw", "eps": 1e-5}
    plain = make(path, optimizer=adamw)
    other = make(path, optimizer=adamw, packing=True, recompute="full")
    for _ in range(2):
        expected, metrics = (
            trainer.update(make_batch(), policy_gradient) for trainer in (plain, other)
        )
    assert metrics["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-5)
    weights = dict(plain.weights())
    for name, weight in other.weights():
        assert (weight - weights[name]).norm() <= 1e-5 * weights[name].norm(), name


def test_a_checkpoint_continues_bit_for_bit(make: Any, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model", "gemma3_text", tokenizer=False, **SIZES, **NARROW)
    trainer, other = make(path), make(path)
    trainer.update(make_batch(), policy_gradient)
    trainer.save(tmp_path / "checkpoint", 1)
    assert other.load(tmp_path / "checkpoint") == 1
    metrics = trainer.update(make_batch(seed=1), policy_gradient)
    assert other.update(make_batch(seed=1), policy_gradient) == metrics
    assert digest(other.weights()) == digest(trainer.weights())


def test_adapters_are_added_before_the_norm_of_what_they_change(make: Any, tmp_path: Path) -> None:
    """What the adapted layers compute is what a model with merged weights computes."""
    path = tiny_model(tmp_path / "model", "gemma3_text", tokenizer=False, **SIZES, **NARROW)
    targets = ["q_proj", "o_proj", "down_proj"]
    trainer = make(path, lr=0.05, lora={"rank": 4, "alpha": 8, "targets": targets})
    before = trainer.score(make_batch())["logprobs"]
    for seed in range(2):
        trainer.update(make_batch(seed=seed), policy_gradient)
    adapted = trainer.score(make_batch())["logprobs"]
    assert (adapted - before).abs().max() > 1e-2
    write_model(tmp_path / "merged", trainer.weights(), path)
    merged = make(tmp_path / "merged").score(make_batch())["logprobs"]
    assert torch.allclose(adapted, merged, atol=2e-5)
