"""The Megatron trainer on a GPU against the plain trainer on the CPU, and against itself after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.trainer.megatron.model import LAYERS
from tests.reference import ORACLE
from tests.unit.trainer.batches import make_batch, policy_gradient

pytestmark = pytest.mark.gpu
HOST = {"optimizer": {"name": "adamw", "offload": True}}
WAYS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"packing": True},
    "computed again": {"packing": True, "recompute": "full"},
    "distributed optimizer": {"packing": True, "distributed_optimizer": True},
    "Adam in host memory": {"packing": True, **HOST},
    "snapshots in host memory": {"offload_snapshots": True},
    "gradients released": {"release_gradients": True},
    "adapters": {"lora": {"rank": 4}},
}


@pytest.fixture(autouse=True)
def local_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine's attention takes no float32."""
    monkeypatch.setenv(LAYERS, "local")
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_updates_on_a_gpu_are_those_of_the_plain_trainer_on_the_cpu(
    make: Any, options: dict[str, Any]
) -> None:
    batch = make_batch()
    kind = {name: value for name, value in options.items() if name == "lora"}
    ours, plain = make(**options), make(backend=ORACLE, device="cpu", **kind)
    for trainer in (ours, plain):
        trainer.snapshot("reference")
    before = plain.score(batch)["logprobs"]
    assert (ours.score(batch)["logprobs"] - before).abs().max() < 1e-4
    for _ in range(2):
        found, expected = ours.update(batch, policy_gradient), plain.update(batch, policy_gradient)
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3, abs=1e-5)
        assert found["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-3)
    after = plain.score(batch)["logprobs"]
    assert (after - before).abs().max() > 1e-3
    assert (ours.score(batch)["logprobs"] - after).abs().max() < 1e-3
    assert (ours.score(batch, "reference")["logprobs"] - before).abs().max() < 1e-4


@pytest.mark.parametrize("layers", ["local", "auto"])
@pytest.mark.parametrize("options", [{}, HOST, {"distributed_optimizer": True}], ids=str)
def test_the_update_after_a_resume_is_that_of_the_uninterrupted_run(
    make: Any, tmp_path: Path, layers: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, with Transformer Engine's layers and Adam where they are installed. A wrong count of
    updates shows after several."""
    monkeypatch.setenv(LAYERS, layers)
    batch, asked = make_batch(), {"dtype": "bfloat16", "packing": True, **options}
    live = make(**asked)
    for _ in range(12):
        live.update(batch, policy_gradient)
    live.save(tmp_path, 12)
    live.update(batch, policy_gradient)
    expected = live.score(batch)["logprobs"]
    resumed = make(**asked)
    for trainer in (resumed, live):
        assert trainer.load(tmp_path) == 12
        trainer.update(batch, policy_gradient)
        assert (trainer.score(batch)["logprobs"] - expected).abs().max() < 1e-5
