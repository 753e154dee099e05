"""What files hold, by hash: wholly, and by samples that cost a few milliseconds whatever the size
of the file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlflow.errors import DataError

SAMPLES = 32
_SAMPLE_BYTES = 1 << 15


def sample_digest(path: Path) -> str:
    """SHA-256 of the file's size and of SAMPLES pieces spread over it, its beginning and end among
    them."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    last = max(0, size - _SAMPLE_BYTES)
    with path.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(last * number // (SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def stamp_file(path: Path) -> dict[str, Any]:
    """{bytes, sha256, sample} of a file."""
    with path.open("rb") as file:
        whole = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": whole, "sample": sample_digest(path)}


def check_files(folder: Path, files: Mapping[str, Any], *, deep: bool = False) -> None:
    """Raises DataError for a file of a folder that is not as it was stamped. deep: read every
    byte."""
    for name, stamp in files.items():
        path = folder / name
        if not path.is_file():
            raise DataError(
                f"{path}: is missing; the index was built with it. Build the index again."
            )
        found = (
            stamp_file(path)
            if deep
            else {"bytes": path.stat().st_size, "sample": sample_digest(path)}
        )
        for key, value in found.items():
            if stamp.get(key) != value:
                raise DataError(
                    f"{path}: is not what the build wrote ({key} {str(stamp.get(key))[:12]} then, "
                    f"{str(value)[:12]} now). Build the index again, or copy it again."
                )
