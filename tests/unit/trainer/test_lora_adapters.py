"""Folders of adapters: merged, exported, refused where they are no plain LoRA, and what peft makes of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model
from safetensors.torch import load_file, save_file

from rlflow.errors import ModelError, StorageError
from rlflow.models.adapter import merge_adapter, read_adapter, write_adapter
from rlflow.models.huggingface import digest, iterate_weights, read_config
from rlflow.models.weight_files import write_model
from rlflow.run.export import export_adapter, export_policy
from rlflow.trainer.options import LoraOptions
from tests.dist.lora_ranks import ALPHA, EPS, LORA, LR, OPTIONS, RANK, gathered_gradients
from tests.dist.megatron_ranks import gathered_logits, make_batch
from tests.unit.trainer.batches import VOCAB, policy_gradient
from tests.unit.trainer.test_lora import updated


@pytest.fixture
def defaults() -> dict[str, Any]:
    return OPTIONS


@pytest.fixture
def folder(make: Any, model: Path, tmp_path: Path) -> tuple[Any, Path]:
    """A trainer after two updates, and the folder of its adapters."""
    trainer = updated(make())
    options = LoraOptions(**LORA)
    write_adapter(
        tmp_path / "adapter",
        trainer.adapter_weights(),
        base=model,
        rank=RANK,
        alpha=ALPHA,
        targets=options.targets,
    )
    return trainer, tmp_path / "adapter"


def test_an_adapter_merged_into_its_base_is_what_the_trainer_streams(
    folder: Any, tmp_path: Path
) -> None:
    trainer, adapter = folder
    merge_adapter(adapter, tmp_path / "merged")
    merged = dict(iterate_weights(tmp_path / "merged"))
    for name, value in trainer.weights():
        torch.testing.assert_close(merged[name], value, atol=1e-6, rtol=1e-6)


def test_a_run_exports_both_and_holds_one_against_the_other(
    make: Any, model: Path, tmp_path: Path
) -> None:
    trainer, options = updated(make()), LoraOptions(**LORA)
    assert export_policy(trainer, tmp_path / "export", str(model), "float32") < 1e-4
    export_adapter(
        trainer, tmp_path / "adapter", tmp_path / "export", str(model), options, "float32"
    )
    assert digest(trainer.adapter_weights()) == digest(
        (f"{layer}.lora_{kind}.weight", factor)
        for layer, pair in read_adapter(tmp_path / "adapter")[0].factors.items()
        for kind, factor in zip("AB", pair)
    )
    updated(trainer, 1)  # what was exported is no longer what is trained
    with pytest.raises(
        ModelError,
        match=r"adapter: 'model\.layers\.0\..*' of .*export is not that of .* with the adapter added",
    ):
        export_adapter(
            trainer, tmp_path / "adapter", tmp_path / "export", str(model), options, "float32"
        )


def test_a_weight_that_an_adapter_takes_nearly_to_zero_is_rounded_and_not_wrong(
    make: Any, model: Path, tmp_path: Path
) -> None:
    """The base's own rounding to bfloat16 is left then, as large as before."""
    trainer, options = make(dtype="bfloat16", lr=0.05), LoraOptions(**LORA)
    updated(trainer)
    write_model(tmp_path / "export", trainer.weights(), model)
    export_adapter(
        trainer, tmp_path / "adapter", tmp_path / "export", str(model), options, "bfloat16"
    )


def test_what_is_no_plain_adapter_is_one_clear_error(
    folder: Any, model: Path, tmp_path: Path
) -> None:
    _, adapter = folder
    with pytest.raises(
        ModelError,
        match=r"is a LoRA adapter \(adapter_config\.json\), not a whole model; .*rlflow merge",
    ):
        read_config(adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    for key, value in (
        ("use_dora", True),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 2}),
        ("init_lora_weights", "pissa"),
        ("use_qalora", True),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("r", 0),
        ("r", True),
    ):
        (adapter / "adapter_config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(ModelError, match=rf"adapter_config\.json: (expected )?{key} "):
            read_adapter(adapter)
    foreign = {"fine_tune_type": "lora", "r": 2, "lora_alpha": 4}  # another library's
    (adapter / "adapter_config.json").write_text(json.dumps(foreign))
    with pytest.raises(
        ModelError, match=r"adapter_config\.json: peft_type is None, which is not supported"
    ):
        read_adapter(adapter)
    (adapter / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": "some/hub-id"})
    )
    with pytest.raises(
        ModelError,
        match=r"names the base 'some/hub-id', and there is no model directory.*--base DIR",
    ):
        merge_adapter(adapter, tmp_path / "merged")
    other = tiny_model(tmp_path / "other", "qwen2", tokenizer=False, hidden_size=48)
    with pytest.raises(ModelError, match=r"it belongs to another base"):
        merge_adapter(adapter, tmp_path / "merged", other)
    head = {
        "lm_head.lora_A.weight": torch.ones(1, 32),
        "lm_head.lora_B.weight": torch.ones(VOCAB, 1),
    }
    write_adapter(tmp_path / "head", head.items(), base=model, rank=1, alpha=1, targets=["lm_head"])
    repeated = shutil.copytree(model, tmp_path / "repeated")
    weights = load_file(repeated / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, repeated / "model.safetensors")
    with pytest.raises(ModelError, match=r"has no 'lm_head\.weight' of its own"):
        merge_adapter(tmp_path / "head", tmp_path / "merged", repeated)
    with pytest.raises(StorageError, match="holds the adapter"):
        merge_adapter(tmp_path / "head", tmp_path / "head", overwrite=True)
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
        adapters, targets = trainer.adapter_weights(), LoraOptions(**LORA).targets
        write_adapter(
            tmp_path / name, adapters, base=model, rank=RANK, alpha=ALPHA, targets=targets
        )
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        return peft.PeftModel.from_pretrained(base, tmp_path / name, **options).eval()

    trainer, batch = make(), make_batch(VOCAB)
    theirs = loaded("start", is_trainable=True)
    factors = {
        name.replace(".default", "").removeprefix("base_model.model."): value
        for name, value in theirs.named_parameters()
        if value.requires_grad
    }
    adam = torch.optim.AdamW(
        list(factors.values()), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.1
    )
    for _ in range(3):
        adam.zero_grad()
        logits = theirs(batch.tokens).logits[:, :-1] / batch.temperatures[:, None, None]
        chosen = logits.log_softmax(-1).gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
        (batch.weights * -batch.advantages)[:, 1:].mul(chosen).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(factors.values(), 1.0)
        assert trainer.update(batch, policy_gradient)["gradient_norm"] == pytest.approx(
            float(norm), rel=1e-5
        )
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
    torch.testing.assert_close(
        gathered_logits(trainer, batch)[valid], logits[valid], atol=1e-5, rtol=1e-5
    )
