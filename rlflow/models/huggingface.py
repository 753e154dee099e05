"""HuggingFace model directories: lazy reading, a content hash, and what goes with the weights."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from rlflow.errors import ModelError
from rlflow.models.architecture import huggingface_shapes, own_rule, stored_architecture
from rlflow.models.entries import PREDICTING, predicting_layers
from rlflow.models.layer_rules import OUTPUT
from rlflow.storage.integrity import EXPORT_MANIFEST

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
"""What a folder has that holds a LoRA adapter and no model."""
COPIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.json",
)
"""What an export takes over beside config.json, `*.jinja` and `*.py`; never weights."""
TEMPLATES = "additional_chat_templates"
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # buffers that old checkpoints hold


def read_config(path: str | Path) -> dict[str, Any]:
    """The parsed config.json of a model directory. Raises ModelError where there is none or it is
    not a JSON object."""
    file = Path(path) / "config.json"
    if not Path(path).is_dir():
        raise ModelError(
            f"{path}: no such model directory; expected config.json, *.safetensors and a "
            "tokenizer there."
        )
    if not file.is_file():
        refuse_adapter(path)
        raise ModelError(f"{file}: missing; a HuggingFace model directory has a config.json.")
    return read_object(file)


def is_adapter(path: str | Path) -> bool:
    """Whether a folder holds an adapter and no model."""
    return (Path(path) / ADAPTER_CONFIG).is_file() and not (Path(path) / "config.json").is_file()


def refuse_adapter(path: str | Path) -> None:
    """Raises ModelError for a folder that holds an adapter and no model."""
    if is_adapter(path):
        raise ModelError(
            f"{path}: is a LoRA adapter ({ADAPTER_CONFIG}), not a whole model; merge it into its "
            f"base first: rlflow merge {path} OUT"
        )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' progress bars, which would tear a display of one's own."""
    from transformers.utils import logging as messages

    shown = messages.is_progress_bar_enabled()
    messages.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            messages.enable_progress_bar()


class WeightFiles(Mapping[str, "Tensor"]):
    """The tensors of a model directory by HuggingFace name, each read from its file when asked for;
    without layers for multi-token prediction, unless `everything` is asked for.

    Raises ModelError at once for a missing or truncated file, so that nothing expensive starts on
    half a model."""

    def __init__(self, path: str | Path, everything: bool = False) -> None:
        self.path = Path(path)
        self._file_of = _locate(self.path)
        headers = {file: header(self.path / file) for file in sorted(set(self._file_of.values()))}
        for name, file in self._file_of.items():
            if name not in headers[file]:
                raise ModelError(
                    f"{self.path / file}: tensor '{name}' is missing, though {INDEX_FILE} lists it."
                )
        later = () if everything else predicting_layers(read_config(path))
        for name in [name for name in self._file_of if name.startswith(later)]:
            del self._file_of[name]

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(self.path / self._file_of[name], framework="pt") as file:
            return file.get_tensor(name)

    def file_of(self, name: str) -> str:
        """The name of the file that a tensor is in."""
        return self._file_of[name]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{name: shape} of all of them, from the headers."""
        headers = {file: header(self.path / file) for file in set(self._file_of.values())}
        return {name: tuple(headers[file][name]["shape"]) for name, file in self._file_of.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def iterate_weights(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """(HuggingFace name, tensor on the CPU) pairs of a model directory, read one at a time.

    Raises ModelError for a directory without safetensors, a missing or a truncated file."""
    yield from WeightFiles(path).items()


def find_not_finite(path: str | Path) -> str | None:
    """One line about the first tensor of a model directory that holds NaN or infinite numbers; None
    where there is none. Reads all of them."""
    weights = WeightFiles(path)
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            count = int((~tensor.isfinite()).sum())
            return (
                f"{weights.path / weights.file_of(name)}: tensor '{name}': {count:,} of "
                f"{tensor.numel():,} numbers are NaN or infinite; the file is damaged, or was "
                "written by a run that diverged. Take another copy or an earlier checkpoint."
            )
    return None


def tensor_hash(name: str, tensor: Tensor) -> str:
    """xxh3 of a tensor's name, dtype, shape and bytes: 32 hex digits. Reads memory once, and copies
    only what is not contiguous or not on the CPU. Finds accidents, not forgeries."""
    import torch

    content = xxhash.xxh3_128(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
    content.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()


def combined_hash(hashes: Iterable[str]) -> str:
    """The `digest` of the tensors with these hashes."""
    return xxhash.xxh3_128_hexdigest("\n".join(sorted(hashes)).encode())


def digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of the set of (name, dtype, shape, bytes), whatever their order: 32 hex digits. It
    verifies every weight sync."""
    return combined_hash(tensor_hash(name, tensor) for name, tensor in weights)


def check_tensors(path: str | Path) -> None:
    """Raises ModelError unless the directory's headers list the tensors that its config.json
    implies, in their shapes."""
    found = {
        name: entry
        for file in sorted(Path(path).glob("*.safetensors"))
        for name, entry in header(file).items()
    }
    shapes = {name: tuple(entry["shape"]) for name, entry in found.items()}
    _check_shapes(path, shapes, huggingface_shapes(stored_architecture(read_config(path))))


def check_loadable(path: str | Path) -> None:
    """As `check_tensors`, of the files that would be loaded, and with the extra tensors that
    loading passes over: the output layer of a tied model, rotary frequencies of old files. Only
    headers are read."""
    model = stored_architecture(read_config(path))
    expected = huggingface_shapes(model)
    repeated = own_rule(model, OUTPUT).names() if model.tied else []
    extra = (*IGNORED_SUFFIXES, *repeated)
    found = WeightFiles(path).shapes()
    for name in [name for name in found if name not in expected and name.endswith(extra)]:
        del found[name]
    _check_shapes(path, found, expected)


def _check_shapes(
    path: str | Path, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    for name in expected:
        if name not in found:
            raise ModelError(f"{path}: tensor '{name}' is missing, which config.json implies.")
    for name, shape in found.items():
        if name not in expected:
            raise ModelError(
                f"{path}: tensor '{name}' is not part of the model that config.json describes."
            )
        if shape != expected[name]:
            raise ModelError(
                f"{path}: '{name}' has shape {shape}, config.json implies {expected[name]}."
            )


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file of a model directory. Raises ModelError."""
    try:
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not valid JSON ({error}).") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file}: expected a JSON object, found {type(value).__name__}.")
    return value


def weight_files(folder: Path) -> list[str]:
    """The names of a model's safetensors files, by its index where it has one. Raises
    ModelError."""
    if not (folder / INDEX_FILE).is_file():
        return [SINGLE_FILE]
    return sorted(set(_weight_map(folder / INDEX_FILE).values()))


def _weight_map(index: Path) -> dict[str, str]:
    """{tensor: file}. Raises ModelError."""
    found = read_object(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ModelError(f"{index}: has no weight_map.")
    for name, file in found.items():
        parts = Path(file).parts if isinstance(file, str) else ()
        if not parts or Path(file).is_absolute() or ".." in parts:
            raise ModelError(
                f"{index}: places '{name}' in {file!r}; expected the name of a file in the same "
                "directory."
            )
    if SINGLE_FILE not in found.values() and (index.parent / SINGLE_FILE).is_file():
        raise ModelError(
            f"{index}: does not name {SINGLE_FILE}, which is there too and which transformers "
            "would load; remove one of the two."
        )
    return found


def _locate(path: Path) -> dict[str, str]:
    """The file name of every tensor, in file order."""
    if (path / INDEX_FILE).is_file():
        return dict(sorted(_weight_map(path / INDEX_FILE).items(), key=lambda item: item[1]))
    if (path / SINGLE_FILE).is_file():
        return dict.fromkeys(header(path / SINGLE_FILE), SINGLE_FILE)
    if not path.is_dir():
        raise ModelError(f"{path}: no such model directory.")
    if any(path.glob("*.bin")):
        raise ModelError(
            f"{path}: only safetensors weights are read (pickled *.bin can run code); convert it "
            "first."
        )
    raise ModelError(f"{path}: no weights; expected {SINGLE_FILE} or {INDEX_FILE} with its shards.")


def header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file: each tensor's dtype, shape and byte range. Raises
    ModelError."""
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        raise ModelError(f"{file}: missing; {INDEX_FILE} in the same directory lists it.")
    try:
        with safe_open(file, framework="np"):  # its tensors cover the file, each byte once
            pass
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            entries = json.loads(stream.read(length))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror or error}).") from None
    except (SafetensorError, ValueError) as error:
        raise ModelError(
            f"{file}: truncated, or its safetensors header is damaged ({error}; "
            f"{file.stat().st_size} bytes found)."
        ) from None
    entries.pop("__metadata__", None)
    return entries


def companions(reference: Path) -> list[str]:
    """The files of a model directory that go with its weights beside config.json: COPIED_FILES,
    `*.jinja` (those in TEMPLATES too), `*.py`."""
    names = [name for name in COPIED_FILES if (reference / name).is_file()]
    for pattern in ("*.jinja", "*.py", f"{TEMPLATES}/*.jinja"):
        names += sorted(str(file.relative_to(reference)) for file in reference.glob(pattern))
    return names


def why_occupied(path: Path, overwrite: bool, **kept: Path | None) -> str | None:
    """Why no model directory may be written at `path`; None where nothing or an empty directory is
    there, or with `overwrite` a model directory. kept: by name, what it may not be or hold."""
    for name, place in kept.items():
        if place is not None and path.resolve() in (place.resolve(), *place.resolve().parents):
            return f"{path}: holds the {name}; choose another directory."
    whole = path.is_dir() and not path.is_symlink()
    if not os.path.lexists(path) or (whole and not any(path.iterdir())):
        return None
    if not overwrite:
        return f"{path}: exists; choose another directory or pass --overwrite."
    if whole and _holds_only_a_model(path):
        return None
    return (
        f"{path}: is not a model directory (a config.json with model_type, no folders of others), "
        "so --overwrite does not replace it; choose another."
    )


def _holds_only_a_model(path: Path) -> bool:
    """Whether a manifest or a config.json says so, and no folder is foreign to it."""
    known, told = {TEMPLATES, ".cache", "__pycache__"}, False
    for name, key in ((EXPORT_MANIFEST, "files"), ("config.json", "model_type")):
        with suppress(ModelError):
            value = read_object(path / name).get(key)
            told = told or bool(value)
            if isinstance(value, dict):
                known |= {file.partition("/")[0] for file in value}
    return told and all(entry.name in known for entry in path.iterdir() if entry.is_dir())


def why_no_room(path: Path, needed: int) -> str | None:
    """Why `needed` bytes cannot be written at `path`; None where its disk has them left."""
    free = shutil.disk_usage(path.parent).free
    if free >= needed:
        return None
    sizes = f"{needed / 1e6:,.1f} MB needed, {free / 1e6:,.1f} MB free"
    return f"{path}: {sizes}; make room or choose another disk."


def copy_companions(
    reference: Path, directory: Path, config: dict[str, Any], dtype: object
) -> None:
    """Writes what goes with weights of a dtype: config.json, and copies of the reference's files;
    never weights."""
    for name in companions(reference):
        (directory / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(reference / name, directory / name)
    text = json.dumps(with_dtype(config, dtype), indent=2)
    (directory / "config.json").write_text(text + "\n")


def file_names(count: int) -> list[str]:
    """Of the files that the weights of a model are in."""
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def in_groups(items: Iterable[T], nbytes: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """The items in order, in groups of at most `most` bytes, or of one item that has more."""
    group: list[T] = []
    filled = 0
    for item in items:
        if group and filled + nbytes(item) > most:
            yield group
            group, filled = [], 0
        group.append(item)
        filled += nbytes(item)
    yield group


def write_index(directory: Path, weight_map: Mapping[str, str], total_size: int) -> None:
    """Writes which of several files holds which tensor; nothing for a single file."""
    if set(weight_map.values()) == {SINGLE_FILE}:
        return
    ordered = dict(sorted(weight_map.items()))
    index = {"metadata": {"total_size": total_size}, "weight_map": ordered}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def companions_digest(reference: str | Path) -> str:
    """A hash of config.json and of all that `copy_files` copies: 64 hex digits."""
    content = hashlib.sha256()
    for name in ("config.json", *companions(Path(reference))):
        file = Path(reference) / name
        try:
            content.update(f"{name}|".encode() + hashlib.sha256(file.read_bytes()).digest())
        except OSError as error:
            raise ModelError(f"{file}: cannot be read ({error.strerror}).") from None
    return content.hexdigest()


def with_dtype(config: dict[str, Any], dtype: object) -> dict[str, Any]:
    """The config of weights of this dtype, neither quantized nor with layers for multi-token
    prediction; transformers 4 writes torch_dtype, 5 writes dtype."""
    key = "dtype" if "dtype" in config else "torch_dtype"
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    plain |= {PREDICTING: 0} if PREDICTING in plain else {}
    return {**plain, key: str(dtype).removeprefix("torch.")}
