"""The weights of a HuggingFace model directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rlflow.models.huggingface import file_names, in_groups, write_index

from ..mapping.plan import Target
from ..stream import Copier
from .files import HashedFile, OutputFile


def safetensors_files(targets: Sequence[Target], shard_bytes: int) -> list[OutputFile]:
    """Files with at most `shard_bytes` of tensors, more only where one tensor alone has more."""
    groups = list(in_groups(targets, lambda target: target.nbytes, shard_bytes))
    return [_file(name, group) for name, group in zip(file_names(len(groups)), groups)]


def write_index_of(directory: Path, files: Sequence[OutputFile]) -> None:
    """Writes what says which of several files holds which tensor."""
    weight_map = {target.name: file.name for file in files for target in file.targets}
    total = sum(target.nbytes for file in files for target in file.targets)
    write_index(directory, weight_map, total)


def _file(name: str, targets: Sequence[Target]) -> OutputFile:
    def write(file: HashedFile, copier: Copier) -> None:
        file.write(_header(targets))
        for target in targets:
            for block in copier.blocks(target):
                file.write(block)

    return OutputFile(name, tuple(targets), write)


def _header(targets: Sequence[Target]) -> bytes:
    """Length and text of a header, padded so that tensors begin at a multiple of 8."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for target in targets:
        entries[target.name] = {
            "dtype": target.dtype.safetensors,
            "shape": list(target.shape),
            "data_offsets": [at, at + target.nbytes],
        }
        at += target.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
