"""Training on a GPU that is not there: the path of GPUs with real values, unmixed devices, and the host's waits counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.trainer.base import Trainer
from rlflow.trainer.megatron import checkpoint, layers, offload
from rlflow.trainer.megatron.cpu import adapted
from rlflow.trainer.megatron.megatron_trainer import MegatronTrainer
from tests.fake_cuda import fake_cuda, on_cuda
from tests.fake_transformer_engine import PACKAGES
from tests.fixtures import tiny_model
from tests.unit.trainer.batches import VOCAB, make_batch, policy_gradient
from tests.unit.trainer.on_gpu import CASES, LAYERS, OFFLOADED, exercise, varlen

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU")
ROOT = Path(__file__).resolve().parents[3]
WAITS = 1
"""How often the host waits for the GPU in each micro-batch: once, for the number of predicted tokens. This figure only falls."""
ROUNDING = {"float32": 1e-5, "bfloat16": 1e-2}
"""Relative: the operations of GPUs round in other places."""
ENGINE = ("packed", "padded float32", "recompute", "LoRA", "critic", "off the GPU")
"""Cases with Transformer Engine."""
SLOW = ("float32", "padded float32")
"""Their parts are in others: float32 in "modules recomputed", padding in "padded"."""


@pytest.fixture(scope="module")
def on_cpu(model: Path) -> Any:
    known: dict[str, Any] = {}

    def of(name: str) -> dict[str, Any]:
        if name not in known:
            known[name] = exercise(model, None, CASES[name])
        return known[name]

    return of


def check(name: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """What holds of every case: it computes what the CPU does, its weights are the model's, a resumed run continues
    bit for bit, and the host waits once per micro-batch, outside of layers."""
    close = ROUNDING[CASES[name].get("dtype", "float32")]
    for key in ("loss", "gradient_norm"):
        assert found[key] == pytest.approx(expected[key], rel=close)
    assert found["score"] == pytest.approx(expected["score"], rel=close)
    assert found["weights"] == expected["weights"] and found.get("reference", True)
    assert found.get("teacher", 0) < 5 * close
    assert found["resumed"] == 0 < found["moved"]
    assert not [place for place in found["waits"] if LAYERS.search(place)]
    assert sum(found["waits"].values()) <= WAITS


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES],
)
def test_local_layers_compute_what_the_cpu_does(
    name: str, model: Path, on_cpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "varlen_attn", varlen)
    monkeypatch.setattr(offload, "PIECE", 256)  # so that many are on their way
    with fake_cuda() as gpu:
        found = exercise(
            model, gpu, {**CASES[name], **(OFFLOADED if name == "off the GPU" else {})}
        )
    assert gpu.backends == ["cpu:gloo,cuda:nccl"]
    check(name, found, on_cpu(name))
    if name == "off the GPU":
        with fake_cuda() as gpu:
            assert found["trained"] == exercise(model, gpu, CASES[name])["trained"]


def test_experts_compute_what_the_cpu_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_model(
        tmp_path,
        "qwen3_moe",
        tokenizer=False,
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=1,
    )

    def updated() -> dict[str, float]:
        options = {"tokens_per_microbatch": 40, "packing": True, "dtype": "bfloat16"}
        with closing(Trainer.from_pretrained(path, lr=1e-3, **options)) as trainer:
            found = trainer.update(make_batch(), policy_gradient)
        return {name: found[name] for name in ("loss", "gradient_norm")}

    expected = updated()
    monkeypatch.setattr(layers, "varlen_attn", varlen)
    with fake_cuda():
        assert updated() == pytest.approx(expected, rel=ROUNDING["bfloat16"])


def test_snapshots_in_host_memory_are_loaded_past_the_gpu(model: Path, tmp_path: Path) -> None:
    with (
        fake_cuda() as gpu,
        closing(Trainer.from_pretrained(model, offload_snapshots=True)) as trainer,
    ):
        assert isinstance(trainer, MegatronTrainer)
        trainer.snapshot("reference")
        kept = trainer._snapshots["reference"]
        trainer.save(tmp_path, 1)
        with adapted():
            loaded = checkpoint.load(tmp_path, trainer._state(0), trainer._kept)
        found = loaded.snapshots["reference"]
        assert all(gpu.is_pinned(value) and not on_cuda(value) for value in found.values())
        assert all(torch.equal(found[name], value) for name, value in kept.items())


@pytest.fixture(scope="module")
def engine(model: Path) -> dict[str, Any]:
    """{case: what came of it} with Transformer Engine's layers, in a process of its own: Megatron looks for them once."""
    if PACKAGES not in os.environ:
        pytest.skip(
            f"no Python of Transformer Engine: tests/environments.sh fetches it for --full, and sets {PACKAGES}"
        )
    command = [
        sys.executable,
        "-m",
        "tests.unit.trainer.on_gpu",
        str(model),
        os.environ[PACKAGES],
        *ENGINE,
    ]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ENGINE)
def test_transformer_engines_layers_compute_what_the_cpu_does(
    name: str, engine: dict[str, Any], on_cpu: Any
) -> None:
    found = engine[name]
    check(name, found, on_cpu(name))
    assert found["layers"] == (
        "ColumnParallelLinear" if name == "LoRA" else "TELayerNormColumnParallelLinear"
    )
    assert found["optimizer"] == ("HostAdamW" if name == "off the GPU" else "FusedAdam")
    assert "rope" in found["calls"]


# ---------------------------------------------------------------- a fake that notices


def test_devices_do_not_mix() -> None:
    with fake_cuda() as gpu:
        there, here = torch.ones(3, device="cuda"), torch.ones(3)
        assert there.device == torch.device("cuda:0") and there.is_cuda and not here.is_cuda
        with pytest.raises(
            RuntimeError, match=r"same device, but add at .* got cuda \[\(3,\)\] and cpu \[\(3,\)\]"
        ):
            there + here
        with pytest.raises(TypeError, match="convert cuda:0 device type tensor to numpy"):
            there.numpy()
        with pytest.raises(RuntimeError, match="indices should be on the same device"):
            here[torch.zeros(2, dtype=torch.int64, device="cuda")]
        assert not gpu.waits
        assert (there.to("cpu") + here).tolist() == [2, 2, 2] and float(there.sum()) == 3
        assert sorted(name for name, _ in gpu.waits) == ["__float__", "to cpu"]
    assert not torch.cuda.is_available()


def test_copies_on_other_streams_are_late() -> None:
    """Whoever reads too early, or writes what is still to be read, computes something else."""
    with fake_cuda():
        there, here = torch.ones(2, device="cuda"), torch.zeros(2, pin_memory=True)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            here.copy_(there, non_blocking=True)
            event = stream.record_event()
        assert here.tolist() == [0, 0]
        event.synchronize()
        assert here.tolist() == [1, 1]
        with torch.cuda.stream(stream):
            there.copy_(here, non_blocking=True)
        here.fill_(3)
        torch.cuda.current_stream().wait_stream(stream)
        assert there.tolist() == [3, 3]


# ---------------------------------------------------------------- optimizers


class FusedAdam(torch.optim.Optimizer):
    """Counts as those of Transformer Engine (pytorch/optimizers/fused_adam.py) and Apex do: one number per group."""

    def __init__(
        self, params: Any, lr: float, betas: Any, eps: float, weight_decay: float, **_: Any
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group["step"] + 1 if "step" in group else 1
            beta1, beta2 = group["betas"]
            for value in group["params"]:
                state, gradient = self.state[value], value.grad
                if not state:
                    state |= {
                        "exp_avg": torch.zeros_like(value),
                        "exp_avg_sq": torch.zeros_like(value),
                    }
                mean = state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1) / (
                    1 - beta1 ** group["step"]
                )
                square = (
                    state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                )
                spread = (square / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
                value.sub_(group["lr"] * (mean / spread + group["weight_decay"] * value))


KINDS = (FusedAdam, torch.optim.Adam, torch.optim.AdamW)
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"dtype": "bfloat16"}, {"distributed_optimizer": True})


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(kind, options, marks=() if number == other else pytest.mark.slow)
        for number, kind in enumerate(KINDS)
        for other, options in enumerate(OPTIONS)
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_resumed_run_updates_as_the_uninterrupted_one(
    kind: Any, options: dict[str, Any], make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Adam's count is lost, its first updates are up to 2.2 times too large."""
    import megatron.core.optimizer as megatron
    from megatron.core.optimizer import distrib_optimizer

    for module in (megatron, distrib_optimizer):
        monkeypatch.setattr(module, "Adam", kind)
    monkeypatch.setattr(megatron, "USING_PYTORCH_OPTIMIZER", kind is not FusedAdam)
    if kind is torch.optim.Adam:
        monkeypatch.setattr(torch.optim, "AdamW", kind)
    trainer, resumed = make(**options), make(**options)
    inner = getattr(trainer._optimizer, "chained_optimizers", [trainer._optimizer])[0].optimizer
    assert type(inner) is kind
    for number in range(3):
        trainer.update(make_batch(seed=number), policy_gradient)
    trainer.save(tmp_path, 3)
    resumed.load(tmp_path)
    batch = make_batch(seed=3)
    for one in (trainer, resumed):
        one.update(batch, policy_gradient)
    assert torch.equal(trainer.score(batch)["logprobs"], resumed.score(batch)["logprobs"])
