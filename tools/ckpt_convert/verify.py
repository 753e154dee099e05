"""Checks of what was written, against its manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlflow.errors import DamagedCheckpointError, ModelError
from rlflow.models.huggingface import check_tensors
from rlflow.storage.integrity import (
    EXPORT_MANIFEST,
    find_damage,
    read_fingerprints,
    read_sealed,
)

from .problems import damaged, missing


def verify_export(path: str | Path) -> dict[str, Any]:
    """The manifest of a directory that an export or a conversion wrote, every file of which has the
    size and checksums that it says, and whose tensors are those that config.json implies. Raises
    ConversionError (3: a file is missing, 4: another content)."""
    path = Path(path)
    file = path / EXPORT_MANIFEST
    if not file.is_file():
        raise missing(f"{file}: missing; only directories written by a conversion can be verified.")
    try:
        manifest = read_sealed(file)
        expected = read_fingerprints(manifest, file)
    except DamagedCheckpointError as error:
        raise damaged(f"{str(error).removesuffix('.')}; export again.") from None
    damage = find_damage(path, expected)
    if damage is not None:
        gone = any(not (path / name).is_file() for name in expected)
        raise (missing if gone else damaged)(f"{damage}; export again.")
    foreign = sorted(file.name for file in path.glob("*.safetensors") if file.name not in expected)
    if foreign:
        raise damaged(f"{path / foreign[0]}: not part of the export; remove it.")
    if (path / "config.json").is_file():
        try:
            check_tensors(path)
        except ModelError as error:
            raise damaged(str(error)) from None
    return manifest
