"""HuggingFace directories: lazy reading, the content hash, and writing that is verified before it exists."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fixtures import tiny_model
from rlflow_tools.ckpt_convert.export_model import write_model

from rlflow.errors import ConversionError, ModelError
from rlflow.models.huggingface import WeightFiles, digest, iterate_weights, read_config


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3", tied=False)


def test_shards_and_index_load_in_transformers_with_the_same_weights(reference: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "out"
    write_model(out, iterate_weights(reference), reference, shard_bytes=60_000)
    shards = sorted(file.name for file in out.glob("*.safetensors"))
    assert len(shards) > 2
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for _, tensor in iterate_weights(reference))
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert digest(model.named_parameters()) == digest(iterate_weights(reference)) == digest(iterate_weights(out))
    assert AutoTokenizer.from_pretrained(out)("yes")["input_ids"]


def test_cast_is_recorded_in_the_config(reference: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "out", iterate_weights(reference), reference, torch.bfloat16)
    assert read_config(tmp_path / "out")["dtype"] == "bfloat16"
    assert {tensor.dtype for _, tensor in iterate_weights(tmp_path / "out")} == {torch.bfloat16}


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


def test_a_stream_of_weights_is_never_whole_in_memory(reference: Path, tmp_path: Path) -> None:
    """A trainer gathers one full tensor at a time; the writer lets each go before it asks for the next but one."""
    seen: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for name in WeightFiles(reference):
            tensor = WeightFiles(reference)[name].clone()
            seen.append(weakref.ref(tensor))
            most = max(most, sum(one() is not None for one in seen))
            yield name, tensor

    write_model(tmp_path / "out", one_by_one(), reference)
    assert len(seen) > 10 and most <= 2


def with_nan(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in iterate_weights(path):
        yield name, tensor * torch.nan if name == "model.norm.weight" else tensor


def without_norm(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    return (pair for pair in iterate_weights(path) if pair[0] != "model.norm.weight")


def with_stranger(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    yield from iterate_weights(path)
    yield "model.stranger", torch.zeros(1)


def with_wrong_shape(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor[:-1] if name == "lm_head.weight" else tensor) for name, tensor in iterate_weights(path))


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (with_nan, "'model.norm.weight' holds NaN"),
        (without_norm, "'model.norm.weight' is missing"),
        (with_stranger, "'model.stranger' is not part of the model"),
        (with_wrong_shape, r"'lm_head.weight' has shape \(\d+, 64\), config.json implies"),
    ],
)
def test_a_wrong_export_never_appears(reference: Path, tmp_path: Path, weights: object, words: str) -> None:
    with pytest.raises(ConversionError, match=words):
        write_model(tmp_path / "out", weights(reference), reference)  # type: ignore[operator]
    assert not (tmp_path / "out").exists()


def test_weights_of_the_reference_are_never_copied(reference: Path, tmp_path: Path) -> None:
    """The reference is one file, the export is sharded: a stray model.safetensors would be loaded instead."""
    write_model(tmp_path / "out", iterate_weights(reference), reference, shard_bytes=60_000)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert "model.safetensors" not in names
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= names


def test_an_existing_directory_is_replaced_only_on_request(reference: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ConversionError, match="exists; choose"):
        write_model(out, iterate_weights(reference), reference)
    assert (out / "notes.txt").read_text() == "mine"
    with pytest.raises(ConversionError, match="not a model directory"):
        write_model(out, iterate_weights(reference), reference, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"
    (out / "config.json").write_text("{}")
    write_model(out, iterate_weights(reference), reference, overwrite=True)
    assert digest(iterate_weights(out)) == digest(iterate_weights(reference))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_missing_and_truncated_files_are_named_before_anything_is_read(reference: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_model(out, iterate_weights(reference), reference, shard_bytes=60_000)
    shard = sorted(out.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    with pytest.raises(
        ModelError, match=rf"{shard.name}: truncated, {len(content) - 10} bytes found, {len(content)} exp"
    ):
        WeightFiles(out)
    shard.write_bytes(content[:4])
    with pytest.raises(ModelError, match="truncated or not a safetensors file"):
        WeightFiles(out)
    shard.unlink()
    with pytest.raises(ModelError, match=rf"{shard.name}: missing"):
        WeightFiles(out)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no weights; expected model.safetensors"),
        ({"pytorch_model.bin": "x"}, "only safetensors weights are read"),
        ({"model.safetensors.index.json": "{}"}, "has no weight_map"),
        ({"model.safetensors.index.json": "{"}, "not valid JSON"),
    ],
)
def test_directories_without_readable_weights(tmp_path: Path, files: dict[str, str], words: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=words):
        list(iterate_weights(tmp_path))


def test_config_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model directory"):
        read_config(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"config.json: missing"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="expected a JSON object, found list"):
        read_config(tmp_path)
