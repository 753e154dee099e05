"""Adapters over a router's float32 bias: merged from a folder and from a checkpoint, as transformers computes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fixtures import tiny_model
from rlflow_tools.ckpt_convert.command import main
from safetensors.torch import save_file
from torch import Tensor

from rlflow.models.adapter import merge_adapter, write_adapter
from rlflow.models.huggingface import WeightFiles, digest, iterate_weights, read_config
from rlflow.models.layer_rules import dtype_of
from rlflow.models.weight_files import write_model
from rlflow.storage.integrity import TRAINER_MANIFEST, fingerprint, write_manifest

RANK, ALPHA = 2, 4.0


def made(path: Path, family: str) -> tuple[Path, dict[str, Tensor]]:
    """A model directory in bfloat16, and adapters of its attention."""
    whole = tiny_model(path / "whole", family, tokenizer=False)
    rounded = [
        (name, value.to(dtype_of(name, torch.bfloat16))) for name, value in iterate_weights(whole)
    ]
    rounded.sort(key=lambda pair: pair[1].dtype is torch.bfloat16)  # as transformers writes them
    write_model(path / "base", rounded, whole)
    draw, factors = torch.Generator().manual_seed(0), {}
    for name, value in rounded:
        if name.endswith("o_proj.weight"):
            layer, (rows, columns) = name.removesuffix(".weight"), value.shape
            factors[f"{layer}.lora_A.weight"] = torch.randn(RANK, columns, generator=draw)
            factors[f"{layer}.lora_B.weight"] = torch.randn(rows, RANK, generator=draw)
    return path / "base", factors


def checkpoint(path: Path, base: Path, factors: dict[str, Tensor]) -> Path:
    """As a trainer with `trainer.lora` saves it."""
    dcp.save(
        {f"lora.{name}": value for name, value in factors.items()},
        checkpoint_id=str(path),
        no_dist=True,
    )
    versions = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (path / "metadata.json").write_text(
        json.dumps({**versions, "common_backend": "torch", "common_backend_version": 1})
    )
    lora = {"rank": RANK, "alpha": ALPHA, "base": digest(iterate_weights(base))}
    manifest = {
        "step": 3,
        "layout": {"tensor_parallel": 1},
        "model": {},
        "dtype": "bfloat16",
        "lora": lora,
    }
    write_manifest(
        path / TRAINER_MANIFEST, manifest, {file.name: fingerprint(file) for file in path.iterdir()}
    )
    return path


def logits(path: Path, factors: dict[str, Tensor] | None = None) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for name, value in model.named_parameters():
            layer = name.removesuffix(".weight")
            if factors and f"{layer}.lora_A.weight" in factors:
                change = factors[f"{layer}.lora_B.weight"] @ factors[f"{layer}.lora_A.weight"]
                value.copy_((value + ALPHA / RANK * change).to(torch.bfloat16))
        return model(torch.arange(40).view(2, 20)).logits


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_a_merge_keeps_the_routers_biases_and_computes_what_transformers_does(
    family: str, tmp_path: Path
) -> None:
    base, factors = made(tmp_path, family)
    targets = ["o_proj"]
    write_adapter(
        tmp_path / "adapter", factors.items(), base=base, rank=RANK, alpha=ALPHA, targets=targets
    )
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    saved, out = checkpoint(tmp_path / "saved", base, factors), tmp_path / "out"
    assert (
        main(
            [
                "to-hf",
                str(saved),
                str(out),
                "--hf",
                str(base),
                "--num-layers",
                "2",
                "--shard-size",
                "20KB",
            ]
        )
        == 0
    )
    assert len(list(out.glob("*.safetensors"))) > 2
    assert digest(iterate_weights(out)) == digest(iterate_weights(tmp_path / "merged"))
    before, after = WeightFiles(base), WeightFiles(out)
    biases = [name for name in before if dtype_of(name, torch.bfloat16) is torch.float32]
    assert biases and all(torch.equal(before[name], after[name]) for name in biases)
    assert all(after[name].dtype is dtype_of(name, torch.bfloat16) for name in after)
    assert torch.equal(logits(out), logits(base, factors))


def test_a_merge_keeps_the_dtypes_of_a_mixed_base(tmp_path: Path) -> None:
    base, factors = made(tmp_path, "qwen3")
    kinds = {
        name: torch.float32 if "norm" in name else torch.bfloat16 for name in WeightFiles(base)
    }
    mixed = {name: value.to(kinds[name]) for name, value in iterate_weights(base)}
    save_file(mixed, base / "model.safetensors", metadata={"format": "pt"})
    write_adapter(
        tmp_path / "adapter", factors.items(), base=base, rank=RANK, alpha=ALPHA, targets=["o_proj"]
    )
    manifest = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    found = dict(iterate_weights(tmp_path / "merged"))
    assert {name: value.dtype for name, value in found.items()} == kinds
    assert manifest["weight_bytes"] == sum(value.nbytes for value in mixed.values())
    changed = {name for name in mixed if not torch.equal(mixed[name], found[name])}
    assert changed == {name for name in mixed if name.endswith("o_proj.weight")}
    assert read_config(tmp_path / "merged")["dtype"] == "bfloat16"
    assert torch.equal(logits(tmp_path / "merged"), logits(base, factors))


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--num-layers", "99"], 5, "layers 99 was expected, 2 found"),
        (["--tp", "8"], 5, "tensor parallel 8 was expected, 1 found"),
        (["--iteration", "4"], 5, "iteration 4 was expected, 3 found"),
        (["--verify", "full"], 10, "verified fast alone, found --verify full; leave it out"),
        (["--verify", "logits"], 10, "verified fast alone, found --verify logits; leave it out"),
        (["--dtype", "fp32"], 10, "leave --dtype out"),
    ],
)
def test_options_that_a_merge_does_not_follow_are_one_line(
    options: list[str], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, factors = made(tmp_path, "qwen3")
    saved, out = checkpoint(tmp_path / "saved", base, factors), tmp_path / "out"
    capsys.readouterr()  # transformers' progress
    assert main(["to-hf", str(saved), str(out), "--hf", str(base), *options]) == code
    message = capsys.readouterr().err
    assert words in message and message.count("\n") == 1 and not out.exists()
