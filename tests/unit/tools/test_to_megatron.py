"""HuggingFace to Megatron: options, bad input, and what is left out. Whether Megatron loads it: test_convert_families.py."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_config, tiny_model
from rlflow_tools.ckpt_convert.export_model import Options, to_huggingface
from rlflow_tools.ckpt_convert.import_model import to_megatron
from rlflow_tools.ckpt_convert.mapping.layout import CheckpointLayout
from rlflow_tools.ckpt_convert.readers.arguments import flags_to_give
from rlflow_tools.ckpt_convert.readers.formats import open_source
from rlflow_tools.ckpt_convert.writers import torch_dist
from safetensors.torch import load_file, save_file

from rlflow.errors import ConversionError
from rlflow.models.architecture import stored_architecture
from rlflow.models.huggingface import digest, iterate_weights, read_config
from tools.ckpt_convert.command import main


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "hf", "qwen2", tokenizer=False, vocab_size=101)


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def shorten(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def mix_dtypes(weights: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    weights[name] = weights[name].bfloat16()


NORM = "model.norm.weight"
BAD: dict[str, tuple[int, str, Callable[[Path], Any], list[str]]] = {
    "truncated": (4, "truncated", shorten, []),
    "tp": (
        5,
        "--tp 3 does not divide the model's 4 attention heads; possible: 1, 2, 4",
        lambda path: None,
        ["--tp", "3"],
    ),
    "pp": (
        5,
        "--pp times --vpp 4 does not divide the model's 2 layers",
        lambda path: None,
        ["--pp", "2", "--vpp", "2"],
    ),
    "uneven": (
        5,
        "do not come out even on --pp 2",
        lambda path: None,
        ["--pp", "2", "--first-stage-layers", "2"],
    ),
    "end of one": (
        5,
        "need several pipeline ranks",
        lambda path: None,
        ["--last-stage-layers", "1"],
    ),
    "groups": (
        5,
        "--tp 4 does not divide the model's 3 key-value heads",
        lambda path: edit_config(path, num_attention_heads=12, num_key_value_heads=3, head_dim=16),
        ["--tp", "4"],
    ),
    "ep": (5, "has no experts", lambda path: None, ["--ep", "2"]),
    "vpp": (5, "needs several pipeline ranks", lambda path: None, ["--vpp", "2"]),
    "family": (6, "'gpt9' is not supported", lambda path: edit_config(path, model_type="gpt9"), []),
    "missing tensor": (
        6,
        "'model.norm.weight' is missing",
        lambda path: edit_weights(path, lambda all: all.pop(NORM)),
        [],
    ),
    "unknown tensor": (
        6,
        "have no place",
        lambda path: edit_weights(path, lambda all: all.update(other=torch.ones(3))),
        [],
    ),
    "layers": (6, "have no place", lambda path: edit_config(path, num_hidden_layers=1), []),
    "shape": (7, "config.json implies", lambda path: edit_config(path, intermediate_size=64), []),
    "dtypes": (7, "of 2 dtypes", lambda path: edit_weights(path, mix_dtypes), []),
    "other output": (
        7,
        "is not the embedding",
        lambda path: edit_config(path, tie_word_embeddings=True),
        [],
    ),
    "nan": (
        4,
        "NaN",
        lambda path: edit_weights(path, lambda all: all[NORM].fill_(float("nan"))),
        [],
    ),
    "integers": (
        10,
        "dtype I64",
        lambda path: edit_weights(
            path, lambda all: all.update({NORM: torch.ones(64, dtype=torch.int64)})
        ),
        [],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_with_its_code(
    name: str, model: Path, tmp_path: Path, capsys: Any
) -> None:
    code, text, damage, options = BAD[name]
    damage(model)
    assert main(["to-megatron", str(model), str(tmp_path / "out"), *options]) == code
    message = capsys.readouterr().err
    assert text in message and message.count("\n") == 1, message
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("out*"))


def test_missing_shard_is_named(tmp_path: Path, capsys: Any) -> None:
    model = tiny_model(tmp_path / "hf", "qwen2", tokenizer=False)
    to_megatron(model, tmp_path / "megatron")
    to_huggingface(tmp_path / "megatron", tmp_path / "sharded", model, Options(shard_bytes=100_000))
    missing = sorted((tmp_path / "sharded").glob("*.safetensors"))[1]
    missing.unlink()
    assert main(["to-megatron", str(tmp_path / "sharded"), str(tmp_path / "out")]) == 3
    assert missing.name in capsys.readouterr().err


def test_embedding_repeated_as_output_layer_of_a_tied_model_is_left_out(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "hf", "qwen2", tied=True, tokenizer=False)
    edit_weights(
        model, lambda all: all.update({"lm_head.weight": all["model.embed_tokens.weight"].clone()})
    )
    to_megatron(
        model,
        tmp_path / "megatron",
        Options(layout=CheckpointLayout(1, 2), verify="full"),
    )
    to_huggingface(tmp_path / "megatron", tmp_path / "back", model)
    assert "lm_head.weight" not in dict(iterate_weights(tmp_path / "back"))


def test_layers_for_multi_token_prediction_are_left_out_and_listed(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "hf", "deepseek_v3", tokenizer=False)
    assert json.loads((model / "config.json").read_text())["num_nextn_predict_layers"] == 1
    whole = digest(iterate_weights(model))
    edit_weights(model, lambda all: all.update({"model.layers.2.eh_proj.weight": torch.ones(3)}))
    manifest = to_megatron(model, tmp_path / "megatron", Options(verify="full"))
    assert manifest["left_out"] == ["model.layers.2.eh_proj.weight"]
    to_huggingface(tmp_path / "megatron", tmp_path / "back", model)
    assert digest(iterate_weights(tmp_path / "back")) == whole


def test_routers_bias_keeps_its_dtype_when_the_model_is_cast(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "hf", "deepseek_v3", tokenizer=False)
    to_megatron(model, tmp_path / "megatron", Options(dtype="bf16", verify="full"))
    to_huggingface(tmp_path / "megatron", tmp_path / "back", model, Options(dtype="bf16"))
    kinds = {name: tensor.dtype for name, tensor in iterate_weights(tmp_path / "back")}
    exact = {name for name, dtype in kinds.items() if dtype is torch.float32}
    assert exact == {"model.layers.1.mlp.gate.e_score_correction_bias"}


def test_output_does_not_depend_on_workers_and_block_size(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for workers, block in ((1, 2 << 20), (5, 1000)):
        monkeypatch.setattr("rlflow_tools.ckpt_convert.stream.BLOCK_BYTES", block)
        layout = CheckpointLayout(2)
        options = Options(layout=layout, shard_bytes=50_000, workers=workers)
        to_megatron(model, tmp_path / str(workers), options)
    single, five = (
        {
            file.relative_to(tmp_path / name): file.read_bytes()
            for file in (tmp_path / name).rglob("*.*")
        }
        for name in ("1", "5")
    )
    assert single == five and len(single) >= 4


def test_large_tensors_are_cut_into_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether Megatron loads them: test_convert_families.py."""
    sizes = {"vocab_size": 101, "num_hidden_layers": 1, "intermediate_size": 16}
    model = tiny_model(tmp_path / "hf", "qwen2", tied=True, tokenizer=False, **sizes)
    monkeypatch.setattr(torch_dist, "CHUNK_BYTES", 1000)
    manifest = to_megatron(model, tmp_path / "out", Options(verify="full"))
    chunks = open_source(tmp_path / "out").tensors["embedding.word_embeddings.weight"].chunks
    assert len(chunks) > 20 and manifest["parameters"] > 0
    sizes = {chunk.length for chunk in chunks}
    assert max(sizes) < 1000 + 2000, "a chunk, and what torch.save adds"
    to_huggingface(tmp_path / "out", tmp_path / "back", model)
    assert digest(iterate_weights(tmp_path / "back")) == digest(iterate_weights(model))


def test_existing_output_is_replaced_only_when_asked(
    model: Path, tmp_path: Path, capsys: Any
) -> None:
    call = ["to-megatron", str(model), str(tmp_path / "out")]
    assert main([*call, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == 1 and not (tmp_path / "out").exists()
    assert main(call) == 0
    assert main(call) == 9
    assert main([*call, "--overwrite", "--shard-size", "50KB", "--json"]) == 0
    several = json.loads(capsys.readouterr().out.splitlines()[-1])["files"]
    assert len(several) > 4
    assert main([*call, "--overwrite", "--format", "torch_dist"]) == 0
    left = sorted(file.name for file in (tmp_path / "out" / "release").glob("*.distcp"))
    assert left == ["__0_0.distcp"], "files of the second are still there"
    assert main(["verify", str(tmp_path / "out")]) == 0
    assert main(["to-megatron", str(model), str(model), "--overwrite"]) == 9


def test_legacy_files_are_not_written(model: Path, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["to-megatron", str(model), str(tmp_path / "out"), "--format", "torch"])
    message = capsys.readouterr().err
    assert "argument --format: invalid choice: 'torch'" in message and "torch_dist" in message


ROUTES: dict[str, tuple[dict[str, Any], tuple[str, bool, bool]]] = {
    "qwen2_moe": ({"norm_topk_prob": False}, ("softmax", True, False)),
    "qwen3_moe": ({}, ("softmax", False, False)),
    "mixtral": ({}, ("softmax", False, False)),
    "deepseek_v3": ({}, ("sigmoid", False, True)),
}


@pytest.mark.parametrize("family", ROUTES)
def test_arguments_say_how_tokens_choose_experts(family: str, tmp_path: Path) -> None:
    sizes, expected = ROUTES[family]
    model = tiny_model(tmp_path / "hf", family, tokenizer=False, vocab_size=101, **sizes)
    to_megatron(model, tmp_path / "out")
    args = torch.load(tmp_path / "out" / "release" / "common.pt", weights_only=False)["args"]
    found = (
        args.moe_router_score_function,
        args.moe_router_pre_softmax,
        args.moe_router_enable_expert_bias,
    )
    assert found == expected and args.moe_router_topk == 2
    assert args.layernorm_epsilon == args.norm_epsilon == read_config(model)["rms_norm_eps"]


def test_what_a_checkpoint_cannot_carry_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model(tmp_path / "hf", "llama", tokenizer=False, vocab_size=101)
    assert main(["to-megatron", str(model), str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert (
        "--norm-epsilon 1e-06" in printed
        and "--use-rope-scaling --rope-scaling-factor 8" in printed
    )
    window = {"sliding_window": 4096, "use_sliding_window": True}
    config = tiny_config("qwen2", **window)
    assert "--window-size '(4095, 0)'" in flags_to_give(config, stored_architecture(config))
    config = tiny_config("gemma3_text", num_hidden_layers=2)
    flags = " ".join(flags_to_give(config, stored_architecture(config)))
    assert "--window-size '(15, 0)' --window-attn-skip-freq '[1,0]'" in flags
    assert "--rotary-seq-len-interpolation-factor 8.0" in flags and "Megatron-Bridge" in flags


def quantize(model: Path) -> dict[str, torch.Tensor]:
    """Puts the projections of a model into 8 bits, as DeepSeek-V3 is published; returns their values."""
    values = {}

    def edit(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if "_proj" in name and name.endswith(".weight")]:
            rows, columns = weights[name].shape
            scales = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5
            wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
            weights[name] = (weights[name] / wide).to(torch.float8_e4m3fn)
            weights[name.replace(".weight", ".weight_scale_inv")] = scales
            values[name] = (weights[name].float() * wide).bfloat16()

    edit_weights(model, edit)
    quantized = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    edit_config(model, quantization_config=quantized)
    return values


@pytest.mark.parametrize("tensor", [1, 2])
def test_weights_in_8_bits_are_read_as_the_products_with_their_scales(
    tensor: int, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 200, "intermediate_size": 300, "num_hidden_layers": 1}
    model = tiny_model(tmp_path / "hf", "qwen3", tokenizer=False, **sizes)
    values = quantize(model)
    assert len(values) == 7
    others = {name: value for name, value in iterate_weights(model) if "_proj" not in name}
    to_megatron(
        model, tmp_path / "megatron", Options(layout=CheckpointLayout(tensor), verify="full")
    )
    to_huggingface(tmp_path / "megatron", tmp_path / "back", model)
    found = dict(iterate_weights(tmp_path / "back"))
    assert found.keys() == values.keys() | others.keys()
    assert all(torch.equal(found[name], value) for name, value in {**values, **others}.items())
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_weights_in_8_bits_without_scales_are_refused(tmp_path: Path, capsys: Any) -> None:
    model = tiny_model(tmp_path / "hf", "qwen3", tokenizer=False)
    quantize(model)
    edit_weights(model, lambda all: all.pop("model.layers.0.mlp.up_proj.weight_scale_inv"))
    assert main(["to-megatron", str(model), str(tmp_path / "out")]) == 10
    message = capsys.readouterr().err
    assert (
        "'model.layers.0.mlp.up_proj.weight' is in 8 bits; expected scales in float32 (1, 1)"
        in message
    )


@pytest.mark.parametrize("verify", ["fast", "none"])
def test_a_file_that_reads_back_otherwise_is_refused(
    verify: str, model: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    real = os.fsync

    def faulty(descriptor: int) -> None:
        """Changes a byte on its way to the disk."""
        real(descriptor)
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name.endswith(".distcp"):
            with open(name, "r+b") as file:
                file.seek(5000)
                file.write(bytes([file.read(1)[0] ^ 1]))

    monkeypatch.setattr(os, "fsync", faulty)
    if verify == "none":
        to_megatron(model, tmp_path / "out", Options(verify=verify))
        return
    with pytest.raises(ConversionError, match="reads back differently") as caught:
        to_megatron(model, tmp_path / "out", Options(verify=verify))
    assert caught.value.exit_code == 4 and not (tmp_path / "out").exists()
