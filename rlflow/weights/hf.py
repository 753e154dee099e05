"""HuggingFace model directories: lazy reading, a content hash, and writing that is verified and atomic."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.errors import ModelError
from rlflow.weights.families import huggingface_shapes, stored_architecture

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
COPIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.json",
)
"""What an export takes over from the reference directory beside config.json, `*.jinja` and `*.py`. Never weights."""


def read_config(path: str | Path) -> dict[str, Any]:
    """The parsed config.json of a model directory. Raises ModelError where there is none or it is not a JSON object."""
    file = Path(path) / "config.json"
    if not Path(path).is_dir():
        raise ModelError(f"{path}: no such model directory; expected config.json, *.safetensors and a tokenizer there.")
    if not file.is_file():
        raise ModelError(f"{file}: missing; a HuggingFace model directory has a config.json.")
    return _read_json(file)


class WeightFiles(Mapping[str, Tensor]):
    """The tensors of a model directory by HuggingFace name, each read from its file when asked for.

    Raises ModelError at once for a missing or truncated file, so that nothing expensive starts on half a model."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file_of = _locate(self.path)
        for name in sorted(set(self._file_of.values())):
            missing = {key for key, file in self._file_of.items() if file == name} - set(header(self.path / name))
            if missing:
                raise ModelError(
                    f"{self.path / name}: tensor '{min(missing)}' is missing, though {INDEX_FILE} lists it."
                )

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(self.path / self._file_of[name], framework="pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def iterate_weights(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """(HuggingFace name, tensor on the CPU) pairs of a model directory, one tensor in memory at a time.

    Raises ModelError for a directory without safetensors, a missing or a truncated file."""
    yield from WeightFiles(path).items()


def digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of the set of (name, dtype, shape, bytes), whatever their order: 64 hex digits. Verifies every weight sync."""
    lines = []
    for name, tensor in weights:
        content = hashlib.sha256(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        content.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        lines.append(content.hexdigest())
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def write_model(
    path: str | Path,
    weights: Iterable[tuple[str, Tensor]],
    reference: str | Path,
    dtype: torch.dtype | None = None,
    *,
    shard_bytes: int = 4 << 30,
    overwrite: bool = False,
) -> None:
    """Writes a HuggingFace directory: `weights` as safetensors, config and tokenizer files from `reference`.

    dtype: cast to it; None keeps each tensor's. More than `shard_bytes` become shards with an index. It is written to
    `<path>.partial`, verified from disk against what config.json implies, and renamed; on failure `path` is as it was.
    Raises ModelError where `path` exists (unless `overwrite`) or the verification fails."""
    path = Path(path)
    if path.exists() and not overwrite:
        raise ModelError(f"{path}: exists already; choose another directory or pass overwrite=True.")
    config = read_config(reference)
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    written = _write_shards(partial, _cast(weights, dtype), shard_bytes)
    copy_files(Path(reference), partial)
    (partial / "config.json").write_text(json.dumps(with_dtype(config, written), indent=2) + "\n")
    verify_model(partial)
    replace_directory(partial, path)


def replace_directory(partial: Path, path: Path) -> None:
    """Renames a finished directory to its name, in place of one that stands there; its files reach the disk first."""
    for one in (*partial.iterdir(), partial):
        descriptor = os.open(one, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    replaced = path.with_name(path.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if path.exists():
        path.rename(replaced)
    partial.rename(path)
    shutil.rmtree(replaced, ignore_errors=True)


def verify_model(path: str | Path) -> None:
    """Raises ModelError unless the directory holds exactly the tensors that its config.json implies, each of the right
    shape and finite."""
    expected = huggingface_shapes(stored_architecture(read_config(path)))
    files = WeightFiles(path)
    for name in expected:
        if name not in files:
            raise ModelError(f"{path}: tensor '{name}' is missing, which config.json implies.")
    for name, tensor in files.items():
        if name not in expected:
            raise ModelError(f"{path}: tensor '{name}' is not part of the model that config.json describes.")
        if tuple(tensor.shape) != expected[name]:
            raise ModelError(f"{path}: '{name}' has shape {tuple(tensor.shape)}, config.json implies {expected[name]}.")
        if not torch.isfinite(tensor).all():
            raise ModelError(f"{path}: '{name}' holds NaN or Inf.")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except ValueError as error:
        raise ModelError(f"{file}: not valid JSON ({error}).") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file}: expected a JSON object, found {type(value).__name__}.")
    return value


def _locate(path: Path) -> dict[str, str]:
    """The file name of every tensor, in file order."""
    if (path / INDEX_FILE).is_file():
        weight_map = _read_json(path / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{path / INDEX_FILE}: has no weight_map.")
        return dict(sorted(weight_map.items(), key=lambda item: item[1]))
    if (path / SINGLE_FILE).is_file():
        return dict.fromkeys(header(path / SINGLE_FILE), SINGLE_FILE)
    if not path.is_dir():
        raise ModelError(f"{path}: no such model directory.")
    if any(path.glob("*.bin")):
        raise ModelError(f"{path}: only safetensors weights are read (pickled *.bin can run code); convert it first.")
    raise ModelError(f"{path}: no weights; expected {SINGLE_FILE} or {INDEX_FILE} with its shards.")


def header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file: 8 bytes little-endian length, then JSON with each tensor's byte range."""
    if not file.is_file():
        raise ModelError(f"{file}: missing; {INDEX_FILE} in the same directory lists it.")
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= size - 8:
            raise ModelError(f"{file}: truncated or not a safetensors file ({size} bytes).")
        try:
            entries = json.loads(stream.read(length))
        except ValueError:
            raise ModelError(f"{file}: the safetensors header is damaged.") from None
    entries.pop("__metadata__", None)
    expected = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if size < expected:
        raise ModelError(f"{file}: truncated, {size} bytes found, {expected} expected.")
    return entries


def _cast(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        # A copy of its own: safetensors refuses tensors that share storage, and a view would pin its base.
        yield name, tensor.detach().to("cpu", dtype or tensor.dtype, copy=True).contiguous()


def _write_shards(directory: Path, weights: Iterable[tuple[str, Tensor]], shard_bytes: int) -> torch.dtype:
    """Writes the weights, one shard in memory at a time; returns the dtype of the first tensor."""
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = pending_bytes = 0
    first: torch.dtype | None = None

    def flush() -> None:
        shards.append(list(pending))
        save_file(pending, directory / f"shard-{len(shards):05d}.safetensors", metadata={"format": "pt"})
        pending.clear()

    for name, tensor in weights:
        first = first or tensor.dtype
        if pending and pending_bytes + tensor.nbytes > shard_bytes:
            flush()
            pending_bytes = 0
        pending[name] = tensor
        pending_bytes += tensor.nbytes
        total += tensor.nbytes
    if first is None:
        raise ModelError(f"{directory}: there are no weights to write.")
    flush()
    _name_shards(directory, shards, total)
    return first


def _name_shards(directory: Path, shards: list[list[str]], total_bytes: int) -> None:
    """Gives the shards their final names (their number is known only now) and writes the index if there are several."""
    if len(shards) == 1:
        (directory / "shard-00001.safetensors").rename(directory / SINGLE_FILE)
        return
    weight_map = {}
    for index, names in enumerate(shards, start=1):
        file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"shard-{index:05d}.safetensors").rename(directory / file)
        weight_map.update(dict.fromkeys(names, file))
    content = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n")


def copy_files(reference: Path, directory: Path) -> None:
    """Copies what goes with the weights (COPIED_FILES, `*.jinja`, `*.py`) from a model directory; never weights."""
    names = [name for name in COPIED_FILES if (reference / name).is_file()]
    names += [file.name for pattern in ("*.jinja", "*.py") for file in reference.glob(pattern)]
    for name in names:
        shutil.copyfile(reference / name, directory / name)


def with_dtype(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The config with its dtype entry set to that of the weights; transformers 4 writes torch_dtype, 5 writes dtype."""
    key = "dtype" if "dtype" in config else "torch_dtype"
    return {**config, key: str(dtype).removeprefix("torch.")}
