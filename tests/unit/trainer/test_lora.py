"""Adapters in place of the weights, in one process: against LoRA written out in torch. Over ranks: tests/dist/test_lora.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model

from rlflow.algorithms import PPOClipLoss, SumLoss, ValueLoss
from rlflow.errors import CheckpointError, ConfigError, ModelError, StorageError
from rlflow.models.adapter import merge_adapter, read_adapter, write_adapter
from rlflow.models.huggingface import digest, header, iterate_weights, read_config
from rlflow.run.export import export_adapter, export_policy
from rlflow.storage.pickles import read_metadata
from rlflow.trainer.options import LoraOptions
from tests.dist.lora_ranks import (
    ALPHA,
    EPS,
    LORA,
    LOSS,
    LR,
    OPTIONS,
    RANK,
    check_against_plain,
    drawn_by_hand,
    gathered_gradients,
    train,
    train_plainly,
)
from tests.dist.megatron_ranks import gathered_logits, make_batch
from tests.unit.trainer.batches import VOCAB, policy_gradient

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
        ("qwen3", {"tokens_per_microbatch": 20, "lora": {**LORA, "targets": ["down_proj", "k_proj"]}}),
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
    batch, trainer = make_batch(VOCAB), make(backend="reference")
    plain = train_plainly(model, batch, dict(trainer.adapter_weights()))
    for wanted in plain["metrics"]:
        got = trainer.update(batch, LOSS)
        assert got["gradient_norm"] == pytest.approx(wanted["gradient_norm"], rel=1e-5)
    for kind, found in (("adapters", trainer.adapter_weights()), ("weights", trainer.weights())):
        for name, value in found:
            torch.testing.assert_close(value, plain[kind][name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["megatron", "reference"])
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


@pytest.mark.parametrize("backend", ["megatron", "reference"])
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


def frozen(trainer: Any) -> list[tuple[str, torch.Tensor]]:
    module = trainer.model if hasattr(trainer, "model") else trainer._chunks[0]
    return [(name, value.detach()) for name, value in module.named_parameters() if not value.requires_grad]


@pytest.mark.parametrize("options", [{}, {"distributed_optimizer": True}, {"dtype": "bfloat16"}], ids=str)
def test_the_frozen_base_has_neither_gradients_nor_moments(make: Any, options: dict[str, Any]) -> None:
    trainer = updated(make(**options))
    adapters = sum(value.numel() for _, value in trainer.adapter_weights())
    whole = sum(parameter.numel() for parameter in trainer._chunks[0].parameters())
    assert 0 < adapters < whole / 4
    buffers = sum(buffer.grad_data.numel() for buffer in trainer._model[0].buffers)
    inner = getattr(trainer._optimizer, "chained_optimizers", [trainer._optimizer])[0].optimizer
    moments = sum(value.numel() for state in inner.state.values() for key, value in state.items() if key != "step")
    assert adapters <= buffers <= adapters + 64 * len(PROJECTIONS) * 4  # Megatron fills up parts of a buffer
    assert moments == 2 * adapters
    assert all(parameter.grad is None for parameter in trainer._chunks[0].parameters() if not parameter.requires_grad)


@pytest.mark.parametrize("backend", ["megatron", "reference"])
def test_the_reference_is_the_base_and_snapshots_hold_adapters_alone(make: Any, backend: str) -> None:
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
    snapshots = trainer.snapshots if backend == "reference" else trainer._snapshots
    assert [sum(value.numel() for value in held.values()) for held in snapshots.values()] == [adapters, adapters]


def test_the_reference_runs_without_its_adapters(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a checkpoint too; one that is taken anew from a trained policy runs with them."""
    from rlflow.trainer.megatron.lora import LayerAdapter

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
        return [*header(checkpoint / "policy.safetensors"), *header(checkpoint / "snapshots.safetensors")]
    with (checkpoint / ".metadata").open("rb") as file:
        return list(read_metadata(file).tensors)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"backend": "reference"},
        {"dtype": "bfloat16", "distributed_optimizer": True, "release_gradients": True, "packing": True},
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
        assert torch.equal(*(one.score(batch, "reference")["logprobs"] for one in (trainer, resumed)))
    assert digest(resumed.adapter_weights()) == digest(trainer.adapter_weights())
    assert digest(resumed.weights()) == digest(trainer.weights())


@pytest.mark.parametrize("backend", ["megatron", "reference"])
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
        (trainer, "whole", r"holds whole weights, and trainer\.lora is set, .*leave trainer\.lora out"),
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
        tmp_path / "copy", "qwen2", tied=True, tokenizer=False, vocab_size=VOCAB, hidden_size=32, intermediate_size=48
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
    found, expected = (make(untied, backend=backend, critic={"lr": 1e-2}) for backend in ("megatron", "reference"))
    for _ in range(3):
        got, wanted = found.update(batch, loss), expected.update(batch, loss)
        assert got["critic_gradient_norm"] == pytest.approx(wanted["critic_gradient_norm"], rel=2e-5)
    values = [one.score(batch, want=("values",))["values"] for one in (found, expected)]
    assert float(values[0].abs().max()) > 0.01
    torch.testing.assert_close(*values, atol=2e-5, rtol=0)
    assert len(dict(found.critic.adapter_weights())) == len(dict(found.adapter_weights()))


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 0}, r"trainer\.lora\.rank: expected a whole number above 0, found 0"),
        ({"alpha": -1}, r"trainer\.lora\.alpha: expected a number above 0, found -1"),
        ({"targets": []}, r"trainer\.lora\.targets: expected at least one of q_proj, k_proj.*leave it out for all"),
        ({"targets": ["qproj"]}, r"trainer\.lora\.targets\[0\]: expected one of q_proj.*Did you mean 'q_proj'"),
        ({"targets": ["lm_head"]}, r"trainer\.lora\.targets\[0\]: expected one of q_proj"),
        ({"dropout": 0.1}, r"trainer\.lora: unknown keyword 'dropout'\. It takes: rank, alpha, targets"),
    ],
)
def test_options_are_checked_before_anything_starts(model: Path, lora: dict[str, Any], message: str) -> None:
    from rlflow.config.checks import check_config
    from rlflow.config.schema import load_config
    from rlflow.trainer.base import Trainer

    with pytest.raises(ConfigError, match=message):
        Trainer.from_pretrained(model, lora=lora)
    with pytest.raises(ConfigError, match=message):
        check_config(load_config(overrides=[f"trainer.lora={json.dumps(lora)}"]), components=False)


def test_one_option_on_the_command_line_turns_it_on() -> None:
    from rlflow.config.schema import load_config

    assert load_config().trainer.adapters is None
    made = load_config(overrides=["trainer.lora.rank=8", "trainer.lora.targets=[v_proj, q_proj]"]).trainer.adapters
    assert made == LoraOptions(rank=8, alpha=32.0, targets=("q_proj", "v_proj"))


# ---------------------------------------------------------------- folders of adapters


@pytest.fixture
def folder(make: Any, model: Path, tmp_path: Path) -> tuple[Any, Path]:
    """A trainer after two updates, and the folder of its adapters."""
    trainer = updated(make())
    options = LoraOptions.of(LORA)
    write_adapter(
        tmp_path / "adapter", trainer.adapter_weights(), base=model, rank=RANK, alpha=ALPHA, targets=options.targets
    )
    return trainer, tmp_path / "adapter"


def test_an_adapter_merged_into_its_base_is_what_the_trainer_streams(folder: Any, tmp_path: Path) -> None:
    trainer, adapter = folder
    merge_adapter(adapter, tmp_path / "merged")
    merged = dict(iterate_weights(tmp_path / "merged"))
    for name, value in trainer.weights():
        torch.testing.assert_close(merged[name], value, atol=1e-6, rtol=1e-6)


def test_a_run_exports_both_and_holds_one_against_the_other(make: Any, model: Path, tmp_path: Path) -> None:
    trainer, options = updated(make()), LoraOptions.of(LORA)
    assert export_policy(trainer, tmp_path / "export", str(model), "float32") < 1e-4
    export_adapter(trainer, tmp_path / "adapter", tmp_path / "export", str(model), options, "float32")
    assert digest(trainer.adapter_weights()) == digest(
        (f"{layer}.lora_{kind}.weight", factor)
        for layer, pair in read_adapter(tmp_path / "adapter")[0].factors.items()
        for kind, factor in zip("AB", pair)
    )
    updated(trainer, 1)  # what was exported is no longer what is trained
    with pytest.raises(
        ModelError, match=r"adapter: 'model\.layers\.0\..*' of .*export is not that of .* with the adapter added"
    ):
        export_adapter(trainer, tmp_path / "adapter", tmp_path / "export", str(model), options, "float32")


def test_what_is_no_plain_adapter_is_one_clear_error(folder: Any, model: Path, tmp_path: Path) -> None:
    _, adapter = folder
    with pytest.raises(
        ModelError, match=r"is a LoRA adapter \(adapter_config\.json\), not a whole model; .*rlflow merge"
    ):
        read_config(adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    for key, value in (
        ("use_dora", True),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 2}),
        ("r", 0),
    ):
        (adapter / "adapter_config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(ModelError, match=rf"adapter_config\.json: (expected )?{key} "):
            read_adapter(adapter)
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "some/hub-id"}))
    with pytest.raises(ModelError, match=r"names the base 'some/hub-id', and there is no model directory.*--base DIR"):
        merge_adapter(adapter, tmp_path / "merged")
    other = tiny_model(tmp_path / "other", "qwen2", tokenizer=False, hidden_size=48)
    with pytest.raises(ModelError, match=r"it belongs to another base"):
        merge_adapter(adapter, tmp_path / "merged", other)
    assert not (tmp_path / "merged").exists()
    (adapter / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors: cannot be read"):
        read_adapter(adapter)
    with pytest.raises(StorageError, match=r"is not an adapter's folder"):
        write_adapter(model, iter(()), base=model, rank=1, alpha=1, targets=())


def test_peft_loads_the_adapter_and_trains_it_alike(make: Any, model: Path, tmp_path: Path) -> None:
    """The package itself, where it is installed: the same gradients and updates from the start on, and the same logits."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from transformers import AutoModelForCausalLM

    def loaded(name: str, **options: Any) -> Any:
        adapters, targets = trainer.adapter_weights(), LoraOptions.of(LORA).targets
        write_adapter(tmp_path / name, adapters, base=model, rank=RANK, alpha=ALPHA, targets=targets)
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        return peft.PeftModel.from_pretrained(base, tmp_path / name, **options).eval()

    trainer, batch = make(), make_batch(VOCAB)
    theirs = loaded("start", is_trainable=True)
    factors = {
        name.replace(".default", "").removeprefix("base_model.model."): value
        for name, value in theirs.named_parameters()
        if value.requires_grad
    }
    adam = torch.optim.AdamW(list(factors.values()), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.1)
    for _ in range(3):
        adam.zero_grad()
        logits = theirs(batch.tokens).logits[:, :-1] / batch.temperatures[:, None, None]
        chosen = logits.log_softmax(-1).gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
        (batch.weights * -batch.advantages)[:, 1:].mul(chosen).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(factors.values(), 1.0)
        assert trainer.update(batch, policy_gradient)["gradient_norm"] == pytest.approx(float(norm), rel=1e-5)
        whole = torch.cat([value.grad.flatten() for value in factors.values()]).norm()
        for name, value in gathered_gradients(trainer).items():
            assert (value - factors[name].grad).norm() <= 1e-5 * whole, name
        adam.step()
    assert set(factors) == set(dict(trainer.adapter_weights()))
    for name, value in trainer.adapter_weights():
        torch.testing.assert_close(value, factors[name].detach(), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        logits = loaded("trained")(batch.tokens).logits
    valid = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
    torch.testing.assert_close(gathered_logits(trainer, batch)[valid], logits[valid], atol=1e-5, rtol=1e-5)
