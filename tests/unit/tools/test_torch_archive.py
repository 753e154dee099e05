"""Files of torch.save, read without torch: what torch writes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rlflow_tools.ckpt_convert.dtypes import NAMED, DType
from rlflow_tools.ckpt_convert.readers.torch_archive import Archive


def of(tensor: torch.Tensor) -> DType:
    return NAMED[str(tensor.dtype).removeprefix("torch.")]


def test_reader_finds_windows_of_a_shared_buffer(tmp_path: Path) -> None:
    """Megatron's distributed optimizer makes parameters views of one buffer, which torch saves once."""
    buffer = torch.arange(20.0)
    torch.save(
        {"first": buffer[2:8].view(2, 3), "second": torch.nn.Parameter(buffer[8:12])},
        tmp_path / "file.pt",
    )
    with (tmp_path / "file.pt").open("rb") as stream:
        archive = Archive(stream, "file.pt")
        first, second = (archive.window(archive.value[name]) for name in ("first", "second"))
        assert first is not None and second is not None and first.record == second.record
        content = (tmp_path / "file.pt").read_bytes()
    assert first.shape == (2, 3)
    for window, expected in ((first, buffer[2:8]), (second, buffer[8:12])):
        data = content[window.start : window.start + window.nbytes]
        assert torch.equal(
            torch.frombuffer(bytearray(data), dtype=getattr(torch, window.dtype.name)), expected
        )


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
        archive = Archive(stream, "file.pt")
        found = {name: archive.window(archive.value[name]) for name in content}
    assert {name: window and (window.shape, window.dtype) for name, window in found.items()} == {
        name: (tuple(tensor.shape), of(tensor)) for name, tensor in content.items()
    }


def test_reader_refuses_what_is_no_run_of_bytes(tmp_path: Path) -> None:
    torch.save(torch.arange(6.0).view(2, 3).t(), tmp_path / "file.pt")
    with (
        (tmp_path / "file.pt").open("rb") as stream,
        pytest.raises(ValueError, match="one after another"),
    ):
        archive = Archive(stream, "file.pt")
        archive.window(archive.value)
