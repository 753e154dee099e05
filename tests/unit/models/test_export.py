"""Writing a model directory: what stands under its name is whole and is what transformers reads."""

from __future__ import annotations

import json
import resource
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fixtures import tiny_model
from rlflow_tools.ckpt_convert.verify import verify_export

from rlflow.errors import ConversionError, ModelError, StorageError
from rlflow.models.huggingface import WeightFiles, digest, iterate_weights, read_config
from rlflow.models.weight_files import write_model


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3", tied=False)


def test_shards_and_index_load_in_transformers_with_the_same_weights(
    reference: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "out"
    write_model(out, iterate_weights(reference), reference, shard_bytes=60_000)
    shards = sorted(file.name for file in out.glob("*.safetensors"))
    assert len(shards) > 2
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for _, tensor in iterate_weights(reference)
    )
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert (
        digest(model.named_parameters())
        == digest(iterate_weights(reference))
        == digest(iterate_weights(out))
    )
    assert AutoTokenizer.from_pretrained(out)("yes")["input_ids"]


def test_the_dtype_of_the_weights_is_recorded_in_the_config(
    reference: Path, tmp_path: Path
) -> None:
    rounded = ((name, tensor.to(torch.bfloat16)) for name, tensor in iterate_weights(reference))
    write_model(tmp_path / "out", rounded, reference)
    assert read_config(tmp_path / "out")["dtype"] == "bfloat16"
    assert {tensor.dtype for _, tensor in iterate_weights(tmp_path / "out")} == {torch.bfloat16}


def test_the_converter_verifies_what_was_written_and_sees_a_changed_byte(
    reference: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    manifest = write_model(out, iterate_weights(reference), reference, shard_bytes=60_000)
    assert verify_export(out) == manifest
    assert manifest["weight_bytes"] == sum(
        tensor.nbytes for _, tensor in iterate_weights(reference)
    )
    assert set(manifest["files"]) == {file.name for file in out.iterdir()} - {"manifest.json"}
    shard = out / sorted(name for name in manifest["files"] if name.endswith(".safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(ConversionError, match="damaged, its checksum is"):
        verify_export(out)


def test_one_file_of_weights_is_in_memory_at_a_time(reference: Path, tmp_path: Path) -> None:
    """A trainer gathers one full tensor at a time: beside a file's worth there are the one in hand and the next."""
    alive: list[tuple[weakref.ref[np.ndarray], int]] = []
    shard_bytes, largest, most = 60_000, 0, 0

    def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most, largest
        for name, value in WeightFiles(reference).items():
            array = value.numpy().copy()
            alive.append((weakref.ref(array), array.nbytes))
            largest = max(largest, array.nbytes)
            most = max(most, sum(size for kept, size in alive if kept() is not None))
            tensor = torch.from_numpy(array)  # its storage keeps the array alive
            del array, value
            yield name, tensor

    write_model(tmp_path / "out", one_by_one(), reference, shard_bytes=shard_bytes)
    assert most <= shard_bytes + 2 * largest < sum(size for _, size in alive) / 2


def with_nan(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in iterate_weights(path):
        yield name, tensor * torch.nan if name == "model.norm.weight" else tensor


def without_norm(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    return (pair for pair in iterate_weights(path) if pair[0] != "model.norm.weight")


def with_stranger(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    yield from iterate_weights(path)
    yield "model.stranger", torch.zeros(1)


def with_another_dtype(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    return (
        (name, tensor.double() if name == "model.norm.weight" else tensor)
        for name, tensor in iterate_weights(path)
    )


def twice(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    yield from iterate_weights(path)
    yield next(iterate_weights(path))


def with_infinity_on_the_way_down(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in iterate_weights(path):
        if name == "lm_head.weight":
            tensor[-1, -1] = -torch.inf
        yield name, tensor


def with_wrong_shape(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    return (
        (name, tensor[:-1] if name == "lm_head.weight" else tensor)
        for name, tensor in iterate_weights(path)
    )


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (with_nan, "'model.norm.weight' holds NaN"),
        (without_norm, "'model.norm.weight' is missing"),
        (with_stranger, "'model.stranger' is not part of the model"),
        (with_infinity_on_the_way_down, "'lm_head.weight' holds NaN or Inf"),
        (with_another_dtype, "'model.norm.weight' has dtype torch.float64, torch.float32 expected"),
        (twice, "is not part of the model that config.json describes, or comes twice"),
        (lambda path: iter(()), "there are no weights"),
        (with_wrong_shape, r"'lm_head.weight' has shape \(\d+, 64\), config.json implies"),
    ],
)
def test_a_wrong_export_never_appears(
    reference: Path, tmp_path: Path, weights: object, words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        write_model(tmp_path / "out", weights(reference), reference)  # type: ignore[operator]
    assert not list(tmp_path.iterdir())


def test_weights_of_the_reference_are_never_copied(reference: Path, tmp_path: Path) -> None:
    """The reference is one file, the export is sharded: a stray model.safetensors would be loaded instead."""
    write_model(tmp_path / "out", iterate_weights(reference), reference, shard_bytes=60_000)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert "model.safetensors" not in names
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= names


def test_an_existing_directory_is_replaced_only_on_request(reference: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match="exists; choose"):
        write_model(out, iterate_weights(reference), reference)
    assert (out / "notes.txt").read_text() == "mine"
    with pytest.raises(StorageError, match="not a model directory"):
        write_model(out, iterate_weights(reference), reference, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"
    (out / "config.json").write_text("{}")
    with pytest.raises(StorageError, match="not a model directory"):
        write_model(out, iterate_weights(reference), reference, overwrite=True)
    (out / "config.json").write_text('{"model_type": "qwen3"}')
    write_model(out, iterate_weights(reference), reference, overwrite=True)
    assert digest(iterate_weights(out)) == digest(iterate_weights(reference))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (out / ".git").mkdir()
    with pytest.raises(StorageError, match="no folders of others"):
        write_model(out, iterate_weights(reference), reference, overwrite=True)
    inside = shutil.copytree(reference, tmp_path / "holds" / "reference")
    with pytest.raises(StorageError, match="holds the reference"):
        write_model(tmp_path / "holds", iterate_weights(inside), inside, overwrite=True)


def test_templates_for_other_occasions_go_along(reference: Path, tmp_path: Path) -> None:
    source, out = shutil.copytree(reference, tmp_path / "source"), tmp_path / "out"
    (source / "additional_chat_templates").mkdir()
    template = "additional_chat_templates/tool_use.jinja"
    (source / template).write_text("tools")
    for overwrite in (False, True):
        manifest = write_model(out, iterate_weights(source), source, overwrite=overwrite)
    assert (out / template).read_text() == "tools" and template in manifest["files"]
    assert verify_export(out) == manifest


@pytest.mark.parametrize("weights", [with_nan, without_norm])
def test_a_failure_leaves_the_earlier_export(
    reference: Path, tmp_path: Path, weights: object
) -> None:
    out = tmp_path / "out"
    write_model(out, iterate_weights(reference), reference)
    before = digest(iterate_weights(out))
    with pytest.raises(ModelError):
        write_model(out, weights(reference), reference, overwrite=True, shard_bytes=60_000)  # type: ignore[operator]
    verify_export(out)
    assert digest(iterate_weights(out)) == before and [
        path.name for path in tmp_path.iterdir()
    ] == ["out"]


def test_a_full_disk_is_one_clear_error(reference: Path, tmp_path: Path) -> None:
    """Of a process that may not write files of this size: with the signal off, as Python has it, writing fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(StorageError) as caught:
            write_model(tmp_path / "out", iterate_weights(reference), reference)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    told = str(caught.value)
    assert told.startswith(f"{tmp_path / 'out'}: the model cannot be written") and "\n" not in told
    assert "File too large" in told and told.endswith("make room or choose another place.")
    assert not list(tmp_path.iterdir())


def test_a_disk_without_room_is_known_before_anything_is_written(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in iterate_weights(reference):
            asked.append(name)
            yield name, tensor

    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    with pytest.raises(StorageError, match=r"out: 0\.\d MB needed, 0\.0 MB free; make room"):
        write_model(tmp_path / "out", stream(), reference)
    assert len(asked) == 1 and not list(tmp_path.iterdir())
