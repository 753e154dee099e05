"""Gradients of an update, by HuggingFace name, against those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow.models.huggingface import digest, iterate_weights
from tests.unit.trainer.batches import make_batch, policy_gradient


def assert_gradients_equal_transformers(make: Any, path: Path, out: Path) -> dict[str, Tensor]:
    """Those of the first update of a trainer that `make` makes of the model; they are returned. out: a folder for
    transformers'."""
    trainer = make(path, max_gradient_norm=0.0, tokens_per_microbatch=50)
    assert digest(trainer.weights()) == digest(iterate_weights(path)), (
        "HF -> Megatron -> HF is not bit-exact"
    )
    metrics = trainer.update(make_batch(), policy_gradient)
    loss, expected = _transformers_gradients(path, out)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    total = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert metrics["gradient_norm"] == pytest.approx(total.item(), rel=1e-5)
    found = gradients(trainer)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name
    return found


def gradients(trainer: Any) -> dict[str, Tensor]:
    """Those of the last update by HuggingFace name: in place of the weights, they leave as weights do."""
    for chunk in trainer._chunks:
        for parameter in chunk.parameters():
            parameter.data.copy_(parameter.main_grad)
        for name, bias in chunk.named_buffers():
            bias *= not name.endswith("expert_bias")  # it has none
    return dict(trainer.weights())


def _transformers_gradients(path: Path, out: Path) -> tuple[float, dict[str, Tensor]]:
    """The loss of `policy_gradient` and its gradients, from full logits; saved as weights, transformers names them."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager"
    )
    batch = make_batch()
    logits = oracle(batch.tokens).logits[:, :-1] / 0.8
    logprobs = logits.log_softmax(-1).gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    loss = -(batch.weights * batch.advantages)[:, 1:].mul(logprobs).sum()
    loss.backward()
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.copy_(
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
        for name, bias in oracle.named_buffers():
            bias *= not name.endswith("correction_bias")
    oracle.save_pretrained(str(out))
    return loss.item(), dict(iterate_weights(out))
