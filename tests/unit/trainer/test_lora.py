"""Adapters in place of the weights, in one process: against LoRA written out in torch. Over ranks: tests/dist/test_lora.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model

from rlflow.algorithms import PPOClipLoss, SumLoss, ValueLoss
from rlflow.errors import CheckpointError, ConfigError
from rlflow.models.huggingface import digest, header, iterate_weights, read_config
from rlflow.storage.pickles import read_metadata
from rlflow.trainer.options import LoraOptions
from tests.dist.lora_ranks import (
    ALPHA,
    LORA,
    LOSS,
    OPTIONS,
    RANK,
    check_against_plain,
    drawn_by_hand,
    train,
    train_plainly,
)
from tests.dist.megatron_ranks import make_batch
from tests.reference import ORACLE
from tests.unit.trainer.backends import BACKENDS
from tests.unit.trainer.batches import VOCAB

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def defaults() -> dict[str, Any]:
    return OPTIONS


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "scale": 0.15}
    return tiny_model(tmp_path_factory.mktemp("untied"), "qwen3", tokenizer=False, **sizes)


def updated(trainer: Any, updates: int = 2) -> Any:
    for _ in range(updates):
        trainer.update(make_batch(VOCAB), LOSS)
    return trainer


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2", {}),
        ("qwen3", {"packing": True, "recompute": "full"}),
        ("qwen2", {"recompute": "selective", "lora": {**LORA, "targets": ["v_proj", "up_proj"]}}),
        (
            "qwen3",
            {"tokens_per_microbatch": 20, "lora": {**LORA, "targets": ["down_proj", "k_proj"]}},
        ),
    ],
    ids=str,
)
def test_gradients_and_updates_are_those_of_plain_torch(
    model: Path, untied: Path, family: str, options: dict[str, Any]
) -> None:
    path, batch = {"qwen2": model, "qwen3": untied}[family], make_batch(VOCAB)
    found = train(path, batch, options)
    check_against_plain(found, train_plainly(path, batch, found["start"]))


def test_the_reference_backend_computes_it_too(make: Any, model: Path) -> None:
    batch, trainer = make_batch(VOCAB), make(backend=ORACLE)
    plain = train_plainly(model, batch, dict(trainer.adapter_weights()))
    for wanted in plain["metrics"]:
        got = trainer.update(batch, LOSS)
        assert got["gradient_norm"] == pytest.approx(wanted["gradient_norm"], rel=1e-5)
    for kind, found in (("adapters", trainer.adapter_weights()), ("weights", trainer.weights())):
        for name, value in found:
            torch.testing.assert_close(value, plain[kind][name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_starts_as_the_base_and_as_peft_draws_it(make: Any, model: Path, backend: str) -> None:
    trainer = make(backend=backend)
    assert digest(trainer.weights()) == digest(iterate_weights(model))
    config, found = read_config(model), dict(trainer.adapter_weights())
    assert len(found) == 2 * len(PROJECTIONS) * config["num_hidden_layers"]
    for name, value in found.items():
        layer, kind = name.removesuffix(".weight").rsplit(".", 1)
        assert layer.rsplit(".", 1)[1] in PROJECTIONS
        if kind == "lora_B":
            assert value.shape[1] == RANK and not bool(value.any())
        else:
            torch.testing.assert_close(value, drawn_by_hand(layer, value.shape[1], OPTIONS["seed"]))
    assert not torch.equal(*(found[f"model.layers.{i}.mlp.up_proj.lora_A.weight"] for i in (0, 1)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_stream_is_the_base_with_the_adapters_added_and_the_base_stays(
    make: Any, model: Path, backend: str
) -> None:
    trainer = make(backend=backend)
    before = {name: value.clone() for name, value in frozen(trainer)}
    updated(trainer)
    factors, base = dict(trainer.adapter_weights()), dict(iterate_weights(model))
    for _ in range(2):  # the second stream is the first: merging changes nothing
        for name, value in trainer.weights():
            expected, layer = base[name], name.removesuffix(".weight")
            if f"{layer}.lora_B.weight" in factors:
                b, a = (factors[f"{layer}.lora_{kind}.weight"].double() for kind in "BA")
                assert bool(b.any())
                expected = (expected.double() + ALPHA / RANK * b @ a).float()
            torch.testing.assert_close(value, expected, atol=1e-6, rtol=1e-6)
    for name, value in frozen(trainer):
        assert torch.equal(value, before[name]), name


def added(trainer: Any) -> dict[str, torch.Tensor]:
    """{name of a weight: what its adapter adds}, float64."""
    factors = dict(trainer.adapter_weights())
    return {
        name.replace("lora_B.", ""): ALPHA
        / RANK
        * value.double()
        @ factors[name.replace("lora_B", "lora_A")].double()
        for name, value in factors.items()
        if "lora_B" in name
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_bfloat16_most_of_the_first_updates_is_lost_and_of_float32_nothing(
    make: Any, untied: Path, backend: str
) -> None:
    """At the learning rate of real models; by hand, over all layers."""
    trainer = make(untied, backend=backend, dtype="bfloat16", lr=1e-5)
    kinds = (None, torch.bfloat16, torch.float32)
    bases = [dict(trainer.weights(merged=merged)) for merged in kinds]
    assert trainer.adapters_arrived() is None  # nothing is added yet
    updated(trainer)
    changes = added(trainer)
    for merged, base in zip(kinds, bases, strict=True):
        found = dict(trainer.weights(merged=merged))
        lost = sum(
            float((found[name].double() - base[name].double() - change).square().sum())
            for name, change in changes.items()
        )
        whole = sum(float(change.square().sum()) for change in changes.values())
        share = 1 - (lost / whole) ** 0.5
        assert trainer.adapters_arrived() == pytest.approx(max(share, 0), abs=0.02)
        assert share > 0.98 if merged is torch.float32 else share < 0.3
        adapted = {value.dtype for name, value in found.items() if name in changes}
        others = {value.dtype for name, value in found.items() if name not in changes}
        assert adapted == {merged or torch.bfloat16} and others == {torch.bfloat16}


def test_without_adapters_nothing_is_said_of_them(make: Any, untied: Path) -> None:
    trainer = make(untied, lora=None)
    assert digest(trainer.weights(merged=torch.bfloat16)) == digest(trainer.weights())
    assert trainer.adapters_arrived() is None


def frozen(trainer: Any) -> list[tuple[str, torch.Tensor]]:
    module = trainer.model if hasattr(trainer, "model") else trainer._chunks[0]
    return [
        (name, value.detach())
        for name, value in module.named_parameters()
        if not value.requires_grad
    ]


@pytest.mark.parametrize(
    "options", [{}, {"distributed_optimizer": True}, {"dtype": "bfloat16"}], ids=str
)
def test_the_frozen_base_has_neither_gradients_nor_moments(
    make: Any, options: dict[str, Any]
) -> None:
    trainer = updated(make(**options))
    adapters = sum(value.numel() for _, value in trainer.adapter_weights())
    whole = sum(parameter.numel() for parameter in trainer._chunks[0].parameters())
    assert 0 < adapters < whole / 4
    buffers = sum(buffer.grad_data.numel() for buffer in trainer._model[0].buffers)
    inner = getattr(trainer._optimizer, "chained_optimizers", [trainer._optimizer])[0].optimizer
    moments = sum(
        value.numel()
        for state in inner.state.values()
        for key, value in state.items()
        if key != "step"
    )
    assert (
        adapters <= buffers <= adapters + 64 * len(PROJECTIONS) * 4
    )  # Megatron fills up parts of a buffer
    assert moments == 2 * adapters
    assert all(
        parameter.grad is None
        for parameter in trainer._chunks[0].parameters()
        if not parameter.requires_grad
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_reference_is_the_base_and_snapshots_hold_adapters_alone(
    make: Any, backend: str
) -> None:
    batch, trainer = make_batch(VOCAB), make(backend=backend)
    base = trainer.score(batch)["logprobs"]
    trainer.snapshot("reference")
    updated(trainer)
    trainer.snapshot("proximal")
    proximal = trainer.score(batch)["logprobs"]
    updated(trainer)
    assert torch.equal(trainer.score(batch, "reference")["logprobs"], base)
    assert torch.equal(trainer.score(batch, "proximal")["logprobs"], proximal)
    assert not torch.equal(trainer.score(batch)["logprobs"], proximal)
    adapters = sum(value.numel() for _, value in trainer.adapter_weights())
    snapshots = trainer.snapshots if backend == ORACLE else trainer._snapshots
    assert [sum(value.numel() for value in held.values()) for held in snapshots.values()] == [
        adapters,
        adapters,
    ]


def test_the_reference_runs_without_its_adapters(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a checkpoint too; one that is taken anew from a trained policy runs with them."""
    from rlflow.trainer.megatron.low_rank import LayerAdapter

    batch, trainer, calls = make_batch(VOCAB), make(), []
    forward = LayerAdapter.forward
    monkeypatch.setattr(LayerAdapter, "forward", lambda *args: calls.append(args) or forward(*args))
    trainer.snapshot("reference")
    trainer.score(batch, "reference")
    assert not calls
    updated(trainer)
    calls.clear()
    trainer.score(batch, "reference")
    assert not calls
    trainer.snapshot("reference")
    trainer.score(batch, "reference")
    assert calls


def tensors_of(checkpoint: Path) -> list[str]:
    """The names of everything with elements that a checkpoint holds."""
    if (checkpoint / "policy.safetensors").is_file():
        return [
            *header(checkpoint / "policy.safetensors"),
            *header(checkpoint / "snapshots.safetensors"),
        ]
    with (checkpoint / ".metadata").open("rb") as file:
        return list(read_metadata(file).tensors)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"backend": ORACLE},
        {
            "dtype": "bfloat16",
            "distributed_optimizer": True,
            "release_gradients": True,
            "packing": True,
        },
    ],
    ids=str,
)
def test_a_checkpoint_holds_adapters_alone_and_resumes_exactly(
    make: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    batch, trainer, resumed = make_batch(VOCAB), make(**options), make(**options)
    trainer.snapshot("reference")
    updated(trainer)
    trainer.begin_save(tmp_path / "checkpoint", 7)
    assert trainer.finish_save()
    assert all("lora" in name for name in tensors_of(tmp_path / "checkpoint"))
    assert resumed.load(tmp_path / "checkpoint") == 7
    for _ in range(2):
        assert trainer.update(batch, LOSS) == resumed.update(batch, LOSS)
        assert torch.equal(
            *(one.score(batch, "reference")["logprobs"] for one in (trainer, resumed))
        )
    assert digest(resumed.adapter_weights()) == digest(trainer.adapter_weights())
    assert digest(resumed.weights()) == digest(trainer.weights())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_of_other_adapters_or_another_base_is_refused(
    make: Any, model: Path, tmp_path: Path, backend: str
) -> None:
    other = tiny_model(tmp_path / "other", "qwen2", tied=True, tokenizer=False, seed=9, vocab_size=VOCAB,
                       hidden_size=32, intermediate_size=48)  # fmt: skip
    trainer = make(backend=backend)
    trainer.save(tmp_path / "adapters", 1)
    whole = make(backend=backend, lora=None)
    whole.save(tmp_path / "whole", 1)
    refused: list[tuple[Any, str, str]] = [
        (
            make(other, backend=backend),
            "adapters",
            r"holds adapters of other weights \(content hash .*set model\.path to the model",
        ),
        (
            make(backend=backend, lora={**LORA, "rank": 8}),
            "adapters",
            r"written with trainer\.lora\.rank=4, found 8; set it as",
        ),
        (
            make(backend=backend, lora={**LORA, "targets": ["q_proj"]}),
            "adapters",
            r"written with trainer\.lora\.targets=\['q_proj', 'k",
        ),
        (
            trainer,
            "whole",
            r"holds whole weights, and trainer\.lora is set, .*leave trainer\.lora out",
        ),
        (
            whole,
            "adapters",
            r"holds LoRA adapters alone, and trainer\.lora is not set; set it to \{rank: 4, alpha: 12\.0, targets: \[q_p",
        ),
    ]
    for one, name, message in refused:
        before = digest(one.weights())
        with pytest.raises(CheckpointError, match=message):
            one.load(tmp_path / name)
        assert digest(one.weights()) == before


def test_the_same_base_in_other_files_is_the_same(make: Any, model: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    copy = tiny_model(
        tmp_path / "copy",
        "qwen2",
        tied=True,
        tokenizer=False,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
    )
    weights = sorted(iterate_weights(copy), reverse=True)
    (copy / "model.safetensors").unlink()
    files = {"a.safetensors": dict(weights[:5]), "b.safetensors": dict(weights[5:])}
    for name, tensors in files.items():
        save_file(tensors, copy / name)
    index = {"weight_map": {key: name for name, tensors in files.items() for key in tensors}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    updated(make()).save(tmp_path / "checkpoint", 2)
    assert make(copy).load(tmp_path / "checkpoint") == 2


def test_a_critic_learns_adapters_and_its_head(make: Any, untied: Path) -> None:
    batch, loss = make_batch(VOCAB), SumLoss((PPOClipLoss(), ValueLoss()))
    draw = torch.Generator().manual_seed(0)
    returns = torch.randn(batch.tokens.shape, generator=draw) * batch.loss_mask
    batch = batch.replace(values=torch.zeros_like(returns), returns=returns)
    found, expected = (
        make(untied, backend=backend, critic={"lr": 1e-2}) for backend in ("megatron", ORACLE)
    )
    for _ in range(3):
        got, wanted = found.update(batch, loss), expected.update(batch, loss)
        assert got["critic_gradient_norm"] == pytest.approx(
            wanted["critic_gradient_norm"], rel=2e-5
        )
    values = [one.score(batch, want=("values",))["values"] for one in (found, expected)]
    assert float(values[0].abs().max()) > 0.01
    torch.testing.assert_close(*values, atol=2e-5, rtol=0)
    assert len(dict(found.critic.adapter_weights())) == len(dict(found.adapter_weights()))


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 0}, r"trainer\.lora\.rank: expected a whole number above 0, found 0"),
        ({"alpha": -1}, r"trainer\.lora\.alpha: expected a number above 0, found -1"),
        (
            {"targets": []},
            r"trainer\.lora\.targets: expected at least one of q_proj, k_proj.*leave it out for all",
        ),
        (
            {"targets": ["qproj"]},
            r"trainer\.lora\.targets\[0\]: expected one of q_proj.*Did you mean 'q_proj'",
        ),
        ({"targets": ["lm_head"]}, r"trainer\.lora\.targets\[0\]: expected one of q_proj"),
        ({"dropout": 0.1}, r"trainer\.lora.*dropout.*: rank, alpha, targets"),
    ],
)
def test_options_are_checked_before_anything_starts(
    model: Path, lora: dict[str, Any], message: str
) -> None:
    from rlflow.config.checks import check_config
    from rlflow.config.schema import load_config
    from rlflow.trainer.base import Trainer

    with pytest.raises(ConfigError, match=message):
        Trainer.from_pretrained(model, lora=lora)
    with pytest.raises(ConfigError, match=message):
        check_config(load_config(overrides=[f"trainer.lora={json.dumps(lora)}"]), components=False)


def test_one_option_on_the_command_line_turns_it_on() -> None:
    from rlflow.config.schema import load_config

    assert load_config().trainer.lora is None
    made = load_config(
        overrides=["trainer.lora.rank=8", "trainer.lora.targets=[v_proj, q_proj]"]
    ).trainer.lora
    assert made == LoraOptions(rank=8, alpha=32.0, targets=("q_proj", "v_proj"))
