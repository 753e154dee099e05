"""`--verify logits` accepts what is right, and sees a mapping error that a round trip would not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model
from rlflow_tools.ckpt_convert.import_model import to_megatron
from rlflow_tools.ckpt_convert.mapping.layout import CheckpointLayout
from safetensors.torch import load_file, save_file

from rlflow.errors import ConversionError
from tests import rounding
from tests.unit.tools.legacy_files import write_checkpoint
from tools.ckpt_convert.command import main
from tools.ckpt_convert.oracle.logits import ROWS, WIDTH, check_logits

pytestmark = pytest.mark.slow  # each check starts processes that import megatron-core


def swap_gate_and_up(model: Path) -> None:
    """What a table that names the two in the wrong order would do, in both directions alike."""
    weights = load_file(model / "model.safetensors")
    gate, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    weights[gate], weights[up] = weights[up], weights[gate]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("family", "layout", "saved"),
    [
        ("qwen3", CheckpointLayout(2, 2), "torch"),
        ("deepseek_v3", CheckpointLayout(), "torch"),
        ("deepseek_v3", CheckpointLayout(2), "torch_dist"),
        ("qwen3_moe", CheckpointLayout(1, 1, 1, 2), "torch"),
        ("qwen2_moe", CheckpointLayout(fused=False), "torch_dist"),
    ],
)
def test_both_directions_verify(
    family: str, layout: CheckpointLayout, saved: str, tmp_path: Path
) -> None:
    model = tiny_model(tmp_path / "hf", family, tokenizer=False, vocab_size=101)
    write_checkpoint(model, tmp_path / "megatron", saved, layout)
    rows = torch.randint(0, 101, (ROWS, WIDTH), generator=torch.Generator().manual_seed(0)).tolist()
    _, bound = rounding.logits(model, rows)  # of each side
    assert check_logits(tmp_path / "megatron", model) <= 2 * bound


STRETCHED = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"rope_parameters": STRETCHED, "max_position_embeddings": 64}),
        ("mistral", {"sliding_window": 5}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    ],
    ids=["yarn", "window", "window of some layers"],
)
def test_stretched_positions_and_windows_verify(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_model(tmp_path / "hf", family, tokenizer=False, vocab_size=101, **changes)
    to_megatron(model, tmp_path / "megatron")
    rows = torch.randint(0, 101, (ROWS, WIDTH), generator=torch.Generator().manual_seed(0)).tolist()
    _, bound = rounding.logits(model, rows)
    assert check_logits(tmp_path / "megatron", model) <= 2 * bound


def test_a_swap_that_keeps_every_shape_is_seen(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "hf", "qwen2", tokenizer=False, vocab_size=101)
    to_megatron(model, tmp_path / "megatron")
    swap_gate_and_up(model)
    with pytest.raises(ConversionError, match="do not compute the same") as caught:
        check_logits(tmp_path / "megatron", model)
    assert caught.value.exit_code == 4


def test_the_command_verifies_before_out_appears(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model(tmp_path / "hf", "llama", tokenizer=False, vocab_size=101)
    call = [
        "to-megatron",
        str(model),
        str(tmp_path / "megatron"),
        "--verify",
        "logits",
        "--dtype",
        "bf16",
    ]
    assert main(call) == 0 and "verified: logits" in capsys.readouterr().out
    config = (
        model / "config.json"
    )  # another activation: shapes agree, and so does all that the checkpoint says of its model
    text = config.read_text()
    config.write_text(text.replace('"hidden_act": "silu"', '"hidden_act": "gelu"'))
    back = [
        "to-hf",
        str(tmp_path / "megatron"),
        str(tmp_path / "back"),
        "--hf",
        str(model),
        "--verify",
        "logits",
    ]
    assert main(back) == 4
    assert not (tmp_path / "back").exists() and "do not compute the same" in capsys.readouterr().err
    config.write_text(text)
    assert main(back) == 0


def test_float32_logits_are_compared_not_only_their_ranking(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "hf", "qwen2", tokenizer=False, vocab_size=101)
    to_megatron(model, tmp_path / "megatron")
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] *= 1 + 1e-3
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert torch.isfinite(weights["lm_head.weight"]).all()
    with pytest.raises(ConversionError):
        check_logits(tmp_path / "megatron", model)
