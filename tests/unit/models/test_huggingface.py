"""HuggingFace directories: lazy reading, and the content hash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fixtures import tiny_model
from safetensors.torch import load_file, save_file

from rlflow.errors import ModelError
from rlflow.models.huggingface import (
    WeightFiles,
    check_loadable,
    digest,
    iterate_weights,
    read_config,
)
from rlflow.models.weight_files import write_model


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3", tied=False)


def test_digest_depends_on_content_and_not_on_order(reference: Path) -> None:
    weights = list(iterate_weights(reference))
    name, tensor = weights[0]
    assert digest(weights) == digest(reversed(weights))
    changed = tensor.clone()
    changed.view(-1)[-1] += 1e-6
    for other in (changed, tensor.double(), tensor.reshape(-1), tensor.flip(0)):
        assert digest([(name, other), *weights[1:]]) != digest(weights)
    assert digest([("renamed", tensor), *weights[1:]]) != digest(weights)
    (first, a), (second, b) = weights[-2:]
    assert digest([(first, b), (second, a), *weights[:-2]]) != digest(weights)


def test_digest_takes_bfloat16_and_views() -> None:
    whole = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    assert digest([("a", whole.t())]) == digest([("a", whole.t().contiguous())])


def test_missing_and_truncated_files_are_named_before_anything_is_read(
    reference: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    write_model(out, iterate_weights(reference), reference, shard_bytes=60_000)
    shard = sorted(out.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    with pytest.raises(
        ModelError, match=rf"{shard.name}: truncated, .*; {len(content) - 10} bytes found"
    ):
        WeightFiles(out)
    shard.write_bytes(content[:4])
    with pytest.raises(ModelError, match="truncated, or its safetensors header is damaged"):
        WeightFiles(out)
    shard.unlink()
    with pytest.raises(ModelError, match=rf"{shard.name}: missing"):
        WeightFiles(out)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_layers_for_multi_token_prediction_are_passed_over_and_not_exported(
    family: str, tmp_path: Path
) -> None:
    model = tiny_model(tmp_path / "hf", family, tokenizer=False)
    whole, file, config = (
        digest(iterate_weights(model)),
        model / "model.safetensors",
        read_config(model),
    )
    save_file(
        {**load_file(file), "model.layers.2.eh_proj.weight": torch.ones(3)},
        file,
        metadata={"format": "pt"},
    )
    (model / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    check_loadable(model)
    assert digest(iterate_weights(model)) == whole
    write_model(tmp_path / "out", iterate_weights(model), model)
    assert read_config(tmp_path / "out")["num_nextn_predict_layers"] == 0
    (model / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(
        ModelError, match=r"'model\.layers\.2\.eh_proj\.weight' is not part of the model"
    ):
        check_loadable(model)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no weights; expected model.safetensors"),
        ({"pytorch_model.bin": "x"}, "only safetensors weights are read"),
        ({"model.safetensors.index.json": "{}"}, "has no weight_map"),
        ({"model.safetensors.index.json": "{"}, "not valid JSON"),
        (
            {"model.safetensors.index.json": '{"weight_map": {"a": "b"}}', "model.safetensors": ""},
            "does not name model.safetensors, which is there too",
        ),
    ],
)
def test_directories_without_readable_weights(
    tmp_path: Path, files: dict[str, str], words: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=words):
        list(iterate_weights(tmp_path))


@pytest.mark.parametrize(
    "file", ["../other/model.safetensors", "/etc/model.safetensors", "a/../../x", "", 7, None]
)
def test_an_index_that_leads_elsewhere_is_refused(file: object, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ModelError, match="expected the name of a file in the same directory"):
        WeightFiles(tmp_path)


def test_damaged_and_unreadable_tables_are_one_line(tmp_path: Path) -> None:
    deep = "[" * 100_000
    (tmp_path / "config.json").write_text(deep)
    with pytest.raises(ModelError, match=r"config.json: not valid JSON"):
        read_config(tmp_path)
    for text in (
        deep,
        "[]",
        '{"a": 1}',
        '{"a": {}}',
        '{"a": {"data_offsets": [0]}}',
        '{"a": {"data_offsets": [0, "b"]}}',
    ):
        content = text.encode()
        (tmp_path / "model.safetensors").write_bytes(len(content).to_bytes(8, "little") + content)
        with pytest.raises(ModelError, match="its safetensors header is damaged"):
            WeightFiles(tmp_path)


def test_config_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model directory"):
        read_config(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"config.json: missing"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="expected a JSON object, found list"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "ranges",
    [[(0, 4), (8, 12)], [(0, 4), (0, 4)], [(4, 8)], [(0, 4)]],
    ids=["gap", "twice", "late", "rest"],
)
def test_a_file_whose_tensors_do_not_cover_it_is_refused_as_by_safetensors(
    ranges: list, tmp_path: Path
) -> None:
    from safetensors import SafetensorError, safe_open

    entries = {
        f"t{number}": {"dtype": "F32", "shape": [1], "data_offsets": places}
        for number, places in enumerate(ranges)
    }
    head = json.dumps(entries).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(head).to_bytes(8, "little") + head + bytes(12))
    with pytest.raises(SafetensorError), safe_open(str(file), "pt"):
        pass
    with pytest.raises(ModelError, match="its safetensors header is damaged"):
        WeightFiles(tmp_path)


def test_a_lora_adapter_is_called_by_its_name_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "Qwen/Qwen2.5-3B"})
    )
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(
        ModelError,
        match=r"is a LoRA adapter \(adapter_config\.json\), not a whole model; .*: rlflow merge ",
    ):
        read_config(tmp_path)
