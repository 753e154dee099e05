"""Archives that are laid out before their bytes are there: torch, zipfile and our own reader agree in what they hold."""

from __future__ import annotations

import argparse
import io
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from rlflow_tools.ckpt_convert.dtypes import BFLOAT16, NAMED, DType
from rlflow_tools.ckpt_convert.readers.torch_archive import Archive
from rlflow_tools.ckpt_convert.writers import torch_archive as archive_layout
from rlflow_tools.ckpt_convert.writers.torch_archive import ALIGNMENT, TensorStandIn, archive_bytes, lay_out_archive


def of(tensor: torch.Tensor) -> DType:
    return NAMED[str(tensor.dtype).removeprefix("torch.")]


CONTENT = {
    "a": torch.arange(15.0).view(3, 5),
    "b": torch.arange(7).bfloat16(),
    "c": torch.full((2, 1, 2), 0.5, dtype=torch.float16),
}
VALUE = {
    "args": argparse.Namespace(tensor_model_parallel_size=2, params_dtype=BFLOAT16),
    "model": {
        **{name: TensorStandIn(name, tuple(tensor.shape), of(tensor)) for name, tensor in CONTENT.items()},
        "extra": None,
    },
}


def written() -> bytes:
    layout = lay_out_archive(VALUE)
    file = bytearray(layout.size)
    raw = {name: tensor.view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in CONTENT.items()}
    for name, at in layout.places().items():
        assert at % ALIGNMENT == 0
        file[at : at + len(raw[name])] = raw[name]
    for at, data in layout.literals({name: zlib.crc32(content) for name, content in raw.items()}):
        file[at : at + len(data)] = data
    return bytes(file)


@pytest.mark.parametrize("large", [archive_layout.FULL, 20])
def test_torch_and_zipfile_read_the_archive(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_layout, "LARGE", large)  # 20: all of it in the form for more than 4 GB
    file = written()
    found = torch.load(io.BytesIO(file), weights_only=False)
    assert found["args"].params_dtype is torch.bfloat16 and found["model"].pop("extra") is None
    assert found["model"].keys() == CONTENT.keys()
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in CONTENT.items())
    assert zipfile.ZipFile(io.BytesIO(file)).testzip() is None, "a checksum is wrong"


def test_value_without_tensors_is_what_torch_saves() -> None:
    assert torch.load(io.BytesIO(archive_bytes([None])), weights_only=True) == [None]


def test_reader_finds_windows_of_a_shared_buffer(tmp_path: Path) -> None:
    """Megatron's distributed optimizer makes parameters views of one buffer, which torch saves once."""
    buffer = torch.arange(20.0)
    torch.save({"first": buffer[2:8].view(2, 3), "second": torch.nn.Parameter(buffer[8:12])}, tmp_path / "file.pt")
    with (tmp_path / "file.pt").open("rb") as stream:
        archive = Archive(stream)
        first, second = (archive.window(archive.value[name]) for name in ("first", "second"))
        assert first is not None and second is not None and first.record == second.record
        content = (tmp_path / "file.pt").read_bytes()
    assert first.shape == (2, 3)
    for window, expected in ((first, buffer[2:8]), (second, buffer[8:12])):
        data = content[window.start : window.start + window.nbytes]
        assert torch.equal(torch.frombuffer(bytearray(data), dtype=getattr(torch, window.dtype.name)), expected)


def test_reader_finds_tensors_and_parameters_with_attributes(tmp_path: Path) -> None:
    """Megatron marks parameters (`tensor_model_parallel`), and torch then saves them in another form."""
    content = {
        "tensor": torch.arange(3.0).bfloat16(),
        "parameter": torch.nn.Parameter(torch.arange(4.0)),
        "plain": torch.nn.Parameter(torch.arange(5.0)),
    }
    content["tensor"].tensor_model_parallel = content["parameter"].partition_dim = True  # type: ignore[attr-defined]
    torch.save(content, tmp_path / "file.pt")
    with (tmp_path / "file.pt").open("rb") as stream:
        archive = Archive(stream)
        found = {name: archive.window(archive.value[name]) for name in content}
    assert {name: window and (window.shape, window.dtype) for name, window in found.items()} == {
        name: (tuple(tensor.shape), of(tensor)) for name, tensor in content.items()
    }


def test_reader_refuses_what_is_no_run_of_bytes(tmp_path: Path) -> None:
    torch.save(torch.arange(6.0).view(2, 3).t(), tmp_path / "file.pt")
    with (tmp_path / "file.pt").open("rb") as stream, pytest.raises(ValueError, match="one after another"):
        archive = Archive(stream)
        archive.window(archive.value)
